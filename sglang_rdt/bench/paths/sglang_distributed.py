"""SGLang's ``update_weights_from_distributed``, as RL frameworks drive it.

Once: ``init_weights_update_group``. Per sync: pause (and begin a session where SGLang has them),
then per bucket the engines' call and the trainer's broadcast of one flattened buffer, then end the
session and continue. The last bucket's call also flushes the cache and sets the version: SGLang's
own option, and cheaper than calls of their own.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench.options import default_bucket_sizes
from sglang_rdt.bench.paths import sglang_calls
from sglang_rdt.bench.paths.base import Context, Timing

if TYPE_CHECKING:
    import torch

    from sglang_rdt.bench.paths.export import Export
    from sglang_rdt.bench.trainer import BenchRank
    from sglang_rdt.coordinator.phases import PhaseTimer

_KEY = "sglang_distributed"


class DistributedPath:
    """NCCL between GPUs, gloo on a CPU."""

    name = "sglang_distributed"
    writes_engines = True
    about = (
        "flattened buckets; pause, flush and session included; the engine answers when its copies "
        "are queued"
    )

    def sizes(self, context: Context) -> tuple[int, ...]:
        """On a GPU none for the whole model: the engine needs several times its size."""
        options = context.options
        return options.bucket_bytes or default_bucket_sizes(
            options.model.nbytes, options.device, whole=options.device == "cpu"
        )

    def start(self, context: Context, size: int | None) -> dict[str, Any]:
        """Every trainer rank that has something to send makes a group with all engine ranks."""
        started = time.perf_counter()
        context.trainers.call(_start, context.hosts, context.options.engine_tp, size, _lock())
        return {"connect_ms": (time.perf_counter() - started) * 1e3}

    def sync(self, context: Context, version: str) -> Timing:
        """One sync on all ranks; rank 0 measures it."""
        return context.trainers.call(_sync, version)[0]

    def staging_bytes(self, context: Context) -> int:
        """The flattened bucket."""
        return max(context.trainers.call(_staging))

    def stop(self, context: Context) -> None:
        """Leaves the groups."""
        context.trainers.call(_stop)


def _lock() -> Any:
    """Buckets of several sources must reach all engines in the same order."""
    import asyncio

    import ray

    class Lock:
        def __init__(self) -> None:
            self._lock = asyncio.Lock()

        async def acquire(self) -> None:
            await self._lock.acquire()

        async def release(self) -> None:
            self._lock.release()

    return ray.remote(num_cpus=0, max_concurrency=1000)(Lock).remote()


class _Sender:
    """What a trainer rank keeps between syncs."""

    def __init__(
        self, rank: BenchRank, hosts: Sequence[Any], engine_tp: int, size: int, lock: Any
    ) -> None:
        from sglang_rdt.bench.paths.export import Export

        self.rank, self.hosts, self.size, self.lock = rank, list(hosts), size, lock
        self.timeout_s = rank.args.timeout_s
        self.export: Export = Export(rank, gather_bytes=size)
        self.several = len(self.export.sources) > 1
        self.group_name = f"bench-{rank.args.rank}-{size}"
        self.group: Any = None
        self.flat: torch.Tensor | None = None
        for source in self.export.sources:  # one group after the other: all engines are in all
            self.export.group.together(functools.partial(self._join, source, engine_tp))

    def _join(self, source: int, engine_tp: int) -> None:
        if source != self.rank.args.rank:
            return
        import ray.util

        from sglang_rdt.bench.paths import update_group
        from sglang_rdt.demo.workers import free_port

        address, port = ray.util.get_node_ip_address(), free_port()
        world = 1 + engine_tp * len(self.hosts)
        backend = "gloo" if self.rank.args.gpu is None else "nccl"
        refs = [
            host.call.remote(
                sglang_calls.join_group,
                address,
                port,
                1 + i * engine_tp,
                world,
                self.group_name,
                backend,
            )
            for i, host in enumerate(self.hosts)
        ]
        self.group = update_group.make(
            address, port, world, self.group_name, backend, self.timeout_s
        )
        ray.get(refs, timeout=self.timeout_s)

    def on_hosts(self, run: Any, *args: Any) -> None:
        """``run(host, *args)`` on all engines at once."""
        import ray

        ray.get([h.call.remote(run, *args) for h in self.hosts], timeout=self.timeout_s)

    def send(
        self, bucket: list[tuple[str, torch.Tensor]], version: str | None, timer: PhaseTimer
    ) -> int:
        """One bucket to all engines; its bytes."""
        import ray
        import torch
        import torch.distributed as dist

        from sglang_rdt.dtypes import dtype_name

        with timer.phase("stage"):
            parts = [t.flatten().view(torch.uint8) for _, t in bucket]
            flat = torch.cat(parts, out=self._buffer(sum(p.numel() for p in parts)))
            names = [name for name, _ in bucket]
            dtypes = [dtype_name(t.dtype) for _, t in bucket]
            shapes = [tuple(t.shape) for _, t in bucket]
        with timer.phase("transfer"):
            if self.several:
                ray.get(self.lock.acquire.remote(), timeout=self.timeout_s)
            refs = [
                h.call.remote(sglang_calls.receive, names, dtypes, shapes, self.group_name, version)
                for h in self.hosts
            ]
            work = dist.broadcast(flat, src=0, group=self.group, async_op=True)
            # The engines first: one that refuses never joins the broadcast.
            ray.get(refs, timeout=self.timeout_s)
            work.wait()
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()  # the buffer is free again
            if self.several:
                ray.get(self.lock.release.remote(), timeout=self.timeout_s)
        return flat.numel()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for one bucket, the same for all of them: new memory costs page faults."""
        import torch

        if self.flat is None or self.flat.numel() < nbytes:
            self.flat = None
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=self.rank.device)
        return self.flat[:nbytes]

    def close(self) -> None:
        """Leaves the group."""
        import ray
        import torch.distributed as dist

        if self.group is not None:
            group, self.group, self.flat = self.group, None, None
            # All at once: NCCL waits for the others on the node.
            refs = [h.call.remote(sglang_calls.leave_group, self.group_name) for h in self.hosts]
            dist.destroy_process_group(group)
            ray.get(refs, timeout=self.timeout_s)
        self.export.close()


def _start(rank: BenchRank, hosts: Sequence[Any], engine_tp: int, size: int, lock: Any) -> None:
    rank.state[_KEY] = _Sender(rank, hosts, engine_tp, size, lock)


def _sync(rank: BenchRank, version: str) -> Timing:
    from sglang_rdt.coordinator.phases import PhaseTimer, slowest

    sender: _Sender = rank.state[_KEY]
    export, timer = sender.export, PhaseTimer()
    started = time.perf_counter()
    with timer.phase("pause"):
        export.group.lead(lambda: sender.on_hosts(sglang_calls.pause, True))
    sent = 0
    try:
        for bucket, last in export.buckets(timer, sender.size):
            final = last and rank.args.rank == export.sources[-1]
            sent += sender.send(bucket, version if final else None, timer)
            del bucket
        everyone = export.group.gather((timer.seconds, sent))
    except BaseException:
        if export.group.leads:
            with contextlib.suppress(Exception):
                sender.on_hosts(sglang_calls.resume, True)
        raise
    with timer.phase("finalise"):
        export.group.lead(lambda: sender.on_hosts(sglang_calls.resume, True))
    seconds = time.perf_counter() - started
    phases = slowest([timer.seconds, *(phases for phases, _ in everyone)])
    return Timing(seconds, phases, sum(count for _, count in everyone) * len(sender.hosts))


def _staging(rank: BenchRank) -> int:
    flat = rank.state[_KEY].flat
    return 0 if flat is None else flat.numel()


def _stop(rank: BenchRank) -> None:
    sender = rank.state.pop(_KEY, None)
    if sender is not None:
        sender.close()
