from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.slices import Box, Slice

from .builders import elements, row_major

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def as_slice(view: torch.Tensor, base: int = 0) -> Slice:
    return Slice(view.storage_offset() - base, tuple(view.shape), tuple(view.stride()))


def box_elements(box: Box, stride: tuple[int, ...]) -> set[int]:
    ranges = (range(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return {
        sum(i * t for i, t in zip(ix, stride, strict=True)) for ix in itertools.product(*ranges)
    }


@st.composite
def tensors(draw: st.DrawFn, gaps: bool = False) -> torch.Tensor:
    """A tensor whose value at each element is the element's offset in the storage."""
    shape = draw(SHAPES)
    if gaps:
        outer = [n + draw(st.integers(0, 2)) for n in shape]
        t = torch.arange(math.prod(outer)).view(outer)
        for dim, n in enumerate(shape):
            t = t.narrow(dim, 0, n)
    else:
        t = torch.arange(math.prod(shape)).view(shape)
    return t.permute(draw(st.permutations(range(len(shape)))))


@st.composite
def viewed(draw: st.DrawFn, t: torch.Tensor, flatten: bool = True) -> torch.Tensor:
    """What loaders do to a tensor before they copy into it."""
    for _ in range(draw(st.integers(0, 5))):
        if not t.dim():
            break
        dim = draw(st.integers(0, t.dim() - 1))
        n = t.shape[dim]
        op = draw(st.sampled_from(["narrow", "select", "chunk", "transpose", "unsqueeze", "flat"]))
        if op == "narrow":
            start = draw(st.integers(0, n - 1))
            t = t.narrow(dim, start, draw(st.integers(1, n - start)))
        elif op == "select":
            t = t.select(dim, draw(st.integers(0, n - 1)))
        elif op == "chunk":
            t = draw(st.sampled_from(t.chunk(draw(st.integers(1, n)), dim)))
        elif op == "transpose":
            t = t.transpose(dim, draw(st.integers(0, t.dim() - 1)))
        elif op == "unsqueeze":
            t = t.unsqueeze(dim)
        elif flatten and dim + 1 < t.dim():
            try:
                t = t.view(*t.shape[:dim], -1, *t.shape[dim + 2 :])
            except RuntimeError:  # not without a copy
                continue
    return t


@given(st.data())
def test_every_loader_view_is_the_box_that_its_elements_span(data: st.DataObject) -> None:
    t = data.draw(tensors())
    view = data.draw(viewed(t))
    box = slices.to_box(as_slice(view), tuple(t.shape), tuple(t.stride()))
    wanted = set(view.flatten().tolist())
    index = torch.nonzero(torch.isin(t, view.flatten())) if t.dim() else torch.zeros(1, 0)
    span = math.prod((index.max(0)[0] - index.min(0)[0] + 1).tolist()) if t.dim() else 1
    if span == len(wanted):
        assert box is not None
        assert box_elements(box, tuple(t.stride())) == wanted
    else:  # a piece of a flattened view need not be a rectangle any more
        assert box is None


@given(st.data())
def test_views_of_tensors_with_gaps_are_boxes_too(data: st.DataObject) -> None:
    t = data.draw(tensors(gaps=True))
    view = data.draw(viewed(t, flatten=False))
    box = slices.to_box(as_slice(view), tuple(t.shape), tuple(t.stride()))
    assert box is not None
    assert box_elements(box, tuple(t.stride())) == set(view.flatten().tolist())


@st.composite
def wild_slices(draw: st.DrawFn) -> Slice:
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    stride = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    return Slice(draw(st.integers(0, 20)), shape, tuple(stride))


@given(tensors(), wild_slices())
@example(torch.arange(6).view(2, 3), Slice(0, (4,), (1,)))
@example(torch.arange(6).view(2, 3), Slice(1, (2,), (2,)))
@example(torch.arange(6).view(2, 3), Slice(0, (2, 2), (0, 1)))
@example(torch.arange(9).view(3, 3), Slice(0, (3,), (4,)))
def test_a_box_is_never_claimed_for_other_elements(t: torch.Tensor, s: Slice) -> None:
    box = slices.to_box(s, tuple(t.shape), tuple(t.stride()))
    if box is not None:
        found = elements(s)
        assert len(set(found)) == len(found) == box.volume
        assert box_elements(box, tuple(t.stride())) == set(found)


def test_a_flat_run_through_a_gap_is_no_box() -> None:
    t = torch.arange(16).view(2, 8)[:, :4]
    run = Slice(0, (8,), (1,))  # columns 4 to 7 lie outside of t
    box = slices.to_box(run, tuple(t.shape), tuple(t.stride()))
    assert box is None or box_elements(box, tuple(t.stride())) == set(elements(run))


def test_a_view_that_splits_a_dimension_is_a_box() -> None:
    t = torch.arange(24).view(6, 4)
    view = t.view(2, 3, 4)  # heads x head_dim x hidden
    box = slices.to_box(as_slice(view), tuple(t.shape), tuple(t.stride()))
    assert box == Box((0, 0), (6, 4))


@st.composite
def boxes(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(0, 3))
    out = []
    for _ in range(draw(st.integers(0, 7))):
        start = [draw(st.integers(0, 4)) for _ in range(dims)]
        stop = [a + draw(st.integers(1, 4)) for a in start]
        out.append(Box(tuple(start), tuple(stop)))
    return out


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(boxes())
def test_union_volume_counts_distinct_points(some: list[Box]) -> None:
    assert slices.union_volume(some) == len(set().union(*map(points, some)))


@given(boxes())
def test_first_overlap_finds_one_if_there_is_one(some: list[Box]) -> None:
    pairs = itertools.combinations(range(len(some)), 2)
    overlapping = {(i, j) for i, j in pairs if points(some[i]) & points(some[j])}
    found = slices.first_overlap(some)
    assert (found in overlapping) if overlapping else (found is None)


@given(boxes())
def test_overlap_is_the_common_points(some: list[Box]) -> None:
    for a, b in itertools.combinations(some, 2):
        common = slices.overlap(a, b)
        assert (points(common) if common else set()) == points(a) & points(b)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Slice, Slice]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))

    def one() -> Slice:
        stride = draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
        return Slice(draw(st.integers(0, 50)), shape, tuple(stride))

    return one(), one()


ROWS = Slice(0, (5, 2), (2, 1)), Slice(3, (5, 2), (1, 9))


@given(pairs(), st.integers(1, 40))
@example(ROWS, 4)  # two rows at a time leave one
@example(ROWS, 1)  # less than a row
@example(ROWS, 3)
def test_split_pair_covers_exactly_in_order_within_the_limit(
    pair: tuple[Slice, Slice], limit: int
) -> None:
    parts = list(slices.split_pair(*pair, limit))
    for dst, src in parts:
        assert dst.shape == src.shape
        assert dst.numel <= limit
    for side in (0, 1):
        assert [e for part in parts for e in elements(part[side])] == elements(pair[side])


@given(pairs(), st.integers(1, 40))
def test_split_pair_makes_no_more_pieces_than_rows_force(
    pair: tuple[Slice, Slice], limit: int
) -> None:
    numel = pair[0].numel
    if numel:
        # Cutting by whole rows at most doubles the pieces at each of the dimensions.
        fewest = -(-numel // limit)
        assert len(list(slices.split_pair(*pair, limit))) <= fewest * 2 ** len(pair[0].shape)


def test_split_pair_refuses_what_it_cannot_split() -> None:
    one, other = Slice(0, (2, 3), (3, 1)), Slice(0, (3, 2), (2, 1))
    with pytest.raises(SlicesError, match="shapes differ"):
        list(slices.split_pair(one, other, 4))
    with pytest.raises(SlicesError, match="pieces of 0 elements"):
        list(slices.split_pair(one, one, 0))


@given(st.data())
def test_contiguous_agrees_with_torch(data: st.DataObject) -> None:
    t = data.draw(st.one_of(tensors(), tensors(gaps=True)))
    view = data.draw(viewed(t))
    assert as_slice(view).contiguous == view.is_contiguous()


@given(pairs())
def test_contiguous_slices_are_one_run_of_elements(pair: tuple[Slice, Slice]) -> None:
    s = pair[0]
    if s.numel:
        run = list(range(s.offset, s.offset + s.numel))
        assert s.contiguous == (elements(s) == run)


@given(pairs())
def test_last_and_numel(pair: tuple[Slice, Slice]) -> None:
    s = pair[0]
    assert s.numel == len(elements(s))
    if s.numel:
        assert s.last == max(elements(s))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_whole_is_the_contiguous_tensor(shape: tuple[int, ...]) -> None:
    s = slices.whole(shape)
    assert (s.offset, s.shape) == (0, shape)
    if math.prod(shape):
        assert s.stride == row_major(shape) == torch.empty(shape).stride()
        assert elements(s) == list(range(math.prod(shape)))


@given(wild_slices(), st.integers(0, 60))
def test_check_accepts_exactly_what_stays_inside(s: Slice, extent: int) -> None:
    inside = all(0 <= e < extent for e in elements(s))
    if inside:
        slices.check(s, extent, "x")
    else:
        with pytest.raises(SlicesError, match="reaches element"):
            slices.check(s, extent, "x")


@pytest.mark.parametrize(
    ("s", "why"),
    [
        (Slice(0, (2,), (1, 1)), "differ in length"),
        (Slice(-1, (2,), (1,)), "negative"),
        (Slice(0, (-2,), (1,)), "negative"),
        (Slice(4, (2,), (-1,)), "negative"),
    ],
)
def test_check_names_what_is_malformed(s: Slice, why: str) -> None:
    with pytest.raises(SlicesError, match=f"some tensor.*{why}"):
        slices.check(s, 10, "some tensor")
