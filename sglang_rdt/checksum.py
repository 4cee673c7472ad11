"""An additive 64-bit checksum of tensor slices.

``sum(bits[i] * (1 + K * i)) mod 2**64`` over the elements, where ``i`` is the element's index in the
whole parameter and ``K`` is even, so that every weight is odd. Sums of parts add up to the sum of the
whole, so trainer and engine compare without gathering anything; a flipped bit, two swapped elements
or a missing slice change it.

It is two moments, ``sum(bits)`` and ``sum(bits * i)``, and in a rectangle the second follows from the
sums of its rows and of its columns: plain reductions, which run at memory speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

MASK = (1 << 64) - 1
# Twice 2**64 / golden ratio: spreads neighbouring indices over all 64 bits.
K = 2 * 0x9E3779B97F4A7C15 & MASK
# Of the upper half of 8-byte elements: as two halves, so that a difference in bit 63 alone is not
# lost in the product.
K_HIGH = 2 * 0xC2B2AE3D27D4EB4F & MASK
# Rows and columns of a block: small enough for the cache, and for sums of 2-byte elements in int32.
_ROWS, _COLS = 256, 8192


def combine(total: int, moment: int, offset: int, factor: int = K) -> int:
    """The checksum of elements with ``sum(bits)`` and ``sum(bits * (i - offset))``."""
    return (total + factor * (offset * total + moment)) & MASK


def slice_sum(view: torch.Tensor, offset: int, stride: tuple[int, ...] | None = None) -> int:
    """Checksum of the elements of ``view``.

    Args:
        view: any shape, dtype, strides and device.
        offset: index of its first element in the whole parameter.
        stride: strides of its dimensions *in the whole parameter* (default: those of ``view``);
            a packed copy of a slice sums to the same as the slice itself.

    Returns:
        An integer in ``[0, 2**64)``.
    """
    import torch

    stride = tuple(view.stride()) if stride is None else stride
    if not view.numel():
        return 0
    bits = _bits(view.detach())
    total = 0
    for part, factor in bits:
        sizes, steps = merged(part.shape, part.stride(), stride)
        part = torch.as_strided(part, sizes, steps[0], part.storage_offset())
        moments = _moments_cuda if part.is_cuda else _moments_cpu
        total += combine(*moments(part, steps[1]), offset, factor)
    return total & MASK


def merged(
    shape: tuple[int, ...], steps: tuple[int, ...], weights: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dimensions that continue one another in memory (``steps``) and in the index (``weights``) as
    one; at least two are left, the inner of a single one at most ``_COLS`` long where it divides."""
    dims: list[tuple[int, int, int]] = []
    for size, step, weight in zip(shape, steps, weights, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == step * size and dims[-1][2] == weight * size:
            dims[-1] = (dims[-1][0] * size, step, weight)
        else:
            dims.append((size, step, weight))
    while len(dims) < 2:
        dims.insert(0, (1, 0, 0))
    size, step, weight = dims[-1]
    if len(dims) == 2 and dims[0][0] == 1 and size > _COLS and size % _COLS == 0:
        dims = [(size // _COLS, step * _COLS, weight * _COLS), (_COLS, step, weight)]
    sizes, tos, ws = zip(*dims, strict=True)
    return sizes, (tos, ws)


def _bits(view: torch.Tensor) -> list[tuple[Any, int]]:
    """Integers with the elements' bits (sign-extended where they have 2 or 4 bytes), and the factor
    of each part."""
    import torch

    if view.dtype == torch.bool:
        view = view.to(torch.uint8)
    size = view.element_size()
    if size == 8:
        wide = view.view(torch.int64)
        return [
            ((wide & 0xFFFFFFFF).view(torch.int64), K),
            ((wide >> 32 & 0xFFFFFFFF).view(torch.int64), K_HIGH),
        ]
    return [(view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]), K)]


def _moments_cpu(bits: torch.Tensor, weights: tuple[int, ...]) -> tuple[int, int]:
    """``sum(bits)`` and ``sum(bits * index)``, modulo 2**64. NumPy's reductions are ten times
    torch's on a CPU."""
    # Not .numpy(): that makes the storage unresizable, which offloading of parameters needs.
    return _moments(np.from_dlpack(bits), weights)


def _moments(bits: np.ndarray[Any, Any], weights: tuple[int, ...]) -> tuple[int, int]:
    if bits.ndim > 2:
        total = moment = 0
        for i, inner in enumerate(bits):
            t, m = _moments(inner, weights[1:])
            total, moment = total + t, moment + m + i * weights[0] * t
        return total & MASK, moment & MASK
    narrow = np.int32 if bits.itemsize <= 2 else np.int64
    total = moment = 0
    for c in range(0, bits.shape[1], _COLS):
        columns = np.zeros(min(_COLS, bits.shape[1] - c), np.uint64)
        for r in range(0, bits.shape[0], _ROWS):
            block = bits[r : r + _ROWS, c : c + _COLS]
            rows = block.sum(axis=1, dtype=narrow).astype(np.int64)
            columns += block.sum(axis=0, dtype=narrow).astype(np.int64).view(np.uint64)
            at = np.arange(r, r + len(rows), dtype=np.int64)
            total += int(rows.sum())
            moment += weights[0] * int((rows.view(np.uint64) * at.view(np.uint64)).sum())
        at = np.arange(c, c + len(columns), dtype=np.uint64)
        moment += weights[1] * int((columns * at).sum())
    return total & MASK, moment & MASK


def _moments_cuda(bits: torch.Tensor, weights: tuple[int, ...]) -> tuple[int, int]:
    import torch

    totals = bits.sum(dtype=torch.int64)
    moments = torch.zeros_like(totals)
    for dim, weight in enumerate(weights):
        # int64 wraps around as it should.
        others = [d for d in range(bits.dim()) if d != dim]
        lines = bits.sum(dim=others, dtype=torch.int64)
        at = torch.arange(len(lines), dtype=torch.int64, device=bits.device)
        moments += (lines * at).sum() * _signed(weight)
    total, moment = torch.stack([totals, moments]).tolist()
    return int(total) & MASK, int(moment) & MASK


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
