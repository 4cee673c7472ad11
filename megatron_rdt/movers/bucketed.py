"""Gather, convert, stage in buckets, let the engines pull: works with any source of HF tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Literal

import torch

from megatron_rdt.movers.base import Moved
from megatron_rdt.progress import Progress
from megatron_rdt.sender import RouteSender
from megatron_rdt.sources.base import WeightSource
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.plan.planner import BucketedShare
from sglang_rdt.plan.specs import TensorSpec

logger = logging.getLogger("megatron_rdt")


class BucketedMover:
    """See :class:`megatron_rdt.movers.base.Mover`.

    Args:
        rank: this trainer rank, for messages.
        source: yields HF tensors; its export is collective.
        specs: what it announced.
        draws: whether this rank draws the progress bar.
    """

    def __init__(
        self,
        rank: int,
        source: WeightSource,
        specs: Sequence[TensorSpec],
        *,
        draws: bool,
    ) -> None:
        self._rank = rank
        self._source = source
        self._specs = specs
        self._senders: list[RouteSender] = []
        self._engines: Sequence[str] = ()
        self._draws = draws

    def follow(self, share: BucketedShare, senders: Sequence[RouteSender]) -> None:
        """Does what ``share`` says from now on.

        Args:
            share: of this rank.
            senders: one per engine rank that this rank serves.
        """
        self._engines = share.engines
        self._senders = list(senders)

    begins = False

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(s.staging_bytes for s in self._senders)

    def move(self, sync_id: str, given_up: Container[str], timer: PhaseTimer, verify: str) -> Moved:
        """One pass over the model, pulling."""
        return self._pass(sync_id, "pull", given_up, timer, checksum=verify == "checksum")

    def compare(self, sync_id: str, given_up: Container[str], timer: PhaseTimer) -> Moved:
        """One pass over the model, comparing."""
        return self._pass(sync_id, "compare", given_up, timer, checksum=False)

    def _pass(
        self,
        sync_id: str,
        mode: Literal["pull", "compare"],
        given_up: Container[str],
        timer: PhaseTimer,
        *,
        checksum: bool,
    ) -> Moved:
        # The export is collective: a rank that fails goes on taking tensors, and reports at the end.
        moved = Moved()
        active = [s for s in self._senders if s.engine not in given_up]
        for sender in active:
            sender.start(sync_id, mode, checksum=checksum, timer=timer)
        total = sum(spec.nbytes for spec in self._specs)
        announced = iter(self._specs)
        with Progress(total, f"weight sync {sync_id}", enabled=self._draws) as progress:
            try:
                for name, tensor in self._source.export(timer):
                    wrong = unlike(next(announced, None), name, tensor)
                    if wrong:
                        for sender in active:
                            moved.failures.setdefault(sender.engine, Failure("convert", wrong))
                    for sender in active:
                        guard(
                            self._rank,
                            sender,
                            moved,
                            lambda s=sender, n=name, t=tensor: s.offer(n, t),  # type: ignore[misc]
                        )
                    progress.advance(tensor.numel() * tensor.element_size())
            except Exception as error:
                logger.exception("the export failed on trainer rank %d", self._rank)
                why = f"the export failed on trainer rank {self._rank}: {calls.short(error)}"
                moved.failures = dict.fromkeys(self._engines, Failure("gather", why))
        for sender in active:
            guard(self._rank, sender, moved, sender.finish)
        collect(active, mode, moved)
        return moved

    def close(self) -> None:
        """Forgets whom it serves; the buckets are their senders' own."""
        self._senders = []


def guard(rank: int, sender: RouteSender, moved: Moved, run: Callable[[], None]) -> None:
    """Runs ``run`` unless the sender's engine has failed; a failure is noted, not raised."""
    if sender.engine in moved.failures:
        return
    try:
        run()
    except Exception as error:
        moved.failures[sender.engine] = Failure(
            getattr(error, "sync_phase", None) or "pull",
            f"trainer rank {rank} to {sender.route.target}: {calls.short(error)}",
        )


def collect(senders: Sequence[RouteSender], mode: str, moved: Moved) -> None:
    """Adds what ``senders`` did in this pass to ``moved``."""
    for sender in senders:
        if mode == "compare":
            if sender.differences:
                moved.differences.setdefault(sender.engine, []).extend(sender.differences)
            continue
        moved.nbytes += sender.nbytes
        for param, value in sender.sums.items():
            moved.add_sum(str(sender.route.target), param, value)


def unlike(spec: TensorSpec | None, name: str, tensor: torch.Tensor) -> str | None:
    """Why an exported tensor is not what was announced, or None."""
    if spec is None:
        return f"the export yields {name}, more than it announced"
    dtype = dtype_name(tensor.dtype)
    if (spec.name, spec.shape, spec.dtype) != (name, tuple(tensor.shape), dtype):
        return (
            f"the export yields {name} {dtype}{list(tensor.shape)} where it announced "
            f"{spec.name} {spec.dtype}{list(spec.shape)}"
        )
    return None
