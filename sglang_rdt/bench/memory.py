"""Peak memory that a path adds in a process, on a GPU exactly, on a CPU as resident memory."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Mark:
    """Memory of a process at one moment, in bytes. ``device``: what the whole GPU has in use."""

    now: int
    device: int = 0


def mark(device: torch.device) -> Mark:
    """Memory in use now; peaks are counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return Mark(torch.cuda.memory_allocated(device), _device_bytes(device))
    # Not allowed everywhere; the peak is then that of the whole life of the process.
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # resets VmHWM
    return Mark(_status("VmRSS"))


def resident() -> int:
    """Bytes of this process that are in main memory now."""
    return _status("VmRSS")


def peak(device: torch.device) -> Mark:
    """Highest use since the last :func:`mark`."""
    if device.type == "cuda":
        return Mark(torch.cuda.max_memory_allocated(device), _device_bytes(device))
    return Mark(_status("VmHWM"))


def extra(before_path: Mark, before_syncs: Mark, top: Mark, staging: int, device_type: str) -> int:
    """Bytes that a path needs beyond the model.

    On a GPU the allocator is exact: from before the path was set up to the peak of its syncs. On a
    CPU setting a path up also imports modules; so what grows during the syncs counts, plus the
    staging memory that the path says it has.
    """
    if device_type == "cuda":
        return max(top.now - before_path.now, 0)
    return max(top.now - before_syncs.now, 0) + staging


def _device_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0
