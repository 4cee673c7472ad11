"""Qwen3.5, its language model: gated delta nets beside gated attention, experts or a dense MLP.

mbridge 0.15.1 does not have it. To be dropped once it does.

Experts get a name each: engines take that as they take the block of a released checkpoint, and no
rank has to gather the others' experts.

Norms scale by 1 + weight in the checkpoint, but for the one behind a gated delta net, which
scales by its weight. In Megatron all do the same: 1 + weight with ``layernorm_zero_centered_gamma``,
and weight without. The ones that differ are computed, in the parameter's dtype: in bfloat16 that
rounds once, as the checkpoint's own dtype does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from megatron_rdt.sources.families.table import (
    Merge,
    TableBridge,
    Tensors,
    columns,
    gated,
    halves,
    in_sections,
    qkv_with_gate,
    rows,
    rule,
)

logger = logging.getLogger("megatron_rdt")
# Of which dtypes it was said that sums are rounded; once is enough.
_rounded: set[torch.dtype] = set()


def _plus(tensor: torch.Tensor, number: float) -> torch.Tensor:
    if tensor.dtype.itemsize < 4 and tensor.dtype not in _rounded:
        _rounded.add(tensor.dtype)
        logger.warning(
            "Qwen3.5: norms of the checkpoint are Megatron's %+g, rounded to %s; "
            "layernorm_zero_centered_gamma says which (docs/sources.md)",
            number,
            str(tensor.dtype).removeprefix("torch."),
        )
    return (tensor.float() + number).to(tensor.dtype)


def _around_zero(bridge: Any, tensor: torch.Tensor) -> Tensors:
    """A norm that scales by 1 + weight in the checkpoint."""
    return [tensor if bridge.config.layernorm_zero_centered_gamma else _plus(tensor, -1)]


def _around_one(bridge: Any, tensor: torch.Tensor) -> Tensors:
    """A norm that scales by its weight in the checkpoint."""
    return [_plus(tensor, 1) if bridge.config.layernorm_zero_centered_gamma else tensor]


def _mixer(c: Any) -> tuple[int, int, int]:
    """Rows of q (and k), rows of v, heads of v."""
    values = c.linear_num_value_heads
    return (
        c.linear_num_key_heads * c.linear_key_head_dim,
        values * c.linear_value_head_dim,
        values,
    )


def _in_proj_sizes(c: Any) -> Sequence[int]:
    qk, v, heads = _mixer(c)
    return qk, qk, v, v, heads, heads


def _conv_sizes(c: Any) -> Sequence[int]:
    qk, v, _ = _mixer(c)
    return qk, qk, v


def _in_proj(bridge: Any, tensor: torch.Tensor) -> Tensors:
    qk, v, heads = _mixer(bridge.hf_config)
    return list(tensor.split([2 * qk + v, v, heads, heads]))


_NORM: dict[str, Any] = {"convert": _around_zero, "computed": True}
_GATE_UP: dict[str, Any] = {"merge": gated, "convert": halves}
_IN_PROJ: Merge = in_sections(_in_proj_sizes)
_TEXT = "model.language_model."


class Qwen35(TableBridge):
    """See the module."""

    PREFIX: ClassVar[dict[str, Any]] = {
        "decoder": f"{_TEXT}layers.{{layer}}.",
        "mtp": "mtp.layers.{layer}.",
    }
    WHOLE: ClassVar[dict[str, Any]] = {
        "embedding.word_embeddings.weight": rule(f"{_TEXT}embed_tokens.weight", merge=rows),
        "decoder.final_layernorm.weight": rule(f"{_TEXT}norm.weight", **_NORM),
        "output_layer.weight": rule("lm_head.weight", merge=rows),
    }
    MTP: ClassVar[dict[str, Any]] = {
        "enorm.weight": rule("mtp.pre_fc_norm_embedding.weight", **_NORM),
        "hnorm.weight": rule("mtp.pre_fc_norm_hidden.weight", **_NORM),
        "eh_proj.weight": rule("mtp.fc.weight", merge=rows),
        "final_layernorm.weight": rule("mtp.norm.weight", **_NORM),
    }
    LAYER: ClassVar[dict[str, Any]] = {
        # TransformerEngine fuses the norm into whichever mixer is behind it.
        "self_attention.linear_qkv.layer_norm_weight": rule("input_layernorm.weight", **_NORM),
        "self_attention.in_proj.layer_norm_weight": rule("input_layernorm.weight", **_NORM),
        "self_attention.linear_qkv.weight": rule(
            *(f"self_attn.{letter}_proj.weight" for letter in "qkv"),
            merge=rows,
            convert=qkv_with_gate,
        ),
        "self_attention.q_layernorm.weight": rule("self_attn.q_norm.weight", **_NORM),
        "self_attention.k_layernorm.weight": rule("self_attn.k_norm.weight", **_NORM),
        "self_attention.linear_proj.weight": rule("self_attn.o_proj.weight", merge=columns),
        "self_attention.in_proj.weight": rule(
            *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            merge=_IN_PROJ,
            convert=_in_proj,
        ),
        "self_attention.conv1d.weight": rule(
            "linear_attn.conv1d.weight", merge=in_sections(_conv_sizes)
        ),
        "self_attention.dt_bias": rule("linear_attn.dt_bias", merge=rows),
        "self_attention.A_log": rule("linear_attn.A_log", merge=rows),
        "self_attention.out_norm.weight": rule(
            "linear_attn.norm.weight", convert=_around_one, computed=True
        ),
        "self_attention.out_proj.weight": rule("linear_attn.out_proj.weight", merge=columns),
        "pre_mlp_layernorm.weight": rule("post_attention_layernorm.weight", **_NORM),
        "mlp.linear_fc1.layer_norm_weight": rule("post_attention_layernorm.weight", **_NORM),
        "mlp.linear_fc1.weight": rule("mlp.gate_proj.weight", "mlp.up_proj.weight", **_GATE_UP),
        "mlp.linear_fc2.weight": rule("mlp.down_proj.weight", merge=columns),
        "mlp.router.weight": rule("mlp.gate.weight"),
        "mlp.experts.linear_fc1.weight": rule(
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            **_GATE_UP,
        ),
        "mlp.experts.linear_fc2.weight": rule(
            "mlp.experts.{expert}.down_proj.weight", merge=columns
        ),
        "mlp.shared_experts.linear_fc1.weight": rule(
            "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight", **_GATE_UP
        ),
        "mlp.shared_experts.linear_fc2.weight": rule(
            "mlp.shared_expert.down_proj.weight", merge=columns
        ),
        "mlp.shared_experts.gate_weight": rule("mlp.shared_expert_gate.weight"),
    }
