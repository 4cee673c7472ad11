"""Strided rectangles of a tensor, in elements.

A :class:`Slice` is relative to the first element of its tensor: the same three numbers that
``torch.as_strided`` takes. A :class:`Box` is the same rectangle in index space.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_rdt.errors import SlicesError


@dataclass(frozen=True, slots=True)
class Slice:
    """``shape`` elements at ``offset`` with ``stride``; all three count elements, not bytes."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements the slice has."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other, in order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def last(self) -> int:
        """Offset of the highest element touched (``offset`` for an empty slice)."""
        return self.offset + sum(
            (n - 1) * s for n, s in zip(self.shape, self.stride, strict=True) if n > 0
        )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


def whole(shape: Sequence[int]) -> Slice:
    """The slice that is the whole of a contiguous tensor."""
    return Slice(0, tuple(shape), contiguous_stride(shape))


def check(s: Slice, extent: int, what: str) -> None:
    """Raises SlicesError unless ``s`` is well formed and stays inside ``extent`` elements."""
    if len(s.shape) != len(s.stride):
        raise SlicesError(f"{what}: shape {s.shape} and stride {s.stride} differ in length")
    if s.offset < 0 or any(n < 0 for n in s.shape) or any(t < 0 for t in s.stride):
        raise SlicesError(f"{what}: negative offset, size or stride in {s}")
    if s.numel and s.last >= extent:
        raise SlicesError(f"{what}: {s} reaches element {s.last} of a tensor of {extent} elements")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in index space: ``start <= index < stop`` in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many elements the box has."""
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))


@functools.lru_cache(maxsize=1 << 16)  # engine ranks want the same slices of layer after layer
def to_box(s: Slice, shape: tuple[int, ...], stride: tuple[int, ...]) -> Box | None:
    """``s`` in the index space of a tensor with ``shape`` and ``stride``, or None.

    Works for whatever ``narrow``, ``select``, ``chunk``, ``view`` of leading dimensions and
    ``transpose`` make of a tensor with distinct strides. None where the slice is no box of the
    tensor (a diagonal, a step, an expanded dimension).
    """
    # Dimensions of size 1 say nothing; the others go from the largest stride down.
    dims = sorted((i for i in range(len(shape)) if shape[i] > 1), key=lambda i: (-stride[i], i))
    if any(stride[i] <= 0 for i in dims):
        return None
    start, stop = [0] * len(shape), [1] * len(shape)
    rest = s.offset
    for i in dims:
        start[i], rest = divmod(rest, stride[i])
        stop[i] = start[i] + 1
    if rest:
        return None
    taken: set[int] = set()
    for step, count in _runs(s):
        # A run may span several of the tensor's dimensions (a flattened view): from the one with
        # its stride outwards, as long as they lie one behind the other without a gap.
        inner = next((k for k, i in enumerate(dims) if stride[i] == step), None)
        if inner is None:
            return None
        for k in range(inner, -1, -1):
            i = dims[k]
            if i in taken or (k < inner and stride[i] != stride[dims[k + 1]] * shape[dims[k + 1]]):
                return None
            taken.add(i)
            if count <= shape[i] - start[i]:
                stop[i] = start[i] + count
                count = 1
                break
            if start[i] != 0 or count % shape[i]:
                return None
            stop[i] = shape[i]
            count //= shape[i]
        if count != 1:
            return None
    box = Box(tuple(start), tuple(stop))
    fits = all(0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True))
    return box if fits and box.volume == s.numel else None


def _runs(s: Slice) -> list[tuple[int, int]]:
    """``(stride, count)`` of the slice's dimensions, those that continue one another merged."""
    runs: list[tuple[int, int]] = []
    for step, count in sorted(
        ((t, n) for n, t in zip(s.shape, s.stride, strict=True) if n > 1), reverse=True
    ):
        if runs and runs[-1][0] == step * count:
            runs[-1] = (step, runs[-1][1] * count)
        else:
            runs.append((step, count))
    return runs


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that overlap, or None. Sweeps over the first dimension."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].start)
    open_: list[int] = []
    for i in order:
        if boxes[i].start:
            open_ = [j for j in open_ if boxes[j].stop[0] > boxes[i].start[0]]
        for j in open_:
            if overlap(boxes[i], boxes[j]) is not None:
                return min(i, j), max(i, j)
        open_.append(i)
    return None


def union_volume(boxes: Sequence[Box]) -> int:
    """How many distinct elements the boxes have together (they may overlap)."""
    unique = sorted({(b.start, b.stop) for b in boxes})
    if not unique:
        return 0
    if not unique[0][0]:
        return 1
    return _union(tuple(unique), {})


_Bounds = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def _union(boxes: _Bounds, cache: dict[_Bounds, int]) -> int:
    """Sweeps over the first dimension; what lies under a stretch of it is known from the boxes
    that are open there, wherever that was."""
    if not boxes[0][0]:
        return 1
    known = cache.get(boxes)
    if known is not None:
        return known
    cuts = sorted({b[0][0] for b in boxes} | {b[1][0] for b in boxes})
    total = 0
    for low, high in itertools.pairwise(cuts):
        inside = {(b[0][1:], b[1][1:]) for b in boxes if b[0][0] <= low and b[1][0] >= high}
        if inside:
            total += (high - low) * _union(tuple(sorted(inside)), cache)
    cache[boxes] = total
    return total


def split_pair(dst: Slice, src: Slice, limit: int) -> Iterator[tuple[Slice, Slice]]:
    """Cuts two slices of equal shape into pairs of at most ``limit`` elements each, in order."""
    if dst.shape != src.shape:
        raise SlicesError(f"cannot split {dst} and {src} together: their shapes differ")
    if limit < 1:
        raise SlicesError(f"cannot split into pieces of {limit} elements")
    if dst.numel <= limit:
        yield dst, src
        return
    dim = next(i for i, n in enumerate(dst.shape) if n > 1)
    row = dst.numel // dst.shape[dim]
    rows = max(limit // row, 1)
    for first in range(0, dst.shape[dim], rows):
        count = min(rows, dst.shape[dim] - first)
        shape = (*dst.shape[:dim], count, *dst.shape[dim + 1 :])
        yield from split_pair(
            Slice(dst.offset + first * dst.stride[dim], shape, dst.stride),
            Slice(src.offset + first * src.stride[dim], shape, src.stride),
            limit,
        )
