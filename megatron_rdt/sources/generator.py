"""Any generator of (HF name, tensor) as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_rdt.dtypes import dtype_name
from sglang_rdt.plan.specs import TensorSpec

if TYPE_CHECKING:
    import torch

    from sglang_rdt.coordinator.phases import PhaseTimer


class GeneratorSource:
    """Wraps ``make``, which returns a fresh iterable of ``(HF name, full tensor)`` per call.

    For bridges that only offer a whole-model generator (NVIDIA Megatron-Bridge's
    ``export_hf_weights``, a framework's own converter). It may be collective; every rank must
    yield the same names in the same order every time, and each rank counts as a holder of what
    it yields. The first call learns names, shapes and dtypes, so it costs one export.
    """

    def __init__(self, make: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._make = make
        self._specs: list[TensorSpec] | None = None

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of one export, which is run and thrown away."""
        if self._specs is None:
            self._specs = [
                TensorSpec(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in self._make()
            ]
        return self._specs

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """Runs the generator; its time counts as ``convert``."""
        iterator = iter(self._make())
        while True:
            with timer.phase("convert"):
                item = next(iterator, None)
            if item is None:
                return
            yield item
