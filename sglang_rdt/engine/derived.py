"""What SGLang derives of weights, and does not derive again at the end of a weight-update session.

A sync would leave it as it was, and no checksum would tell.

Source: sglang/srt/model_loader/loader.py (post_load_weights), model_executor/model_runner.py
(_prepare_replicated_q_proj), models/glm4_moe_lite_nextn.py, 0.5.21 to 0.5.23.
"""

from __future__ import annotations

import torch

_DERIVE = "post_load_weights"


def problems(model: torch.nn.Module) -> list[str]:
    """One line for each kind of it; none where a session derives everything."""
    return [line for line in (_not_asked(model), _without_layers(model), _gathered(model)) if line]


def _not_asked(model: torch.nn.Module) -> str | None:
    """A session asks the model itself, and not what is inside of it."""
    if hasattr(model, _DERIVE):
        return None
    inner = next((n for n, m in model.named_modules() if n and hasattr(m, _DERIVE)), None)
    if inner is None:
        return None
    return f"{inner} derives weights after loading, and {type(model).__name__} does not ask it to"


def _without_layers(model: torch.nn.Module) -> str | None:
    """A draft of one layer that inherits what derives of the target's layers."""
    inner = getattr(model, "model", None)
    one_layer = hasattr(inner, "decoder") and not hasattr(inner, "start_layer")
    if not one_layer or not hasattr(model, _DERIVE) or _DERIVE in vars(type(model)):
        return None
    return (
        f"{type(model).__name__} inherits {_DERIVE}, which looks for layers that it does not have"
    )


def _gathered(model: torch.nn.Module) -> str | None:
    """Copies of other ranks' queries, for decode context parallelism."""
    for name, module in model.named_modules():
        if getattr(module, "w_kc_qrep", None) is not None:
            return f"{name}: dcp_replicate_q_proj keeps copies of its weights; switch it off"
    return None
