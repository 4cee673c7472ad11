"""What the coordinator asks engines for, and what they report: plain data for both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_rdt.brief import brief
from sglang_rdt.engine.states import State
from sglang_rdt.errors import EngineStateError

PAUSE_MODES = ("retract", "in_place")
RUNNERS = ("target", "draft", "both")


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
    nothing passes for copied that was not. ``runner``: which of the engine's models it is about.
    """

    sync_id: str
    owner: str
    purpose: Literal["connect", "sync"]
    pause_mode: str = "retract"
    flush: bool = True
    stall_timeout_s: float = 600.0
    begin_timeout_s: float = 120.0
    phase_timeout_s: float = 120.0
    connection: Connection | None = None
    replaces: str | None = None
    overwrite: bool = False
    runner: Literal["target", "draft", "both"] = "target"


# What settings allow, and what threads can wait.
_MAX_SECONDS = 1e9
_MAX_TEXT = 1024


def check(request: SyncRequest) -> None:
    """Raises EngineStateError unless ``request`` can be one; nothing is begun then."""
    if type(request) is not SyncRequest:
        raise EngineStateError(f"{brief(request)} is no SyncRequest")
    for name in ("sync_id", "owner"):
        _check_line(getattr(request, name), name)
    for name, choices in (
        ("purpose", ("connect", "sync")),
        ("pause_mode", PAUSE_MODES),
        ("runner", RUNNERS),
        ("flush", (True, False)),
        ("overwrite", (True, False)),
    ):
        value = getattr(request, name)
        if type(value) is not type(choices[0]) or value not in choices:
            raise EngineStateError(f"a sync request with {name} {brief(value)}")
    for name in ("stall_timeout_s", "begin_timeout_s", "phase_timeout_s"):
        value = getattr(request, name)
        if type(value) not in (int, float) or not 0 < value <= _MAX_SECONDS:
            raise EngineStateError(f"a sync request with {name} {brief(value)}")
    if request.replaces is not None:
        _check_line(request.replaces, "replaces")
    made = request.connection
    if made is not None:
        if type(made) is not Connection or type(made.trainer) is not Trainer:
            raise EngineStateError(f"a sync request with connection {brief(made)}")
        for text, what in ((made.id, "connection"), (made.trainer.token, "token")):
            _check_line(text, what)
        _check_line(made.trainer.where, "trainer")


def check_version(version: object) -> None:
    """Raises EngineStateError unless every reply can carry ``version`` (JSON has no lone
    surrogates, and a label of a megabyte would come with each)."""
    _check_line(version, "version")


def _check_line(text: object, what: str) -> None:
    if type(text) is not str or not 0 < len(text) <= _MAX_TEXT or not text.isprintable():
        raise EngineStateError(f"{brief(text)} is no {what}: one line of text was expected")


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


def is_result(answer: object) -> bool:
    """Whether an engine rank's answer is one that can be added up."""
    return (
        type(answer) is ReadResult
        and type(answer.nbytes) is int
        and answer.nbytes >= 0
        and type(answer.sums) is dict
        and type(answer.seconds) is dict
        and all(type(v) is float and 0 <= v < 1e9 for v in answer.seconds.values())
    )
