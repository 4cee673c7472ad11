"""Checksums of many slices at once: prepared at connect time, run at every sync.

On a GPU one kernel sums all slices (one launch and one small copy back, at memory speed); on a CPU
it is :func:`sglang_rdt.checksum.slice_sum` in a loop.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sglang_rdt.checksum import MASK, slice_sum

logger = logging.getLogger("sglang_rdt")

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Part:
    """A slice to be summed.

    ``view``: its elements. ``offset``, ``stride``: index of its first element in the whole
    parameter, and what one step in each dimension adds to it. ``dtype``: what the elements count
    as, if they are stored as another (they are converted first).
    """

    view: torch.Tensor
    offset: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    def sum(self) -> int:
        """Its checksum."""
        return slice_sum(self.view.to(self.dtype), self.offset, self.stride)


class Sums(Generic[K]):
    """Sums ``parts`` (key, slice); slices of one key add up.

    The slices' memory must stay where it is.
    """

    def __init__(self, parts: Sequence[tuple[K, Part]]) -> None:
        self.keys = list(dict.fromkeys(key for key, _ in parts))
        slot = {key: i for i, key in enumerate(self.keys)}
        # 8-byte elements and conversions are rare: they go one by one.
        fast = [(slot[k], p) for k, p in parts if p.view.is_cuda and _plain(p)]
        self._slow = [(slot[k], p) for k, p in parts if not (p.view.is_cuda and _plain(p))]
        self._kernel = _kernel(fast, len(self.keys)) if fast else None
        if self._kernel is None:
            self._slow += fast
        self._started = False

    def start(self) -> None:
        """On a GPU, begins in the current stream; :meth:`result` waits."""
        if self._kernel is not None:
            self._kernel.start()
        self._started = True

    def result(self) -> dict[K, int]:
        """The checksums, in ``[0, 2**64)``: as of :meth:`start`, or of now without it."""
        if not self._started:
            self.start()
        self._started = False
        totals = [0] * len(self.keys)
        for i, part in self._slow:
            totals[i] += part.sum()
        if self._kernel is not None:
            for i, value in enumerate(self._kernel.result()):
                totals[i] += value
        return {key: totals[i] & MASK for i, key in enumerate(self.keys)}


def _kernel(parts: Sequence[tuple[int, Part]], slots: int) -> Any:
    """The kernel over ``parts``, compiled and tried out; None if there is none that works here."""
    try:
        from sglang_rdt.sums_cuda import SumKernels

        # The smallest slice of each element size, against the loop.
        smallest: dict[int, Part] = {}
        for _, part in sorted(parts, key=lambda p: p[1].view.numel(), reverse=True):
            if part.view.numel():
                smallest[part.view.element_size()] = part
        for part in smallest.values():
            trial = SumKernels([(0, part)], 1)
            trial.start()
            if trial.result()[0] & MASK != part.sum():
                raise RuntimeError(f"it sums a {part.view.dtype} slice wrongly")
        return SumKernels(parts, slots)
    except Exception as error:
        logger.warning(
            "checksums go slice by slice, since the kernel does not work here: %s", error
        )
        return None


def _plain(part: Part) -> bool:
    return (
        part.view.dtype == part.dtype
        and part.view.element_size() < 8
        and part.view.dtype != torch.bool
    )
