"""Checkpoint tensors to Megatron parameters, written by hand.

The other way round than the package goes, and without any of its code or a bridge's: what is
exported is judged by where these put things.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Whole:
    """A Megatron parameter with the shards of all ranks in it.

    Args:
        tensor: all of it.
        cut: the dimension that TP (ETP) cuts; None: whole on every rank.
        sections: sizes along that dimension, each of which is cut for itself.
    """

    tensor: Tensor
    cut: int | None = None
    sections: Sequence[int] = ()

    def shard(self, rank: int, size: int) -> Tensor:
        """What rank ``rank`` of ``size`` has."""
        if self.cut is None:
            return self.tensor
        parts = self.tensor.split(list(self.sections), self.cut) if self.sections else [self.tensor]
        return torch.cat([part.chunk(size, self.cut)[rank] for part in parts], self.cut)


def wholes(name: str, hf: State, c: Any, padded_vocab: int) -> dict[str, Whole]:
    """Local-spec names, layers and experts numbered over the whole model."""
    return dict(_wholes(name, hf, c, padded_vocab))


def _wholes(name: str, hf: State, c: Any, padded_vocab: int) -> Iterator[tuple[str, Whole]]:
    prefix = "model.language_model." if name == "qwen3_5_moe" else "model."
    embedding, head = hf[f"{prefix}embed_tokens.weight"], hf.get("lm_head.weight")
    yield "embedding.word_embeddings.weight", _vocabulary(embedding, padded_vocab)
    yield "decoder.final_layernorm.weight", Whole(hf[f"{prefix}norm.weight"])
    if head is not None:
        yield "output_layer.weight", _vocabulary(head, padded_vocab)
    for layer in range(c.num_hidden_layers):
        at = {
            n.removeprefix(f"{prefix}layers.{layer}."): t
            for n, t in hf.items()
            if n.startswith(f"{prefix}layers.{layer}.")
        }
        for inner, whole in _layer(name, at, c):
            yield f"decoder.layers.{layer}.{inner}", whole
    behind = f"model.layers.{c.num_hidden_layers}."
    extra = {n.removeprefix(behind): t for n, t in hf.items() if n.startswith(behind)}
    if extra:
        for one in ("enorm", "hnorm"):
            yield f"mtp.layers.0.{one}.weight", Whole(extra[f"{one}.weight"])
        yield "mtp.layers.0.eh_proj.weight", Whole(extra["eh_proj.weight"], 0)
        yield "mtp.layers.0.final_layernorm.weight", Whole(extra["shared_head.norm.weight"])
        for inner, whole in _layer(name, extra, c):
            yield f"mtp.layers.0.transformer_layer.{inner}", whole


def _vocabulary(tensor: Tensor, padded: int) -> Whole:
    # Not zero: who forgets to cut the padding off shall notice.
    padding = tensor.new_ones(padded - tensor.shape[0], tensor.shape[1])
    return Whole(torch.cat([tensor, padding]), 0)


def _layer(name: str, at: State, c: Any) -> Iterator[tuple[str, Whole]]:
    yield "input_layernorm.weight", Whole(at["input_layernorm.weight"])
    yield "pre_mlp_layernorm.weight", Whole(at["post_attention_layernorm.weight"])
    if name == "glm4":
        yield "post_self_attn_layernorm.weight", Whole(at["post_self_attn_layernorm.weight"])
        yield "post_mlp_layernorm.weight", Whole(at["post_mlp_layernorm.weight"])
    if "self_attn.kv_b_proj.weight" in at:
        attention = _latent(at)
    elif "linear_attn.A_log" in at:
        attention = _delta_net(at, c)
    else:
        attention = _attention(at, c)
    for inner, whole in attention:
        yield f"self_attention.{inner}", whole
    for inner, whole in _mlp(at, c):
        yield f"mlp.{inner}", whole


def _attention(at: State, c: Any) -> Iterator[tuple[str, Whole]]:
    groups = c.num_key_value_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in at:
            continue
        q, k, v = (at[f"self_attn.{letter}_proj.{kind}"] for letter in "qkv")
        rows = []
        per_group = q.shape[0] // groups
        for group in range(groups):
            own = q[group * per_group : (group + 1) * per_group]
            if per_group == 2 * size * (c.num_attention_heads // groups):
                # A head, then its gate; Megatron has all heads of a group, then all gates.
                heads = own.view(-1, 2, size, *own.shape[1:])
                rows += [
                    heads[:, 0].reshape(-1, *own.shape[1:]),
                    heads[:, 1].reshape(-1, *own.shape[1:]),
                ]
            else:
                rows.append(own)
            rows += [k[group * size : (group + 1) * size], v[group * size : (group + 1) * size]]
        yield f"linear_qkv.{kind}", Whole(torch.cat(rows), 0)
    yield "linear_proj.weight", Whole(at["self_attn.o_proj.weight"], 1)
    if "self_attn.o_proj.bias" in at:
        yield "linear_proj.bias", Whole(at["self_attn.o_proj.bias"])
    if "self_attn.sinks" in at:
        yield "core_attention.softmax_offset", Whole(at["self_attn.sinks"], 0)
    for letter in "qk":
        if f"self_attn.{letter}_norm.weight" in at:
            yield f"{letter}_layernorm.weight", Whole(at[f"self_attn.{letter}_norm.weight"])


def _latent(at: State) -> Iterator[tuple[str, Whole]]:
    if "self_attn.q_proj.weight" in at:
        yield "linear_q_proj.weight", Whole(at["self_attn.q_proj.weight"], 0)
    else:
        yield "linear_q_down_proj.weight", Whole(at["self_attn.q_a_proj.weight"], 0)
        yield "q_layernorm.weight", Whole(at["self_attn.q_a_layernorm.weight"])
        yield "linear_q_up_proj.weight", Whole(at["self_attn.q_b_proj.weight"], 0)
    yield "linear_kv_down_proj.weight", Whole(at["self_attn.kv_a_proj_with_mqa.weight"], 0)
    yield "kv_layernorm.weight", Whole(at["self_attn.kv_a_layernorm.weight"])
    yield "linear_kv_up_proj.weight", Whole(at["self_attn.kv_b_proj.weight"], 0)
    yield "linear_proj.weight", Whole(at["self_attn.o_proj.weight"], 1)


def _delta_net(at: State, c: Any) -> Iterator[tuple[str, Whole]]:
    qk = c.linear_num_key_heads * c.linear_key_head_dim
    v, heads = c.linear_num_value_heads * c.linear_value_head_dim, c.linear_num_value_heads
    parts = [at[f"linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
    yield "in_proj.weight", Whole(torch.cat(parts), 0, (qk, qk, v, v, heads, heads))
    yield "conv1d.weight", Whole(at["linear_attn.conv1d.weight"], 0, (qk, qk, v))
    yield "dt_bias", Whole(at["linear_attn.dt_bias"], 0)
    yield "A_log", Whole(at["linear_attn.A_log"], 0)
    # The tests' norm scales by 1 + weight, as Megatron's does with zero-centered gamma.
    yield "out_norm.weight", Whole(at["linear_attn.norm.weight"] - 1)
    yield "out_proj.weight", Whole(at["linear_attn.out_proj.weight"], 1)


def _mlp(at: State, c: Any) -> Iterator[tuple[str, Whole]]:
    if "mlp.gate_up_proj.weight" in at:
        yield from _fc(*at["mlp.gate_up_proj.weight"].chunk(2), at["mlp.down_proj.weight"], "")
    elif "mlp.gate_proj.weight" in at:
        yield from _gate_up_down(at, "mlp.", "")
    for router in ("mlp.gate.", "mlp.router."):
        if f"{router}weight" in at:
            yield "router.weight", Whole(at[f"{router}weight"])
        if f"{router}bias" in at:
            yield "router.bias", Whole(at[f"{router}bias"])
    if "mlp.gate.e_score_correction_bias" in at:
        yield "router.expert_bias", Whole(at["mlp.gate.e_score_correction_bias"])
    for shared in ("mlp.shared_experts.", "mlp.shared_expert."):
        if f"{shared}gate_proj.weight" in at:
            yield from _gate_up_down(at, shared, "shared_experts.")
    if "mlp.shared_expert_gate.weight" in at:
        yield "shared_experts.gate_weight", Whole(at["mlp.shared_expert_gate.weight"])
    fused = at.get("mlp.experts.gate_up_proj")
    if fused is not None:
        yield from _fused_experts(at, fused)
    expert = 0
    while f"mlp.experts.{expert}.gate_proj.weight" in at:
        yield from _gate_up_down(at, f"mlp.experts.{expert}.", f"experts.local_experts.{expert}.")
        expert += 1


def _gate_up_down(at: State, hf: str, megatron: str) -> Iterator[tuple[str, Whole]]:
    gate, up, down = (at[f"{hf}{part}_proj.weight"] for part in ("gate", "up", "down"))
    yield from _fc(gate, up, down, megatron)


def _fc(gate: Tensor, up: Tensor, down: Tensor, megatron: str) -> Iterator[tuple[str, Whole]]:
    width = gate.shape[0]
    yield f"{megatron}linear_fc1.weight", Whole(torch.cat([gate, up]), 0, (width, width))
    yield f"{megatron}linear_fc2.weight", Whole(down, 1)


def _fused_experts(at: State, fused: Tensor) -> Iterator[tuple[str, Whole]]:
    biases = at.get("mlp.experts.gate_up_proj_bias")
    for expert in range(fused.shape[0]):
        to = f"experts.local_experts.{expert}."
        rows, down = fused[expert], at["mlp.experts.down_proj"][expert]
        if biases is None:
            yield from _fc(*rows.chunk(2), down, to)
            continue
        # GPT-OSS: columns for rows, and gate and up in turn.
        rows = rows.T
        yield from _fc(rows[0::2], rows[1::2], down.T, to)
        bias = biases[expert]
        width = bias.shape[0] // 2
        both = torch.cat([bias[0::2], bias[1::2]])
        yield f"{to}linear_fc1.bias", Whole(both, 0, (width, width))
        yield f"{to}linear_fc2.bias", Whole(at["mlp.experts.down_proj_bias"][expert])
