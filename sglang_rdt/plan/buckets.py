"""Packing of one source's bytes for one engine rank into rounds of one fixed-size bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan.slices import Slice, split_pair
from sglang_rdt.plan.specs import ITEMSIZE, ParamSpec, Want

# Every dtype may start here; NIXL and the copy kernels like it too.
ALIGN = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Source side: the slice ``src`` of HF tensor ``source``, as ``dtype``, contiguous at byte
    ``at`` of the bucket."""

    source: str
    src: Slice
    dtype: str
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes in the bucket."""
        return self.src.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Target:
    """Engine side: the bytes at ``at`` of the bucket are slice ``dst`` of ``param``."""

    param: str
    dst: Slice
    dtype: str
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes in the bucket."""
        return self.dst.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Round:
    """One filling of a bucket: what is staged, and where it lands."""

    pieces: tuple[Piece, ...]
    targets: tuple[Target, ...]
    nbytes: int


def pack(
    wants: Iterable[Want],
    order: Sequence[str],
    params: Mapping[str, ParamSpec],
    bucket_bytes: int,
) -> tuple[Round, ...]:
    """Rounds for the ``wants`` of one engine rank from one source.

    Pieces come in the order in which the source yields HF tensors (``order``), so that at most
    one round is open at any time. A slice larger than the bucket is cut by rows. Neighbours that
    lie side by side in the bucket and in the parameter become one target: each costs a
    descriptor (about 5 µs).
    """
    by_source: dict[str, list[Want]] = {name: [] for name in order}
    for want in wants:
        by_source[want.source].append(want)
    rounds: list[Round] = []
    pieces: list[Piece] = []
    targets: list[Target] = []
    used = 0

    def close() -> None:
        nonlocal pieces, targets, used
        if pieces:
            rounds.append(Round(tuple(pieces), tuple(targets), used))
        pieces, targets, used = [], [], 0

    for name in order:
        # In the parameter's own order, so that neighbours meet.
        for want in sorted(by_source[name], key=lambda w: (w.param, w.dst.offset)):
            dtype = params[want.param].dtype
            item = ITEMSIZE[dtype]
            if bucket_bytes < item:
                raise SlicesError(
                    f"a bucket of {bucket_bytes} bytes cannot hold one {dtype} element"
                )
            for dst, src in split_pair(want.dst, want.src, bucket_bytes // item):
                nbytes = dst.numel * item
                if not nbytes:
                    continue
                at = _place(used, targets, want.param, dst, dtype)
                if at + nbytes > bucket_bytes:
                    close()
                    at = 0
                pieces.append(Piece(name, src, dtype, at))
                _add_target(targets, Target(want.param, dst, dtype, at))
                used = at + nbytes
    close()
    return tuple(rounds)


def _follows(last: Target, param: str, dst: Slice, dtype: str) -> bool:
    return (
        last.param == param
        and last.dtype == dtype
        and last.dst.contiguous
        and dst.contiguous
        and last.dst.offset + last.dst.numel == dst.offset
    )


def _place(used: int, targets: Sequence[Target], param: str, dst: Slice, dtype: str) -> int:
    if targets and _follows(targets[-1], param, dst, dtype):
        return used  # side by side: no padding in between, so that the two can merge
    return -(-used // ALIGN) * ALIGN


def _add_target(targets: list[Target], new: Target) -> None:
    if targets and _follows(targets[-1], new.param, new.dst, new.dtype):
        last = targets[-1]
        if last.at + last.nbytes == new.at:
            count = last.dst.numel + new.dst.numel
            targets[-1] = Target(
                last.param, Slice(last.dst.offset, (count,), (1,)), last.dtype, last.at
            )
            return
    if new.dst.contiguous and len(new.dst.shape) != 1:
        new = Target(new.param, Slice(new.dst.offset, (new.dst.numel,), (1,)), new.dtype, new.at)
    targets.append(new)
