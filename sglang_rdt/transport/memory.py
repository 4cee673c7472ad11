"""Which memory may be registered with NIXL.

CUDA memory from ``expandable_segments`` (VMM) moves at 0.3 GB/s instead of hundreds, or fails
(ai-dynamo/nixl#1754); it is refused before it can be registered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.errors import TransportError

if TYPE_CHECKING:
    import torch

# torch reads the second one since 2.9; PYTORCH_HIP_ALLOC_CONF is ROCm's.
ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_WHY = (
    "expandable segments, which NIXL moves at 0.3 GB/s (measured; ordinary memory: hundreds of "
    "GB/s) or not at all"
)


def expandable_segments(environ: Mapping[str, str] | None = None) -> str | None:
    """The setting that switches expandable segments on, as ``NAME=value``, or None."""
    environ = os.environ if environ is None else environ
    for name in ALLOC_CONF_NAMES:
        for part in environ.get(name, "").split(","):
            key, _, value = part.partition(":")
            if key.strip().lower() == "expandable_segments" and value.strip().lower() in (
                "true",
                "1",
            ):
                return f"{name}={environ[name]}"
    return None


def check_registrable(tensor: torch.Tensor, segments: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raises TransportError if ``tensor`` lies in memory that must not be registered.

    Args:
        segments: ``torch.cuda.memory_snapshot()``, which also tells what
            ``torch.cuda.memory._set_allocator_settings`` switched on without any variable.
    """
    if not tensor.is_cuda:
        return
    setting = expandable_segments()
    if setting is not None:
        raise TransportError(f"{setting} puts tensors into {_WHY}; unset it in this process")
    if not segments:
        return
    address = tensor.untyped_storage().data_ptr()
    for segment in segments:
        if (
            segment.get("is_expandable")
            and segment["address"] <= address < segment["address"] + segment["total_size"]
        ):
            raise TransportError(
                f"a tensor at {address:#x} lies in {_WHY}; this process switched them on "
                "(expandable_segments:True, torch.cuda.memory._set_allocator_settings) before it "
                "was allocated"
            )


def cuda_segments(tensors: Sequence[torch.Tensor]) -> Sequence[Mapping[str, Any]]:
    """The allocator's segments, if any of ``tensors`` is on a GPU."""
    if not any(t.is_cuda for t in tensors):
        return ()
    import torch

    return torch.cuda.memory_snapshot()  # type: ignore[no-any-return]
