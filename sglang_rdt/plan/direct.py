"""The plan of direct mode: which engine rank reads which bytes of which trainer rank's memory."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.plan import coverage, forms, staging
from sglang_rdt.plan.buckets import pack
from sglang_rdt.plan.compose import Composer, Holders, Template
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.planner import Route, refuse, refuse_rounds
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    TensorSpec,
    TrainerRank,
    Want,
)
from sglang_rdt.plan.spread import Pieces, Share, spread
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
    "How",
    "Transfer",
    "check_target_transfers",
    "make_direct_plan",
    "wanted_elements",
]


@dataclass(slots=True)
class _Table:
    """Transfers as arrays, one row each."""

    param: NDArray[np.int32]
    entry: NDArray[np.int32]
    shape: Ints
    dst: Ints
    dst_stride: Ints
    holder: Ints  # row of Holders
    src: Ints
    src_stride: Ints


@dataclass(slots=True)
class DirectPlan:
    """Everything that a direct sync moves.

    Compact: engine ranks with equal parameters and recordings share a template; of each engine
    rank there are only arrays with one number per part. Transfers are made when asked for.

    Args:
        targets: the engine ranks; ``target`` below is an index into them.
        specs: the trainer's HF tensors.
        casts: the conversions that will happen (for the log).
        egress: bytes that leave each trainer rank, in the order of ``sources``.
        ingress: bytes that reach each target.
        sources: the trainer ranks' numbers.
    """

    targets: tuple[EngineRank, ...]
    specs: dict[str, TensorSpec]
    casts: tuple[str, ...]
    sources: tuple[int, ...]
    egress: Ints
    ingress: Ints
    _holders: Holders
    _templates: list[Template]
    _template_of: list[int]
    _shares: list[Share]
    _hows: list[staging.Hows]
    _staged: dict[How, int]
    # All parts of all targets by trainer rank: from ``_first[i]`` on those of ``sources[i]``.
    _first: Ints
    _by_source: NDArray[np.int32] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes per sync over all links."""
        return int(self.ingress.sum())

    @property
    def staged_bytes(self) -> dict[How, int]:
        """Bytes per sync over all links by how they move."""
        return dict(self._staged)

    def transfers(self, target: int) -> list[Transfer]:
        """All transfers to one engine rank."""
        return self._make(target, np.arange(len(self._shares[target].piece)))

    def transfers_from(self, source: int) -> list[tuple[int, Transfer]]:
        """All transfers from the trainer rank with number ``source``, each with its target.

        Raises:
            KeyError: there is no such trainer rank.
        """
        return [(target, one) for target, parts in self._parts_from(source) for one in parts]

    def sources_of(self, target: int) -> tuple[int, ...]:
        """Numbers of the trainer ranks that an engine rank reads from, ascending."""
        ranks = np.unique(self._holders.rank[self._holder_rows(target)])
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
        routes = []
        for target, parts in self._parts_from(source, staging.PACK):
            wants = [Want(t.param, t.dst, f"{t.block}/{t.src_dtype}", t.src) for t in parts]
            order = list(dict.fromkeys(w.source for w in wants))
            params = {p.name: p for p in self._templates[self._template_of[target]].params}
            rank = self.targets[target]
            refuse_rounds(rank, sum(t.nbytes for t in parts) // bucket_bytes, bucket_bytes)
            rounds = pack(wants, order, params, bucket_bytes)
            refuse_rounds(rank, len(rounds), bucket_bytes)
            if rounds:
                routes.append(Route(source, rank, rounds))
        return tuple(routes)

    def _parts_from(self, source: int, how: int | None = None) -> list[tuple[int, list[Transfer]]]:
        if source not in self.sources:
            raise KeyError(f"no trainer rank {source} in this plan")
        index = self.sources.index(source)
        target, part = self._by_source[:, self._first[index] : self._first[index + 1]]
        out = []
        for t in np.unique(target).tolist():
            parts = part[target == t]
            if how is not None:
                parts = parts[self._hows[t][parts] == how]
            if len(parts):
                out.append((t, self._make(t, parts)))
        return out

    def _holder_rows(self, target: int) -> Ints:
        return _holder_rows(
            self._templates[self._template_of[target]], self._shares[target], self._holders
        )

    def _make(self, target: int, parts: NDArray[np.integer]) -> list[Transfer]:
        template = self._templates[self._template_of[target]]
        table = _table(template, self._shares[target], self._holders, parts)
        holders = self._holders
        names = [(p.name, p.dtype) for p in template.params]
        made = []
        for param, entry, rank, block, shape, dst, dst_stride, src, src_stride, how in zip(
            table.param.tolist(),
            table.entry.tolist(),
            holders.rank[table.holder].tolist(),
            holders.block[table.holder].tolist(),
            table.shape.tolist(),
            table.dst.tolist(),
            table.dst_stride.tolist(),
            table.src.tolist(),
            table.src_stride.tolist(),
            self._hows[target][parts].tolist(),
            strict=True,
        ):
            dims = [d for d, n in enumerate(shape) if n != 1]
            sizes = tuple([shape[d] for d in dims])
            name, dtype = names[param]
            made.append(
                Transfer(
                    self.sources[rank],
                    block,
                    Slice(src, sizes, tuple([src_stride[d] for d in dims])),
                    holders.dtypes[entry],
                    name,
                    Slice(dst, sizes, tuple([dst_stride[d] for d in dims])),
                    dtype,
                    HOWS[how],
                )
            )
        return made


def _holder_rows(template: Template, share: Share, holders: Holders) -> Ints:
    return holders.first[template.entry[share.piece]] + share.slot


def _axis(template: Template) -> NDArray[np.intp]:
    """The dimension by which each piece is cut: the outermost one of the parameter."""
    return np.where(template.shape > 1, template.dst_stride, -1).argmax(axis=1)


def _table(
    template: Template, share: Share, holders: Holders, parts: NDArray[np.integer]
) -> _Table:
    piece, low, high = share.piece[parts], share.low[parts].astype(np.int64), share.high[parts]
    axis, row = _axis(template)[piece], np.arange(len(piece))
    shape, delta = template.shape[piece], template.delta[piece]
    shape[row, axis] = high - low
    delta[row, axis] += low
    entry = template.entry[piece]
    holder = holders.first[entry] + share.slot[parts]
    src_stride = holders.strides[holders.layout[holder]]
    dst_stride = template.dst_stride[piece]
    return _Table(
        template.param[piece],
        entry,
        shape,
        template.dst[piece] + low * dst_stride[row, axis],
        dst_stride,
        holder,
        holders.offset[holder] + (delta * src_stride).sum(axis=1),
        src_stride,
    )


def make_direct_plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    *,
    costs: LinkCosts | None = None,
    allow_cast: bool = False,
    allow_padding: bool = False,
) -> DirectPlan:
    """Plans a direct sync of all engine ranks in ``layouts`` out of what ``trainers`` hold.

    Args:
        costs: None: the defaults.
        allow_cast: whether dtype conversions may lose bits.
        allow_padding: whether loaders may fill up tensors that are smaller than their parameter.

    Raises:
        PlanError: naming every culprit; nothing is planned then.
    """
    with _no_collection():
        return _plan(trainers, layouts, costs or LinkCosts(), allow_cast, allow_padding)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Specs of a large model are millions of objects, none of them in a cycle; looking through
    all of them again and again would take as long as planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    costs: LinkCosts,
    allow_cast: bool,
    allow_padding: bool,
) -> DirectPlan:
    problems = forms.check_trainers(trainers) + forms.check_layouts(layouts)
    refuse(problems)
    distinct, template_of = _distinct(layouts)
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
        same = f" (so do {count - 1} engine ranks with the same layout)" if count > 1 else ""
        problems += [f"{line}{same}" for line in found]
        casts += happening
    problems += _check_engines(layouts, template_of, distinct, specs)
    refuse(problems)
    return _assemble(
        trainers, layouts, specs, casts, composer.holders, templates, template_of, costs
    )


def _assemble(
    trainers: Sequence[TrainerRank],
    layouts: Sequence[EngineRankLayout],
    specs: dict[str, TensorSpec],
    casts: Sequence[str],
    holders: Holders,
    templates: list[Template],
    template_of: list[int],
    costs: LinkCosts,
) -> DirectPlan:
    class_of, classes = holders.classes()
    src_item = np.array([ITEMSIZE[d] for d in holders.dtypes], np.int64)
    names = {d: i for i, d in enumerate(ITEMSIZE)}
    src_dtype = np.array([names[d] for d in holders.dtypes], np.int64)
    items, dtypes, pieces = [], [], []
    for one in templates:
        # Buffers that no loader writes may have any dtype.
        items.append(np.array([ITEMSIZE.get(p.dtype, 0) for p in one.params], np.int64))
        dtypes.append(np.array([names.get(p.dtype, -1) for p in one.params], np.int64))
        item = np.minimum(items[-1][one.param], src_item[one.entry])
        rows = one.shape[np.arange(len(one)), _axis(one)]
        pieces.append(Pieces(class_of[one.entry], one.shape.prod(axis=1) * item, rows))
    shares = spread(
        classes,
        pieces,
        template_of,
        [t.node_ip for t in trainers],
        [one.rank.node_ip for one in layouts],
        costs.descriptor_bytes,
    )
    egress, ingress = np.zeros(len(trainers), np.int64), np.zeros(len(layouts), np.int64)
    staged = np.zeros(len(HOWS), np.int64)
    hows: list[staging.Hows] = []
    ranks: list[NDArray[np.int32]] = []
    # Engine ranks that differ only in who gives what are decided once.
    decided: dict[tuple[int, int, bytes], tuple[staging.Hows, Ints]] = {}
    for number, share in zip(template_of, shares, strict=True):
        template = templates[number]
        holder = _holder_rows(template, share, holders)
        ranks.append(holders.rank[holder])
        key = number, id(share.piece), holders.layout[holder].tobytes()
        if key not in decided:
            table = _table(template, share, holders, np.arange(len(holder)))
            dst_item, of_item = items[number][table.param], src_item[table.entry]
            cast = dtypes[number][table.param] != src_dtype[table.entry]
            how = staging.decide(
                table.shape, table.dst_stride, table.src_stride, dst_item, of_item, cast, costs
            )
            moved = table.shape.prod(axis=1) * np.where(how == staging.PACK, dst_item, of_item)
            decided[key] = how, moved
        how, moved = decided[key]
        hows.append(how)
        ingress[len(hows) - 1] = moved.sum()
        np.add.at(egress, ranks[-1], moved)
        np.add.at(staged, how, moved)
    rank = np.concatenate(ranks) if ranks else np.zeros(0, np.int32)
    order = np.argsort(rank, kind="stable")
    counts = [len(r) for r in ranks]
    target = np.repeat(np.arange(len(ranks), dtype=np.int32), counts)
    part = np.concatenate([np.arange(n, dtype=np.int32) for n in counts] or [rank])
    first = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=len(trainers)))])
    return DirectPlan(
        targets=tuple(one.rank for one in layouts),
        specs=specs,
        casts=tuple(casts),
        sources=tuple(t.rank for t in trainers),
        egress=egress,
        ingress=ingress,
        _holders=holders,
        _templates=templates,
        _template_of=template_of,
        _shares=shares,
        _hows=hows,
        _staged=dict(zip(HOWS, staged.tolist(), strict=True)),
        _first=first.astype(np.int64),
        _by_source=np.stack([target[order], part[order]]),
    )


# Proofs, once per distinct thing.


_FLAT = attrgetter(
    "param",
    "dst.offset",
    "dst.shape",
    "dst.stride",
    "source",
    "src.offset",
    "src.shape",
    "src.stride",
)

_PARAM = attrgetter("name", "shape", "stride", "dtype")


def _distinct(layouts: Sequence[EngineRankLayout]) -> tuple[list[EngineRankLayout], list[int]]:
    """The layouts that differ in parameters or recording, and of each layout which it is."""
    distinct: list[EngineRankLayout] = []
    seen: dict[Any, list[tuple[list[Any], int]]] = defaultdict(list)
    numbers = []
    for layout in layouts:
        try:
            wants = tuple(map(_FLAT, layout.recording.wants))
            # Addresses differ from process to process; what counts is who shares memory with whom.
            order: dict[int, int] = {}
            params = [
                (order.setdefault(p.storage, len(order)), p.offset, p.buffer, *_PARAM(p))
                for p in layout.params
            ]
            flat = [wants, layout.recording.constants, layout.recording.padding, params]
            bucket = seen[hash(wants)]
            number = next((n for known, n in bucket if known == flat), None)
        except (AttributeError, TypeError, ValueError):
            # No recording at all: like no other, and refused when it is looked at.
            flat, bucket, number = [], [], None
        if number is None:
            number = len(distinct)
            distinct.append(layout)
            bucket.append((flat, number))
        numbers.append(number)
    return distinct, numbers


def _check_engines(
    layouts: Sequence[EngineRankLayout],
    template_of: Sequence[int],
    distinct: Sequence[EngineRankLayout],
    specs: dict[str, TensorSpec],
) -> list[str]:
    engines: dict[str, list[int]] = {}
    for layout, number in zip(layouts, template_of, strict=True):
        engines.setdefault(layout.rank.engine, []).append(number)
    problems: list[str] = []
    seen: set[tuple[int, ...]] = set()
    for engine, numbers in engines.items():
        key = tuple(sorted(set(numbers)))
        if key in seen:
            continue
        seen.add(key)
        here = [replace(distinct[n], rank=replace(distinct[n].rank, engine=engine)) for n in key]
        problems += coverage.check_engine(here, specs)
    return problems


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
