"""Tracing a conversion against running it with real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_rdt import tracing
from sglang_rdt.errors import ExportError, SlicesError
from sglang_rdt.plan import pieces
from sglang_rdt.plan.pieces import Piece, join, simplified, without
from sglang_rdt.plan.slices import Slice, whole
from sglang_rdt.tracing import Tracer

from .builders import elements, row_major

Convert = Callable[..., Tensor]


def real_leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Different numbers in every element of every leaf."""
    return [
        torch.arange(math.prod(shape)).view(shape) + 10_000 * i for i, shape in enumerate(shapes)
    ]


def traced(convert: Convert, *shapes: tuple[int, ...]) -> tuple[Piece, ...]:
    tracer = Tracer()
    leaves = [tracer.leaf(shape, torch.int64) for shape in shapes]
    with tracer:
        out = convert(*leaves)
    return tracer.pieces(out)


def check(convert: Convert, *shapes: tuple[int, ...]) -> tuple[Piece, ...]:
    """Puts the result together from the pieces, each element once, and compares."""
    leaves = real_leaves(*shapes)
    expected = convert(*[leaf.clone() for leaf in leaves])
    found = traced(convert, *shapes)
    got: dict[int, int] = {}
    for piece in found:
        assert piece.dst.shape == piece.src.shape
        source = leaves[int(piece.origin)].flatten()
        for at, element in zip(elements(piece.dst), elements(piece.src), strict=True):
            assert at not in got, f"element {at} twice"
            got[at] = int(source[element])
    assert [got.get(i) for i in range(expected.numel())] == expected.flatten().tolist()
    return found


# Random conversions. A step takes the tensor so far, the leaves and a source of random numbers;
# it draws them with real tensors, and takes the same ones again with meta tensors.


class Draw:
    def __init__(self, data: st.DataObject) -> None:
        self._data, self._taken, self._next = data, [], 0

    def again(self) -> Draw:
        self._next = 0
        return self

    def __call__(self, low: int, high: int) -> int:
        if self._next == len(self._taken):
            self._taken.append(self._data.draw(st.integers(low, high)))
        self._next += 1
        return self._taken[self._next - 1]


def permuted(n: int, draw: Draw) -> list[int]:
    left = list(range(n))
    return [left.pop(draw(0, len(left) - 1)) for _ in range(n)]


def factored(n: int, draw: Draw) -> list[int]:
    """Sizes whose product is ``n``."""
    sizes = []
    while n > 1 and len(sizes) < 3:
        divisors = [d for d in range(2, n + 1) if n % d == 0]
        sizes.append(divisors[draw(0, len(divisors) - 1)])
        n //= sizes[-1]
    return [*sizes, n] if n > 1 or not sizes else sizes


def part(t: Tensor, draw: Draw) -> tuple[int, int, int]:
    """A dimension, and a range in it of at least one element."""
    dim = draw(0, t.dim() - 1)
    start = draw(0, t.shape[dim] - 1)
    return dim, start, draw(1, t.shape[dim] - start)


def cat(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim, start, count = part(t, draw)
    return torch.cat([t.narrow(dim, start, count), t, t.narrow(dim, 0, 1)], dim)


def cat_leaf(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    return torch.cat([t.reshape(-1), leaves[draw(0, len(leaves) - 1)].flatten()])


def shuffled(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim = draw(0, t.dim() - 1)
    chunks = t.chunk(draw(1, 4), dim)
    return torch.cat([chunks[i] for i in permuted(len(chunks), draw)], dim)


def steps_of(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim = draw(0, t.dim() - 1)
    return t[(slice(None),) * dim + (slice(draw(0, t.shape[dim] - 1), None, draw(1, 3)),)]


def filled(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    dim, start, count = part(t, draw)
    out.copy_(t)
    out.narrow(dim, start, count).copy_(t.narrow(dim, 0, 1))
    out.select(dim, start)[...] = out.select(dim, 0).clone()
    return out


def interleaved(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    out = t.new_empty((*t.shape[:-1], 2 * t.shape[-1]))
    out[..., 0::2] = t
    out[..., 1::2] = t.roll(1, -1)
    return out


def scattered(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim, start, count = part(t, draw)
    t = torch.select_scatter(t, t.select(dim, 0), dim, start)
    return torch.slice_scatter(t, t.narrow(dim, 0, count), dim, start, start + count)


def indexed(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim = draw(0, t.dim() - 1)
    index = torch.tensor([draw(-t.shape[dim], t.shape[dim] - 1) for _ in range(draw(1, 6))])
    return t[(slice(None),) * dim + (index,)]


def selected(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    dim, start, count = part(t, draw)
    index = torch.arange(start, start + count, device=t.device)
    return t.index_select(dim, index.flip(0) if draw(0, 1) else index)


def reshaped(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    return t.reshape(factored(t.numel(), draw))


def permutation(t: Tensor, leaves: list[Tensor], draw: Draw) -> Tensor:
    return t.permute(permuted(t.dim(), draw))


STEPS: list[Callable[[Tensor, list[Tensor], Draw], Tensor]] = [
    *[cat, cat_leaf, shuffled, steps_of, filled, interleaved, scattered, indexed, selected],
    *[reshaped, permutation] * 3,
    lambda t, leaves, draw: t.narrow(*part(t, draw)),
    lambda t, leaves, draw: torch.stack([t, t.clone()], draw(0, t.dim())),
    lambda t, leaves, draw: t.clone(),
    lambda t, leaves, draw: t.contiguous(),
    lambda t, leaves, draw: t.transpose(0, -1).contiguous(),
    lambda t, leaves, draw: t.flip(draw(0, t.dim() - 1)),
    lambda t, leaves, draw: t.roll(draw(-3, 3), draw(0, t.dim() - 1)),
    lambda t, leaves, draw: t.repeat(draw(1, 2), *[1] * (t.dim() - 1), draw(1, 2)),
    lambda t, leaves, draw: t.repeat_interleave(draw(1, 3), draw(0, t.dim() - 1)),
    lambda t, leaves, draw: t.expand(draw(1, 3), *t.shape),
    lambda t, leaves, draw: t.unsqueeze(draw(0, t.dim())),
]


@given(st.data())
def test_random_conversions(data: st.DataObject) -> None:
    size = st.integers(1, 6)
    shapes = data.draw(
        st.lists(st.lists(size, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
    )
    chosen = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=7))
    draw = Draw(data)

    def convert(*leaves: Tensor) -> Tensor:
        draw.again()
        t = leaves[0]
        for step in chosen:
            following = step(t if t.dim() else t.reshape(1), list(leaves), draw)
            if following.numel() <= 2000:
                t = following
        return t

    check(convert, *shapes)


@given(st.data())
def test_join_and_without_for_any_slices(data: st.DataObject) -> None:
    """Strides that do not divide one another, and views that overlap themselves, too."""

    def some_slice(distinct: bool) -> Slice:
        dims = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=3))
        s = Slice(
            data.draw(st.integers(0, 12)), tuple(n for n, _ in dims), tuple(t for _, t in dims)
        )
        return s if not distinct or len(set(elements(s))) == s.numel else whole(s.shape)

    a_src, b_dst = some_slice(distinct=False), some_slice(distinct=True)
    a = Piece(whole(a_src.shape), a_src, "a")
    b = Piece(b_dst, whole(b_dst.shape), 7)
    there = dict(zip(elements(b.dst), elements(b.src), strict=True))
    expected = {
        i: there[e] for i, e in zip(elements(a.dst), elements(a.src), strict=True) if e in there
    }
    found = join(a, b)
    assert all(p.origin == 7 for p in found)
    assert sum(p.dst.numel for p in found) == len(expected)
    assert as_map(found) == expected
    assert as_map(simplified(found, a_src.shape)) == expected

    rest = without(b, a_src)
    expected = {at: e for at, e in there.items() if at not in elements(a_src)}
    assert sum(p.dst.numel for p in rest) == len(expected)
    assert as_map(rest) == expected


def as_map(found: Iterable[Piece]) -> dict[int, int]:
    return {at: e for p in found for at, e in zip(elements(p.dst), elements(p.src), strict=True)}


# How few pieces.


def test_qkv_split_is_three_rectangles_per_shard() -> None:
    groups, q, hidden, tp = 8, 4, 16, 2

    def query(*shards: Tensor) -> Tensor:
        return torch.cat(shards).view(groups, -1, hidden)[:, :q].reshape(-1, hidden)

    found = check(query, *[(groups // tp * (q + 2), hidden)] * tp)
    # All groups of a shard at once, with the step from one group to the next.
    assert [p.src for p in found] == [Slice(0, (4, q * hidden), ((q + 2) * hidden, 1))] * tp
    assert [p.dst.offset for p in found] == [0, 4 * q * hidden]


def test_the_same_by_an_index() -> None:
    """As NVIDIA's converters write it: the rows of each group, listed."""
    groups, q, hidden = 8, 4, 16

    def query(qkv: Tensor) -> Tensor:
        rows = torch.cat([torch.arange((q + 2) * i, (q + 2) * i + q) for i in range(groups)])
        return qkv.view(-1, 2, hidden)[rows].reshape(-1, hidden)

    found = check(query, (groups * (q + 2) * 2, hidden))
    assert [p.src.shape for p in found] == [(groups, 2 * q * hidden)]


def test_what_was_cut_and_put_together_again_is_whole() -> None:
    for dim in (0, 1):
        convert: Convert = lambda x, dim=dim: torch.cat(x.chunk(3, dim), dim)  # noqa: E731
        assert check(convert, (6, 9)) == (Piece(whole((54,)), whole((54,)), 0),)


def test_columns_of_shards() -> None:
    found = check(lambda *shards: torch.cat(shards, 1), (5, 3), (5, 3))
    assert [(p.dst, p.src) for p in found] == [
        (Slice(i * 3, (5, 3), (6, 1)), whole((5, 3))) for i in (0, 1)
    ] or [p.dst.shape for p in found] == [(5, 3), (5, 3)]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (3, 0)])
def test_small_and_empty(shape: tuple[int, ...]) -> None:
    check(lambda x: x.clone(), shape)
    check(lambda x: torch.stack([x, x]), shape)


def test_indices_are_computed_with_data() -> None:
    """What is no slice of a parameter may be scattered, read and written as it likes."""

    def convert(x: Tensor) -> Tensor:
        index = torch.arange(10_000, device=x.device).flip(0)[torch.randperm(10_000)]
        index[::2] = 0
        index = torch.cat([index, index.sort().values]) * 2 + 1
        return x[torch.where(index > 3, 2, 1)[:2] * 0 + torch.tensor([1, 2])]

    check(convert, (4, 3))


def test_a_mask_and_an_index_of_two_dimensions() -> None:
    check(lambda x: x[torch.tensor([True, False, True, True])], (4, 3))
    check(lambda x: x[:, torch.arange(4).view(2, 2).t()], (3, 4, 2))


def test_metadata_changed_in_place() -> None:
    check(lambda x: x.clone().transpose_(0, 1).unsqueeze_(0), (4, 3))


def test_what_is_cut_away_again_may_be_anything() -> None:
    check(
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, 2)).new_empty(0).new_empty(4, 3).copy_(x),
        (4, 3),
    )
    check(lambda x: torch.cat([x, x * 2])[:4], (4, 3))


def overwritten_zeros(x: Tensor) -> Tensor:
    out = torch.zeros(6, 3, dtype=x.dtype, device=x.device)
    out[1:5] = x
    return out[1:5]


def test_constants_that_are_written_over() -> None:
    check(overwritten_zeros, (4, 3))


# Refusals.


def in_place(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(t)
    return t


@pytest.mark.parametrize(
    ("convert", "made"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: torch.cat([x, x.mul(2)]), "aten.mul.Tensor"),
        (lambda x: x.to(torch.bfloat16), "a cast from float32 to bfloat16"),
        (lambda x: x.double().clone().float(), "a cast from float64 to float32"),
        (lambda x: x.view(torch.int32), "a cast from float32 to int32"),
        (lambda x: torch.nn.functional.pad(x, (0, 1)), "aten.constant_pad_nd"),
        (lambda x: torch.where(x == 0, x, x), "aten.where.self"),
        (lambda x: in_place(x.clone(), lambda t: t[:1].mul_(2)), "aten.mul_.Tensor"),
        (lambda x: in_place(x.clone(), lambda t: t.zero_()), "the constant 0.0"),
        (lambda x: in_place(x.clone(), lambda t: t.resize_(40)), "aten.resize_"),
        (lambda x: in_place(x.new_empty(4, 3), lambda t: t[:3].copy_(x[:3])), "never written"),
        (lambda x: in_place(x.new_zeros(4, 3), lambda t: t[:3].copy_(x[:3])), "the constant 0.0"),
        (lambda x: torch.cat([x, torch.ones(1, 3, device=x.device)]), "aten.ones"),
        (lambda x: torch.zeros(3), "not made of the parameter"),
        (lambda x: FOREIGN, "not made of the parameter"),
        (lambda x: torch.cat([x, FOREIGN]), "not made of the parameter"),
        (lambda x: x.gather(0, x.new_zeros(4, 3, dtype=torch.int64)), "aten.gather"),
        # A list becomes a meta tensor before anybody sees it.
        (lambda x: x[[0, 2]], "aten.index.Tensor"),
        (lambda x: torch.cat([x, x.bfloat16()]), "a cast from bfloat16 to float32"),
        (
            lambda x: in_place(x.clone(), lambda t: t.view(torch.int32).copy_(x.int())),
            "a cast from int32 to float32",
        ),
    ],
)
def test_what_is_computed_is_refused_by_its_operation(convert: Convert, made: str) -> None:
    tracer = Tracer()
    leaf = tracer.leaf((4, 3), torch.float32)
    with tracer:
        out = convert(leaf)
    with pytest.raises(ExportError, match=made.replace(".", r"\.")):
        tracer.pieces(out)


FOREIGN = torch.ones(4, 3, device="meta")


@pytest.mark.parametrize(
    ("convert", "why"),
    [
        # With real tensors it would have changed the parameter.
        (lambda x: x[:1].copy_(x[1:2]), "writes into the parameter"),
        (lambda x: x.t().mul_(2), "writes into the parameter"),
        (lambda x: torch.empty(4, 3).copy_(x), "a tensor on cpu"),
        (lambda x: torch.zeros(1 << 12, 1 << 12), "allocates 16777216 elements"),
        (lambda x: x.new_ones(1 << 12, 1 << 12, device="cpu"), "allocates 16777216 elements"),
        (
            lambda x: torch.zeros_like(x.expand(1 << 22, 4, 3), device="cpu"),
            "allocates 50331648 elements",
        ),
        (lambda x: torch.arange(1 << 30), "allocates 1073741824 elements"),
    ],
)
def test_what_must_not_happen(convert: Convert, why: str) -> None:
    tracer = Tracer()
    leaf = tracer.leaf((4, 3), torch.float32)
    with pytest.raises(ExportError, match=why), tracer:
        convert(leaf)


def test_a_swarm_of_single_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_RUNS", 8)
    shuffled_rows = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ExportError, match="too scattered"):
        traced(lambda x: x[shuffled_rows], (64, 3))
    with pytest.raises(ExportError, match="too scattered"):
        traced(lambda x: x.flip(0), (64, 3))
    join.cache_clear()
    monkeypatch.setattr(pieces, "MAX_UNROLLED", 8)
    with pytest.raises(ExportError, match="too scattered"):
        # Rows of 35 in the one, of 21 in the other.
        traced(lambda x: torch.cat([x, x], 1).view(-1, 21)[:, :20], (42, 35))
    with pytest.raises(ExportError, match=r"aten.clone.default is too scattered"):
        traced(lambda x: torch.cat([x, x], 1).view(-1, 21)[:, :20].clone(), (42, 35))


def test_a_broken_map_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "join", lambda a, b: join(a, b) if b.origin != 1 else ())
    with pytest.raises(ExportError, match="only 6 of its 12 elements"):
        traced(lambda x, y: torch.cat([x, y]), (2, 3), (2, 3))


class Allocations(TorchDispatchMode):
    """Largest tensor with data that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, Tensor) and t.device.type != "meta":
                self.largest = max(self.largest, t.numel())
        return out


def test_large_tensors_take_no_memory() -> None:
    vocab, hidden, tp = 151_936, 4096, 8
    with Allocations() as allocations:
        tracer = Tracer()
        shards = [tracer.leaf((vocab // tp, hidden), torch.bfloat16) for _ in range(tp)]
        with tracer:
            rows = torch.cat(shards)[: vocab - 1024].view(-1, 2, 8, hidden)
            out = rows.transpose(1, 2).contiguous().view(-1, hidden)[torch.arange(64)]
        found = tracer.pieces(out)
    assert sum(p.dst.numel for p in found) == 64 * hidden
    assert row_major((64, hidden))[0] == hidden
    assert 0 < allocations.largest <= 64


def test_swarms_are_named_by_join() -> None:
    a = Piece(whole((100_000, 3)), Slice(0, (100_000, 3), (5, 1)), "a")
    b = Piece(Slice(0, (100_000, 3), (7, 1)), whole((100_000, 3)), 0)
    with pytest.raises(SlicesError, match="do not line up"):
        join(a, b)
