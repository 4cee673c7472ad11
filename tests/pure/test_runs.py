from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import strided
from sglang_rdt.plan.buckets import ALIGN
from sglang_rdt.plan.runs import Runs, direct_runs, unpack_rounds
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import ITEMSIZE
from sglang_rdt.plan.transfers import How, Transfer

from .builders import elements, row_major


def transfer(
    src: Slice,
    dst: Slice,
    *,
    block: int = 0,
    param: str = "p",
    source: int = 0,
    how: How = "direct",
    dtype: str = "float32",
    src_dtype: str | None = None,
) -> Transfer:
    return Transfer(source, block, src, src_dtype or dtype, param, dst, dtype, how)


def flat(offset: int, count: int) -> Slice:
    return Slice(offset, (count,), (1,))


def bytes_of(s: Slice, item: int) -> list[int]:
    return [e * item + b for e in elements(s) for b in range(item)]


def rows(runs: Runs) -> list[tuple[str, int, int, int, int]]:
    columns = (runs.param_at, runs.block, runs.block_at, runs.nbytes)
    return [(runs.names[p], *map(int, rest)) for p, *rest in zip(runs.param, *columns, strict=True)]


@st.composite
def slices_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    """Any slice that has each element once."""
    stride, step = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 2]))
    order = draw(st.sampled_from([tuple(reversed(range(len(shape)))), None]))
    for d in order or draw(st.permutations(range(len(shape)))):
        stride[d] = step
        step *= max(shape[d], 1)
        step += draw(st.sampled_from([0, 0, 0, 1, 5]))
    return Slice(draw(st.integers(0, 20)), shape, tuple(stride))


@st.composite
def transfers(draw: st.DrawFn, how: How) -> list[Transfer]:
    """Transfers that write into the same parameters, each behind the last one."""
    out: list[Transfer] = []
    dst_end: dict[str, int] = {}
    src_end: dict[tuple[int, int], int] = {}
    for _ in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
        source = 0 if how == "direct" else draw(st.integers(0, 2))
        block, param = draw(st.integers(0, 1)), draw(st.sampled_from("pq"))
        dst, src = draw(slices_of(shape)), draw(slices_of(shape))
        dtype = {"p": "float32", "q": "int8"}[param]
        src_dtype = dtype if how == "direct" else draw(st.sampled_from(["float16", dtype]))
        gap = draw(st.sampled_from([0, 0, 3]))
        dst = Slice(dst_end.get(param, 0) + gap, shape, dst.stride)
        first = -(-src_end.get((source, block), 0) // ITEMSIZE[src_dtype])
        src = Slice(first + gap, shape, src.stride)
        dst_end[param] = dst.last + 1
        src_end[source, block] = (src.last + 1) * ITEMSIZE[src_dtype]
        out.append(
            transfer(
                src,
                dst,
                block=block,
                param=param,
                source=source,
                how=how,
                dtype=dtype,
                src_dtype=src_dtype,
            )
        )
    return draw(st.permutations(out))


@given(transfers("direct"))
def test_runs_are_the_transfers_byte_by_byte(some: list[Transfer]) -> None:
    wanted = [
        (t.param, to, t.block, of)
        for t in some
        for to, of in zip(
            bytes_of(t.dst, ITEMSIZE[t.dtype]), bytes_of(t.src, ITEMSIZE[t.dtype]), strict=True
        )
    ]
    runs = direct_runs(some)
    got = [
        (name, to + i, block, of + i)
        for name, to, block, of, nbytes in rows(runs)
        for i in range(nbytes)
    ]
    assert sorted(got) == sorted(wanted)
    assert (runs.nbytes > 0).all()
    assert (np.diff(runs.nbytes) >= 0).all(), "the small ones go first"
    # No two could be one.
    ends = {(name, to + n, block, of + n) for name, to, block, of, n in rows(runs)}
    assert not ends & {(name, to, block, of) for name, to, block, of, _ in rows(runs)}


def test_neighbours_on_both_sides_are_one_run() -> None:
    gate, up = transfer(flat(10, 6), flat(0, 6)), transfer(flat(16, 6), flat(6, 6))
    assert rows(direct_runs([up, gate])) == [("p", 0, 0, 40, 48)]
    # Neighbours on one side only, or in another block, are not.
    apart = transfer(flat(17, 6), flat(6, 6))
    other = transfer(flat(16, 6), flat(6, 6), block=1)
    param = transfer(flat(16, 6), flat(6, 6), param="q")
    for second in (apart, other, param):
        assert len(direct_runs([gate, second])) == 2


def test_a_whole_tensor_is_one_run_in_whatever_order_its_dimensions_are() -> None:
    turned = Slice(0, (3, 5), (1, 3))
    assert rows(direct_runs([transfer(turned, turned)])) == [("p", 0, 0, 0, 60)]
    across = transfer(Slice(0, (3, 5), (5, 1)), turned)
    assert len(direct_runs([across])) == 15


def test_only_direct_transfers_of_one_source_are_runs() -> None:
    one = transfer(flat(0, 4), flat(0, 4))
    with pytest.raises(SlicesError, match="p from trainer rank 0: unpack; expected direct"):
        direct_runs([transfer(flat(0, 4), flat(0, 4), how="unpack")])
    with pytest.raises(SlicesError, match="p from trainer rank 3"):
        direct_runs([one, transfer(flat(0, 4), flat(4, 4), source=3)])
    assert len(direct_runs([])) == 0


@given(transfers("unpack"), st.integers(4, 200))
def test_unpacked_rounds_are_the_transfers_element_by_element(
    some: list[Transfer], scratch_bytes: int
) -> None:
    wanted = [
        (t.param, to, t.source, t.block, of * ITEMSIZE[t.src_dtype], t.src_dtype)
        for t in some
        for to, of in zip(elements(t.dst), elements(t.src), strict=True)
    ]
    got = []
    for one in unpack_rounds(some, scratch_bytes):
        assert 0 < one.nbytes <= scratch_bytes
        assert (np.diff(one.source) >= 0).all()
        where: dict[int, tuple[int, int, int]] = {}
        columns: Any = (one.source, one.block, one.block_at, one.at, one.run_bytes)
        for source, block, of, at, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            assert nbytes > 0
            for i in range(nbytes):
                assert at + i not in where
                where[at + i] = source, block, of + i
        assert max(where) < one.nbytes
        used = 0
        for copy in one.copies:
            assert copy.at % ALIGN == 0
            assert copy.at >= used
            item = ITEMSIZE[copy.src_dtype]
            used = copy.at + copy.dst.numel * item
            for k, to in enumerate(elements(copy.dst)):
                source, block, of = where[copy.at + k * item]
                assert [where[copy.at + k * item + i] for i in range(item)] == [
                    (source, block, of + i) for i in range(item)
                ]
                got.append((copy.param, to, source, block, of, copy.src_dtype))
    assert sorted(got) == sorted(wanted)


def test_the_source_is_read_in_its_own_order() -> None:
    # Stored column by column on the source: one run, whatever the parameter looks like.
    one = transfer(Slice(5, (3, 4), (1, 3)), Slice(0, (3, 4), (9, 2)), how="unpack")
    (only,) = unpack_rounds([one], 1 << 10)
    assert only.run_bytes.tolist() == [48]
    assert [c.dst for c in only.copies] == [Slice(0, (4, 3), (2, 9))]


def test_rounds_are_filled_before_a_new_one_begins() -> None:
    one = transfer(Slice(0, (100, 8), (8, 1)), Slice(0, (100, 8), (16, 1)), how="unpack")
    rounds = unpack_rounds([one], 1 << 10)
    assert [r.nbytes for r in rounds] == [1024, 1024, 1024, 128]


def test_scratch_memory_that_holds_no_element_is_refused() -> None:
    one = transfer(flat(0, 4), flat(0, 4), how="unpack", dtype="float64")
    with pytest.raises(SlicesError, match="7 bytes of scratch memory cannot hold one float64"):
        unpack_rounds([one], 7)
    with pytest.raises(SlicesError, match="p from trainer rank 0: direct, no unpack"):
        unpack_rounds([transfer(flat(0, 4), flat(0, 4))], 1 << 10)


# Runs of many slices at once.


@given(st.data())
def test_expanded_runs_are_the_elements(data: st.DataObject) -> None:
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    one = [data.draw(slices_of(s)) for s in shapes]
    two = [data.draw(slices_of(s)) for s in shapes]
    shape = strided.padded(shapes, 1)
    strides = [strided.padded([s.stride for s in side], 0) for side in (one, two)]
    out = strided.expand(shape, *strides)
    got: list[set[tuple[int, int]]] = [set() for _ in shapes]
    for row, n, a, b in zip(out.row, out.length, *out.offsets, strict=True):
        got[row] |= {(int(a) + i, int(b) + i) for i in range(int(n))}
    counts = strided.count_runs(shape, *strides)
    for i in range(len(shapes)):
        pairs = set(
            zip(
                (e - one[i].offset for e in elements(one[i])),
                (e - two[i].offset for e in elements(two[i])),
                strict=True,
            )
        )
        assert got[i] == pairs
        # As few as can be: an element follows the one before it, or begins a run.
        begins = {(a, b) for a, b in pairs if (a - 1, b - 1) not in pairs}
        assert int((out.row == i).sum()) >= len(begins)
        if pairs:
            assert counts[i] == (out.row == i).sum()


def test_a_contiguous_tensor_is_one_run() -> None:
    shapes = [(2, 3, 4), (7,), (), (1, 1, 5)]
    shape = strided.padded(shapes, 1)
    stride = strided.padded([row_major(s) for s in shapes], 0)
    assert strided.count_runs(shape, stride, stride).tolist() == [1, 1, 1, 1]
    assert list(itertools.chain(strided.run_lengths(shape, stride)[0])) == [24, 7, 1, 5]
