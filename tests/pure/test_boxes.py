from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import boxes as boxes_module
from sglang_rdt.plan.boxes import Part, align, first_overlap, minus
from sglang_rdt.plan.slices import Box, Slice, overlap, whole

from .builders import elements, rect, row_major

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    """A slice of a contiguous tensor, as numpy's view operations make it."""
    view = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    for _ in range(draw(st.integers(0, 5))):
        if not view.ndim:
            break
        axis = draw(st.integers(0, view.ndim - 1))
        n = view.shape[axis]
        op = draw(st.sampled_from(["narrow", "select", "step", "turn", "split", "flat", "one"]))
        if op == "narrow":
            first = draw(st.integers(0, n))
            view = view[(slice(None),) * axis + (slice(first, draw(st.integers(first, n))),)]
        elif op == "select" and n:
            view = view[(slice(None),) * axis + (draw(st.integers(0, n - 1)),)]
        elif op == "step":
            view = view[(slice(None),) * axis + (slice(None, None, draw(st.integers(1, 3))),)]
        elif op == "turn":
            view = np.moveaxis(view, axis, draw(st.integers(0, view.ndim - 1)))
        elif op == "one":
            view = np.expand_dims(view, axis)
        elif op == "split" and n:
            parts = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            view = same(view, (*view.shape[:axis], parts, n // parts, *view.shape[axis + 1 :]))
        elif op == "flat" and axis + 1 < view.ndim:
            size = n * view.shape[axis + 1]
            view = same(view, (*view.shape[:axis], size, *view.shape[axis + 2 :]))
    first = int(view.flat[0]) if view.size else 0
    return Slice(first, view.shape, tuple(s // view.itemsize for s in view.strides))


def same(view: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``view`` reshaped, if that is possible without a copy."""
    copy = view.reshape(shape)
    return copy if np.shares_memory(copy, view) else view


def moved(part: Part, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(element of the HF tensor, element of the other side)`` of a part, by enumeration."""
    ranges = [range(a, b) for a, b in zip(part.box.start, part.box.stop, strict=True)]
    out = []
    for index in itertools.product(*ranges):
        of = sum(i * t for i, t in zip(index, row_major(shape), strict=True))
        steps = zip(index, part.box.start, part.stride, strict=True)
        out.append((of, part.offset + sum((i - a) * t for i, a, t in steps)))
    return out


@st.composite
def aligned(draw: st.DrawFn) -> tuple[tuple[int, ...], Slice, Slice]:
    shape = draw(SHAPES)
    hf = draw(views(shape))
    # The other side: compact in any order of dimensions, with gaps, or anything at all.
    kind = draw(st.sampled_from(["compact", "gaps", "any"]))
    stride = [0] * len(hf.shape)
    step = 1
    for d in (
        draw(st.permutations(range(len(hf.shape))))
        if kind != "compact"
        else reversed(range(len(hf.shape)))
    ):
        stride[d] = step
        step *= max(hf.shape[d], 1) + (draw(st.integers(0, 2)) if kind == "gaps" else 0)
    if kind == "any":
        stride = [draw(st.integers(0, 9)) for _ in stride]
    return shape, hf, Slice(draw(st.integers(0, 9)), hf.shape, tuple(stride))


@given(aligned())
@example(((), Slice(0, (), ()), Slice(3, (), ())))
@example(((4, 3), Slice(2, (5,), (1,)), Slice(0, (5,), (2,))))  # through three rows
@example(((2, 3, 4), Slice(5, (14,), (1,)), Slice(0, (14,), (1,))))
@example(((6, 2), Slice(0, (2, 2, 2), (6, 2, 1)), Slice(0, (2, 2, 2), (16, 2, 1))))  # groups
@example(((4, 4), Slice(0, (4,), (5,)), Slice(0, (4,), (1,))))  # a diagonal
@example(((4,), Slice(0, (2, 3), (1, 1)), Slice(0, (2, 3), (3, 1))))  # some elements twice
@example(((1, 4, 1), Slice(0, (4, 1, 1), (1, 1, 1)), Slice(0, (4, 1, 1), (1, 7, 9))))
def test_parts_are_the_slice_element_by_element(
    case: tuple[tuple[int, ...], Slice, Slice],
) -> None:
    shape, hf, other = case
    parts = align(hf, other, shape, "x")
    pairs = [pair for part in parts for pair in moved(part, shape)]
    assert sorted(pairs) == sorted(zip(elements(hf), elements(other), strict=True))
    for part in parts:
        assert len(part.box.start) == len(part.stride) == len(shape)
        inside = zip(part.box.start, part.box.stop, shape, strict=True)
        assert all(0 <= a < b <= n for a, b, n in inside)


@given(st.data())
def test_a_rectangle_is_one_part(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    bounds = []
    for n in shape:
        low = data.draw(st.integers(0, n - 1))
        bounds.append((low, data.draw(st.integers(low + 1, n))))
    hf = rect(shape, *bounds)
    (part,) = align(hf, Slice(7, hf.shape, row_major(hf.shape)), shape, "x")
    assert part.box == Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    assert part.offset == 7


def test_interleaved_groups_are_one_box_each_unless_they_lie_together() -> None:
    # Query heads of 4 groups, 2 heads of 8 rows each, out of a fused [q q k v] per group.
    hf = Slice(0, (4, 16, 5), (80, 5, 1))
    fused = Slice(0, (4, 16, 5), (32 * 5, 5, 1))
    parts = align(hf, fused, (64, 5), "x")
    assert [p.box for p in parts] == [Box((16 * g, 0), (16 * g + 16, 5)) for g in range(4)]
    assert [p.offset for p in parts] == [160 * g for g in range(4)]
    assert all(p.stride == (5, 1) for p in parts)
    (whole_tensor,) = align(hf, Slice(0, (4, 16, 5), (80, 5, 1)), (64, 5), "x")
    assert whole_tensor == Part(Box((0, 0), (64, 5)), 0, (5, 1))


def test_a_flat_slice_of_many_rows_is_at_most_three_boxes_per_dimension() -> None:
    parts = align(Slice(5, (700,), (1,)), Slice(0, (700,), (1,)), (100, 10), "x")
    assert [p.box for p in parts] == [
        Box((0, 5), (1, 10)),
        Box((1, 0), (70, 10)),
        Box((70, 0), (71, 5)),
    ]


def test_a_step_is_one_box_per_step() -> None:
    parts = align(Slice(1, (3, 4), (8, 1)), Slice(0, (3, 4), (4, 1)), (6, 4), "x")
    assert [p.box.start for p in parts] == [(0, 1), (2, 1), (4, 1)] or len(parts) > 3


def test_an_empty_slice_has_no_parts() -> None:
    assert align(Slice(0, (0, 3), (3, 1)), Slice(0, (0, 3), (3, 1)), (4, 3), "x") == []
    assert align(Slice(0, (0,), (1,)), Slice(0, (0,), (1,)), (0,), "x") == []


@pytest.mark.parametrize(
    ("hf", "other", "why"),
    [
        (Slice(0, (2, 3), (0, 1)), whole((2, 3)), "repeats elements"),
        (Slice(0, (2, 3), (3, 1)), whole((3, 2)), "shapes differ"),
        (Slice(0, (2, 9), (4, 1)), whole((2, 9)), "reaches element 12"),
        (Slice(-1, (2,), (1,)), whole((2,)), "negative"),
        (Slice(0, (2,), (1,)), Slice(-1, (2,), (1,)), "negative"),
        (Slice(0, (2,), (1, 1)), Slice(0, (2,), (1,)), "differ in length"),
        (Slice(0, (2,), (1,)), Slice(0, (2,), (1, 1)), "differ in length"),
        (Slice(0, (10**30,), (1,)), Slice(0, (10**30,), (1,)), "reaches element"),
    ],
)
def test_what_is_no_pair_of_slices_is_named(hf: Slice, other: Slice, why: str) -> None:
    with pytest.raises(SlicesError, match=f"some tensor.*{why}"):
        align(hf, other, (3, 4), "some tensor")


def test_dust_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    n = boxes_module.MAX_PARTS + 1
    with pytest.raises(SlicesError, match=f"some tensor.*more than {n - 1} rectangles"):
        align(Slice(0, (n,), (2,)), Slice(0, (n,), (1,)), (2 * n,), "some tensor")
    monkeypatch.setattr(boxes_module, "MAX_PARTS", 20)
    hf = Slice(0, (5, 5), (20, 2))
    with pytest.raises(SlicesError, match="more than 20 rectangles"):
        align(hf, Slice(0, (5, 5), (5, 1)), (10, 10), "x")
    assert len(align(Slice(0, (4, 5), (20, 2)), Slice(0, (4, 5), (5, 1)), (8, 10), "x")) == 20


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def some_boxes(draw: st.DrawFn, count: int) -> list[Box]:
    dims = draw(st.integers(0, 3))
    out = []
    for _ in range(draw(st.integers(min(count, 2), count))):
        start = tuple(draw(st.integers(0, 4)) for _ in range(dims))
        out.append(Box(start, tuple(a + draw(st.integers(1, 4)) for a in start)))
    return out


@given(some_boxes(2))
def test_minus_leaves_what_is_not_in_the_hole(two: list[Box]) -> None:
    box, other = two
    hole = overlap(box, other)
    if hole is None:
        return
    left = minus(box, other)
    assert sum(b.volume for b in left) == box.volume - hole.volume
    assert set().union(*map(points, left)) == points(box) - points(other)


@given(some_boxes(7))
def test_first_overlap_finds_one_if_there_is_one(some: list[Box]) -> None:
    pairs = itertools.combinations(range(len(some)), 2)
    overlapping = {(i, j) for i, j in pairs if points(some[i]) & points(some[j])}
    found = first_overlap(some)
    assert (found in overlapping) if overlapping else (found is None)
