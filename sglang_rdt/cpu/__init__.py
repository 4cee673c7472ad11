"""Running the stack on a machine without a GPU.

Stock SGLang, Ray and Megatron-core assume CUDA in a handful of places. This package holds what
it takes to start them on a plain CPU anyway, so that the project can be tried and tested on a
laptop: stand-ins for the few missing pieces (:mod:`sglang_rdt.cpu.boot`), and the settings known
to work (:func:`environment`, :func:`engine_kwargs`). Nothing here is used on a GPU machine.

``python -m sglang_rdt.cpu install`` switches the stand-ins on for every process of the current
Python environment, ``python -m sglang_rdt.cpu uninstall`` switches them off again.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["engine_kwargs", "environment", "launch_args"]

# One bind entry per GPU ordinal that Ray may hand out on a node; see environment().
_MIN_BIND_ENTRIES = 16


def environment(tp_size: int = 2, fake_gpus: int | None = None) -> dict[str, str]:
    """Return the environment variables that a CPU engine needs.

    They must be set before ``sglang`` is imported, in the driver *and* in every Ray worker. A
    cluster that the driver starts itself inherits them; for a cluster that is already running,
    pass them on: ``ray.init(runtime_env={"env_vars": environment()})``.

    Args:
        tp_size: The number of engine ranks on one node, over all engines that run there.
        fake_gpus: How many GPUs Ray shall believe that the node has. SGLang asks Ray for one per
            rank. Needed where SGLang starts Ray itself (``python -m sglang.launch_server``);
            a driver says ``ray.init(num_gpus=...)`` instead.

    Returns:
        Names and values, ready for ``os.environ.update``.

    Raises:
        ValueError: If ``tp_size`` is not positive.
    """
    if tp_size < 1:
        raise ValueError(f"tp_size must be at least 1, got {tp_size}")
    variables = {
        # Picks SGLang's CPU platform; without it the rotary embedding asks for vLLM's kernels.
        "SGLANG_USE_CPU_ENGINE": "1",
        # Without a list SGLang refuses more ranks than NUMA nodes. It is indexed by the GPU
        # ordinal that Ray assigned, so a second engine on the node needs entries beyond tp_size.
        "SGLANG_CPU_OMP_THREADS_BIND": _cpu_bind_list(tp_size),
        # Ranks share few cores: one OpenMP thread each, or they slow one another down.
        "OMP_NUM_THREADS": "1",
        # Otherwise the first forward compiles small functions with inductor: 18 s at TP 2.
        "TORCHDYNAMO_DISABLE": "1",
        # The models are local directories: never wait for a hub.
        "HF_HUB_OFFLINE": "1",
        # Ray otherwise sends usage reports.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if fake_gpus is not None:
        variables["RAY_OVERRIDE_RESOURCES"] = json.dumps({"GPU": fake_gpus})
    return variables


def engine_kwargs(model_path: str, **overrides: Any) -> dict[str, Any]:
    """Return keyword arguments for ``RayEngine`` or ``ServerArgs`` that work on a CPU.

    Args:
        model_path: A local checkpoint directory.
        **overrides: Arguments to add or replace, for example ``tp_size=2``.

    Returns:
        The arguments, known to work with SGLang 0.5.23 and small models. Everything that works
        on a CPU as it is, such as the overlap schedule and the radix cache, is left as in
        production.
    """
    kwargs: dict[str, Any] = {
        "model_path": model_path,
        "device": "cpu",
        "dtype": "bfloat16",
        "use_ray": True,
        # What SGLang picks on most CPUs anyway; on some it would look for its own CPU kernels.
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        # SGLang cannot size its KV cache when the CPU bind list is set: say it.
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        # Token ids in, token ids out: the tiny test models need no tokenizer.
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "error",
    }
    kwargs.update(overrides)
    return kwargs


def launch_args(model_path: str, **overrides: Any) -> list[str]:
    """Return :func:`engine_kwargs` as flags for ``python -m sglang.launch_server``.

    Args:
        model_path: A local checkpoint directory.
        **overrides: Arguments to add or replace; a value of ``False`` or ``None`` leaves a flag
            out.

    Returns:
        The command line arguments, one list item per word.
    """
    words: list[str] = []
    for name, value in engine_kwargs(model_path, **overrides).items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


def _cpu_bind_list(ranks: int) -> str:
    """Return one core per rank, reusing the cores that this process may run on in turn."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    entries = max(ranks, _MIN_BIND_ENTRIES)
    return "|".join(str(cores[rank % len(cores)]) for rank in range(entries))
