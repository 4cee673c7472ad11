"""Which slice of one tensor is which slice of another, and how such statements compose. Pure.

Two slices of one tensor are compared as numbers in a mixed radix: the strides of both are the
weights of the digits, and each slice is a few boxes of digits. Boxes intersect, and subtract,
exactly. Where the strides do not divide one another, a dimension is unrolled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan.slices import Slice, contiguous_stride, to_box

# Rows that may be unrolled where two slices meet. More is a swarm that nobody wants to move.
MAX_UNROLLED = 1 << 14


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements ``dst`` of one tensor are, in order, the elements ``src`` of another one.

    Both slices have the same shape. ``origin`` says what ``src`` is a slice of: a number, or in
    words what made the elements if they are no slice of anything.
    """

    dst: Slice
    src: Slice
    origin: int | str


# Size, stride in the space where two slices meet, stride in the other space.
_Dim = tuple[int, int, int]


@dataclass(slots=True)
class _Layout:
    """A slice of the common space; ``other`` and the third numbers lead to its other side."""

    offset: int
    other: int
    dims: list[_Dim]

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * stride for n, stride, _ in self.dims)

    def rows(self, dim: int) -> Iterator[_Layout]:
        n, stride, other = self.dims[dim]
        rest = self.dims[:dim] + self.dims[dim + 1 :]
        for i in range(n):
            yield _Layout(self.offset + i * stride, self.other + i * other, rest)


@dataclass(slots=True)
class _Digits:
    """A box of digits, lowest weight first: ``low``, ``size`` and ``step`` (on the other side)
    per digit; ``other`` belongs to the lowest corner."""

    low: list[int]
    size: list[int]
    step: list[int]
    other: int


# The layers of a model ask the same again and again, hence the caches.
@functools.lru_cache(maxsize=1 << 12)
def join(a: Piece, b: Piece) -> tuple[Piece, ...]:
    """What ``a.dst`` has of ``b.src``, where ``a.src`` and ``b.dst`` are slices of one tensor.

    ``a.src`` may repeat elements (stride 0); ``b.dst`` may not.

    Raises:
        SlicesError: more than MAX_UNROLLED rows would have to be looked at one by one.
    """
    if not a.dst.numel or not b.dst.numel:
        return ()
    run = _run_step(b)
    if run is not None and b.dst.offset <= a.src.offset and a.src.last <= b.dst.last:
        first = b.src.offset + (a.src.offset - b.dst.offset) * run
        stride = tuple(t * run for t in a.src.stride)
        return (Piece(a.dst, Slice(first, a.src.shape, stride), b.origin),)
    left = _layout(a.src, a.dst)
    right = _layout(b.dst, b.src)
    repeated = [(n, other, 0) for n, stride, other in left.dims if stride == 0]
    left.dims = [dim for dim in left.dims if dim[1] != 0]
    return tuple(
        _piece(dst, src, [*repeated, *dims], b.origin)
        for dst, src, dims in _common(left, right, [MAX_UNROLLED])
    )


def without(piece: Piece, cut: Slice) -> list[Piece]:
    """``piece`` without the elements of ``dst`` that ``cut`` touches (of the same tensor).

    Raises:
        SlicesError: as :func:`join`.
    """
    if not piece.dst.numel or not cut.numel:
        return [piece]
    hole = _layout(cut, cut)
    hole.dims = [dim for dim in hole.dims if dim[1] != 0]
    left = _layout(piece.dst, piece.src)
    rest = _minus(left, hole, [MAX_UNROLLED])
    if len(rest) == 1 and rest[0] is left:
        return [piece]
    return [_piece(layout.offset, layout.other, layout.dims, piece.origin) for layout in rest]


@functools.lru_cache(maxsize=1 << 7)
def simplified(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The same elements in as few pieces as a sweep finds, in order of ``dst``.

    ``dst`` are slices of a contiguous tensor of ``shape``; pieces are put together only where that
    makes a box of it.
    """
    stride = contiguous_stride(shape)
    todo = sorted(
        (_piece(p.dst.offset, p.src.offset, _dims(p.dst, p.src), p.origin) for p in pieces),
        key=lambda p: (str(p.origin), p.dst.offset),
    )
    while True:
        done: list[Piece] = []
        for piece in todo:
            while done:
                both = _together(done[-1], piece, shape, stride)
                if both is None:
                    break
                done.pop()
                piece = both
            done.append(piece)
        if len(done) == len(todo):
            break
        todo = done
    return tuple(sorted(done, key=lambda p: p.dst.offset))


def _dims(one: Slice, other: Slice) -> list[_Dim]:
    return [
        (n, s, t) for n, s, t in zip(one.shape, one.stride, other.stride, strict=True) if n != 1
    ]


def _merged(dims: Iterable[_Dim]) -> list[_Dim]:
    """Largest stride first; dimensions that continue one another on both sides are one."""
    merged: list[_Dim] = []
    for n, stride, other in sorted(dims, key=lambda dim: (-dim[1], -dim[2])):
        if merged and merged[-1][1] == stride * n and merged[-1][2] == other * n:
            n *= merged.pop()[0]
        merged.append((n, stride, other))
    return merged


def _layout(here: Slice, there: Slice) -> _Layout:
    return _Layout(here.offset, there.offset, _merged(_dims(here, there)))


def _piece(dst: int, src: int, dims: Iterable[_Dim], origin: int | str) -> Piece:
    dims = _merged(dim for dim in dims if dim[0] != 1)
    shape = tuple(n for n, _, _ in dims)
    return Piece(
        Slice(dst, shape, tuple(stride for _, stride, _ in dims)),
        Slice(src, shape, tuple(other for _, _, other in dims)),
        origin,
    )


def _run_step(piece: Piece) -> int | None:
    """The stride of ``src`` if ``dst`` is one contiguous run and ``src`` evenly spaced."""
    if not piece.dst.shape:
        return 1
    if len(piece.dst.shape) == 1 and piece.dst.stride[0] == 1:
        return piece.src.stride[0]
    return None


def _common(a: _Layout, b: _Layout, budget: list[int]) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Offset on a's other side, on b's other side, and dimensions of each common rectangle."""
    if a.last < b.offset or b.last < a.offset:
        return
    system = _System.of(a, b)
    if isinstance(system, _System):
        for one, two in itertools.product(system.boxes[0], system.boxes[1]):
            span = _overlap(one, two)
            if span is not None:
                low, size = span
                yield (
                    _at(one, low),
                    _at(two, low),
                    list(zip(size, one.step, two.step, strict=True)),
                )
        return
    which, dim = system
    for row in _spend((a, b)[which], dim, budget):
        yield from _common(*((row, b) if which == 0 else (a, row)), budget)


def _minus(a: _Layout, hole: _Layout, budget: list[int]) -> list[_Layout]:
    if a.last < hole.offset or hole.last < a.offset:
        return [a]
    system = _System.of(a, hole)
    if not isinstance(system, _System):
        which, dim = system
        if which == 0:
            return [left for row in _spend(a, dim, budget) for left in _minus(row, hole, budget)]
        rest = [a]
        for row in _spend(hole, dim, budget):
            rest = [left for layout in rest for left in _minus(layout, row, budget)]
        return rest
    boxes, changed = system.boxes[0], False
    for cut in system.boxes[1]:
        kept = []
        for box in boxes:
            if _overlap(box, cut) is None:
                kept.append(box)
            else:
                changed = True
                kept += _cut_out(box, cut)
        boxes = kept
    return [system.layout(box) for box in boxes] if changed else [a]


def _spend(layout: _Layout, dim: int, budget: list[int]) -> Iterator[_Layout]:
    budget[0] -= layout.dims[dim][0]
    if budget[0] < 0:
        raise SlicesError(f"more than {MAX_UNROLLED} rows do not line up")
    return layout.rows(dim)


@dataclass(slots=True)
class _System:
    """The number system of two layouts, and both as boxes of digits in it."""

    base: int
    weights: list[int]
    boxes: tuple[list[_Digits], list[_Digits]]

    @classmethod
    def of(cls, a: _Layout, b: _Layout) -> _System | tuple[int, int]:
        """Or, if there is none, which layout's (0: a, 1: b) which dimension is to be unrolled."""
        weights = sorted({stride for x in (a, b) for _, stride, _ in x.dims}) or [1]
        for small, large in itertools.pairwise(weights):
            if large % small:
                _, which, dim = min(
                    (n, which, i)
                    for which, x in enumerate((a, b))
                    for i, (n, stride, _) in enumerate(x.dims)
                    if stride in (small, large)
                )
                return which, dim
        base = a.offset % weights[0]
        if b.offset % weights[0] != base:
            return cls(base, weights, ([], []))
        boxes = []
        for which, layout in enumerate((a, b)):
            digits = _to_digits(layout, base, weights)
            if digits is None:
                return which, 0
            boxes.append(digits)
        return cls(base, weights, (boxes[0], boxes[1]))

    def layout(self, box: _Digits) -> _Layout:
        """The inverse: addresses of a box."""
        offset = self.base + sum(d * w for d, w in zip(box.low, self.weights, strict=True))
        dims = zip(box.size, self.weights, box.step, strict=True)
        return _Layout(offset, box.other, _merged(dim for dim in dims if dim[0] != 1))


def _to_digits(layout: _Layout, base: int, weights: list[int]) -> list[_Digits] | None:
    """None where two dimensions would share a digit: the layout overlaps itself."""
    own: dict[int, tuple[int, int]] = {}
    for n, stride, other in layout.dims:
        if stride in own:
            return None
        own[stride] = (n, other)
    # Boxes of the digits so far, each with what it carries over: an amount, and a range (how
    # many, step on the other side) where a dimension is longer than the digit's radix.
    open_ = [(_Digits([], [], [], layout.other), 0, 1, 0)]
    for i, weight in enumerate(weights):
        radix = weights[i + 1] // weight if i + 1 < len(weights) else None
        digit = (layout.offset - base) // weight
        following = []
        for box, carry, n, step in open_:
            if weight in own:
                if n > 1:
                    return None
                n, step = own[weight]
            start, over = (digit + carry, 0) if radix is None else (digit % radix + carry, 0)
            if radix is not None:
                over, start = divmod(start, radix)
            for first, low, size, up, rows in _rows(start, n, radix):
                grown = _Digits(
                    [*box.low, low], [*box.size, size], [*box.step, step], box.other + first * step
                )
                following.append((grown, over + up, rows, step * (radix or 0)))
        open_ = following
    return [box for box, _, _, _ in open_]


def _rows(start: int, n: int, radix: int | None) -> Iterator[tuple[int, int, int, int, int]]:
    """The range of ``n`` numbers from ``start`` (< radix) on, by rows of ``radix`` numbers.

    Yields (index of its first number, low, size, first row, how many rows) of the part in the
    first row, the full rows, and the part in the last row.
    """
    if radix is None or start + n <= radix:
        yield 0, start, n, 0, 1
        return
    done, row = 0, 0
    if start:
        yield 0, start, radix - start, 0, 1
        done, row = radix - start, 1
    full, rest = divmod(n - done, radix)
    if full:
        yield done, 0, radix, row, full
    if rest:
        yield done + full * radix, 0, rest, row + full, 1


def _overlap(a: _Digits, b: _Digits) -> tuple[list[int], list[int]] | None:
    low = [max(x, y) for x, y in zip(a.low, b.low, strict=True)]
    size = [
        min(x + n, y + m) - first
        for x, n, y, m, first in zip(a.low, a.size, b.low, b.size, low, strict=True)
    ]
    return (low, size) if all(n > 0 for n in size) else None


def _at(box: _Digits, low: list[int]) -> int:
    """Offset on the other side of the element with digits ``low``."""
    return box.other + sum((x - y) * t for x, y, t in zip(low, box.low, box.step, strict=True))


def _cut_out(box: _Digits, cut: _Digits) -> list[_Digits]:
    """``box`` without ``cut``, as boxes that do not overlap. (The two do.)"""
    kept = []
    low, size = list(box.low), list(box.size)

    def keep(i: int, first: int, stop: int) -> None:
        if first < stop:
            corner = [*low[:i], first, *low[i + 1 :]]
            kept.append(
                _Digits(
                    corner, [*size[:i], stop - first, *size[i + 1 :]], box.step, _at(box, corner)
                )
            )

    for i in range(len(low)):
        stop = low[i] + size[i]
        first_in, stop_in = max(low[i], cut.low[i]), min(stop, cut.low[i] + cut.size[i])
        keep(i, low[i], first_in)
        keep(i, stop_in, stop)
        low[i], size[i] = first_in, stop_in - first_in
    return kept


def _together(a: Piece, b: Piece, shape: Sequence[int], stride: tuple[int, ...]) -> Piece | None:
    """Both as one piece, if that is a box of the tensor; ``a`` comes first in ``dst``."""
    if a.origin != b.origin:
        return None
    one, two = _dims(a.dst, a.src), _dims(b.dst, b.src)
    step = b.dst.offset - a.dst.offset, b.src.offset - a.src.offset
    if step[1] < 0:
        return None
    for dims in _extended(one, two, step):
        piece = _piece(a.dst.offset, a.src.offset, dims, a.origin)
        if to_box(piece.dst, shape, stride) is not None:
            return piece
    return None


def _extended(one: list[_Dim], two: list[_Dim], step: tuple[int, int]) -> Iterator[list[_Dim]]:
    """Dimensions of what ``one`` and, ``step`` further, ``two`` may be together."""
    if one == two:
        yield [(2, *step), *one]
    for k, (n, stride, other) in enumerate(one):
        if step != (n * stride, n * other):
            continue
        rest = one[:k] + one[k + 1 :]
        if two == rest:
            yield [*rest, (n + 1, stride, other)]
        for j, (m, *steps) in enumerate(two):
            if steps == [stride, other] and two[:j] + two[j + 1 :] == rest:
                yield [*rest, (n + m, stride, other)]
    for k, (n, stride, other) in enumerate(two):
        if step == (stride, other) and two[:k] + two[k + 1 :] == one:
            yield [*one, (n + 1, stride, other)]
