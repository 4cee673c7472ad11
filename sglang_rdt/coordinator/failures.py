"""What went wrong on one engine: in which phase, with whom, and whether it helps to connect again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_rdt.coordinator import calls
from sglang_rdt.errors import AnotherRankError, ReconnectError


@dataclass(frozen=True)
class Failure:
    """Why one engine did not get a sync.

    ``phase``: where the sync was. ``text``: who failed, and how. ``reconnect``: it refused before
    anything changed, and connecting again is what helps. ``state``: what the engine was left in,
    once that is known.
    """

    phase: str
    text: str
    reconnect: bool = False
    state: str = ""

    def __str__(self) -> str:
        left = f" (the engine is {self.state})" if self.state else ""
        return f"{self.phase}: {self.text}{left}"


def of_ranks(phase: str, errors: Mapping[str, BaseException]) -> Failure:
    """The failure of an engine, from the errors of its ranks (rank as text -> error).

    Args:
        phase: of the call; an error that came from inside of the engine knows better.
    """
    inside = [p for e in errors.values() if (p := getattr(e, "sync_phase", None))]
    # Ranks that only hear that another one gave up say nothing new, but they are told all the same.
    return Failure(
        inside[0] if inside else phase,
        "; ".join(f"{who}: {calls.short(e)}" for who, e in errors.items()),
        reconnect=any(isinstance(e, ReconnectError) for e in errors.values())
        and all(isinstance(e, ReconnectError | AnotherRankError) for e in errors.values()),
    )
