"""What the benchmark asks of a path, and what a path gets to work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path as Folder

    from sglang_rdt.bench.options import Options
    from sglang_rdt.bench.trainer import BenchTrainers


@dataclass
class Context:
    """Everything that runs.

    Args:
        engines: :class:`~sglang_rdt.demo.workers.ServedEngine` objects.
        nbytes: bytes that one sync brings to all engines.
        folder: where files may be written.
    """

    options: Options
    trainers: BenchTrainers
    engines: list[Any]
    nbytes: int
    folder: Folder

    @property
    def hosts(self) -> list[Any]:
        """Actor handles of the processes that own the engines."""
        return [served.host for served in self.engines]

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of each engine."""
        return [served.address for served in self.engines]

    @property
    def engine_world(self) -> int:
        """Engine ranks of all engines together."""
        return len(self.engines) * self.options.engine_tp


@dataclass(frozen=True)
class Timing:
    """One sync. ``seconds``: from the call until generation goes on; ``phases``: seconds too, the
    slowest rank's."""

    seconds: float
    phases: dict[str, float]
    nbytes: int
    notes: dict[str, Any] = field(default_factory=dict)


class BenchPath(Protocol):
    """One way to bring weights into engines."""

    name: str
    # Whether the engines' parameters are what it writes (the raw copy writes elsewhere).
    writes_engines: bool
    # Said in results: what is and is not in its time.
    about: str

    def sizes(self, context: Context) -> tuple[int, ...]:
        """Bucket sizes to choose the best of; empty: it has none."""
        ...

    def start(self, context: Context, size: int | None) -> dict[str, Any]:
        """Sets it up for buckets of ``size``; what is worth noting about that."""
        ...

    def sync(self, context: Context, version: str) -> Timing:
        """One sync."""
        ...

    def staging_bytes(self, context: Context) -> int:
        """Staging memory on the trainer rank that has most of it."""
        ...

    def stop(self, context: Context) -> None:
        """Undoes ``start``; also after a failure."""
        ...
