"""Engines for a benchmark: random weights, nothing but a ``config.json`` to start from."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_rdt.bench.options import BenchError, Options
from sglang_rdt.bench.trainer import NOSET

NAMESPACE = "sglang-rdt-bench"
# Known to work from SGLang 0.5.16 on, with no kernels but Triton's.
_CUDA = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.5,
    "random_seed": 0,
    "log_level": "error",
}


def environment(options: Options) -> None:
    """Sets what this process, and so the cluster that it starts, needs."""
    if options.device == "cuda":
        os.environ.update(NOSET)
    else:
        from sglang_rdt import cpu

        os.environ.update(cpu.environment(options.engine_tp * options.engines))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ray_environment()


def ray_environment() -> None:
    """A cluster of this process's own, that tells nobody of itself."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@contextlib.contextmanager
def cluster(options: Options, gpus: int) -> Iterator[None]:
    """A Ray cluster of this machine's own."""
    import ray

    world = options.engine_tp * options.engines
    ray.init(
        address="local",
        num_cpus=max(8, world + 4),
        num_gpus=gpus if options.device == "cuda" else world,  # nothing is behind them on a CPU
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def only_on(gpus: tuple[int, ...], count: int, timeout_s: float) -> Iterator[None]:
    """While inside, Ray hands out no GPUs but ``gpus`` (of ``count``)."""
    import ray

    class Holder:
        def where(self) -> int:
            return int(ray.get_gpu_ids()[0])

    kind = ray.remote(num_cpus=0, num_gpus=1)(Holder)
    holders = [kind.remote() for _ in range(count)]
    try:
        places = ray.get([h.where.remote() for h in holders], timeout=timeout_s)
        for holder, gpu in zip(holders, places, strict=True):
            if gpu in gpus:
                ray.kill(holder)
        yield
    finally:
        for holder in holders:
            with contextlib.suppress(Exception):
                ray.kill(holder)


def kwargs(options: Options, folder: Path, load_format: str) -> dict[str, Any]:
    """Arguments of ``RayEngine``."""
    from sglang_rdt.demo.workers import free_port

    common = {
        "model_path": str(folder),
        "tp_size": options.engine_tp,
        "port": free_port(),
        "load_format": load_format,
        "dtype": "bfloat16",
    }
    if options.device == "cuda":
        return {**_CUDA, **common, **options.engine_args}
    from sglang_rdt import cpu

    return {**cpu.engine_kwargs(str(folder)), **common, **options.engine_args}


@contextlib.contextmanager
def running(
    options: Options, folder: Path, gpus: int, load_format: str = "dummy"
) -> Iterator[list[Any]]:
    """Engines on the model in ``folder``, stopped at the end.

    Raises:
        BenchError: one did not start.
    """
    from sglang_rdt.demo.workers import ServedEngine

    environ = NOSET if options.device == "cuda" else None
    started: list[Any] = []
    try:
        held = (
            only_on(options.engine_gpus, gpus, options.timeout_s)
            if options.device == "cuda"
            else contextlib.nullcontext()
        )
        with held:
            for _ in range(options.engines):
                try:
                    started.append(
                        ServedEngine(
                            kwargs(options, folder, load_format),
                            environ=environ,
                            timeout_s=options.timeout_s,
                        )
                    )
                except Exception as error:
                    raise BenchError(f"an engine did not start: {error}") from error
        yield started
    finally:
        for served in started:
            with contextlib.suppress(Exception):
                served.shutdown()
