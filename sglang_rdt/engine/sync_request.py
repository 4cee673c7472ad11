"""What the coordinator asks engines for, and what they report: plain data for both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_rdt.engine.states import State

PAUSE_MODES = ("retract", "in_place")


@dataclass(frozen=True)
class Trainer:
    """One weight sync of a training program, as engines know it.

    ``token``: unique. ``where``: host and process, for messages. ``job``, ``actor``: Ray's ids of
    its driver and of its actor (empty: it is none), which tell whether it is still there.
    """

    token: str
    where: str
    job: str = ""
    actor: str = ""


@dataclass(frozen=True)
class Connection:
    """What a trainer and an engine agreed on at connect time. ``id``: unique."""

    id: str
    trainer: Trainer


@dataclass(frozen=True)
class SyncRequest:
    """What the coordinator asks an engine to begin.

    ``purpose``: ``connect`` describes and records, and writes no weight; ``sync`` does.
    ``owner``: host and process of the coordinator, for messages. ``connection``: the one to make
    (``connect``) or to use (``sync``). ``replaces``: token of the trainer that this connection may
    replace. ``overwrite``: fill everything that is to be written with a pattern first, so that
    nothing passes for copied that was not.
    """

    sync_id: str
    owner: str
    purpose: Literal["connect", "sync"]
    pause_mode: str = "retract"
    flush: bool = True
    stall_timeout_s: float = 300.0
    begin_timeout_s: float = 120.0
    phase_timeout_s: float = 120.0
    connection: Connection | None = None
    replaces: str | None = None
    overwrite: bool = False


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
    connection: Connection | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadResult:
    """What one engine rank did in one call.

    ``nbytes``: read. ``sums``: parameter -> checksum, where asked for. ``seconds``: per phase.
    """

    nbytes: int
    sums: dict[str, int]
    seconds: dict[str, float]
