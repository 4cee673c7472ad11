"""From what both sides report to who stages what for whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rdt.errors import PlanError
from sglang_rdt.plan import coverage, forms
from sglang_rdt.plan.buckets import Round, pack
from sglang_rdt.plan.distinct import (
    and_others,
    check_engines,
    distinct_layouts,
    no_collection,
    target_key,
)
from sglang_rdt.plan.routing import Holders, assign, classes_of, same_names
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    EngineRank,
    EngineRankLayout,
    RankId,
    TensorSpec,
    TrainerRank,
    Want,
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


_Key = tuple[str, str, RankId]


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a plan rests on: the next one keeps what it can.

    Args:
        ranks: the trainer ranks' numbers.
        names: :func:`~sglang_rdt.plan.routing.same_names` of them.
        number: of each engine rank, its layout in ``distinct``.
        dealt: of each engine rank, who serves it with which class.
        rounds: of each engine rank, what each trainer rank (its index) sends to it.
    """

    ranks: tuple[int, ...]
    names: tuple[list[int], list[tuple[str, ...]]]
    bucket_bytes: int
    distinct: list[EngineRankLayout]
    number: dict[_Key, int]
    dealt: dict[_Key, dict[Holders, int]]
    rounds: dict[_Key, dict[int, tuple[Round, ...]]]


@dataclass(frozen=True, slots=True)
class BucketedShare:
    """What one trainer rank needs of a plan, to be sent to it alone.

    Args:
        rank: the trainer rank's number.
        engines: all engines of the plan, also those to which this rank sends nothing.
        nbytes: of the whole plan.
        routes: those that start at this rank.
    """

    rank: int
    engines: tuple[str, ...]
    nbytes: int
    routes: tuple[Route, ...]

    def routes_of(self, source: int) -> tuple[Route, ...]:
        """Routes that start at trainer rank ``source``.

        Raises:
            KeyError: this is the share of another one.
        """
        if source != self.rank:
            raise KeyError(f"this is the share of trainer rank {self.rank}, not of {source}")
        return self.routes


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of planning: routes, and the conversions that will happen (for the log).

    Engine ranks that want the same of the same trainer ranks share their rounds. The plan stays
    with whoever made it; each trainer rank is sent its :meth:`share`.
    """

    routes: tuple[Route, ...]
    casts: tuple[str, ...]
    specs: dict[str, TensorSpec]
    _basis: _Basis | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        # What it rests on is as large as everything that both sides reported.
        return Plan, (self.routes, self.casts, self.specs)

    def routes_of(self, source: int) -> tuple[Route, ...]:
        """Routes that start at trainer rank ``source``."""
        return tuple(r for r in self.routes if r.source == source)

    def share(self, source: int) -> BucketedShare:
        """What trainer rank ``source`` needs of this plan."""
        return BucketedShare(source, self.engines, self.nbytes, self.routes_of(source))

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines that anything is sent to, sorted."""
        return tuple(sorted({r.target.engine for r in self.routes}))

    @property
    def nbytes(self) -> int:
        """Bytes per sync over all routes."""
        each: dict[int, int] = {}
        for r in self.routes:
            if id(r.rounds) not in each:
                each[id(r.rounds)] = r.nbytes
        return sum(each[id(r.rounds)] for r in self.routes)


def _check(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    distinct: Sequence[EngineRankLayout],
    number_of: Sequence[int],
    allow_cast: bool,
    allow_padding: bool,
) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """All proofs of :mod:`sglang_rdt.plan.coverage` over all engines, those of each different
    layout once.

    Returns:
        The union of the trainer's HF tensors, and the conversions that will happen.

    Raises:
        PlanError: naming every culprit.
    """
    refuse([line for layout in distinct for line in forms.check_layout(layout)])
    specs, problems = coverage.union_of_specs(e for _, e in forms.distinct_exports(trainers))
    casts: list[str] = []
    count = Counter(number_of)
    for number, layout in enumerate(distinct):
        found = coverage.check_sizes(layout, specs)
        found += coverage.check_rank(layout, specs, allow_padding)
        lossy, happening = coverage.check_dtypes(layout, specs, allow_cast)
        problems += [line + and_others(count[number]) for line in found + lossy]
        casts += happening
    problems += check_engines(layouts, number_of, distinct, specs)
    refuse(problems)
    return specs, tuple(casts)


def make_plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    bucket_bytes: int,
    *,
    allow_cast: bool = False,
    allow_padding: bool = False,
    previous: Plan | None = None,
) -> Plan:
    """Plans a bucketed sync of all engine ranks in ``layouts``.

    With ``previous`` only what has changed is planned: an engine rank that was in it (same engine,
    instance and rank) and wants the same keeps its routes. The others are dealt out around these;
    of what the same trainer ranks hold, none then serves more engine ranks than it did before, or
    its fair share rounded up, whichever is more. If the trainer yields anything else than it did,
    or in other buckets, everything is planned afresh.

    Args:
        bucket_bytes: the most that a source stages at a time for one engine rank.
        allow_cast: whether dtype conversions may lose bits.
        allow_padding: whether loaders may fill up tensors that are smaller than their parameter.
        previous: the plan that this one follows.

    Raises:
        PlanError: naming every culprit; nothing is planned then.
    """
    refuse(forms.check_trainers(trainers) + forms.check_layouts(layouts))
    with no_collection():
        distinct, number_of = distinct_layouts(layouts)
        specs, casts = _check(trainers, layouts, distinct, number_of, allow_cast, allow_padding)
        names = same_names(trainers)
        keys = [target_key(layout.rank) for layout in layouts]
        basis = _Basis(
            tuple(t.rank for t in trainers),
            names,
            bucket_bytes,
            distinct,
            dict(zip(keys, number_of, strict=True)),
            {key: {} for key in keys},
            {key: {} for key in keys},
        )
        kept: dict[_Key, _Basis] = {}
        old = previous._basis if previous is not None and previous.specs == specs else None
        if old is not None:
            kept = dict.fromkeys(_kept(old, basis), old)
        routes = _routes(trainers, layouts, number_of, basis, kept)
    return Plan(routes, casts, specs, basis)


def _kept(old: _Basis, new: _Basis) -> list[_Key]:
    """The engine ranks whose routes stay the same."""
    if (old.ranks, old.names, old.bucket_bytes) != (new.ranks, new.names, new.bucket_bytes):
        return []
    # Which of the new layouts is which of the old ones: known by standing in one row with them.
    _, numbers = distinct_layouts([*old.distinct, *new.distinct])
    now = numbers[len(old.distinct) :]
    return [
        key
        for key, number in new.number.items()
        if key in old.number and numbers[old.number[key]] == now[number]
    ]


def _routes(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    number_of: Sequence[int],
    basis: _Basis,
    kept: Mapping[_Key, _Basis],
) -> tuple[Route, ...]:
    """All routes; ``basis`` learns of them."""
    ranks = [layout.rank for layout in layouts]
    keys = list(map(target_key, ranks))
    wants: dict[int, dict[str, list[Want]]] = {}
    for number, layout in enumerate(basis.distinct):
        wants[number] = defaultdict(list)
        for want in layout.recording.wants:
            wants[number][want.source].append(want)
    wanted = [set(each) for each in wants.values()]
    classes = classes_of(*basis.names)
    dealt = assign(
        classes,
        trainers,
        ranks,
        [wanted[n] for n in number_of],
        {t: kept[key].dealt[key] for t, key in enumerate(keys) if key in kept},
    )
    packed: dict[tuple[int, int, tuple[Holders, ...]], tuple[Round, ...]] = {}
    routes = []
    for (source, target), mine in sorted(dealt.items()):
        key, number = keys[target], number_of[target]
        basis.dealt[key] |= dict.fromkeys(mine, source)
        if key in kept:
            rounds = kept[key].rounds[key].get(source, ())
        else:
            same = number, basis.names[0][source], tuple(mine)
            if same not in packed:
                names = {n for c in mine for n in classes[c] if n in wanted[number]}
                order = [s.name for s in trainers[source].exports if s.name in names]
                packed[same] = _pack(
                    basis.distinct[number], wants[number], order, ranks[target], basis.bucket_bytes
                )
            rounds = packed[same]
        basis.rounds[key][source] = rounds
        if rounds:
            routes.append(Route(trainers[source].rank, ranks[target], rounds))
    return tuple(routes)


def _pack(
    layout: EngineRankLayout,
    by_source: Mapping[str, list[Want]],
    order: Sequence[str],
    rank: EngineRank,
    bucket_bytes: int,
) -> tuple[Round, ...]:
    params = {p.name: p for p in layout.params}
    wants = [w for name in order for w in by_source[name]]
    nbytes = sum(w.dst.numel * ITEMSIZE[params[w.param].dtype] for w in wants)
    # As few as there can be, before they are made; then as many as there are.
    refuse_rounds(rank, nbytes // bucket_bytes, bucket_bytes)
    rounds = pack(wants, order, params, bucket_bytes)
    refuse_rounds(rank, len(rounds), bucket_bytes)
    return rounds
