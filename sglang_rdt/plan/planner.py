"""From what both sides report to who stages what for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_rdt.errors import PlanError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.buckets import Round, pack
from sglang_rdt.plan.routing import route
from sglang_rdt.plan.specs import EngineRank, EngineRankLayout, TensorSpec, TrainerRank

# Each round is an RDT object and a call.
MAX_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Route:
    """Everything that one trainer rank sends to one engine rank in a sync."""

    source: int
    target: EngineRank
    rounds: tuple[Round, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per sync over this route, padding not counted."""
        return sum(t.nbytes for r in self.rounds for t in r.targets)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of staging memory that the route needs: its fullest round."""
        return max((r.nbytes for r in self.rounds), default=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of planning: routes, and the conversions that will happen (for the log)."""

    routes: tuple[Route, ...]
    casts: tuple[str, ...]
    specs: dict[str, TensorSpec]

    def routes_of(self, source: int) -> tuple[Route, ...]:
        """Routes that start at trainer rank ``source``."""
        return tuple(r for r in self.routes if r.source == source)

    @property
    def nbytes(self) -> int:
        """Bytes per sync over all routes."""
        return sum(r.nbytes for r in self.routes)


def check(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    *,
    allow_cast: bool = False,
    allow_padding: bool = False,
) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """All proofs of :mod:`sglang_rdt.plan.coverage` over all engines.

    Returns:
        The union of the trainer's HF tensors, and the conversions that will happen.

    Raises:
        PlanError: naming every culprit.
    """
    specs, problems = coverage.union_of_specs([t.exports for t in trainers])
    casts: list[str] = []
    engines: dict[str, list[EngineRankLayout]] = {}
    for layout in layouts:
        engines.setdefault(layout.rank.engine, []).append(layout)
        problems += coverage.check_rank(layout, specs, allow_padding)
        lossy, happening = coverage.check_dtypes(layout, specs, allow_cast)
        problems += lossy
        casts += happening
    for engine_layouts in engines.values():
        problems += coverage.check_engine(engine_layouts, specs)
    if problems:
        raise PlanError("trainer and engines do not fit together", problems)
    return specs, tuple(casts)


def make_plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    bucket_bytes: int,
    *,
    allow_cast: bool = False,
    allow_padding: bool = False,
) -> Plan:
    """Plans a bucketed sync of all engine ranks in ``layouts``.

    Args:
        bucket_bytes: the most that a source stages at a time for one engine rank.
        allow_cast: whether dtype conversions may lose bits.
        allow_padding: whether loaders may fill up tensors that are smaller than their parameter.

    Raises:
        PlanError: naming every culprit; nothing is planned then.
    """
    specs, casts = check(trainers, layouts, allow_cast=allow_cast, allow_padding=allow_padding)
    wanted = [{w.source for w in layout.recording.wants} for layout in layouts]
    ranks = [layout.rank for layout in layouts]
    routes = []
    for (source, target), names in sorted(route(trainers, ranks, wanted).items()):
        layout = layouts[target]
        rounds = pack(
            [w for w in layout.recording.wants if w.source in names],
            [s.name for s in trainers[source].exports if s.name in names],
            {p.name: p for p in layout.params},
            bucket_bytes,
        )
        if len(rounds) > MAX_ROUNDS:
            raise PlanError(
                "the staging bucket is too small",
                [
                    f"{ranks[target]}: {len(rounds)} rounds of {bucket_bytes} bytes, more than "
                    f"{MAX_ROUNDS}; raise SGLANG_RDT_BUCKET_BYTES"
                ],
            )
        if rounds:
            routes.append(Route(trainers[source].rank, ranks[target], rounds))
    return Plan(tuple(routes), casts, specs)
