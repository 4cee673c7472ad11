"""Transfers as contiguous runs of bytes: what is handed to NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan.buckets import ALIGN
from sglang_rdt.plan.slices import Slice, split_pair
from sglang_rdt.plan.specs import ITEMSIZE
from sglang_rdt.plan.strided import Ints, expand, padded
from sglang_rdt.plan.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes, one row each.

    Args:
        names: parameters that are written.
        param: index into ``names``.
        param_at: bytes from the parameter's first element.
        block: number of the source's block.
        block_at: bytes from the block's start.
        nbytes: of the run.
    """

    names: tuple[str, ...]
    param: NDArray[np.int32]
    param_at: Ints
    block: NDArray[np.int32]
    block_at: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def where(self, rows: NDArray[np.bool_] | slice) -> Runs:
        """Only ``rows``: a mask, or a range."""
        return Runs(
            self.names,
            self.param[rows],
            self.param_at[rows],
            self.block[rows],
            self.block_at[rows],
            self.nbytes[rows],
        )


@dataclass(frozen=True, slots=True)
class Unpack:
    """The contiguous elements of ``src_dtype`` at byte ``at`` of the scratch memory, as a tensor
    of ``dst.shape``, go to slice ``dst`` of ``param``."""

    at: int
    src_dtype: str
    param: str
    dst: Slice
    dtype: str


@dataclass(frozen=True, slots=True)
class UnpackRound:
    """One filling of the scratch memory: runs of bytes that are read into it, then copies.

    Args:
        source: trainer rank number of each run; ascending.
        block, block_at: where it starts there, in bytes.
        at: where it goes in the scratch memory, in bytes.
        run_bytes: bytes of each run.
        copies: in order of ``at``.
        nbytes: of scratch memory that are used.
    """

    source: NDArray[np.int32]
    block: NDArray[np.int32]
    block_at: Ints
    at: Ints
    run_bytes: Ints
    copies: tuple[Unpack, ...]
    nbytes: int


def direct_runs(transfers: Sequence[Transfer]) -> Runs:
    """The runs of the direct ``transfers`` from one source.

    What is adjacent on both sides is one run, also across transfers. Sorted by size, the smallest
    first: where one thread posts, the link is not kept waiting for the last of many small ones.

    Raises:
        SlicesError: a transfer is not direct, or they come from several sources.
    """
    for one in transfers:
        if one.how != "direct" or one.source != transfers[0].source:
            raise SlicesError(
                f"{one.param} from trainer rank {one.source}: {one.how}; expected direct transfers "
                f"from trainer rank {transfers[0].source}"
            )
    names: dict[str, int] = {}
    param = np.array([names.setdefault(t.param, len(names)) for t in transfers], np.int32)
    block = np.array([t.block for t in transfers], np.int32)
    item = np.array([ITEMSIZE[t.dtype] for t in transfers], np.int64)
    dst = np.array([t.dst.offset for t in transfers], np.int64)
    src = np.array([t.src.offset for t in transfers], np.int64)
    row, length, (to, at) = expand(
        padded([t.dst.shape for t in transfers], 1),
        padded([t.dst.stride for t in transfers], 0),
        padded([t.src.stride for t in transfers], 0),
    )
    item = item[row]
    columns = _joined(
        param[row], (dst[row] + to) * item, block[row], (src[row] + at) * item, length * item
    )
    order = np.argsort(columns[-1], kind="stable")
    return Runs(tuple(names), *(c[order] for c in columns))


def _joined(*columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Merges runs that are adjacent on both sides; sorted by side one.

    Columns: memory and place of one side, memory and place of the other, bytes.
    """
    one, one_at, two, two_at, nbytes = columns
    order = np.lexsort((one_at, one))
    one, one_at, two, two_at, nbytes = (c[order] for c in (one, one_at, two, two_at, nbytes))
    follows = (
        (one[1:] == one[:-1])
        & (two[1:] == two[:-1])
        & (one_at[1:] == one_at[:-1] + nbytes[:-1])
        & (two_at[1:] == two_at[:-1] + nbytes[:-1])
    )
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(one), 1), np.bool_), ~follows]))
    total = np.add.reduceat(nbytes, starts) if len(starts) else nbytes
    return one[starts], one_at[starts], two[starts], two_at[starts], total


def unpack_rounds(transfers: Sequence[Transfer], scratch_bytes: int) -> tuple[UnpackRound, ...]:
    """Rounds for the "unpack" ``transfers`` of one engine rank, from any sources, in their order
    by source.

    Raises:
        SlicesError: a transfer is no "unpack", or the scratch memory cannot hold one element.
    """
    rounds: list[UnpackRound] = []
    placed: list[tuple[Transfer, Slice, int]] = []
    copies: list[Unpack] = []
    used = 0

    def close() -> None:
        nonlocal placed, copies, used
        if placed:
            rounds.append(_round(placed, tuple(copies), used))
        placed, copies, used = [], [], 0

    for one in sorted(transfers, key=lambda t: t.source):
        if one.how != "unpack":
            raise SlicesError(f"{one.param} from trainer rank {one.source}: {one.how}, no unpack")
        item = ITEMSIZE[one.src_dtype]
        if scratch_bytes < item:
            raise SlicesError(
                f"{scratch_bytes} bytes of scratch memory cannot hold one {one.src_dtype} element"
            )
        src, dst = _in_source_order(one)
        for to, of in split_pair(dst, src, scratch_bytes // item):
            nbytes = of.numel * item
            if not nbytes:
                continue
            at = -(-used // ALIGN) * ALIGN
            if at + nbytes > scratch_bytes:
                close()
                at = 0
            placed.append((one, of, at))
            copies.append(Unpack(at, one.src_dtype, one.param, to, one.dtype))
            used = at + nbytes
    close()
    return tuple(rounds)


def _in_source_order(one: Transfer) -> tuple[Slice, Slice]:
    """Dimensions by falling stride of the source, so that it is read in as few runs as it has."""
    order = sorted(range(len(one.src.shape)), key=lambda d: -one.src.stride[d])
    shape = tuple(one.src.shape[d] for d in order)
    return (
        Slice(one.src.offset, shape, tuple(one.src.stride[d] for d in order)),
        Slice(one.dst.offset, shape, tuple(one.dst.stride[d] for d in order)),
    )


def _round(
    placed: Sequence[tuple[Transfer, Slice, int]], copies: tuple[Unpack, ...], nbytes: int
) -> UnpackRound:
    shape = padded([s.shape for _, s, _ in placed], 1)
    # Row-major strides of the packed copy.
    packed = np.ones_like(shape)
    packed[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    row, length, (of, to) = expand(shape, padded([s.stride for _, s, _ in placed], 0), packed)
    item = np.array([ITEMSIZE[t.src_dtype] for t, _, _ in placed], np.int64)[row]
    src = np.array([s.offset for _, s, _ in placed], np.int64)[row] + of
    at = np.array([at for *_, at in placed], np.int64)[row] + to * item
    source = np.array([t.source for t, _, _ in placed], np.int32)[row]
    block = np.array([t.block for t, _, _ in placed], np.int32)[row]
    # Sources rise with the place in the scratch memory; runs of different ones must not merge.
    both = source.astype(np.int64) << 32 | block
    _, at, both, block_at, run_bytes = _joined(
        np.zeros(len(row), np.int32), at, both, src * item, length * item
    )
    return UnpackRound(
        (both >> 32).astype(np.int32),
        (both & 0xFFFFFFFF).astype(np.int32),
        block_at,
        at,
        run_bytes,
        copies,
        nbytes,
    )
