"""Wants composed with holds: which bytes of which trainer ranks are which bytes of a parameter.

Equal boxes of an HF tensor on several trainer ranks are one *entry* with several holders. One
recording becomes one *template*: pieces, each a part of one entry, whoever of its holders gives it.
Both are arrays with one row per holder or piece, because there are hundreds of thousands of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.brief import brief, cut, one_line
from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.boxes import Part, align, first_overlap, minus
from sglang_rdt.plan.forms import MAX_BYTES, MAX_DIMS, why_no_slice
from sglang_rdt.plan.slices import Box, Slice
from sglang_rdt.plan.specs import ITEMSIZE, Hold, ParamSpec, TensorSpec, TrainerRank, Want
from sglang_rdt.plan.strided import Ints, padded

# Above this many boxes numpy finds the ones that overlap faster than a loop does.
_MANY = 16
# No model has more; slices that fall apart into single elements do.
MAX_PIECES = 1 << 22
MAX_HELD = 1 << 24
# With fewer rows, each may be a piece of its own.
MIN_STEPS = 64


@dataclass(slots=True)
class Holders:
    """Who holds each entry: rows ``first[e]`` to ``first[e + 1]`` of the other arrays.

    Args:
        rank: index of the trainer rank; ascending within an entry.
        block: number of its block.
        offset: elements of ``dtypes[e]`` from the block's first byte to the entry's first element.
        layout: row of ``strides``, the elements per step in each dimension of the HF tensor.
        dtypes: of each entry.
    """

    first: Ints
    rank: NDArray[np.int32]
    block: NDArray[np.int32]
    offset: Ints
    layout: NDArray[np.int32]
    strides: Ints
    dtypes: tuple[str, ...]

    def classes(self) -> tuple[NDArray[np.int32], list[tuple[int, ...]]]:
        """Per entry the number of its set of holders, and these sets."""
        sets: dict[bytes, int] = {}
        rank, first = self.rank, self.first.tolist()
        numbers = [
            sets.setdefault(rank[a:b].tobytes(), len(sets)) for a, b in itertools.pairwise(first)
        ]
        lists = [tuple(np.frombuffer(key, np.int32).tolist()) for key in sets]
        return np.array(numbers, np.int32), lists


@dataclass(slots=True)
class Template:
    """The pieces that one recording takes; all engine ranks with equal recordings share it.

    Args:
        params: all parameters of such a rank.
        param: index into ``params`` of each piece.
        entry: of which it is a part.
        delta: where the part begins in the entry, in index space.
        shape: of the part, in the dimensions of the HF tensor (size 1 where it has fewer).
        dst: elements from the parameter's first one.
        dst_stride: elements per step in each dimension.
    """

    params: tuple[ParamSpec, ...]
    param: NDArray[np.int32]
    entry: NDArray[np.int32]
    delta: Ints
    shape: Ints
    dst: Ints
    dst_stride: Ints

    def __len__(self) -> int:
        return len(self.param)


def same_holders(one: Holders, two: Holders) -> bool:
    """Whether every entry lies at the same place of the same trainer ranks."""
    return one.dtypes == two.dtypes and _same(
        one, two, ("first", "rank", "block", "offset", "layout", "strides")
    )


def same_template(one: Template, two: Template) -> bool:
    """Whether two templates over the same holders take the same, for the same parameters. Where
    these lie differs from process to process."""
    return [_shown(p) for p in one.params] == [_shown(p) for p in two.params] and _same(
        one, two, ("param", "entry", "delta", "shape", "dst", "dst_stride")
    )


def _shown(param: ParamSpec) -> tuple[Any, ...]:
    return param.name, param.shape, param.stride, param.dtype


def _same(one: Any, two: Any, names: Sequence[str]) -> bool:
    return all(np.array_equal(getattr(one, n), getattr(two, n)) for n in names)


@dataclass(slots=True)
class _Cells:
    """How one shape of want falls onto one pattern of entries."""

    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # entry, sub, dst offset
    missing: int = 0
    span: int = 0  # elements from the first to the last one written


class Composer:
    """Indexes what the trainer holds once, then composes any number of recordings with it.

    Holds that cannot be used are named in ``problems``. Alignment and intersection are done once
    per distinct shape: the experts of all layers look the same.
    """

    def __init__(
        self, trainers: Sequence[TrainerRank], specs: Mapping[str, TensorSpec], allow_cast: bool
    ) -> None:
        self.problems: list[str] = []
        self.casts: list[str] = []
        self._specs = _stepped(specs, trainers)
        self._allow_cast = allow_cast
        self._ndim = max((len(s.shape) for s in self._specs.values()), default=0) or 1
        self._boxes: dict[Box, int] = {}
        self._strides: dict[tuple[int, ...], int] = {}
        self._aligned: dict[tuple, tuple[list[tuple[int, int, int]], int] | str] = {}
        self._entries: dict[str, dict[int, int]] = {}  # HF name -> box -> entry
        self._dtype: dict[str, tuple[str, TrainerRank]] = {}
        self._subs: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], int] = {}
        self._patterns: dict[tuple, int] = {}
        self._pattern_boxes: list[tuple[list[Box], bool]] = []  # and whether they are disjoint
        self._order: dict[str, tuple[list[int], int]] = {}
        self._cells: dict[tuple, _Cells | str] = {}
        self.holders = self._index(trainers)
        self._first: list[int] = self.holders.first.tolist()
        self._box_list = list(self._boxes)

    # Holds.

    def _index(self, trainers: Sequence[TrainerRank]) -> Holders:
        # One row per holder of an entry: entry, rank, block, offset, layout.
        rows: list[tuple[int, int, int, int, int]] = []
        dtypes: list[str] = []
        last: list[int] = []  # the trainer rank that was last seen holding each entry
        for number, trainer in enumerate(trainers):
            sizes = self._block_sizes(trainer)
            if len(rows) > MAX_HELD:
                self.problems.append(f"the trainer holds more than {MAX_HELD} pieces")
                break
            for hold in trainer.holds:
                entries = self._entries.setdefault(hold.source, {})
                for box, offset, layout in self._usable(trainer, hold, sizes):
                    entry = entries.get(box)
                    if entry is None:
                        entry = entries[box] = len(dtypes)
                        dtypes.append(hold.dtype)
                        last.append(-1)
                    # Held twice by the same rank (tied weights): one of them is enough.
                    if last[entry] == number:
                        continue
                    last[entry] = number
                    rows.append((entry, number, hold.block, offset, layout))
        table = np.array(rows, np.int64).reshape(-1, 5)
        table = table[np.argsort(table[:, 0], kind="stable")]
        counts = np.bincount(table[:, 0], minlength=len(dtypes))
        return Holders(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            table[:, 1].astype(np.int32),
            table[:, 2].astype(np.int32),
            table[:, 3].copy(),
            table[:, 4].astype(np.int32),
            padded(list(self._strides), 0, self._ndim),
            tuple(dtypes),
        )

    def _block_sizes(self, trainer: TrainerRank) -> list[int]:
        sizes = []
        for block in trainer.blocks:
            if not 0 <= block.nbytes <= MAX_BYTES:
                self.problems.append(f"{trainer}: block {block.name} of {block.nbytes} bytes")
            sizes.append(block.nbytes if 0 <= block.nbytes <= MAX_BYTES else 0)
        return sizes

    def _usable(
        self, trainer: TrainerRank, hold: Hold, sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """``(box, offset, layout)`` of each part of a hold; none, and a problem, if it is bad."""
        name, hf, local = hold.source, hold.hf, hold.local
        spec = self._specs.get(name) if type(name) is str else None
        if spec is None:
            return self._refuse(f"{trainer} holds {_text(name)}, which the trainer does not yield")
        if type(hf) is not Slice or type(local) is not Slice or type(hold.dtype) is not str:
            return self._refuse(f"{trainer} holds {name} as {brief(hf)} in {brief(local)}")
        known = self._dtype.get(name)
        if known is None or known[0] != hold.dtype:
            problem = self._check_dtype(trainer, hold, spec)
            if problem:
                return self._refuse(problem)
        # Everything that does not depend on where the slice lies in its block.
        key = (hf.offset, hf.shape, hf.stride, local.shape, local.stride, spec.shape)
        try:
            aligned = self._aligned.get(key)
        except TypeError:  # a list where a tuple should be
            return self._refuse(
                f"{trainer} holds {name}: {why_no_slice(hf) or why_no_slice(local)}"
            )
        if aligned is None:
            aligned = self._aligned[key] = self._align(hold, spec)
        if isinstance(aligned, str):
            return self._refuse(f"{trainer} holds {name}: {aligned}")
        parts, span = aligned
        if type(hold.block) is not int or not 0 <= hold.block < len(sizes):
            return self._refuse(
                f"{trainer} holds {name} in block {brief(hold.block)} of {len(sizes)}"
            )
        offset = local.offset
        if (
            type(offset) is not int
            or not 0 <= offset <= sizes[hold.block] // ITEMSIZE[hold.dtype] - span
        ):
            return self._refuse(
                f"{trainer} holds {name} outside of block {trainer.blocks[hold.block].name}: "
                f"{brief(local, 200)} of {hold.dtype}, the block has {sizes[hold.block]} bytes"
            )
        return [(box, offset + relative, layout) for box, relative, layout in parts]

    def _refuse(self, problem: str) -> list[tuple[int, int, int]]:
        self.problems.append(problem)
        return []

    def _check_dtype(self, trainer: TrainerRank, hold: Hold, spec: TensorSpec) -> str | None:
        name, dtype = hold.source, hold.dtype
        if dtype not in ITEMSIZE:
            return f"{trainer} holds {name} as {_text(dtype)}, which is no known dtype"
        if name in self._dtype:
            first, holder = self._dtype[name]
            return f"{trainer} holds {name} as {dtype}, {holder} as {first}"
        self._dtype[name] = dtype, trainer
        if dtype == spec.dtype:
            return None
        line = f"{trainer} holds {name} as {dtype}, the trainer yields it as {spec.dtype}"
        if not self._allow_cast:
            return f"{line}; set SGLANG_RDT_ALLOW_CAST=1 to convert straight from {dtype}"
        self.casts.append(line)
        return None

    def _align(self, hold: Hold, spec: TensorSpec) -> tuple[list[tuple[int, int, int]], int] | str:
        local = Slice(0, hold.local.shape, hold.local.stride)
        why = why_no_slice(hold.hf) or why_no_slice(local)
        if why:
            return why
        try:
            parts = align(hold.hf, local, spec.shape, "hold")
        except SlicesError as error:
            return str(error)
        if local.numel and local.last >= MAX_BYTES:
            return f"{local} is no slice of memory"
        return [
            (
                self._boxes.setdefault(part.box, len(self._boxes)),
                part.offset,
                self._strides.setdefault(part.stride, len(self._strides)),
            )
            for part in parts
        ], (local.last + 1 if parts else 0)

    # Wants.

    def compose(
        self, wants: Sequence[Want], params: Sequence[ParamSpec], who: str
    ) -> tuple[Template, list[str]]:
        """The pieces of one recording, in its order, and what of it nobody holds.

        Wants that name no parameter or no HF tensor, or leave their parameter, are left to the
        proofs of :mod:`sglang_rdt.plan.coverage`.
        """
        index = {p.name: (i, p.extent) for i, p in enumerate(params)}
        param_of: list[int] = []
        entry_of: list[int] = []
        sub_of: list[int] = []
        dst_of: list[int] = []
        missing: dict[str, int] = defaultdict(int)
        problems: list[str] = []
        for want in wants:
            spec, known = self._specs.get(want.source), index.get(want.param)
            if spec is None or known is None:
                continue
            param, extent = known
            src, dst = want.src, want.dst
            entries, pattern = self._pattern(want.source, spec)
            key = (src.offset, src.shape, src.stride, dst.shape, dst.stride, pattern)
            cells = self._cells.get(key)
            if cells is None:
                cells = self._cells[key] = self._intersect(want, spec, pattern)
            if isinstance(cells, str):
                problems.append(f"{who}: {want.param} from {want.source}: {cells}")
                continue
            if not 0 <= dst.offset <= extent - cells.span:
                continue
            if cells.missing:
                missing[want.source] += cells.missing
            for place, sub, offset in cells.pieces:
                param_of.append(param)
                entry_of.append(entries[place])
                sub_of.append(sub)
                dst_of.append(dst.offset + offset)
            if len(param_of) > MAX_PIECES:
                problems.append(f"{who}: its parameters fall into more than {MAX_PIECES} pieces")
                break
        problems += [
            f"{who}: {count} elements that it wants of HF tensor {name} are held by no trainer rank"
            for name, count in missing.items()
        ]
        subs = list(self._subs)
        rows = np.array(sub_of, np.int64)
        return Template(
            params=tuple(params),
            param=np.array(param_of, np.int32),
            entry=np.array(entry_of, np.int32),
            delta=padded([s[0] for s in subs], 0, self._ndim)[rows],
            shape=padded([s[1] for s in subs], 1, self._ndim)[rows],
            dst=np.array(dst_of, np.int64),
            dst_stride=padded([s[2] for s in subs], 0, self._ndim)[rows],
        ), problems

    def _pattern(self, name: str, spec: TensorSpec) -> tuple[list[int], int]:
        """The entries of an HF tensor in the order in which they are used, and the number of the
        pattern that their boxes make."""
        known = self._order.get(name)
        if known is None:
            first, boxes = self._first, self._box_list
            # Where boxes overlap, those with the most holders leave the most choice.
            order = sorted(
                (first[e] - first[e + 1], boxes[b].start, boxes[b].stop, e, b)
                for b, e in self._entries.get(name, {}).items()
            )
            key = (spec.shape, tuple(b for *_, b in order))
            pattern = self._patterns.setdefault(key, len(self._patterns))
            if pattern == len(self._pattern_boxes):
                here = [boxes[b] for b in key[1]]
                self._pattern_boxes.append((here, first_overlap(here) is None))
            known = self._order[name] = [e for *_, e, _ in order], pattern
        return known

    def _intersect(self, want: Want, spec: TensorSpec, pattern: int) -> _Cells | str:
        dst = Slice(0, want.dst.shape, want.dst.stride)
        try:
            parts = align(want.src, dst, spec.shape, "want")
        except SlicesError as error:
            return str(error)
        boxes, disjoint = self._pattern_boxes[pattern]
        shape = len(boxes), len(spec.shape)
        starts = np.array([b.start for b in boxes], np.int64).reshape(shape)
        stops = np.array([b.stop for b in boxes], np.int64).reshape(shape)
        cells = _Cells(span=dst.last + 1 if parts else 0)
        for part in parts:
            places: Sequence[int] = range(len(boxes))
            if len(boxes) > _MANY:
                near = (starts < part.box.stop) & (stops > part.box.start)
                places = np.flatnonzero(near.all(axis=1)).tolist()
            rest, volume = [part.box], part.box.volume
            for place in places:
                left = []
                for box in rest:
                    common = slices.overlap(box, boxes[place])
                    if common is None:
                        left.append(box)
                        continue
                    volume -= common.volume
                    cells.pieces.append(self._piece(place, boxes[place], part, common))
                    if not disjoint:
                        left += minus(box, common)
                if not volume:
                    break
                if not disjoint:
                    rest = left
            cells.missing += volume
        return cells

    def _piece(self, place: int, entry: Box, part: Part, common: Box) -> tuple[int, int, int]:
        delta = tuple(a - b for a, b in zip(common.start, entry.start, strict=True))
        shape = tuple(b - a for a, b in zip(common.start, common.stop, strict=True))
        sub = self._subs.setdefault((delta, shape, part.stride), len(self._subs))
        offset = part.offset + sum(
            (a - b) * t for a, b, t in zip(common.start, part.box.start, part.stride, strict=True)
        )
        return place, sub, offset


def _stepped(
    specs: Mapping[str, TensorSpec], trainers: Sequence[TrainerRank]
) -> dict[str, TensorSpec]:
    """The HF tensors with a dimension cut in two where it is held in steps.

    Then what is held is a rectangle: every second column, of a tensor that has gate and up columns in
    turn, is all of one dimension and one of the other. Without that each column were a piece of its
    own. In memory nothing is different.
    """
    out = dict(specs)
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    # Almost everything is held in the steps that the tensor has anyway.
    usual = {name: {1, *slices.contiguous_stride(s.shape)} for name, s in specs.items()}
    for trainer in trainers:
        for hold in trainer.holds:
            if type(hold.hf) is not Slice or type(hold.source) is not str:
                continue  # named later
            try:
                if hold.source not in out or usual[hold.source].issuperset(hold.hf.stride):
                    continue
                key = hold.source, hold.hf.shape, hold.hf.stride
                if key in seen:
                    continue
                seen.add(key)
            except TypeError:
                continue
            if why_no_slice(hold.hf) is None:
                spec = out[hold.source]
                for n, step in zip(hold.hf.shape, hold.hf.stride, strict=True):
                    if n >= MIN_STEPS:
                        spec = replace(spec, shape=_cut(spec.shape, step))
                out[hold.source] = spec
    return out


def _cut(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    """``shape`` with a dimension that advances by ``step`` elements, if one can be cut so."""
    strides = slices.contiguous_stride(shape)
    for d, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and 0 < stride <= step:
            times, rest = divmod(step, stride)
            if rest or times == 1 or n % times or n == times or len(shape) >= MAX_DIMS:
                return shape
            return (*shape[:d], n // times, times, *shape[d + 1 :])
    return shape


def _text(value: object) -> str:
    return cut(one_line(value), 200) if isinstance(value, str) else brief(value)
