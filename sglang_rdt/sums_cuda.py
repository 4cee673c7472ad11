"""The checksum of :mod:`sglang_rdt.checksum` as one Triton kernel over a table of slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_rdt.checksum import _MULTIPLIER

if TYPE_CHECKING:
    from sglang_rdt.sums import Part

_TILE = 1 << 16  # elements per program
_STEP = 1 << 11  # elements per turn of its loop
_MAX_ROWS_COLS = 1 << 31
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    bases, table, tiles, out, MULTIPLIER: tl.constexpr, FLAT: tl.constexpr,
    ITEM: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    entry = tl.load(tiles + 2 * tile)
    start = tl.load(tiles + 2 * tile + 1)
    row = table + 8 * entry
    count, cols = tl.load(row), tl.load(row + 1)
    step0, step1 = tl.load(row + 2), tl.load(row + 3)
    index0, weight0, weight1 = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    slot = tl.load(row + 7)
    address = tl.load(bases + entry)
    if ITEM == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif ITEM == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    total = tl.zeros((STEP,), dtype=tl.int64)
    for at in range(0, TILE, STEP):
        i = start + at + tl.arange(0, STEP)
        inside = i < count
        if FLAT:
            where = i
            index = index0 + i
        else:
            r = (i.to(tl.int32) // cols.to(tl.int32)).to(tl.int64)
            c = i - r * cols
            where = r * step0 + c * step1
            index = index0 + r * weight0 + c * weight1
        bits = tl.load(pointer + where, mask=inside, other=0).to(tl.int64)
        total += bits * ((index * MULTIPLIER) | 1)
    tl.atomic_add(out + slot, tl.sum(total, axis=0))


class SumKernels:
    """One launch per element size and kind of slice; see the module.

    Args:
        parts: ``(slot, slice)``, all on one GPU.
        slots: how many sums there are.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], slots: int) -> None:
        device = parts[0][1].view.device
        groups: dict[tuple[int, bool], list[tuple[int, list[int]]]] = {}
        for slot, part in parts:
            item = part.view.element_size()
            for address, row, flat in _rows(part):
                groups.setdefault((item, flat), []).append((address, [*row, slot]))
        self._out = torch.zeros(slots, dtype=torch.int64, device=device)
        self._launches = []
        for (item, flat), entries in groups.items():
            bases = torch.tensor([a for a, _ in entries], dtype=torch.int64)
            table = torch.tensor([r for _, r in entries], dtype=torch.int64)
            tiles = [
                (e, start) for e, (_, r) in enumerate(entries) for start in range(0, r[0], _TILE)
            ]
            self._launches.append(
                (
                    item,
                    flat,
                    bases.to(device),
                    table.to(device),
                    torch.tensor(tiles, dtype=torch.int64).to(device),
                    len(tiles),
                )
            )

    def start(self) -> None:
        """Launches in the current stream."""
        self._out.zero_()
        with torch.cuda.device(self._out.device):
            for item, flat, bases, table, tiles, count in self._launches:
                _sum_kernel[(count,)](
                    bases, table, tiles, self._out,
                    MULTIPLIER=_MULTIPLIER, FLAT=flat, ITEM=item, TILE=_TILE, STEP=_STEP,
                )  # fmt: skip

    def result(self) -> list[int]:
        """The sums, signed; waits for the launches."""
        return [int(v) for v in self._out.cpu().tolist()]


def _rows(part: Part) -> Iterator[tuple[int, list[int], bool]]:
    """``(address, [elements, columns, steps in memory (2), index, steps of the index (2)], flat)``
    of two-dimensional pieces."""
    view, item = part.view, part.view.element_size()
    # Dimensions that continue one another in memory and in the index become one.
    dims: list[tuple[int, int, int]] = []
    for size, step, weight in zip(view.shape, view.stride(), part.stride, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == step * size and dims[-1][2] == weight * size:
            dims[-1] = (dims[-1][0] * size, step, weight)
        else:
            dims.append((size, step, weight))
    if not view.numel():
        return
    while len(dims) < 2:
        dims.insert(0, (1, 0, 0))
    outer, (rows, step0, weight0), (cols, step1, weight1) = dims[:-2], dims[-2], dims[-1]
    flat = rows == 1 and step1 == 1 and weight1 == 1
    most = max(_MAX_ROWS_COLS // max(cols, 1) - 1, 1)
    for place in itertools.product(*(range(n) for n, _, _ in outer)):
        at = sum(i * s for i, (_, s, _) in zip(place, outer, strict=True))
        index = part.offset + sum(i * w for i, (_, _, w) in zip(place, outer, strict=True))
        for first in range(0, rows, most):
            count = min(most, rows - first)
            address = view.data_ptr() + (at + first * step0) * item
            row = [math.prod((count, cols)), cols, step0, step1]
            yield address, [*row, index + first * weight0, weight0, weight1], flat
