"""Which memory may be registered with NIXL.

CUDA memory from ``expandable_segments`` (VMM) moves at 0.3 GB/s instead of hundreds, or fails
(ai-dynamo/nixl#1754); it is refused before it can be registered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_rdt.errors import TransportError

if TYPE_CHECKING:
    import torch

# torch reads the second one since 2.9; PYTORCH_HIP_ALLOC_CONF is ROCm's.
ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


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


def check_registrable(tensor: torch.Tensor) -> None:
    """Raises TransportError if ``tensor`` lies in memory that must not be registered."""
    if not tensor.is_cuda:
        return
    setting = expandable_segments()
    if setting is not None:
        raise TransportError(
            f"{setting} puts tensors into expandable segments, which NIXL moves at a thousandth of "
            "the link's speed or not at all; unset it in this process"
        )
