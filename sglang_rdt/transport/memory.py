"""Which memory may be registered with NIXL.

CUDA memory from ``expandable_segments`` (VMM) moves at 0.3 GB/s instead of hundreds, or fails
(ai-dynamo/nixl#1754); it is refused before it can be registered.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.brief import brief
from sglang_rdt.errors import TransportError

if TYPE_CHECKING:
    import torch

    from sglang_rdt.transport.agent import RemoteMemory

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


# Addresses have 64 bits; no piece of memory has more than 48.
_MAX_ADDRESS, _MAX_BYTES = 1 << 64, 1 << 48


def checked(memory: RemoteMemory, who: str) -> RemoteMemory:
    """``memory``, which another process has described.

    Raises:
        TransportError: it is no memory; names ``who``.
    """
    pairs = list(itertools.zip_longest(memory.addresses, memory.sizes))
    for number, (address, size) in enumerate(pairs):
        numbers = type(address) is int and type(size) is int
        if not numbers or not 0 <= size <= _MAX_BYTES or not 0 <= address <= _MAX_ADDRESS - size:
            raise TransportError(
                f"{who} offers no memory: block {number} of {len(pairs)} has {brief(size)} bytes at "
                f"{brief(address)}"
            )
    return memory


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
