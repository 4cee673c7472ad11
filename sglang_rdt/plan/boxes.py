"""From a pair of slices to boxes of a contiguous tensor, and where each box lies on the other side.

One side is a slice of a contiguous HF tensor, the other any slice of the same shape. Where the HF
side is no rectangle (a view that flattens dimensions, groups, steps) it is cut into rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.slices import Box, Slice

# More rectangles than this are no layout any more: a slice that must be moved element by element.
MAX_PARTS = 1 << 16

_Dim = tuple[int, int, int]  # size, stride on the HF side, stride on the other side


class Part(NamedTuple):
    """``box`` of the HF tensor lies at element ``offset`` of the other side, which advances by
    ``stride[d]`` elements for one step along dimension ``d`` of the HF tensor."""

    box: Box
    offset: int
    stride: tuple[int, ...]


def align(hf: Slice, other: Slice, shape: Sequence[int], what: str) -> list[Part]:
    """Cuts ``hf``, a slice of a contiguous tensor of ``shape``, into boxes of that tensor.

    Together the parts have every element of the slice exactly once.

    Args:
        other: where the same elements lie on the other side, in the same order; any strides.
        what: for messages.

    Raises:
        SlicesError: a slice is malformed or leaves the tensor, the shapes differ, ``hf`` repeats
            elements (stride 0), or more than ``MAX_PARTS`` boxes would be needed.
    """
    if hf.shape != other.shape:
        raise SlicesError(f"{what}: shapes differ: {list(hf.shape)} and {list(other.shape)}")
    slices.check(hf, math.prod(shape), what)
    slices.check(other, other.last + 1 if len(other.shape) == len(other.stride) else 0, what)
    if not hf.numel:
        return []
    if any(n > 1 and s == 0 for n, s in zip(hf.shape, hf.stride, strict=True)):
        raise SlicesError(f"{what}: {hf} repeats elements (an expanded dimension)")
    dims = [d for d in zip(hf.shape, hf.stride, other.stride, strict=True) if d[0] > 1]
    return _parts(hf.offset, _merged(dims), other.offset, tuple(shape), what)


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """From the smallest HF stride up; dimensions that continue one another on both sides joined."""
    out: list[_Dim] = []
    for n, s, o in sorted(dims, key=lambda d: (d[1], d[0], d[2])):
        if out and s == out[-1][0] * out[-1][1] and o == out[-1][0] * out[-1][2]:
            out[-1] = (out[-1][0] * n, out[-1][1], out[-1][2])
        else:
            out.append((n, s, o))
    return out


def _parts(
    offset: int, dims: list[_Dim], other: int, shape: tuple[int, ...], what: str
) -> list[Part]:
    strides = slices.contiguous_stride(shape)
    # Strides of these fall strictly; dimensions of size 1 say nothing.
    axes = [d for d in range(len(shape)) if shape[d] > 1]
    parts: list[Part] = []
    todo = [(offset, dims, other)]
    while todo:
        offset, dims, other = todo.pop()
        start, rest = [0] * len(shape), offset
        for d in axes:
            start[d], rest = divmod(rest, strides[d])
        stop = [i + 1 for i in start]
        steps = [0] * len(shape)
        # From the inside out: once the inner dimensions fit, ``start`` tells the truth further out.
        for k, (n, s, o) in enumerate(dims):
            d = next(d for d in axes if strides[d] <= s)
            before, behind = dims[:k], dims[k + 1 :]
            cuts = []
            if strides[d] != s or stop[d] != start[d] + 1:
                cuts = [(i, 1) for i in range(n)] if n <= MAX_PARTS else []
            elif start[d] + n <= shape[d]:
                stop[d] = start[d] + n
                steps[d] = o
                continue
            elif start[d] == 0 and n % shape[d] == 0:
                inner, outer = (shape[d], s, o), (n // shape[d], s * shape[d], o * shape[d])
                merged = sorted([*before, inner, outer, *behind], key=lambda x: (x[1], x[0]))
                todo.append((offset, [x for x in merged if x[0] > 1], other))
                break
            else:  # a flat run through several rows: the first row's rest, whole rows, what is left
                head = (shape[d] - start[d]) % shape[d]
                whole = (n - head) // shape[d] * shape[d]
                cuts = [(0, head), (head, whole), (head + whole, n - head - whole)]
            if not cuts or len(parts) + len(todo) + len(cuts) > MAX_PARTS:
                raise SlicesError(
                    f"{what}: a slice of a tensor of {list(shape)} falls into more than "
                    f"{MAX_PARTS} rectangles"
                )
            for first, count in reversed(cuts):
                if count:
                    here = [*before, (count, s, o), *behind] if count > 1 else [*before, *behind]
                    todo.append((offset + first * s, here, other + first * o))
            break
        else:
            parts.append(Part(Box(tuple(start), tuple(stop)), other, tuple(steps)))
    return parts


def minus(box: Box, hole: Box) -> list[Box]:
    """What of ``box`` is not in ``hole``, as disjoint boxes. ``hole`` must overlap ``box``."""
    out = []
    start, stop = list(box.start), list(box.stop)
    for d in range(len(start)):
        if start[d] < hole.start[d]:
            out.append(Box(tuple(start), (*stop[:d], hole.start[d], *stop[d + 1 :])))
            start[d] = hole.start[d]
        if hole.stop[d] < stop[d]:
            out.append(Box((*start[:d], hole.stop[d], *start[d + 1 :]), tuple(stop)))
            stop[d] = hole.stop[d]
    return out


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that overlap, or None. Sweeps over the dimension that tells most of
    them apart, so that column by column is as fast as row by row."""
    if len(boxes) < 2 or not boxes[0].start:
        return slices.first_overlap(boxes)
    d = max(range(len(boxes[0].start)), key=lambda i: len({b.start[i] for b in boxes}))
    turned = [
        Box(
            (b.start[d], *b.start[:d], *b.start[d + 1 :]),
            (b.stop[d], *b.stop[:d], *b.stop[d + 1 :]),
        )
        for b in boxes
    ]
    return slices.first_overlap(turned)
