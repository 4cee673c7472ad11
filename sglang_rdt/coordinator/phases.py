"""Phase timings of a sync: measured everywhere, logged in one line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sglang_rdt.plan.selection import Selection

if TYPE_CHECKING:
    from sglang_rdt.coordinator.failures import Failure

ORDER = (
    "final_params",
    "pause",
    "gather",
    "convert",
    "stage",
    "put",
    "pull",
    "finalise",
    "verify",
    "version",
)


class PhaseTimer:
    """Adds up seconds per phase. Phases may nest: time counts for the innermost only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside for ``name``."""
        now = time.perf_counter()
        if self._open:
            outer, since = self._open[-1]
            self.add(outer, now - since)
        self._open.append((name, now))
        try:
            yield
        finally:
            now = time.perf_counter()
            _, since = self._open.pop()
            self.add(name, now - since)
            if self._open:
                self._open[-1] = (self._open[-1][0], now)

    def add(self, name: str, seconds: float) -> None:
        """Counts ``seconds`` more for ``name``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def slowest(timings: Iterable[dict[str, float]]) -> dict[str, float]:
    """Per phase, the longest that any rank spent in it."""
    out: dict[str, float] = {}
    for seconds in timings:
        for name, value in seconds.items():
            out[name] = max(out.get(name, 0.0), value)
    return out


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    ``phases``: seconds per phase, the slowest rank's. ``nbytes``: bytes pulled by all engines.
    ``failures``: engine -> what happened (empty on success). ``engines``: names of the engines
    that serve ``version`` now. ``selection``: what a name filter left as it was.
    """

    version: str
    engines: tuple[str, ...]
    nbytes: int
    seconds: float
    phases: dict[str, float]
    failures: dict[str, Failure] = field(default_factory=dict)
    verified: str = "off"
    selection: Selection = Selection()

    def joined_by(self, second: SyncReport) -> SyncReport:
        """Both as one: ``second`` went over some engines once more."""
        kept = {n: f for n, f in self.failures.items() if n not in second.engines}
        phases = dict(self.phases)
        for name, seconds in second.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds
        return replace(
            self,
            engines=(*self.engines, *second.engines),
            nbytes=self.nbytes + second.nbytes,
            seconds=second.seconds,
            phases=phases,
            failures=kept | second.failures,
        )

    def ordered_phases(self) -> list[tuple[str, float]]:
        """``(phase, seconds)`` in the order in which phases begin."""
        return sorted(self.phases.items(), key=lambda p: ORDER.index(p[0]) if p[0] in ORDER else 99)

    def line(self) -> str:
        """One line for the log."""
        parts = ", ".join(f"{name} {s * 1e3:.1f}" for name, s in self.ordered_phases())
        return (
            f"weight sync {self.version!r}: {len(self.engines)} engine(s), {human_bytes(self.nbytes)}, "
            f"{self.seconds * 1e3:.1f} ms ({parts}; ms), verify {self.verified}"
            + (f", {kept_line(self.selection)}" if self.selection.kept else "")
            + (f", FAILED on {', '.join(self.failures)}" if self.failures else "")
        )


def kept_line(selection: Selection) -> str:
    """``kept 12 of 31 HF tensors, 1.2 GB of 16.4 GB``."""
    return (
        f"kept {len(selection.kept)} of {selection.tensors} HF tensors, "
        f"{human_bytes(selection.kept_bytes)} of {human_bytes(selection.nbytes)}"
    )


def human_bytes(count: float) -> str:
    """``16.4 GB``: powers of 1000, as links are measured."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
