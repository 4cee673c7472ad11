"""Megatron ranks for a benchmark: real parallel layouts, no optimizer, values changed in place."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench.options import BenchError, Options
from sglang_rdt.bench.shapes import Shape
from sglang_rdt.demo.trainer import Layout

if TYPE_CHECKING:
    from sglang_rdt.settings import Settings

NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclasses.dataclass(frozen=True)
class RankArgs:
    """What one rank is started with.

    Args:
        gpu: device ordinal; None: the CPU.
        backend: of the default process group.
        train: build Megatron's optimizer too, with ``TinyTrainer``.
    """

    shape: Shape
    layout: Layout
    rank: int
    master_port: int
    gpu: int | None
    backend: str
    ddp: bool
    train: bool
    timeout_s: float


class BenchRank:
    """One trainer rank, in a Ray actor.

    Attributes:
        state: what a path keeps on this rank from its start to its end.
    """

    def __init__(self, args: RankArgs) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        import torch

        import megatron_rdt  # noqa: F401  (its hook must be in place before Megatron is imported)
        from sglang_rdt.demo.trainer import TinyTrainer, init_distributed

        if args.gpu is None:
            torch.set_num_threads(1)
            from megatron_rdt import cpu

            cpu.install()
        else:
            torch.cuda.set_device(args.gpu)
        self.args = args
        self.model = args.shape.model
        self.hf_config = self.model.hf_config()
        self.key = 0
        self.sync: Any = None
        self.state: dict[str, Any] = {}
        init_distributed(
            args.rank,
            args.layout.world,
            "127.0.0.1",
            args.master_port,
            backend=args.backend,
            timeout_s=args.timeout_s,
        )
        kind = "cpu" if args.gpu is None else "cuda"
        self.trainer: Any = (
            TinyTrainer(self.model, args.layout, device=kind, seed=3)  # type: ignore[arg-type]
            if args.train
            else _bare_trainer(self.model, args.layout, kind, args.ddp)
        )
        self.chunks = self.trainer.model_chunks

    @property
    def device(self) -> Any:
        """Where the parameters are."""
        import torch

        return torch.device("cpu") if self.args.gpu is None else torch.device("cuda", self.args.gpu)

    def device_name(self) -> str:
        """What the device calls itself; empty for a CPU."""
        import torch

        return "" if self.args.gpu is None else torch.cuda.get_device_name(self.args.gpu)

    def synchronize(self) -> None:
        """Waits for the device."""
        import torch

        if self.args.gpu is not None:
            torch.cuda.synchronize(self.args.gpu)

    def change(self, key: int) -> None:
        """Gives every parameter the values of ``key``, in place."""
        import torch

        from sglang_rdt.bench import pattern

        self._enter()
        with torch.no_grad():
            if self.key == 0:
                pattern.fill_trainer(self.chunks, self.model, key)
            else:
                for parameter in _distinct(self.chunks):
                    pattern.rekey(parameter, self.key, key)
        self.key = key
        self.synchronize()

    def attach(self, settings: Settings, engines: Sequence[str]) -> float:
        """Makes a WeightSync and connects it; seconds."""
        from megatron_rdt import WeightSync

        self._enter()
        self.detach()
        started = time.perf_counter()
        self.sync = WeightSync(
            self.chunks, hf_config=self.hf_config, engines=list(engines), settings=settings
        )
        self.sync.connect()
        return time.perf_counter() - started

    def detach(self) -> None:
        """Closes the WeightSync, if there is one."""
        if self.sync is not None:
            sync, self.sync = self.sync, None
            sync.close()

    def _enter(self) -> None:
        # The current device is a thread's own, and Ray says nothing about threads.
        if self.args.gpu is not None:
            import torch

            torch.cuda.set_device(self.args.gpu)

    def call(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(self, *args)``."""
        self._enter()
        return run(self, *args)


def _bare_trainer(model: Any, layout: Layout, device: str, ddp: bool) -> Any:
    """A ``TinyTrainer`` without an optimizer and without initial weights."""
    import torch

    from sglang_rdt.demo import trainer as demo

    class BareTrainer(demo.TinyTrainer):
        def __init__(self) -> None:
            self.model, self.layout = model, layout
            self._device = torch.device(device)
            demo._init_model_parallel(layout, 0)
            self.config = dataclasses.replace(
                demo._transformer_config(model, layout, torch.bfloat16),
                use_cpu_initialization=device == "cpu",
            )
            # Megatron marks what it shards where it initialises; the values are ours.
            for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
                setattr(self.config, name, _leave)
            # Norms are built in float32; Float16Module would convert them.
            chunks = [self._build_chunk(v).to(torch.bfloat16) for v in self._vpp_ranks()]
            self.model_chunks = [self._in_buffers(c) for c in chunks] if ddp else chunks

        def _in_buffers(self, chunk: Any) -> Any:
            from megatron.core.distributed import (
                DistributedDataParallel,
                DistributedDataParallelConfig,
            )

            # With a distributed optimizer the parameters lie in one contiguous buffer.
            config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=False,
                average_in_collective=False,
                use_distributed_optimizer=True,
            )
            return DistributedDataParallel(config=self.config, ddp_config=config, module=chunk)

    return BareTrainer()


def _leave(tensor: Any) -> Any:
    """An init method that does nothing."""
    return tensor


def _distinct(chunks: Sequence[Any]) -> list[Any]:
    """All parameters, each once (``parameters()`` of different chunks may share)."""
    return list({id(p): p for chunk in chunks for p in chunk.parameters()}.values())


class BenchTrainers:
    """All ranks; methods run on every rank together."""

    def __init__(self, options: Options) -> None:
        import ray

        from sglang_rdt.demo.workers import free_port

        cuda = options.device == "cuda"
        # Two ranks on one GPU cannot talk through NCCL; gloo takes GPU tensors too.
        backend = "cpu:gloo,cuda:nccl" if cuda and not options.shared_gpu else "gloo"
        self._timeout_s = options.timeout_s
        port = free_port()
        environ = {"env_vars": NOSET} if cuda else {}
        kind = ray.remote(num_cpus=0, enable_tensor_transport=True, runtime_env=environ)(BenchRank)
        self.ranks = []
        for rank in range(options.trainer.world):
            args = RankArgs(
                shape=options.model,
                layout=options.trainer,
                rank=rank,
                master_port=port,
                gpu=options.gpu_of_rank[rank] if cuda else None,
                backend=backend,
                ddp=options.ddp,
                train=bool(options.train),
                timeout_s=options.timeout_s,
            )
            self.ranks.append(kind.remote(args))
        self.all("__ray_ready__")

    def all(self, method: str, *args: Any) -> list[Any]:
        """``method`` on every rank; results in rank order.

        Raises:
            BenchError: a rank did not answer in time.
        """
        return _get([getattr(r, method).remote(*args) for r in self.ranks], self._timeout_s, method)

    def call(self, run: Callable[..., Any], *args: Any) -> list[Any]:
        """``run(rank, *args)`` on every rank."""
        refs = [r.call.remote(run, *args) for r in self.ranks]
        return _get(refs, self._timeout_s, run.__name__)

    def lead(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(rank, *args)`` on rank 0 alone."""
        return _get([self.ranks[0].call.remote(run, *args)], self._timeout_s, run.__name__)[0]

    def stop(self) -> None:
        """Ends the ranks."""
        import ray

        for rank in self.ranks:
            ray.kill(rank)


def _get(refs: list[Any], timeout_s: float, what: str) -> list[Any]:
    import ray

    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        missing = [i for i, ref in enumerate(refs) if ref not in done]
        raise BenchError(
            f"trainer rank {', '.join(map(str, missing))} did not finish {what!r} within "
            f"{timeout_s:g} s"
        ) from None
