"""What others sent, as a part of one of our messages: one line, printable, bounded."""

from __future__ import annotations

import re

_BREAK = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*(?:- )?")


def brief(value: object, limit: int = 80) -> str:
    """``repr(value)`` in one line of at most ``limit`` characters; whatever ``value`` is."""
    if isinstance(value, str | bytes):
        # A repr of all of it could take as long as a gigabyte takes.
        value = value[: limit + 1]
    elif isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # broken, too deep, or too many digits
        text = f"a {type(value).__name__}"
    return cut(one_line(text), limit)


def one_line(text: str) -> str:
    """``text`` without line breaks and control characters; lists become ``a; b; c``."""
    out = ""
    for part in filter(None, (p.strip() for p in _BREAK.split(text))):
        out += part if not out else f" {part}" if out.endswith((":", ";", ",")) else f"; {part}"
    return out if out.isprintable() else "".join(c if c.isprintable() else "?" for c in out)


def cut(text: str, limit: int) -> str:
    """The beginning of ``text``, at most ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
