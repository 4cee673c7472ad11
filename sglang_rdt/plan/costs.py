"""What moving bytes costs: the few numbers that staging decisions rest on."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rdt.brief import brief
from sglang_rdt.errors import SettingError
from sglang_rdt.plan.forms import MAX_BYTES

# Speeds and times that can be; products of two of them are numbers still.
LEAST, MOST = 1e-15, 1e18


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Speeds of one cluster. The defaults are those of two H200 of one host.

    Args:
        link_bytes_per_s: bytes per second that one engine rank reads over its link, in one large
            piece. 396e9: peer memcpy of 4 GiB over NVLink.
        descriptor_s: seconds that each contiguous run costs when it is posted. 3.5e-6: NIXL over
            UCX with one thread (2026-11-30).
        copy_bytes_per_s: bytes per second of a strided copy within one GPU's memory. 1.2e12: a
            part of an H200's 4.8e12, which such a copy reads, writes and does not fill.
        round_s: seconds of one packed round: a call on either side and a copy kernel.

    Raises:
        SettingError: a value is no finite number above 0.
    """

    link_bytes_per_s: float = 396e9
    descriptor_s: float = 3.5e-6
    copy_bytes_per_s: float = 1.2e12
    round_s: float = 2e-3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise SettingError(
                    f"link cost {field.name}", brief(value), "must be a finite number above 0"
                )
            if not LEAST <= value <= MOST:
                raise SettingError(
                    f"link cost {field.name}", brief(value), f"must be from {LEAST:g} to {MOST:g}"
                )

    @property
    def descriptor_bytes(self) -> int:
        """Bytes that the link moves in the time of one descriptor: smaller runs are not worth
        having."""
        return min(max(int(self.link_bytes_per_s * self.descriptor_s), 1), MAX_BYTES)

    def save(self, path: str | Path) -> None:
        """Writes a JSON object to ``path``.

        Raises:
            OSError: as open() does.
        """
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LinkCosts:
        """Reads what :meth:`save` or a person wrote; keys that are missing keep their default.

        Raises:
            OSError: as open() does.
            SettingError: no JSON object, an unknown key, or a value that cannot be used.
        """
        name = f"link costs in {path}"
        try:
            data: Any = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8
            raise SettingError(name, "...", f"is no JSON: {error}") from None
        if not isinstance(data, dict):
            raise SettingError(name, type(data).__name__, "must be a JSON object")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise SettingError(
                name, brief(", ".join(unknown), 200), f"unknown; there are {', '.join(known)}"
            )
        return cls(**data)
