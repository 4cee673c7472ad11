"""One tiny random model per family: its config, and the tensors of a checkpoint.

Names and shapes are written out as released checkpoints have them, not taken from any model class,
so that they can judge all of them: transformers' models, SGLang's loaders, Megatron's bridges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# SGLang pads a vocabulary to a multiple of 64: this one needs padding.
VOCAB = 500
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 128
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
# The least that an engine at TP 2 on a CPU does not pad.
MOE_INTERMEDIATE = 64
MAX_POSITIONS = 512
NORM_EPS = 1e-5
# Large enough that greedy tokens of a random model vary.
_STD = 0.2

# Name, shape, and the dtype where it is not that of the checkpoint.
_Tensor = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
        name: as in :data:`FAMILIES`.
        stands_for: models that people train.
        architecture: class name in transformers and SGLang.
        moe: whether it has experts.
        mla: whether it has multi-head latent attention.
        notes: what is peculiar about its checkpoints.
    """

    name: str
    stands_for: str
    architecture: str
    _config: Callable[..., Any]
    _tensors: Callable[[Any], Iterator[_Tensor]]
    _mtp: Callable[[Any], Iterator[_Tensor]] | None = None
    moe: bool = False
    mla: bool = False
    notes: str = ""

    @property
    def has_mtp(self) -> bool:
        """Whether released checkpoints have a multi-token-prediction layer (that we describe)."""
        return self._mtp is not None

    def make_config(self, **overrides: Any) -> Any:
        """The transformers config; ``overrides`` go to the family's own config class."""
        config = self._config(**overrides)
        config.architectures = [self.architecture]
        return config

    def hf_shapes(
        self, config: Any = None, *, mtp: bool = False
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Name -> shape and dtype (None: the checkpoint's) of every tensor of a checkpoint.

        ``mtp``: with those of the multi-token-prediction layer.
        """
        config = self.make_config() if config is None else config
        tensors = [*self._tensors(config)]
        if mtp:
            if self._mtp is None:
                raise ValueError(f"{self.name} has no multi-token-prediction layer")
            tensors += self._mtp(config)
        return {t[0]: (t[1], t[2] if len(t) == 3 else None) for t in tensors}

    def hf_state(
        self,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        config: Any = None,
        *,
        mtp: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Random checkpoint tensors: weights and biases around 0, norms around 1.

        Everything is random, so that no mix-up goes unnoticed. The same seed gives the same
        numbers, rounded to ``dtype``. Tensors that checkpoints keep in float32 are float32.
        """
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for name, (shape, own) in self.hf_shapes(config, mtp=mtp).items():
            numbers = torch.randn(shape, generator=generator) * _STD
            if "norm" in name or name.endswith("A_log"):
                numbers = numbers + 1
            state[name] = numbers.to(own or dtype)
        return state


def _common(**overrides: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": False,
        "initializer_range": _STD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **overrides,
    }


def _rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _yarn(theta: float = 10000.0) -> dict[str, Any]:
    """SGLang's rotary embedding of MLA models on a CPU exists for this kind only."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITIONS // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


# -- what the families have in common -----------------------------------------------------------


def _embedding(c: Any, prefix: str = "model.") -> Iterator[_Tensor]:
    yield f"{prefix}embed_tokens.weight", (c.vocab_size, c.hidden_size)


def _head(c: Any, prefix: str = "model.") -> Iterator[_Tensor]:
    yield f"{prefix}norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def _norms(c: Any, layer: str, *names: str) -> Iterator[_Tensor]:
    for name in names or ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}{name}.weight", (c.hidden_size,)


def _attention(
    c: Any,
    layer: str,
    *,
    bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
) -> Iterator[_Tensor]:
    at = f"{layer}self_attn."
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv = c.num_attention_heads * dim, c.num_key_value_heads * dim
    for letter, rows in (("q", 2 * q if gated else q), ("k", kv), ("v", kv)):
        yield f"{at}{letter}_proj.weight", (rows, c.hidden_size)
        if bias:
            yield f"{at}{letter}_proj.bias", (rows,)
    yield f"{at}o_proj.weight", (c.hidden_size, q)
    if o_bias:
        yield f"{at}o_proj.bias", (c.hidden_size,)
    if qk_norm:
        yield f"{at}q_norm.weight", (dim,)
        yield f"{at}k_norm.weight", (dim,)


def _mla(c: Any, layer: str) -> Iterator[_Tensor]:
    at = f"{layer}self_attn."
    q_rows = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.q_lora_rank is None:
        yield f"{at}q_proj.weight", (q_rows, c.hidden_size)
    else:
        yield f"{at}q_a_proj.weight", (c.q_lora_rank, c.hidden_size)
        yield f"{at}q_a_layernorm.weight", (c.q_lora_rank,)
        yield f"{at}q_b_proj.weight", (q_rows, c.q_lora_rank)
    yield (
        f"{at}kv_a_proj_with_mqa.weight",
        (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
    )
    yield f"{at}kv_a_layernorm.weight", (c.kv_lora_rank,)
    kv_rows = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    yield f"{at}kv_b_proj.weight", (kv_rows, c.kv_lora_rank)
    yield f"{at}o_proj.weight", (c.hidden_size, c.num_attention_heads * c.v_head_dim)


def _mlp(c: Any, prefix: str, width: int) -> Iterator[_Tensor]:
    yield f"{prefix}gate_proj.weight", (width, c.hidden_size)
    yield f"{prefix}up_proj.weight", (width, c.hidden_size)
    yield f"{prefix}down_proj.weight", (c.hidden_size, width)


def _experts(c: Any, layer: str, count: int) -> Iterator[_Tensor]:
    for expert in range(count):
        yield from _mlp(c, f"{layer}mlp.experts.{expert}.", c.moe_intermediate_size)


def _deepseek_moe(c: Any, layer: str) -> Iterator[_Tensor]:
    """The router with its correction bias, the routed experts, the shared ones as one MLP."""
    yield f"{layer}mlp.gate.weight", (c.n_routed_experts, c.hidden_size)
    yield f"{layer}mlp.gate.e_score_correction_bias", (c.n_routed_experts,), torch.float32
    yield from _experts(c, layer, c.n_routed_experts)
    shared = c.moe_intermediate_size * c.n_shared_experts
    yield from _mlp(c, f"{layer}mlp.shared_experts.", shared)


def _layers(c: Any, prefix: str = "model.") -> Iterator[tuple[int, str]]:
    for layer in range(c.num_hidden_layers):
        yield layer, f"{prefix}layers.{layer}."


def _mtp_layer(c: Any, decoder: Callable[[Any, str], Iterator[_Tensor]]) -> Iterator[_Tensor]:
    """The layer behind the last one that predicts the token after the next."""
    layer = f"model.layers.{c.num_hidden_layers}."
    yield f"{layer}embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield from _norms(c, layer, "enorm", "hnorm")
    yield f"{layer}eh_proj.weight", (c.hidden_size, 2 * c.hidden_size)
    yield from _norms(c, layer)
    yield from decoder(c, layer)
    yield f"{layer}shared_head.norm.weight", (c.hidden_size,)
    yield f"{layer}shared_head.head.weight", (c.vocab_size, c.hidden_size)


# -- dense ----------------------------------------------------------------------------------------


def _qwen2_5_config(**overrides: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_common(**{"rope_parameters": _rope(1e6), **overrides}))


def _qwen2_5(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for _, layer in _layers(c):
        yield from _norms(c, layer)
        yield from _attention(c, layer, bias=True)
        yield from _mlp(c, f"{layer}mlp.", c.intermediate_size)
    yield from _head(c)


def _qwen3_config(**overrides: Any) -> Any:
    from transformers import Qwen3Config

    own = {"head_dim": HEAD_DIM, "rope_parameters": _rope(1e6)}
    return Qwen3Config(**_common(**{**own, **overrides}))


def _qwen3(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for _, layer in _layers(c):
        yield from _norms(c, layer)
        yield from _attention(c, layer, qk_norm=True)
        yield from _mlp(c, f"{layer}mlp.", c.intermediate_size)
    yield from _head(c)


def _llama3_config(**overrides: Any) -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": MAX_POSITIONS // 4,
    }
    own = {"head_dim": HEAD_DIM, "rope_parameters": rope}
    return LlamaConfig(**_common(**{**own, **overrides}))


def _llama3(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for _, layer in _layers(c):
        yield from _norms(c, layer)
        yield from _attention(c, layer)
        yield from _mlp(c, f"{layer}mlp.", c.intermediate_size)
    yield from _head(c)


def _glm4_config(**overrides: Any) -> Any:
    from transformers import Glm4Config

    rope = _rope(partial_rotary_factor=0.5)
    own = {"head_dim": HEAD_DIM, "attention_bias": True, "rope_parameters": rope}
    return Glm4Config(**_common(**{**own, **overrides}))


def _glm4(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for _, layer in _layers(c):
        yield from _norms(
            c,
            layer,
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        )
        yield from _attention(c, layer, bias=c.attention_bias)
        yield f"{layer}mlp.gate_up_proj.weight", (2 * c.intermediate_size, c.hidden_size)
        yield f"{layer}mlp.down_proj.weight", (c.hidden_size, c.intermediate_size)
    yield from _head(c)


# -- mixture of experts -----------------------------------------------------------------------------


def _qwen3_moe_config(**overrides: Any) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **{
            **_common(
                head_dim=HEAD_DIM,
                rope_parameters=_rope(1e6),
                num_experts=EXPERTS,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                moe_intermediate_size=MOE_INTERMEDIATE,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            ),
            **overrides,
        }
    )


def _qwen3_moe(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for _, layer in _layers(c):
        yield from _norms(c, layer)
        yield from _attention(c, layer, qk_norm=True)
        yield f"{layer}mlp.gate.weight", (c.num_experts, c.hidden_size)
        yield from _experts(c, layer, c.num_experts)
    yield from _head(c)


def _qwen3_5_moe_config(**overrides: Any) -> Any:
    from transformers import Qwen3_5MoeTextConfig

    common = _common(
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        rope_parameters=_rope(1e6, partial_rotary_factor=0.5),
        linear_conv_kernel_dim=4,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=MOE_INTERMEDIATE,
        shared_expert_intermediate_size=MOE_INTERMEDIATE,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )
    del common["intermediate_size"]
    config = Qwen3_5MoeTextConfig(**{**common, **overrides})
    # In the released config.json, and what SGLang reads; transformers' class keeps the list only.
    config.full_attention_interval = 4
    return config


def _gated_delta_net(c: Any, layer: str) -> Iterator[_Tensor]:
    at = f"{layer}linear_attn."
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    yield f"{at}in_proj_qkv.weight", (2 * keys + values, c.hidden_size)
    yield f"{at}in_proj_z.weight", (values, c.hidden_size)
    yield f"{at}in_proj_b.weight", (c.linear_num_value_heads, c.hidden_size)
    yield f"{at}in_proj_a.weight", (c.linear_num_value_heads, c.hidden_size)
    yield f"{at}conv1d.weight", (2 * keys + values, 1, c.linear_conv_kernel_dim)
    yield f"{at}dt_bias", (c.linear_num_value_heads,)
    yield f"{at}A_log", (c.linear_num_value_heads,), torch.float32
    yield f"{at}norm.weight", (c.linear_value_head_dim,), torch.float32
    yield f"{at}out_proj.weight", (c.hidden_size, values)


def _qwen3_5_moe(c: Any) -> Iterator[_Tensor]:
    prefix = "model.language_model."
    yield from _embedding(c, prefix)
    for i, layer in _layers(c, prefix):
        yield from _norms(c, layer)
        if c.layer_types[i] == "linear_attention":
            yield from _gated_delta_net(c, layer)
        else:
            yield from _attention(c, layer, qk_norm=True, gated=True)
        yield f"{layer}mlp.gate.weight", (c.num_experts, c.hidden_size)
        width = c.moe_intermediate_size
        yield f"{layer}mlp.experts.gate_up_proj", (c.num_experts, 2 * width, c.hidden_size)
        yield f"{layer}mlp.experts.down_proj", (c.num_experts, c.hidden_size, width)
        yield from _mlp(c, f"{layer}mlp.shared_expert.", c.shared_expert_intermediate_size)
        yield f"{layer}mlp.shared_expert_gate.weight", (1, c.hidden_size)
    yield from _head(c, prefix)


def _glm4_moe_config(**overrides: Any) -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **{
            **_common(
                head_dim=HEAD_DIM,
                attention_bias=True,
                rope_parameters=_rope(1e6, partial_rotary_factor=0.5),
                n_routed_experts=EXPERTS,
                n_shared_experts=1,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                moe_intermediate_size=MOE_INTERMEDIATE,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
                routed_scaling_factor=1.5,
                norm_topk_prob=True,
                use_qk_norm=False,
                num_nextn_predict_layers=1,
            ),
            **overrides,
        }
    )


def _glm4_moe_decoder(c: Any, layer: str) -> Iterator[_Tensor]:
    yield from _attention(c, layer, bias=c.attention_bias, qk_norm=c.use_qk_norm)
    yield from _deepseek_moe(c, layer)


def _glm4_moe(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for i, layer in _layers(c):
        yield from _norms(c, layer)
        if i < c.first_k_dense_replace:
            yield from _attention(c, layer, bias=c.attention_bias, qk_norm=c.use_qk_norm)
            yield from _mlp(c, f"{layer}mlp.", c.intermediate_size)
        else:
            yield from _glm4_moe_decoder(c, layer)
    yield from _head(c)


def _mla_sizes() -> dict[str, Any]:
    # Full-sized models have as many key-value heads as heads: the cache holds one latent vector.
    return {
        "num_key_value_heads": HEADS,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    }


def _glm4_moe_lite_config(**overrides: Any) -> Any:
    from transformers import Glm4MoeLiteConfig

    config = Glm4MoeLiteConfig(
        **{
            **_common(),
            **_mla_sizes(),
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _yarn(1e6),
            "mlp_layer_types": ["dense", "sparse"],
            **overrides,
        }
    )
    # In the released config.json, and what SGLang reads; transformers' class has a list instead.
    config.first_k_dense_replace = 1
    config.moe_layer_freq = 1
    return config


def _deepseek_v3_config(**overrides: Any) -> Any:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **{
            **_common(),
            **_mla_sizes(),
            "n_routed_experts": 2 * EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": _yarn(),
            "num_nextn_predict_layers": 1,
            **overrides,
        }
    )
    # In the released config.json, and what SGLang reads; transformers' class does not have them.
    config.moe_layer_freq = 1
    config.topk_method = "noaux_tc"
    config.scoring_func = "sigmoid"
    return config


def _mla_decoder(c: Any, layer: str) -> Iterator[_Tensor]:
    yield from _mla(c, layer)
    yield from _deepseek_moe(c, layer)


def _mla_model(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    for i, layer in _layers(c):
        yield from _norms(c, layer)
        if i < c.first_k_dense_replace:
            yield from _mla(c, layer)
            yield from _mlp(c, f"{layer}mlp.", c.intermediate_size)
        else:
            yield from _mla_decoder(c, layer)
    yield from _head(c)


def _gpt_oss_config(**overrides: Any) -> Any:
    from transformers import GptOssConfig

    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": MAX_POSITIONS // 4,
    }
    config = GptOssConfig(
        **{
            **_common(),
            "intermediate_size": MOE_INTERMEDIATE,
            "head_dim": HEAD_DIM,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": rope,
            **overrides,
        }
    )
    # In the released config.json, and what SGLang reads; transformers' class does not have it.
    config.swiglu_limit = 7.0
    return config


def _gpt_oss(c: Any) -> Iterator[_Tensor]:
    yield from _embedding(c)
    width = c.intermediate_size
    for _, layer in _layers(c):
        yield from _norms(c, layer)
        yield from _attention(c, layer, bias=True, o_bias=True)
        yield f"{layer}self_attn.sinks", (c.num_attention_heads,)
        yield f"{layer}mlp.router.weight", (c.num_local_experts, c.hidden_size)
        yield f"{layer}mlp.router.bias", (c.num_local_experts,)
        experts = f"{layer}mlp.experts."
        # Input rows first, and gate and up columns in turn, unlike everybody else.
        yield f"{experts}gate_up_proj", (c.num_local_experts, c.hidden_size, 2 * width)
        yield f"{experts}gate_up_proj_bias", (c.num_local_experts, 2 * width)
        yield f"{experts}down_proj", (c.num_local_experts, width, c.hidden_size)
        yield f"{experts}down_proj_bias", (c.num_local_experts, c.hidden_size)
    yield from _head(c)


_ALL = (
    Family("qwen2_5", "Qwen2.5", "Qwen2ForCausalLM", _qwen2_5_config, _qwen2_5),
    Family("qwen3", "Qwen3-8B", "Qwen3ForCausalLM", _qwen3_config, _qwen3),
    Family(
        "qwen3_moe",
        "Qwen3-30B-A3B, Qwen3-235B-A22B",
        "Qwen3MoeForCausalLM",
        _qwen3_moe_config,
        _qwen3_moe,
        moe=True,
    ),
    Family(
        "qwen3_5_moe",
        "Qwen3.5-35B-A3B, its language model",
        "Qwen3_5MoeForCausalLM",
        _qwen3_5_moe_config,
        _qwen3_5_moe,
        moe=True,
        notes="Fused experts; A_log and the gated norm are float32; names carry language_model.",
    ),
    Family("llama3", "Llama 3", "LlamaForCausalLM", _llama3_config, _llama3),
    Family(
        "glm4",
        "GLM-Z1-9B",
        "Glm4ForCausalLM",
        _glm4_config,
        _glm4,
        notes="Norms before and after each block; gate and up in one tensor.",
    ),
    Family(
        "glm4_moe",
        "GLM-4.5-Air",
        "Glm4MoeForCausalLM",
        _glm4_moe_config,
        _glm4_moe,
        lambda c: _mtp_layer(c, _glm4_moe_decoder),
        moe=True,
    ),
    Family(
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        "Glm4MoeLiteForCausalLM",
        _glm4_moe_lite_config,
        _mla_model,
        lambda c: _mtp_layer(c, _mla_decoder),
        moe=True,
        mla=True,
    ),
    Family(
        "deepseek_v3",
        "DeepSeek-V3, Moonlight, Kimi-K2",
        "DeepseekV3ForCausalLM",
        _deepseek_v3_config,
        _mla_model,
        lambda c: _mtp_layer(c, _mla_decoder),
        moe=True,
        mla=True,
        notes="Moonlight has no q_lora_rank: make_config(q_lora_rank=None).",
    ),
    Family(
        "gpt_oss",
        "GPT-OSS in bfloat16",
        "GptOssForCausalLM",
        _gpt_oss_config,
        _gpt_oss,
        moe=True,
        notes="Released in MXFP4; people train the bfloat16 form, whose names these are.",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
