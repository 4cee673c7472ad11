"""The trainer's half of SGLang's own paths: HF tensors out of Megatron, each from one rank.

What RL frameworks write around a bridge; here with this package's gathers and mbridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang_rdt.coordinator.phases import PhaseTimer

if TYPE_CHECKING:
    import torch

    from sglang_rdt.bench.trainer import BenchRank


class Export:
    """Which HF tensors this rank sends, and all of them in turn.

    Collective over all trainer ranks.

    Args:
        gather_bytes: how many gathered bytes are held at a time.

    Attributes:
        group: all trainer ranks.
        mine: HF names that this rank sends; every name is one rank's.
        sources: ranks that send anything.
    """

    def __init__(self, rank: BenchRank, gather_bytes: int) -> None:
        from megatron_rdt.parallel import TrainerGroup
        from megatron_rdt.sources.mbridge import MBridgeSource

        self._source = MBridgeSource(rank.chunks, rank.hf_config, gather_bytes=gather_bytes)
        self.group = TrainerGroup(rank.args.timeout_s)
        names = self.group.gather([spec.name for spec in self._source.specs()])
        first: dict[str, int] = {}
        for index, theirs in enumerate(names):
            for name in theirs:
                first.setdefault(name, index)
        self.mine = {name for name, index in first.items() if index == self.group.rank}
        self.sources = sorted(set(first.values()))

    def tensors(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank sends; gathers with the others all the same. ``timer`` takes the phases
        ``gather`` and ``convert``."""
        for name, tensor in self._source.export(timer):
            if name in self.mine:
                yield name, tensor.detach()

    def buckets(
        self, timer: PhaseTimer, nbytes: int
    ) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Lists of tensors of up to ``nbytes``, and whether it is this rank's last one."""
        held: list[tuple[str, Any]] = []
        size, left = 0, len(self.mine)
        for name, tensor in self.tensors(timer):
            count = tensor.numel() * tensor.element_size()
            if held and size + count > nbytes:
                yield held, False
                held, size = [], 0
            held.append((name, tensor))
            size += count
            left -= 1
            if not left:
                yield held, True
                held = []

    def close(self) -> None:
        """Gives the group up."""
        self.group.close()
