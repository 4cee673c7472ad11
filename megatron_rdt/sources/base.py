"""What the export needs of a bridge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sglang_rdt.coordinator.phases import PhaseTimer
    from sglang_rdt.plan.specs import TensorSpec


class WeightSource(Protocol):
    """Yields the model as HF tensors, one after the other.

    Both methods are collective: all trainer ranks call them together.

    A source that knows where the HF tensors lie in live memory also has ``holds() -> Holdings``
    and ``addresses() -> tuple[int, ...]`` (see :mod:`megatron_rdt.sources.holds`); direct mode asks
    with ``hasattr``. Both work on one rank alone. ``holds()`` raises ExportError, by name, where
    an HF tensor is no slice of live memory, and is to be called again once ``addresses()``
    differs from ``Holdings.addresses``. If some of that memory is computed of the parameters, the
    source also has ``refresh()``, which is called before each sync, once parameters are final.
    """

    def specs(self) -> Sequence[TensorSpec]:
        """The HF tensors that :meth:`export` yields *on this rank*, in that order."""
        ...

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """``(HF name, full tensor)``, valid until the next one is asked for.

        ``timer`` takes the phases ``gather`` and ``convert``.
        """
        ...
