"""Version ranges, without importing ``packaging`` at start-up."""

from __future__ import annotations

import re


def release(version: str) -> tuple[int, ...]:
    """The leading numeric part: ``0.5.12.post1`` -> ``(0, 5, 12)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    if not match:
        raise ValueError(f"not a version: {version!r}")
    return tuple(int(part) for part in match[0].split("."))


def in_range(version: str, low: str, high: str | None) -> bool:
    """Whether ``low <= version``, and ``version`` belongs to a release up to ``high``."""
    found = release(version)
    if found < release(low):
        return False
    return high is None or found[: len(release(high))] <= release(high)


def range_text(low: str, high: str | None) -> str:
    """For people: ``0.5.16 to 0.5.23``."""
    return f"{low} to {high}" if high else f"{low} or newer"
