"""Engines read live parameters: no gather, no conversion, no staging but for strided slices.

Rank 0 tells all engine ranks at once to read what they prepared at connect time. What has to be
packed first (slices whose rows are too small to read one by one) goes the bucketed way at the
same time, straight from the parameters. Checksums of what is read are computed meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import torch

from megatron_rdt.movers.base import Moved
from megatron_rdt.movers.bucketed import collect, guard
from megatron_rdt.sender import RouteSender
from sglang_rdt.brief import brief
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.coordinator import Coordinator
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import PhaseTimer, slowest
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.engine.sync_request import ReadResult, is_result
from sglang_rdt.plan.direct import DirectShare
from sglang_rdt.sums import Part, Sums
from sglang_rdt.transport import nixl

logger = logging.getLogger("megatron_rdt")


class DirectMover:
    """See :class:`megatron_rdt.movers.base.Mover`.

    Args:
        rank: this trainer rank.
        blocks: flat uint8 tensors over this rank's blocks, in the plan's order.
        coordinator: on rank 0, which drives the engines; None elsewhere.
        verify: whether what is read may be summed up, and is prepared for that.
    """

    def __init__(
        self,
        rank: int,
        blocks: Sequence[torch.Tensor],
        coordinator: Coordinator | None,
        *,
        verify: bool,
    ) -> None:
        self._rank = rank
        self._blocks = list(blocks)
        self._senders: list[RouteSender] = []
        self._coordinator = coordinator
        self._verify = verify
        self._packs = False
        self._names: list[str] = []
        self._engine_of: list[str] = []
        self._engines: tuple[str, ...] = ()
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._summed: list[tuple[int, str, tuple[Any, ...]]] = []
        self._sums: Sums[tuple[Any, ...]] | None = None

    def follow(self, share: DirectShare, senders: Sequence[RouteSender]) -> None:
        """Does what ``share`` says from now on.

        Args:
            share: of this rank.
            senders: for what this rank packs; their pieces name ``block/dtype``.
        """
        self._senders = list(senders)
        # On any rank: an engine that others still send packed slices to must not end its session.
        self._packs = share.staged_bytes["pack"] > 0
        self._names = [str(t) for t in share.targets]
        self._engine_of = [t.engine for t in share.targets]
        self._engines = share.engines
        self._summed, self._sums = [], None
        if self._verify:
            self._prepare_sums(share)

    @property
    def begins(self) -> bool:
        """One round trip less, where engine ranks have nothing to wait for but their own reads."""
        return not self._packs

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buckets for packed slices."""
        return sum(s.staging_bytes for s in self._senders)

    def move(self, sync_id: str, given_up: Container[str], timer: PhaseTimer, verify: str) -> Moved:
        """All engine ranks read at once."""
        return self._pass(sync_id, "pull", given_up, timer, verify)

    def compare(self, sync_id: str, given_up: Container[str], timer: PhaseTimer) -> Moved:
        """All engine ranks read again, beside what they hold."""
        return self._pass(sync_id, "compare", given_up, timer, "off")

    def _pass(
        self,
        sync_id: str,
        mode: Literal["pull", "compare"],
        given_up: Container[str],
        timer: PhaseTimer,
        verify: str,
    ) -> Moved:
        checksum = verify == "checksum" and self._sums is not None
        phase = "verify" if mode == "compare" else "pull" if self._packs else "pause to finalise"
        moved = Moved()
        began = time.perf_counter()
        started: dict[str, Any] = {}
        if self._coordinator is not None:
            good = [e for e in self._coordinator.taking_part if e not in given_up]
            if mode == "compare":
                started = self._coordinator.start_compares(sync_id, good)
            elif self._packs:
                started = self._coordinator.start_reads(sync_id, good)
            else:
                started = self._coordinator.start_syncs(
                    sync_id, checksum=checksum, overwrite=verify == "equal"
                )
        own_s = 0.0
        try:
            self._pack(sync_id, mode, given_up, moved, timer, checksum)
            if mode == "pull" and checksum:
                own = time.perf_counter()
                self._sum_up(given_up, moved)
                own_s = time.perf_counter() - own
        except Exception as error:
            # The other ranks are in the same pass: it is reported at its end, not raised here.
            logger.exception("trainer rank %d failed while engines read", self._rank)
            why = f"trainer rank {self._rank}: {calls.short(error)}"
            for engine in self._engines:
                moved.failures.setdefault(engine, Failure(phase, why))
        if self._coordinator is None:
            return moved
        results, failures = self._coordinator.finish_reads(started, phase)
        for engine, answers in list(results.items()) if mode == "pull" else ():
            odd = [r for r, a in answers.items() if not is_result(a)]
            if odd:
                failures[engine] = Failure(phase, f"{odd[0]} answers {brief(answers[odd[0]])}")
                del results[engine]
        for engine, failure in failures.items():
            moved.failures.setdefault(engine, failure)
        whole_s = time.perf_counter() - began
        if mode == "pull":
            self._take(results, moved, timer, whole_s, own_s)
            return moved
        timer.add("verify", whole_s)
        for engine, answers in results.items():
            lines = [line for answer in answers.values() for line in answer]
            if lines:
                moved.differences.setdefault(engine, []).extend(lines)
        return moved

    def _take(
        self,
        results: Mapping[str, Mapping[str, ReadResult]],
        moved: Moved,
        timer: PhaseTimer,
        whole_s: float,
        own_s: float,
    ) -> None:
        answers = {rank: answer for ranks in results.values() for rank, answer in ranks.items()}
        moved.nbytes += sum(answer.nbytes for answer in answers.values())
        engines = slowest(answer.seconds for answer in answers.values())
        if self._packs:
            # What was packed has its own phases; it went on beside the reads.
            timer.add("pull", engines.get("pull", 0.0))
            return
        moved.finalised = {rank: answer.sums for rank, answer in answers.items()}
        # One call did it all: its time, less what the slowest rank spent on other things, is the
        # pull. Own checksums count for what they took longer than the engines.
        late_s = max(own_s - sum(engines.values()), 0.0)
        engines["verify"] = engines.get("verify", 0.0) + late_s
        others = {phase: seconds for phase, seconds in engines.items() if phase != "pull"}
        timer.add("pull", max(whole_s - sum(others.values()), 0.0))
        for phase, seconds in others.items():
            if seconds:
                timer.add(phase, seconds)

    def _pack(
        self,
        sync_id: str,
        mode: Literal["pull", "compare"],
        given_up: Container[str],
        moved: Moved,
        timer: PhaseTimer,
        checksum: bool,
    ) -> None:
        active = [s for s in self._senders if s.engine not in given_up]
        for sender in active:
            sender.start(sync_id, mode, checksum=checksum, timer=timer)
        # Round by round over all engine ranks, so that they pull at the same time.
        for key in dict.fromkeys(key for sender in active for key in sender.sources):
            tensor = self._flat(key)
            for sender in active:
                guard(
                    self._rank,
                    sender,
                    moved,
                    lambda s=sender, k=key, t=tensor: s.offer(k, t),  # type: ignore[misc]
                )
        for sender in active:
            guard(self._rank, sender, moved, sender.finish)
        collect(active, mode, moved)

    def _flat(self, key: str) -> torch.Tensor:
        block, dtype = key.split("/")
        return self._typed(int(block), dtype)

    def _typed(self, block: int, dtype: str) -> torch.Tensor:
        view = self._views.get((block, dtype))
        if view is None:
            kind = torch_dtype(dtype)
            whole = self._blocks[block]
            view = whole[: whole.numel() // kind.itemsize * kind.itemsize].view(kind)
            self._views[block, dtype] = view
        return view

    def _prepare_sums(self, share: DirectShare) -> None:
        # Engines of one shape want the same slices at the same place: summed once.
        parts: dict[tuple[Any, ...], Part] = {}
        for target, t in share.transfers_from(self._rank):
            if t.how == "pack":
                continue  # summed in the bucket
            key = (t.block, t.src, t.dst.offset, t.dst.stride, t.src_dtype, t.dtype)
            if key not in parts:
                view = torch.as_strided(
                    self._typed(t.block, t.src_dtype), t.src.shape, t.src.stride, t.src.offset
                )
                parts[key] = Part(view, t.dst.offset, t.dst.stride, torch_dtype(t.dtype))
            self._summed.append((target, t.param, key))
        self._sums = Sums(list(parts.items()))

    def _sum_up(self, given_up: Container[str], moved: Moved) -> None:
        values = self._sums.result() if self._sums is not None else {}
        for target, param, key in self._summed:
            if self._engine_of[target] not in given_up:
                moved.add_sum(self._names[target], param, values[key])

    def close(self) -> None:
        """Gives the registration of the parameters back."""
        self._senders = []
        self._views.clear()
        self._sums, self._summed = None, []
        nixl.deregister(self._blocks)
        self._blocks = []
