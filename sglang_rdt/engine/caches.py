"""Copies of weights that models make in their first forward pass, and keep.

SGLang does not make them anew when weights change: what was copied from the weights before would be
served on. They are filled in place, since CUDA graphs remember where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cache:
    """A tensor that modules keep.

    Args:
        name: attribute of the module.
        of: attribute that it is a copy of, in another dtype.
        source: upstream file, and the releases that have it.
    """

    name: str
    of: str
    source: str


# To be dropped with SGLang 0.5.18: from 0.5.19 on the router reads its weight itself.
CACHES = (
    Cache(
        "_weight_fp32",
        "weight",
        "sglang/srt/models/glm4_moe.py and glm4_moe_lite.py, Glm4Moe[Lite]Gate.forward; 0.5.16 to 0.5.18",
    ),
)


def refresh(model: torch.nn.Module) -> list[str]:
    """Fills every copy from its weight again; names of what was filled."""
    filled = []
    for prefix, module in model.named_modules():
        for cache in CACHES:
            kept, weight = getattr(module, cache.name, None), getattr(module, cache.of, None)
            if isinstance(kept, torch.Tensor) and isinstance(weight, torch.Tensor):
                with torch.no_grad():
                    kept.copy_(weight)
                filled.append(f"{prefix}.{cache.name}")
    return filled
