"""Making model parameters final after ``optimizer.step()``.

With ``overlap_param_gather`` a step leaves each data-parallel rank with a different, stale mix:
the all-gathers run in the next forward pass (NVIDIA-NeMo/RL#4086). They are forced here.
Source: megatron/core/optimizer/distrib_optimizer.py, megatron/training/training.py
(force_param_sync).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_rdt.errors import ExportError


def make_final(model_chunks: Sequence[Any], optimizer: Any | None) -> bool:
    """Completes parameter all-gathers that a step left for later. Collective over DP ranks.

    Args:
        model_chunks: DDP-wrapped chunks, as given to ``get_megatron_optimizer``.
        optimizer: the outermost optimizer, where known.

    Returns:
        Whether anything had to be forced.

    Raises:
        ExportError: this Megatron version cannot make the parameters final at this point.
    """
    lagging = [chunk for chunk in model_chunks if _lags(chunk)]
    if not lagging:
        return False
    prepare = getattr(optimizer, "prepare_model_params_for_param_sync", None)
    if prepare is not None:
        prepare()
    elif any(getattr(c.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False) for c in lagging):
        raise ExportError(
            "mxfp8 parameters that share the gradient buffer become final only in the next forward "
            "pass in this Megatron-core; use 0.19 or newer, or overlap_param_gather=False"
        )
    for chunk in lagging:
        chunk.start_param_sync(force_sync=True)
    return True


def _lags(chunk: Any) -> bool:
    config = getattr(chunk, "ddp_config", None)
    return bool(
        config is not None
        and getattr(config, "use_distributed_optimizer", False)
        and getattr(config, "overlap_param_gather", False)
    )
