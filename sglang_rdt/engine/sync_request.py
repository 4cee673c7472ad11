"""What the coordinator asks engines for, and what they report: plain data for both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["current", "syncing", "dirty"]


@dataclass(frozen=True)
class SyncRequest:
    """What the coordinator asks an engine to begin.

    ``purpose``: ``connect`` describes and records, and writes no weight; ``sync`` does.
    ``owner``: host and process of the coordinator, for messages.
    """

    sync_id: str
    owner: str
    purpose: Literal["connect", "sync"]
    pause_mode: str = "retract"
    flush: bool = True
    stall_timeout_s: float = 300.0
    begin_timeout_s: float = 120.0
    phase_timeout_s: float = 120.0


@dataclass
class RankStatus:
    """State of one engine rank; ``detail`` says why a dirty rank is dirty."""

    state: State = "current"
    version: str = ""
    sync_id: str | None = None
    owner: str | None = None
    detail: str = ""
    bytes_landed: int = 0
    syncs: int = 0
    registrations: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadResult:
    """What one engine rank did in one call.

    ``nbytes``: read. ``sums``: parameter -> checksum, where asked for. ``seconds``: per phase.
    """

    nbytes: int
    sums: dict[str, int]
    seconds: dict[str, float]
