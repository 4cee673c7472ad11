"""Registered scratch memory: what cannot land in place lands here first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang_rdt.transport import nixl, unfinished

ALIGN = 16
# Bytes that fill memory to which something is about to be copied, where nothing may pass for copied
# that was not: parameters, and the scratch memory that they are compared with. They differ, or two
# copies that both did nothing would be equal.
OVERWRITTEN = 0xA5
UNREAD = 0x5A


class Scratch:
    """One buffer that grows to the most that was ever asked for; one user at a time.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._buffer is None else self._buffer.numel()

    def bytes(self, count: int) -> torch.Tensor:
        """The first ``count`` bytes: uint8, shape (count,). What was taken before is lost."""
        if self._buffer is None or self._buffer.numel() < count:
            if self._buffer is not None:
                unfinished.close(_Registered(self._buffer))
            self._buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
            nixl.register([self._buffer])
        return self._buffer[:count]

    def like(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous tensors of the same shapes and dtypes, side by side."""
        if not views:
            return []
        at, places = 0, []
        for view in views:
            places.append(at)
            at += -(-view.numel() * view.element_size() // ALIGN) * ALIGN
        buffer = self.bytes(at)
        return [
            buffer[p : p + math.prod(v.shape) * v.element_size()].view(v.dtype).view(v.shape)
            for p, v in zip(places, views, strict=True)
        ]

    def close(self) -> None:
        """Gives the memory back."""
        if self._buffer is not None:
            _Registered(self._buffer).close()
            self._buffer = None


class _Registered:
    """A buffer that was in use."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer: torch.Tensor | None = buffer

    def close(self) -> None:
        """Frees it."""
        if self._buffer is not None:
            nixl.deregister([self._buffer])
            self._buffer = None
