"""Whether a model's weights are, in a session, what its loader filled.

SGLang quantises or packs weights after loading. A session undoes that where a method says how
(``restore_weights_before_loading``), and does it again at the end. Where a method does not, the end
of *every* session works on what it has made before: with ``quantization="fp8"`` on a bf16 checkpoint
it quantises FP8 weights once more, and the engine is broken by connecting to it, before any byte
has moved. So this is asked before a session is opened.

Source: sglang/srt/model_loader/loader.py (restore_weights_before_loading, postprocess_weights,
QuantizedRLModelLoader), layers/quantization/base_config.py (QuantizeMethodBase), fp8.py, amx_utils.py;
0.5.21 to 0.5.23.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# Their process_weights_after_loading derives nothing from what it wrote itself.
_AGAIN_AND_AGAIN = ("BaseKVCacheMethod", "Fp8KVCacheMethod")
# Kernels for experts that take a checkpoint's blocks as they are.
_PLAIN_EXPERTS = ("auto", "triton", "deep_gemm")
# Where the methods of these do nothing.
_BASES = (
    "QuantizeMethodBase",
    "BaseLinearScheme",
    "BaseMoEScheme",
    "CompressedTensorsMoEScheme",
)


def why_not(model: torch.nn.Module, updater: Any = None) -> str | None:
    """Why SGLang's sessions do not make the weights of ``model`` loadable, or None.

    Args:
        updater: SGLang's own for that model: what it refuses is refused.
    """
    if getattr(model, "flash_rl_initial_load_complete", False):
        return (
            "load_format flash_rl quantises inside of load_weights, from whole tensors of each call, "
            "which no slice by slice sync can do; start the engine without it, unquantised"
        )
    methods = {
        f"{type(module.quant_method).__name__}{detail}"
        for module in model.modules()
        if getattr(module, "quant_method", None) is not None
        for detail in [_detail(module, module.quant_method)]
        if detail is not None
    }
    if methods:
        return (
            f"weights were quantised or packed after loading ({', '.join(sorted(methods))}), and SGLang "
            "does not restore them for an update: the end of a session would do it to them once "
            "more. Start the engine unquantised, or with a block-quantised FP8 checkpoint"
        )
    return _of_sglang(model, updater)


def _detail(module: Any, method: Any) -> str | None:
    """What is wrong with ``module``, for the name of its method; None if nothing is."""
    name = type(method).__name__
    if getattr(module, "use_intel_amx_backend", False):
        return " packed for AMX"
    if name.startswith("Unquantized") or name in _AGAIN_AND_AGAIN:
        return None
    if _restores(method) and _restores(getattr(module, "scheme", None), method):
        return None
    if name in ("Fp8LinearMethod", "Fp8MoEMethod"):
        return _fp8(module, method)
    process = getattr(type(method), "process_weights_after_loading", None)
    if process is None or getattr(process, "__qualname__", "").partition(".")[0] in _BASES:
        return None
    return ""


def _restores(method: Any, default: Any = None) -> bool:
    """Whether its class says how to undo what it does after loading."""
    if method is None:
        return default is not None
    restore = getattr(type(method), "restore_weights_before_loading", None)
    owner = getattr(restore, "__qualname__", "").partition(".")[0]
    return restore is not None and owner not in _BASES


def _fp8(module: Any, method: Any) -> str | None:
    """A checkpoint's own FP8 blocks and fp32 scales stay as they are, as long as no kernel wants
    them in another form."""
    config = getattr(method, "quant_config", None)
    if not getattr(config, "is_checkpoint_fp8_serialized", False):
        return " of an unquantised checkpoint"
    if not getattr(method, "block_quant", False):
        return " with one scale per tensor"
    backend = _experts_backend() if type(method).__name__ == "Fp8MoEMethod" else "auto"
    if backend not in _PLAIN_EXPERTS:
        return f" for {backend}"
    tensors = dict(module.named_parameters(recurse=False))
    scales = [t for name, t in tensors.items() if name.endswith("_scale_inv")]
    weights = [t for name, t in tensors.items() if name.endswith("weight")]
    plain = (
        scales
        and all(t.dtype == torch.float32 and not getattr(t, "format_ue8m0", False) for t in scales)
        and all(
            t.dtype == torch.float8_e4m3fn and not getattr(t, "is_shuffled", False) for t in weights
        )
        and all(t.device.type == "cuda" for t in (*scales, *weights))
        and not getattr(method, "use_mxfp8", False)
        and not getattr(method, "convert_mxfp8_to_block", False)
        and not getattr(method, "block_fp8_as_mxfp8", False)
        and not getattr(module, "deepgemm_mxfp8_input", False)
    )
    return None if plain else " with repacked blocks or scales"


def _experts_backend() -> str:
    module = sys.modules.get("sglang.srt.layers.moe.utils")
    ask = getattr(module, "get_moe_runner_backend", None)
    return str(getattr(ask(), "value", "unknown")) if ask is not None else "unknown"


def _of_sglang(model: torch.nn.Module, updater: Any) -> str | None:
    check = getattr(updater, "_assert_weight_cache_inactive", None)
    if check is not None:
        try:
            check("a weight sync")
        except RuntimeError as error:
            return str(error)
    module = sys.modules.get(type(updater).__module__)
    derived = getattr(module, "_unsupported_derived_weight_cache_error", None)
    return derived(model) if derived is not None else None
