"""The matrix: which phases, which victims, which of them make a cell, and what a cell promises.

Plain data; nothing here starts a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal[
    "connect",
    "plan",
    "pause",
    "gather",
    "put",
    "pull",
    "finalise",
    "verify",
    "version",
    "continue",
]
Victim = Literal[
    "engine rank",
    "engine",
    "http server",
    "ray node",
    "source rank",
    "driver",
    "nixl error",
    "never completes",
    "killed in flight",
    "resumes late",
]
Mode = Literal["direct", "bucketed"]

PHASES: tuple[Phase, ...] = get_args(Phase)
# In this order they need the fewest new processes.
VICTIMS: tuple[Victim, ...] = (
    "nixl error",
    "never completes",
    "source rank",
    "driver",
    "killed in flight",
    "resumes late",
    "engine rank",
    "engine",
    "http server",
    "ray node",
)
# Which side the victim belongs to decides what the other side is promised.
OF_TRAINER: frozenset[Victim] = frozenset(
    {"source rank", "driver", "killed in flight", "resumes late"}
)
# Nobody dies; the read goes wrong.
OF_TRANSFER: frozenset[Victim] = frozenset({"nixl error", "never completes"})
# Before a sync begins: engines must be untouched.
BEFORE_SYNC: frozenset[Phase] = frozenset({"connect", "plan"})
# Only a bucketed sync gathers and puts.
BUCKETED_ONLY: frozenset[Phase] = frozenset({"gather", "put"})

# What a message may call the phase. In a direct sync an engine rank pauses, reads, sums up and
# finalises in one call: a dead process cannot say how far in it was, so the call's name will do.
ONE_CALL: frozenset[Phase] = frozenset({"pause", "pull", "finalise", "verify"})
SPOKEN: dict[Phase, tuple[str, ...]] = {
    "connect": ("connect", "record_load", "identity", "describe", "begin_sync", "register_weights"),
    "plan": ("plan", "connect", "end_sync", "accept_memory", "prepare"),
    "pause": ("begin", "pause"),
    "gather": ("gather", "export"),
    "put": ("put", "pull"),
    "pull": ("pull", "read"),
    "finalise": ("finalise",),
    "verify": ("verify", "checksum", "compare"),
    "version": ("version", "end_sync", "commit"),
    # Setting the version and going on are one call.
    "continue": ("continue", "version", "end_sync", "commit"),
}

# Cells that make no sense, with the reason.
NO_TRANSFER = "no byte moves over NIXL in this phase"
NOT_READING = "nothing is being read in this phase"


@dataclass(frozen=True)
class Cell:
    """One fault: ``victim`` fails when the sync reaches ``phase``."""

    phase: Phase
    victim: Victim
    mode: Mode = "direct"

    @property
    def name(self) -> str:
        """For pytest ids and the command line."""
        return f"{self.phase}-{self.victim}-{self.mode}".replace(" ", "_")

    @property
    def promise(self) -> str:
        """What must hold, in words."""
        typed = "typed error names victim and phase"
        if self.victim == "resumes late":
            return "a read that was given up never lands in weights that were synced since"
        if self.victim in OF_TRAINER:
            return f"{typed}; engines old and running, or dirty and paused, or new and whole"
        return f"{typed}; A serves the new version"

    def spoken(self) -> tuple[str, ...]:
        """Words of which one must be in the error."""
        if self.mode == "direct" and self.phase in ONE_CALL:
            return tuple(word for phase in sorted(ONE_CALL) for word in SPOKEN[phase])
        if self.victim == "nixl error":
            # NIXL may say DONE of a copy that failed; then it is the checksums that tell.
            return (*SPOKEN[self.phase], *SPOKEN["verify"])
        return SPOKEN[self.phase]


def impossible(phase: Phase, victim: Victim) -> str | None:
    """Why there is no such cell, or None."""
    if victim in OF_TRANSFER and phase not in ("pull", "verify"):
        return NO_TRANSFER
    if victim == "nixl error" and phase == "verify":
        return "as in pull: verify=equal reads again with the same calls"
    if victim in ("killed in flight", "resumes late") and phase != "pull":
        return NOT_READING
    return None


def all_cells() -> list[Cell]:
    """Every cell, those first that leave everything alive."""
    cells = []
    for victim in VICTIMS:
        for phase in PHASES:
            if impossible(phase, victim):
                continue
            if phase in BUCKETED_ONLY:
                cells.append(Cell(phase, victim, "bucketed"))
                continue
            cells.append(Cell(phase, victim))
            # The same victim where the other mode pulls, in the two ways that differ most.
            if phase == "pull" and victim in ("source rank", "driver", "engine rank", "nixl error"):
                cells.append(Cell(phase, victim, "bucketed"))
    return cells


# What every run of the tests has: every phase and every victim at least once.
CORE: tuple[Cell, ...] = (
    Cell("pull", "nixl error"),
    Cell("pull", "nixl error", "bucketed"),
    Cell("pull", "never completes"),
    Cell("verify", "never completes"),
    Cell("plan", "driver"),
    Cell("gather", "source rank", "bucketed"),
    Cell("put", "driver", "bucketed"),
    Cell("pull", "killed in flight"),
    Cell("pull", "resumes late"),
    Cell("version", "source rank"),
    Cell("continue", "driver"),
    Cell("connect", "engine"),
    Cell("finalise", "engine rank"),
    Cell("pull", "http server"),
    Cell("pause", "ray node"),
)
# With these, a third of the matrix.
MORE: tuple[Cell, ...] = (
    Cell("connect", "source rank"),
    Cell("pause", "source rank"),
    Cell("pull", "source rank"),
    Cell("pull", "driver"),
    Cell("verify", "driver"),
    Cell("finalise", "source rank"),
    Cell("pull", "engine rank"),
    Cell("version", "driver"),
)
SUITE = (*CORE, *MORE)
