"""GPT-OSS: attention sinks, biases everywhere, all experts of a layer in one tensor.

mbridge 0.15.1 does not have it. The HF tensors are those of bfloat16 checkpoints, which is what
engines take in a sync; released ones are MXFP4. To be dropped once mbridge has it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from megatron_rdt.sources.families.table import (
    TableBridge,
    Tensors,
    as_is,
    columns,
    gated,
    qkv,
    rows,
    rule,
)


def _interleaved(_: Any, experts: torch.Tensor) -> Tensors:
    """Gate and up rows in turn; the weight input rows first."""
    gate, up = experts.chunk(2, dim=1)
    turns = torch.stack([gate, up], dim=2).flatten(1, 2)
    return [turns.transpose(1, 2) if turns.dim() == 3 else turns]


def _input_first(_: Any, experts: torch.Tensor) -> Tensors:
    return [experts.transpose(1, 2)]


class GptOss(TableBridge):
    """See the module."""

    WHOLE: ClassVar[dict[str, Any]] = {
        "embedding.word_embeddings.weight": rule("model.embed_tokens.weight", merge=rows),
        "decoder.final_layernorm.weight": rule("model.norm.weight"),
        "output_layer.weight": rule("lm_head.weight", merge=rows),
    }
    LAYER: ClassVar[dict[str, Any]] = {
        "self_attention.linear_qkv.layer_norm_weight": rule("input_layernorm.weight"),
        **{
            f"self_attention.linear_qkv.{kind}": rule(
                *(f"self_attn.{letter}_proj.{kind}" for letter in "qkv"), merge=rows, convert=qkv
            )
            for kind in ("weight", "bias")
        },
        "self_attention.core_attention.softmax_offset": rule("self_attn.sinks", merge=rows),
        "self_attention.linear_proj.weight": rule("self_attn.o_proj.weight", merge=columns),
        "self_attention.linear_proj.bias": rule("self_attn.o_proj.bias"),
        "pre_mlp_layernorm.weight": rule("post_attention_layernorm.weight"),
        "mlp.router.weight": rule("mlp.router.weight"),
        "mlp.router.bias": rule("mlp.router.bias"),
        "mlp.experts.linear_fc1.weight": rule(
            "mlp.experts.gate_up_proj", merge=gated, convert=_interleaved, block=True
        ),
        "mlp.experts.linear_fc1.bias": rule(
            "mlp.experts.gate_up_proj_bias", merge=gated, convert=_interleaved, block=True
        ),
        "mlp.experts.linear_fc2.weight": rule(
            "mlp.experts.down_proj", merge=columns, convert=_input_first, block=True
        ),
        "mlp.experts.linear_fc2.bias": rule(
            "mlp.experts.down_proj_bias", convert=as_is, block=True
        ),
    }
