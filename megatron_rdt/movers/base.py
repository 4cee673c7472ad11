"""What a weight sync needs of whoever moves its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from megatron_rdt.sender import RouteSender
    from sglang_rdt.coordinator.failures import Failure
    from sglang_rdt.coordinator.phases import PhaseTimer

MASK = (1 << 64) - 1


@dataclass
class Moved:
    """What one trainer rank did in one pass.

    ``failures``: engine -> what happened. ``nbytes``: bytes that left this rank. ``sums``: (engine
    rank as text, parameter) -> additive checksum of what went there. ``differences``: engine ->
    where its bytes differ (after ``compare``). ``finalised``: engine rank -> checksums by
    parameter, of the engines that ended their session with the move.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    nbytes: int = 0
    sums: dict[tuple[str, str], int] = field(default_factory=dict)
    differences: dict[str, list[str]] = field(default_factory=dict)
    finalised: dict[str, dict[str, int]] | None = None

    def add_sum(self, target: str, param: str, value: int) -> None:
        """Adds up checksums of parts."""
        key = (target, param)
        self.sums[key] = (self.sums.get(key, 0) + value) & MASK


class Mover(Protocol):
    """One rank's part in moving a sync. Every rank has one; both passes are collective."""

    @property
    def begins(self) -> bool:
        """Whether :meth:`move` begins the sync on the engines, too."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory of this rank, in bytes."""
        ...

    def follow(self, share: Any, senders: Sequence[RouteSender]) -> None:
        """Does what ``share`` says from now on.

        Args:
            share: this rank's, of a plan of this mover's kind.
            senders: for what this rank stages.
        """
        ...

    def move(self, sync_id: str, given_up: Container[str], timer: PhaseTimer, verify: str) -> Moved:
        """Moves everything to the engines that are not in ``given_up``. Never raises.

        Args:
            verify: ``off``, ``checksum`` or ``equal``: how this sync will be verified.
        """
        ...

    def compare(self, sync_id: str, given_up: Container[str], timer: PhaseTimer) -> Moved:
        """Compares every byte that was moved with what the engines hold. Never raises."""
        ...

    def close(self) -> None:
        """Gives registrations back."""
        ...
