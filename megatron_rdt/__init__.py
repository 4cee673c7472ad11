"""The trainer side: optimizer-step hook, bucketed export, weight sync of a Megatron model.

Importing this package switches the Megatron patches on (see :mod:`sglang_rdt.activation`). It
imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_rdt.activation import activate

if TYPE_CHECKING:
    from megatron_rdt.weight_sync import WeightSync

__all__ = ["WeightSync", "activate"]

activate()


def __getattr__(name: str) -> Any:
    # Lazy: WeightSync needs torch and Ray, which importing this package must not cost.
    if name == "WeightSync":
        from megatron_rdt.weight_sync import WeightSync

        return WeightSync
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
