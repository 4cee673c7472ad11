"""The limit: a raw copy of as many bytes, with nothing around it.

Between GPUs: torch's peer copy in one process, to all engine GPUs at once. On a CPU: one copy in
memory, by one thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench.paths.base import Context, Timing

if TYPE_CHECKING:
    from sglang_rdt.bench.trainer import BenchRank

_KEY = "peer_copy"
# Bytes copied at a time; the buffers are used again and again.
_CHUNK = 4 << 30


class PeerCopyPath:
    """Runs in trainer rank 0, which sees all GPUs."""

    name = "peer_copy"
    writes_engines = False
    about = "a raw copy of the same bytes; no engine takes part"

    def sizes(self, context: Context) -> tuple[int, ...]:
        """None."""
        return ()

    def start(self, context: Context, size: int | None) -> dict[str, Any]:
        """Allocates on both ends."""
        options = context.options
        pairs = [
            (options.trainer_gpus[i % len(options.trainer_gpus)], gpu)
            for i, gpu in enumerate(options.engine_gpus)
        ]
        each = context.nbytes // max(len(pairs), 1)
        context.trainers.lead(_start, pairs, each)
        return {}

    def sync(self, context: Context, version: str) -> Timing:
        """One copy of everything."""
        return context.trainers.lead(_copy)

    def staging_bytes(self, context: Context) -> int:
        """None of it is anybody's staging."""
        return 0

    def stop(self, context: Context) -> None:
        """Frees both ends."""
        self.equal = context.trainers.lead(_stop)


def _start(rank: BenchRank, pairs: list[tuple[int, int]], each: int) -> None:
    import torch

    chunk = min(each, _CHUNK)
    cpu = torch.device("cpu")
    places = [(torch.device("cuda", a), torch.device("cuda", b)) for a, b in pairs] or [(cpu, cpu)]
    buffers = []
    for here, there in places:
        a = torch.empty(chunk, dtype=torch.uint8, device=here).random_()
        buffers.append((a, torch.zeros(chunk, dtype=torch.uint8, device=there)))
    rank.state[_KEY] = (buffers, each)


def _copy(rank: BenchRank) -> Timing:
    import torch

    buffers, each = rank.state[_KEY]
    devices = {t.device for pair in buffers for t in pair if t.is_cuda}

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    for at in range(0, each, _CHUNK):
        for a, b in buffers:
            count = min(each - at, _CHUNK)
            b[:count].copy_(a[:count], non_blocking=True)
    wait()
    seconds = time.perf_counter() - started
    return Timing(seconds, {"copy": seconds}, each * len(buffers))


def _stop(rank: BenchRank) -> bool:
    import torch

    buffers, _ = rank.state.pop(_KEY, ((), 0))
    equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in buffers)
    del buffers
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return equal
