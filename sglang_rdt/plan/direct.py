"""The plan of direct mode: which engine rank reads which bytes of which trainer rank's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.plan import coverage, forms, staging
from sglang_rdt.plan.compose import Composer, Holders, Template, same_holders, same_template
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.distinct import (
    and_others,
    check_engines,
    distinct_layouts,
    no_collection,
    target_key,
)
from sglang_rdt.plan.parts import DirectShare, Parts, axis_of, holder_rows, table
from sglang_rdt.plan.planner import Route, refuse
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    TensorSpec,
    TrainerRank,
)
from sglang_rdt.plan.spread import Pieces, Share, fair_shares, spread
from sglang_rdt.plan.strided import Ints
from sglang_rdt.plan.transfers import (
    HOWS,
    MAX_MARKED,
    How,
    Transfer,
    check_target_transfers,
    wanted_elements,
)

__all__ = [
    "DirectPlan",
    "DirectShare",
    "How",
    "Transfer",
    "check_target_transfers",
    "make_direct_plan",
    "wanted_elements",
]


@dataclass(slots=True)
class DirectPlan:
    """Everything that a direct sync moves. It stays with whoever made it; each trainer rank is sent
    its :meth:`share`.

    Args:
        targets: the engine ranks; ``target`` below is an index into them.
        specs: the trainer's HF tensors.
        casts: the conversions that will happen (for the log).
        egress: bytes that leave each trainer rank, in the order of ``sources``.
        ingress: bytes that reach each target.
        sources: the trainer ranks' numbers.
        fair: bytes that would leave each trainer rank if its holders gave equal parts of
            everything.
        kept: the targets whose transfers are those that they had in the previous plan.
    """

    targets: tuple[EngineRank, ...]
    specs: dict[str, TensorSpec]
    casts: tuple[str, ...]
    sources: tuple[int, ...]
    egress: Ints
    ingress: Ints
    fair: NDArray[np.float64]
    kept: frozenset[int]
    _parts: Parts
    _staged: dict[How, int]
    # All parts of all targets by trainer rank: from ``_first[i]`` on those of ``sources[i]``.
    _first: Ints
    _by_source: NDArray[np.int32] = field(repr=False)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines' names, sorted."""
        return tuple(sorted({t.engine for t in self.targets}))

    @property
    def nbytes(self) -> int:
        """Bytes per sync over all links."""
        return int(self.ingress.sum())

    @property
    def staged_bytes(self) -> dict[How, int]:
        """Bytes per sync over all links by how they move."""
        return dict(self._staged)

    @property
    def unevenness(self) -> float:
        """How much more the busiest trainer rank sends than the busiest one would if everything
        were spread evenly; 1 is perfect. Large after many engines have left: then a plan without
        ``previous`` is worth having."""
        most = float(self.fair.max(initial=0.0))
        return float(self.egress.max(initial=0)) / most if most else 1.0

    def transfers(self, target: int) -> list[Transfer]:
        """All transfers to one engine rank."""
        return self._parts.make(target, np.arange(len(self._parts.shares[target].piece)))

    def transfers_from(self, source: int) -> list[tuple[int, Transfer]]:
        """All transfers from the trainer rank with number ``source``, each with its target.

        Raises:
            KeyError: there is no such trainer rank.
        """
        chosen = self._rows_from(source)
        return [(t, one) for t, parts in chosen.items() for one in self._parts.make(t, parts)]

    def sources_of(self, target: int) -> tuple[int, ...]:
        """Numbers of the trainer ranks that an engine rank reads from, ascending."""
        ranks = np.unique(self._parts.holders.rank[self._parts.holder_rows(target)])
        return tuple(sorted(self.sources[i] for i in ranks.tolist()))

    def packed_routes(self, source: int, bucket_bytes: int) -> tuple[Route, ...]:
        """What trainer rank ``source`` packs for whom: its "pack" transfers in rounds.

        ``Piece.source`` is ``"<block>/<dtype>"``, ``Piece.src`` a slice of that block in elements
        of that dtype.

        Raises:
            KeyError: there is no such trainer rank.
            PlanError: ``bucket_bytes`` makes more than ``MAX_ROUNDS`` rounds.
            SlicesError: not even an element fits.
        """
        return self._parts.pack(source, self._rows_from(source), bucket_bytes)

    def share(self, source: int) -> DirectShare:
        """What trainer rank ``source`` needs of this plan: plain data, a small part of it.

        Raises:
            KeyError: there is no such trainer rank.
        """
        parts = self._parts.only(source, self._rows_from(source))
        return DirectShare(source, self.engines, self.nbytes, self.staged_bytes, parts)

    def _rows_from(self, source: int) -> dict[int, NDArray[np.int32]]:
        if source not in self.sources:
            raise KeyError(f"no trainer rank {source} in this plan")
        index = self.sources.index(source)
        target, part = self._by_source[:, self._first[index] : self._first[index + 1]]
        return {t: part[target == t] for t in np.unique(target).tolist()}


def make_direct_plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    *,
    costs: LinkCosts | None = None,
    allow_cast: bool = False,
    allow_padding: bool = False,
    previous: DirectPlan | None = None,
) -> DirectPlan:
    """Plans a direct sync of all engine ranks in ``layouts`` out of what ``trainers`` hold.

    With ``previous`` only what has changed is planned: an engine rank that was in it (same engine,
    instance and rank) and wants the same keeps its transfers, whoever else has joined or left, so
    that whatever was prepared for them stays good. The others are planned around the load that
    these put on the trainer ranks. If the trainer holds anything else than it did, or holds it
    anywhere else, everything is planned afresh.

    Then the load may be less even. By classes of holders (what the same trainer ranks hold), a
    trainer rank sends no more than what it sends to those who are kept, or 1 +
    ``spread.TOLERANCE`` of its fair share, whichever is more; what is too small to be cut comes on
    top, as without ``previous``. So nobody ever sends more than its share of the fullest plan in a
    row of plans, each made with the one before.

    Args:
        costs: None: the defaults. Those who are kept are staged as they were.
        allow_cast: whether dtype conversions may lose bits.
        allow_padding: whether loaders may fill up tensors that are smaller than their parameter.
        previous: the plan that this one follows.

    Raises:
        PlanError: naming every culprit; nothing is planned then.
    """
    with no_collection():
        return _plan(trainers, layouts, costs or LinkCosts(), allow_cast, allow_padding, previous)


def _plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    costs: LinkCosts,
    allow_cast: bool,
    allow_padding: bool,
    previous: DirectPlan | None,
) -> DirectPlan:
    problems = forms.check_trainers(trainers) + forms.check_layouts(layouts)
    refuse(problems)
    distinct, template_of = distinct_layouts(layouts)
    refuse([line for layout in distinct for line in forms.check_layout(layout)])
    specs, problems = coverage.union_of_specs(e for _, e in forms.distinct_exports(trainers))
    like = np.bincount(np.array(template_of, np.int64), minlength=len(distinct)).tolist()
    composer = Composer(trainers, specs, allow_cast)
    problems += composer.problems
    casts = list(composer.casts)
    templates: list[Template] = []
    for layout, count in zip(distinct, like, strict=True):
        found = coverage.check_rank(layout, specs, allow_padding)
        lossy, happening = coverage.check_dtypes(layout, specs, allow_cast)
        found += lossy
        sizes = _check_memory(layout, specs)
        if not sizes:
            template, missing = composer.compose(
                layout.recording.wants, layout.params, str(layout.rank)
            )
            templates.append(template)
            found += missing
        found += sizes
        problems += [line + and_others(count) for line in found]
        casts += happening
    problems += check_engines(layouts, template_of, distinct, specs)
    refuse(problems)
    ranks = tuple(one.rank for one in layouts)
    pieces = _Pieces.of(composer.holders, templates)
    sources = tuple(t.rank for t in trainers)
    kept = _kept(previous, sources, composer.holders, templates, ranks, template_of)
    shares = spread(
        pieces.classes,
        pieces.each,
        template_of,
        [t.node_ip for t in trainers],
        [rank.node_ip for rank in ranks],
        costs.descriptor_bytes,
        [share for share, _ in kept],
    )
    parts = Parts(ranks, sources, composer.holders, templates, template_of, shares, [])
    fair = fair_shares(pieces.classes, pieces.each, template_of, len(trainers))
    return _assemble(parts, pieces, [how for _, how in kept], specs, casts, fair, costs)


_Kept = tuple[Share | None, staging.Hows | None]


def _kept(
    previous: DirectPlan | None,
    sources: tuple[int, ...],
    holders: Holders,
    templates: Sequence[Template],
    ranks: Sequence[EngineRank],
    template_of: Sequence[int],
) -> list[_Kept]:
    """What each target has from ``previous``, or nothing.

    Whether it is still right is not asked of who reported what but of the outcome: entries that lie
    at the same place of the same trainer ranks, and a template that takes the same of them.
    """
    nothing: list[_Kept] = [(None, None)] * len(ranks)
    if previous is None or previous.sources != sources:
        return nothing
    old = previous._parts
    if not same_holders(old.holders, holders):
        return nothing
    place = {target_key(rank): i for i, rank in enumerate(old.targets)}
    same: dict[tuple[int, int], bool] = {}
    out = nothing
    for t, rank in enumerate(ranks):
        i = place.get(target_key(rank))
        if i is None:
            continue
        two = old.template_of[i], template_of[t]
        if two not in same:
            same[two] = same_template(old.templates[two[0]], templates[two[1]])
        if same[two]:
            out[t] = old.shares[i], old.hows[i]
    return out


@dataclass(slots=True)
class _Pieces:
    """What :func:`~sglang_rdt.plan.spread.spread` looks at, and the dtypes on either side."""

    classes: list[tuple[int, ...]]
    each: list[Pieces]
    items: list[Ints]  # bytes per element of each parameter, by template
    dtypes: list[Ints]  # numbers, by template
    src_item: Ints  # of each entry
    src_dtype: Ints

    @classmethod
    def of(cls, holders: Holders, templates: Sequence[Template]) -> _Pieces:
        class_of, classes = holders.classes()
        names = {d: i for i, d in enumerate(ITEMSIZE)}
        out = cls(
            classes,
            [],
            [],
            [],
            np.array([ITEMSIZE[d] for d in holders.dtypes], np.int64),
            np.array([names[d] for d in holders.dtypes], np.int64),
        )
        for one in templates:
            # Buffers that no loader writes may have any dtype.
            out.items.append(np.array([ITEMSIZE.get(p.dtype, 0) for p in one.params], np.int64))
            out.dtypes.append(np.array([names.get(p.dtype, -1) for p in one.params], np.int64))
            item = np.minimum(out.items[-1][one.param], out.src_item[one.entry])
            rows = one.shape[np.arange(len(one)), axis_of(one)]
            out.each.append(Pieces(class_of[one.entry], one.shape.prod(axis=1) * item, rows))
        return out


def _assemble(
    parts: Parts,
    pieces: _Pieces,
    kept: Sequence[staging.Hows | None],
    specs: dict[str, TensorSpec],
    casts: Sequence[str],
    fair: NDArray[np.float64],
    costs: LinkCosts,
) -> DirectPlan:
    """Decides how the parts of those who are not ``kept`` move, and sums everything up."""
    holders, sources = parts.holders, parts.sources
    egress, ingress = np.zeros(len(sources), np.int64), np.zeros(len(parts.targets), np.int64)
    staged = np.zeros(len(HOWS), np.int64)
    ranks: list[NDArray[np.int32]] = []
    # Engine ranks that differ only in who gives what are decided once.
    decided: dict[tuple[int, int, int, bytes], tuple[staging.Hows, Ints]] = {}
    for number, share, how in zip(parts.template_of, parts.shares, kept, strict=True):
        template = parts.templates[number]
        holder = holder_rows(template, share, holders)
        ranks.append(holders.rank[holder])
        key = number, id(share.piece), id(how), holders.layout[holder].tobytes()
        if key not in decided:
            rows = table(template, share, holders, np.arange(len(holder)))
            dst_item, of_item = pieces.items[number][rows.param], pieces.src_item[rows.entry]
            if how is None:
                cast = pieces.dtypes[number][rows.param] != pieces.src_dtype[rows.entry]
                how = staging.decide(
                    rows.shape, rows.dst_stride, rows.src_stride, dst_item, of_item, cast, costs
                )
            moved = rows.shape.prod(axis=1) * np.where(how == staging.PACK, dst_item, of_item)
            decided[key] = how, moved
        how, moved = decided[key]
        parts.hows.append(how)
        ingress[len(parts.hows) - 1] = moved.sum()
        np.add.at(egress, ranks[-1], moved)
        np.add.at(staged, how, moved)
    rank = np.concatenate(ranks) if ranks else np.zeros(0, np.int32)
    order = np.argsort(rank, kind="stable")
    counts = [len(r) for r in ranks]
    target = np.repeat(np.arange(len(ranks), dtype=np.int32), counts)
    part = np.concatenate([np.arange(n, dtype=np.int32) for n in counts] or [rank])
    first = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=len(sources)))])
    return DirectPlan(
        targets=parts.targets,
        specs=specs,
        casts=tuple(casts),
        sources=sources,
        egress=egress,
        ingress=ingress,
        fair=fair,
        kept=frozenset(t for t, how in enumerate(kept) if how is not None),
        _parts=parts,
        _staged=dict(zip(HOWS, staged.tolist(), strict=True)),
        _first=first.astype(np.int64),
        _by_source=np.stack([target[order], part[order]]),
    )


# Proofs, once per distinct layout.


def _check_memory(layout: EngineRankLayout, specs: dict[str, TensorSpec]) -> list[str]:
    """Sizes and dtypes that memory can have; no memory written through two different views."""
    problems = coverage.check_sizes(layout, specs)
    if problems:
        return problems
    wanted = {w.param for w in layout.recording.wants}
    by_storage: dict[int, list[ParamSpec]] = defaultdict(list)
    for param in layout.params:
        if param.name in wanted and param.numel:
            by_storage[param.storage].append(param)
    for params in by_storage.values():
        # The same view under several names (tied weights) is one region.
        views = {(p.offset, p.shape, p.stride, p.dtype): p for p in params}.values()
        open_: list[ParamSpec] = []
        for one in sorted(views, key=_bytes_of):
            open_ = [p for p in open_ if _bytes_of(p)[1] > _bytes_of(one)[0]]
            problems += [
                f"{layout.rank}: {two.name} and {one.name} are different views of the same memory"
                for two in open_
                if _overlap(one, two)
            ]
            open_.append(one)
    return problems


def _bytes_of(param: ParamSpec) -> tuple[int, int]:
    item = ITEMSIZE[param.dtype]
    return param.offset * item, (param.offset + param.extent) * item


def _overlap(one: ParamSpec, two: ParamSpec) -> bool:
    """Whether two views that lie within one another's bounds have bytes in common; True where it
    would take too much memory to tell."""
    begin = min(_bytes_of(one)[0], _bytes_of(two)[0])
    end = max(_bytes_of(one)[1], _bytes_of(two)[1])
    if end - begin > MAX_MARKED:
        return True
    marks = np.zeros(end - begin, np.bool_)
    views = [
        np.lib.stride_tricks.as_strided(
            marks[p.offset * ITEMSIZE[p.dtype] - begin :],
            (*p.shape, ITEMSIZE[p.dtype]),
            (*(t * ITEMSIZE[p.dtype] for t in p.stride), 1),
        )
        for p in (one, two)
    ]
    views[0][...] = True
    return bool(views[1].any())
