"""From what both sides report to who stages what for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_rdt.errors import PlanError
from sglang_rdt.plan import coverage, forms
from sglang_rdt.plan.buckets import Round, pack
from sglang_rdt.plan.routing import route
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    EngineRank,
    EngineRankLayout,
    TensorSpec,
    TrainerRank,
)

# Each round is an RDT object and a call.
MAX_ROUNDS = 20_000


def refuse(problems: Sequence[str]) -> None:
    """Raises PlanError if there are any."""
    if problems:
        raise PlanError("trainer and engines do not fit together", list(dict.fromkeys(problems)))


def refuse_rounds(rank: EngineRank, rounds: int, bucket_bytes: int) -> None:
    """Raises PlanError for more than ``MAX_ROUNDS``."""
    if rounds > MAX_ROUNDS:
        raise PlanError(
            "the staging bucket is too small",
            [
                f"{rank}: {rounds} rounds of {bucket_bytes} bytes, more than {MAX_ROUNDS}; "
                "raise SGLANG_RDT_BUCKET_BYTES"
            ],
        )


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
    refuse(forms.check_trainers(trainers) + forms.check_layouts(layouts))
    refuse([line for layout in layouts for line in forms.check_layout(layout)])
    specs, problems = coverage.union_of_specs(e for _, e in forms.distinct_exports(trainers))
    casts: list[str] = []
    engines: dict[str, list[EngineRankLayout]] = {}
    for layout in layouts:
        engines.setdefault(layout.rank.engine, []).append(layout)
        problems += coverage.check_sizes(layout, specs)
        problems += coverage.check_rank(layout, specs, allow_padding)
        lossy, happening = coverage.check_dtypes(layout, specs, allow_cast)
        problems += lossy
        casts += happening
    for engine_layouts in engines.values():
        problems += coverage.check_engine(engine_layouts, specs)
    refuse(problems)
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
        params = {p.name: p for p in layout.params}
        wants = [w for w in layout.recording.wants if w.source in names]
        nbytes = sum(w.dst.numel * ITEMSIZE[params[w.param].dtype] for w in wants)
        # As few as there can be, before they are made; then as many as there are.
        refuse_rounds(ranks[target], nbytes // bucket_bytes, bucket_bytes)
        order = [s.name for s in trainers[source].exports if s.name in names]
        rounds = pack(wants, order, params, bucket_bytes)
        refuse_rounds(ranks[target], len(rounds), bucket_bytes)
        if rounds:
            routes.append(Route(trainers[source].rank, ranks[target], rounds))
    return Plan(tuple(routes), casts, specs)
