"""What a benchmark ran on, without naming the host."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sglang_rdt.activation import installed_version

PACKAGES = ("sglang-rdt", "sglang", "megatron-core", "mbridge", "ray", "nixl", "torch")


def check_writable(folder: Path, option: str) -> None:
    """Makes ``folder`` before anything long is begun.

    Raises:
        BenchError: nothing can be written there.
    """
    from sglang_rdt.bench.options import BenchError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise BenchError(f"{option} {folder}: {error.strerror}") from None
    if not writable:
        raise BenchError(f"{option} {folder}: nothing can be written there")


def pick_device(asked: str) -> tuple[Literal["cpu", "cuda"], int]:
    """``(device, GPUs)`` for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ValueError: neither of them, or there is no GPU where one was asked for.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{asked!r}: expected auto, cpu or cuda")
    if asked == "cuda" and not gpus:
        raise ValueError("this machine has no GPU that torch sees")
    if asked == "cpu" and gpus:
        raise ValueError(
            "Megatron insists on the GPUs that it sees; hide them (CUDA_VISIBLE_DEVICES=)"
        )
    return ("cuda", gpus) if gpus else ("cpu", 0)


def slug(device_names: Sequence[str], gpus: int) -> str:
    """``2xH200``, or ``cpu-2cores``: for file names.

    Args:
        device_names: what the devices call themselves; empty on a CPU.
        gpus: how many take part.
    """
    if not device_names or not device_names[0]:
        return f"cpu-{len(os.sched_getaffinity(0))}cores"
    words = re.sub(r"\b(NVIDIA|Tesla|GeForce)\b", "", device_names[0]).split()
    return f"{gpus}x{words[0] if words else 'GPU'}"


def describe(device_names: Sequence[str]) -> dict[str, Any]:
    """Hardware and versions."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "hardware": {
            "gpus": [name for name in device_names if name],
            "cpu": found[1] if found else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{p: installed_version(p) for p in PACKAGES},
        },
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
