"""An additive 64-bit checksum of tensor slices.

``sum(bits[i] * weight(i)) mod 2**64`` over the elements, where ``i`` is the element's index in
the whole parameter and ``weight`` is an odd number per index. Sums of parts add up to the sum of
the whole, so trainer and engine compare without gathering anything; a flipped bit, two swapped
elements or a missing slice change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASK = (1 << 64) - 1
# 2**64 / golden ratio, odd: spreads neighbouring indices over all 64 bits. As a signed number.
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_HIGH = 0xC2B2AE3D27D4EB4F - (1 << 64)  # of the upper half of 8-byte elements
_LOW = (1 << 32) - 1
# Elements handled at a time: bounds the int64 scratch memory to a few tens of MB.
_CHUNK = 1 << 22


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
    stride = tuple(view.stride()) if stride is None else stride
    if not view.numel():
        return 0
    if view.dim() == 0:
        view, stride = view.reshape(1), (1,)
    return _sum(view, offset, stride) & MASK


def _sum(view: torch.Tensor, offset: int, stride: tuple[int, ...]) -> int:
    import torch

    row = view.numel() // view.shape[0]
    if row > _CHUNK:
        return sum(_sum(view[i], offset + i * stride[0], stride[1:]) for i in range(view.shape[0]))
    rows = max(_CHUNK // row, 1)
    # The index pattern is the same in every block but for its start.
    index = torch.zeros((), dtype=torch.int64, device=view.device)
    shape = (min(rows, view.shape[0]), *view.shape[1:])
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        line = torch.arange(size, dtype=torch.int64, device=view.device) * step
        index = index.unsqueeze(-1) + line.view((1,) * dim + (size,)) if dim else line
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for first in range(0, view.shape[0], rows):
        part = view[first : first + rows]
        at = index[: part.shape[0]] + (offset + first * stride[0])
        bits = _bits(part)
        if part.element_size() == 8:
            # Weights differ by even numbers: a difference in bit 63 alone would be lost.
            high, bits = (bits >> 32) & _LOW, bits & _LOW
            total = total + (high * ((at * _MULTIPLIER_HIGH) | 1)).sum()
        total = total + (bits * ((at * _MULTIPLIER) | 1)).sum()
    return int(total)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Element bits as int64 (sign-extended)."""
    import torch

    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if t.dtype == torch.bool:
        return t.to(torch.int64)
    return t.view(ints[t.element_size()]).to(torch.int64)
