"""One engine rank's reads of trainer memory: prepared at connect time, run at every sync.

What lies in contiguous runs goes straight into the live parameters, all of it in one post per
source if nothing else is to be done. What would be a swarm of small runs is read into scratch
memory in the order in which the source has it, and copied into place from there, one half of the
scratch memory being filled while the other is emptied. Then the direct runs are posted a part at a
time, a part with each filling, so that the link has work while scratch memory is emptied.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.errors import SlicesError
from sglang_rdt.plan.runs import Runs, Unpack, UnpackRound, direct_runs, unpack_rounds
from sglang_rdt.plan.specs import ITEMSIZE
from sglang_rdt.plan.transfers import Transfer
from sglang_rdt.transport import nixl, unfinished
from sglang_rdt.transport.memory import checked
from sglang_rdt.transport.reads import PreparedRead, Rows
from sglang_rdt.transport.scratch import UNREAD, Scratch

if TYPE_CHECKING:
    from sglang_rdt.engine.live_weights import LiveWeights
    from sglang_rdt.transport.agent import RemoteMemory


# Shares of the bytes of a read on a GPU, one after the other, where somebody sums up what has landed
# while the rest is on its way. Measured on 2xH200, 16.4 GB: summing up all of it takes 6.2 ms; 1.05 is
# left at the end with these shares, 1.9 with (0.88, 0.12). The second post costs 0.6 ms. Posted at the
# same time, the second share is as likely as not to come first.
STAGES = (0.85, 0.15)


@dataclass
class _Filling:
    """One filling of (a half of) the scratch memory."""

    reads: list[PreparedRead]
    copies: tuple[Unpack, ...]
    scratch: torch.Tensor  # uint8, its bytes


class DirectReader:
    """Reads ``transfers`` into ``weights``. Event-loop thread only.

    Args:
        weights: the live parameters; they must stay where they are.
        transfers: of this rank, checked against its parameters.
        sources: trainer rank -> reference to its blocks.
        scratch_bytes: the most scratch memory to use.
        timeout_s: deadline of reaching one source.
        staged: whether somebody has a use for parameters that are complete before the others are.

    Raises:
        SlicesError: a transfer leaves its source's memory.
        TransportError: a source cannot be reached.
    """

    def __init__(
        self,
        weights: LiveWeights,
        transfers: Sequence[Transfer],
        sources: Mapping[int, Any],
        *,
        scratch_bytes: int,
        timeout_s: float,
        staged: bool = False,
    ) -> None:
        self._weights = weights
        self._transfers = [t for t in transfers if t.how != "pack"]
        self._scratch_bytes = scratch_bytes
        # On a CPU who reads also copies: there is nothing to do meanwhile.
        self._shares = STAGES if staged and weights.device.type == "cuda" else (1.0,)
        self._memory = {
            source: checked(nixl.memory_of(sources[source], timeout_s), f"trainer rank {source}")
            for source in sorted({t.source for t in self._transfers})
        }
        self.nbytes = sum(t.nbytes for t in self._transfers)
        # Its own: others that used it would make it grow, and move, under the prepared reads.
        self._scratch = Scratch(weights.device)
        self._fillings: list[_Filling] = []
        self._stage: dict[str, int] = {}
        # The i-th part, from all sources, goes out with the i-th filling.
        self._direct: list[list[PreparedRead]] = []
        try:
            self._prepare_all()
        except BaseException:
            self.close()
            raise

    def _prepare_all(self) -> None:
        self._fillings = self._fill(
            [t for t in self._transfers if t.how == "unpack"], self._scratch, halves=2
        )
        direct = [
            (source, direct_runs(of_source))
            for source, of_source in _by_source(t for t in self._transfers if t.how == "direct")
        ]
        if self._fillings:
            self._direct = [[] for _ in self._fillings]
            for source, runs in direct:
                for i, part in enumerate(_split(runs, len(self._fillings))):
                    self._direct[i].append(self._read_in_place(source, part))
            return
        self._stage = stages([runs for _, runs in direct], self._shares)
        self._direct = [[] for _ in range(max(self._stage.values(), default=0) + 1)]
        for source, runs in direct:
            for i, part in _by_stage(runs, self._stage):
                self._direct[i].append(self._read_in_place(source, part))

    @property
    def stages(self) -> int:
        """In how many stages parameters become complete; 1: at the end, all of them."""
        return 1 if self._fillings else max(len(self._direct), 1)

    def stage_of(self, param: str) -> int:
        """The stage after which ``param`` is complete."""
        return self._stage.get(param, 0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory held."""
        return self._scratch.nbytes

    @property
    def descriptors(self) -> int:
        """Runs per sync."""
        return sum(read.count for read in self._reads())

    def _reads(self) -> list[PreparedRead]:
        return [
            *(read for part in self._direct for read in part),
            *(read for filling in self._fillings for read in filling.reads),
        ]

    def read(self, timeout_s: float, landed: Callable[[int], None] | None = None) -> int:
        """Reads everything; returns when every byte is in place; bytes read.

        Args:
            landed: called with the number of each stage when it is complete.

        Raises:
            DeadlineError, TransportError: naming the source.
        """
        deadline = time.monotonic() + timeout_s
        if self._fillings:
            self._read_and_unpack(deadline, timeout_s)
            return self.nbytes
        for i, stage in enumerate(self._direct):
            if i == 0:
                _post(stage)
            _wait(stage, deadline, timeout_s)
            if i + 1 < len(self._direct):
                _post(self._direct[i + 1])
            if landed is not None:
                landed(i)
        return self.nbytes

    def _read_and_unpack(self, deadline: float, timeout_s: float) -> None:
        _post(self._fillings[0].reads)
        for i, (part, filling) in enumerate(zip(self._direct, self._fillings, strict=True)):
            _post(part)
            _wait(filling.reads, deadline, timeout_s)
            if i + 1 < len(self._fillings):
                # The other half is empty once the copies before these are done.
                self._synchronize()
                _post(self._fillings[i + 1].reads)
            self._unpack(filling)
        for part in self._direct:
            _wait(part, deadline, timeout_s)
        self._synchronize()

    def compare(self, timeout_s: float) -> list[str]:
        """Reads everything again, into scratch memory; one line per difference."""
        deadline = time.monotonic() + timeout_s
        differences: list[str] = []
        again = [replace(t, how="unpack") for t in self._transfers]
        scratch = Scratch(self._weights.device)
        fillings: list[_Filling] = []
        try:
            fillings = self._fill(again, scratch, halves=1)
            for filling in fillings:
                # Never equal by accident: scratch that the read did not reach must not match.
                filling.scratch.fill_(UNREAD)
                self._synchronize()
                _post(filling.reads)
                _wait(filling.reads, deadline, timeout_s)
                for copy in filling.copies:
                    differences += self._difference(filling, copy)
        finally:
            for filling in fillings:
                for read in filling.reads:
                    read.release()
            unfinished.close(scratch)
        return differences

    def under_way(self) -> list[str]:
        """The other ends of reads that were given up and may still write."""
        return [read.who for read in self._reads() if read.under_way()]

    def close(self) -> None:
        """Gives the prepared reads and the scratch memory back."""
        for read in self._reads():
            read.release()
        self._direct, self._fillings = [], []
        unfinished.close(self._scratch)

    def _read_in_place(self, source: int, runs: Runs) -> PreparedRead:
        base = np.array([self._weights.address(n) for n in runs.names], dtype=np.uint64)
        return self._prepare(
            source,
            base[runs.param] + runs.param_at.astype(np.uint64),
            runs.block,
            runs.block_at,
            runs.nbytes,
        )

    def _fill(
        self, transfers: Sequence[Transfer], scratch: Scratch, *, halves: int
    ) -> list[_Filling]:
        if not transfers:
            return []
        half = self._scratch_bytes // halves
        rounds = unpack_rounds(transfers, half)
        halves = min(halves, len(rounds))
        half = max(r.nbytes for r in rounds) + 15 & ~15
        buffer = scratch.bytes(half * halves)
        return [self._filling(r, buffer[i % halves * half :]) for i, r in enumerate(rounds)]

    def _filling(self, one: UnpackRound, scratch: torch.Tensor) -> _Filling:
        reads = []
        for source in sorted(set(one.source.tolist())):
            mine = one.source == source
            reads.append(
                self._prepare(
                    source,
                    np.uint64(scratch.data_ptr()) + one.at[mine].astype(np.uint64),
                    one.block[mine],
                    one.block_at[mine],
                    one.run_bytes[mine],
                )
            )
        return _Filling(reads, one.copies, scratch[: one.nbytes])

    def _prepare(
        self, source: int, local: Rows, block: Any, block_at: Any, nbytes: Any
    ) -> PreparedRead:
        memory = self._memory[source]
        self._check(source, memory, block, block_at, nbytes)
        addresses = np.array(memory.addresses, dtype=np.uint64)
        device = self._weights.device
        return PreparedRead(
            memory,
            local,
            addresses[block] + block_at.astype(np.uint64),
            nbytes.astype(np.uint64),
            device=device.index or 0,
            kind=device.type,
            who=f"trainer rank {source}",
        )

    def _check(
        self, source: int, memory: RemoteMemory, block: Any, block_at: Any, nbytes: Any
    ) -> None:
        sizes = np.array(memory.sizes, dtype=np.int64)
        inside = (block >= 0) & (block < len(sizes)) & (block_at >= 0) & (nbytes > 0)
        if inside.any():  # with no blocks at all there is nothing to look up
            inside &= block_at + nbytes <= sizes[np.where(inside, block, 0)]
        if not inside.all():
            at = int(np.flatnonzero(~inside)[0])
            raise SlicesError(
                f"{self._weights.who}: {int(nbytes[at])} bytes at {int(block_at[at])} of block "
                f"{int(block[at])} are not in the memory of trainer rank {source} "
                f"({len(sizes)} blocks)"
            )

    def _unpack(self, filling: _Filling) -> None:
        for copy in filling.copies:
            self._weights.view(copy.param, copy.dst).copy_(_landed(filling, copy))

    def _difference(self, filling: _Filling, copy: Unpack) -> list[str]:
        held = self._weights.view(copy.param, copy.dst).contiguous()
        expected = _landed(filling, copy).to(held.dtype)
        wrong = int((_bytes(held) != _bytes(expected)).sum())
        if not wrong:
            return []
        return [
            f"{self._weights.who}: {copy.param} at element {copy.dst.offset}: {wrong} of "
            f"{held.numel() * held.element_size()} bytes differ"
        ]

    def _synchronize(self) -> None:
        if self._weights.device.type == "cuda":
            torch.cuda.current_stream(self._weights.device).synchronize()


def _post(reads: Sequence[PreparedRead]) -> None:
    for read in reads:
        read.post()


def _wait(reads: Sequence[PreparedRead], deadline: float, timeout_s: float) -> None:
    for read in reads:
        read.wait(deadline, timeout_s)


def _split(runs: Runs, parts: int) -> list[Runs]:
    """Cut into at most ``parts`` of about equal bytes, in order; none is empty."""
    ends = np.cumsum(runs.nbytes)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts, side="right")
    edges = np.unique(np.concatenate([[0], cuts, [len(runs)]]))
    return [runs.where(slice(low, high)) for low, high in itertools.pairwise(edges.tolist())]


def stages(runs: Sequence[Runs], shares: Sequence[float]) -> dict[str, int]:
    """Parameter -> stage, so that each stage has about its share of the bytes of all ``runs``."""
    sizes: dict[str, int] = {}
    for one in runs:
        per_param = np.bincount(one.param, weights=one.nbytes, minlength=len(one.names))
        for name, nbytes in zip(one.names, per_param.tolist(), strict=True):
            sizes[name] = sizes.get(name, 0) + int(nbytes)
    if not sizes:
        return {}
    ends = np.cumsum(list(sizes.values()))
    edges = np.cumsum(shares)[:-1] * ends[-1]
    # Without gaps: a large parameter may fill several stages.
    _, stage = np.unique(np.searchsorted(edges, ends, side="left"), return_inverse=True)
    return dict(zip(sizes, stage.tolist(), strict=True))


def _by_stage(runs: Runs, stage: Mapping[str, int]) -> list[tuple[int, Runs]]:
    of_run = np.array([stage[name] for name in runs.names])[runs.param]
    return [(i, runs.where(of_run == i)) for i in np.unique(of_run).tolist()]


def _landed(filling: _Filling, copy: Unpack) -> torch.Tensor:
    nbytes = copy.dst.numel * ITEMSIZE[copy.src_dtype]
    flat = filling.scratch[copy.at : copy.at + nbytes]
    return flat.view(torch_dtype(copy.src_dtype)).view(copy.dst.shape)


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    return contiguous.reshape(-1).view(torch.uint8)


def _by_source(transfers: Any) -> list[tuple[int, list[Transfer]]]:
    grouped: dict[int, list[Transfer]] = {}
    for t in transfers:
        grouped.setdefault(t.source, []).append(t)
    return sorted(grouped.items())
