"""The checksum of :mod:`sglang_rdt.checksum` as one Triton kernel over a table of slices.

What a program does per element is an addition and a multiply-add, in 32 bits where that is enough, so
the memory is what it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_rdt.checksum import K, merged

if TYPE_CHECKING:
    from sglang_rdt.sums import Part

_TILE = 1 << 16  # elements per program, at most
_STEP = 1 << 11  # elements per turn of its loop: 32 turns, so that int32 does not overflow
_SIGNED_K = K - (1 << 64) if K >> 63 else K


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    tiles, out, FACTOR: tl.constexpr, DENSE: tl.constexpr, ITEM: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tiles + 6 * tl.program_id(0).to(tl.int64)
    address, count = tl.load(row), tl.load(row + 1)
    step, index, weight, slot = (
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
    )
    lane = tl.arange(0, STEP)
    if ITEM == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif ITEM == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    if ITEM == 4:
        bits_of_lane = tl.zeros((STEP,), dtype=tl.int64)
        times_turn = tl.zeros((STEP,), dtype=tl.int64)
    else:
        bits_of_lane = tl.zeros((STEP,), dtype=tl.int32)
        times_turn = tl.zeros((STEP,), dtype=tl.int32)
    for turn in range(TILE // STEP):
        at = turn * STEP + lane
        where = at if DENSE else at.to(tl.int64) * step
        bits = tl.load(pointer + where, mask=at < count, other=0).to(bits_of_lane.dtype)
        bits_of_lane += bits
        times_turn += bits * turn
    total = tl.sum(bits_of_lane.to(tl.int64), axis=0)
    moment = tl.sum(bits_of_lane.to(tl.int64) * lane + times_turn.to(tl.int64) * STEP, axis=0)
    tl.atomic_add(out + slot, total + FACTOR * (index * total + weight * moment))


class SumKernels:
    """One launch per element size; see the module.

    Args:
        parts: ``(slot, slice)``, all on one device.
        slots: how many sums there are.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], slots: int) -> None:
        self._device = parts[0][1].view.device
        groups: dict[tuple[int, bool], list[np.ndarray[Any, Any]]] = {}
        for slot, part in parts:
            if part.view.numel():
                tiles = tiles_of(part, slot)
                dense = bool((tiles[:, 2] == 1).all())
                groups.setdefault((part.view.element_size(), dense), []).append(tiles)
        self._out = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._launches = [
            (item, dense, torch.from_numpy(np.concatenate(tiles)).to(self._device))
            for (item, dense), tiles in groups.items()
        ]

    def start(self) -> None:
        """Launches in the current stream."""
        self._out.zero_()
        for item, dense, tiles in self._launches:
            _sum_kernel[(len(tiles),)](
                tiles, self._out,
                FACTOR=_SIGNED_K, DENSE=dense, ITEM=item, TILE=_TILE, STEP=_STEP,
            )  # fmt: skip

    def result(self) -> list[int]:
        """The sums, signed; waits for the launches."""
        return [int(v) for v in self._out.tolist()]


def tiles_of(part: Part, slot: int) -> np.ndarray[Any, Any]:
    """int64, one row per tile: address, elements, step between them in memory (elements), index of
    the first, step of the index, slot. No tile crosses the end of a line of the slice."""
    view = part.view
    sizes, (steps, weights) = merged(tuple(view.shape), tuple(view.stride()), part.stride)
    # A flat slice was cut into lines for the cache of a CPU; here it is better whole.
    if len(sizes) == 2 and steps[0] == steps[1] * sizes[1] and weights[0] == weights[1] * sizes[1]:
        sizes, steps, weights = (1, math.prod(sizes)), (0, steps[1]), (0, weights[1])
    memory = index = np.zeros(1, np.int64)
    for size, step, weight in zip(sizes[:-1], steps[:-1], weights[:-1], strict=True):
        at = np.arange(size, dtype=np.int64)
        memory = (memory[:, None] + at * step).ravel()
        index = (index[:, None] + at * weight).ravel()
    first = np.arange(0, sizes[-1], _TILE, dtype=np.int64)
    tiles = np.empty((len(memory), len(first), 6), np.int64)
    tiles[..., 0] = view.data_ptr() + (memory[:, None] + first * steps[-1]) * view.element_size()
    tiles[..., 1] = np.minimum(sizes[-1] - first, _TILE)
    tiles[..., 2] = steps[-1]
    tiles[..., 3] = part.offset + index[:, None] + first * weights[-1]
    tiles[..., 4] = weights[-1]
    tiles[..., 5] = slot
    return tiles.reshape(-1, 6)
