"""The tiny models of the zoo as Megatron-core models that train on a CPU, or on a GPU."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rdt.sources.mbridge import unwrap
from sglang_rdt.demo.trainer import Layout, TinyTrainer, _init_model_parallel

from . import to_megatron
from .zoo import FAMILIES

SEED = 7
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=experts\.local_experts\.)(\d+)(?=\.)")


def hf_config(name: str, *, tied: bool = False, nolora: bool = False, **sizes: Any) -> Any:
    """The zoo's config, where Megatron can do the same.

    Args:
        tied: one tensor for embedding and head.
        nolora: latent attention without a down projection of the queries, as Moonlight has it.
        sizes: other numbers than the zoo's.
    """
    family = FAMILIES[name]
    config = family.make_config(**sizes)
    config.tie_word_embeddings = tied
    if nolora:
        config.q_lora_rank = None
    if name == "llama3":
        # megatron-core has this number in its code.
        config.rope_parameters["original_max_position_embeddings"] = 8192
    return config


def hf_state(
    name: str, dtype: torch.dtype, mtp: bool = False, seed: int = SEED, **config_options: Any
) -> dict[str, Tensor]:
    """Checkpoint tensors, every one random. Copies of others are copies."""
    config = hf_config(name, **config_options)
    family = FAMILIES[name]
    state = family.hf_state(seed, dtype, config, mtp=mtp)
    for key, tensor in state.items():
        if "linear_attn.norm" in key:
            # So that to take 1 away and to add it again changes nothing.
            state[key] = ((tensor * 64).round() / 64).to(dtype)
        elif key.endswith("A_log"):
            state[key] = tensor.to(dtype)
        elif key.endswith("e_score_correction_bias"):
            # Megatron's Float16Module rounds it before it is float32 again.
            state[key] = tensor.to(dtype).float()
    behind = f"model.layers.{config.num_hidden_layers}."
    for copy, original in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        if behind + copy in state:
            state[behind + copy] = state[original]
    return state


class FamilyTrainer(TinyTrainer):
    """A family's model, its DDP, its optimizer and its schedule; see :class:`TinyTrainer`."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        mtp: bool = False,
        lr: float = 1e-3,
        device: str = "cpu",
        seed: int = SEED,
        **config_options: Any,
    ) -> None:
        if device == "cpu":
            from megatron_rdt import cpu

            cpu.install()  # before megatron.core is imported
        elif FAMILIES[name].mla:
            _let_attention_be_latent()
        self.family, self.layout, self.mtp = name, layout, mtp
        self.hf_config, self._options = hf_config(name, **config_options), config_options
        self.padded_vocab = -(-self.hf_config.vocab_size // 32) * 32
        self.model = SimpleNamespace(vocab=self.hf_config.vocab_size)  # type: ignore[assignment]
        self.rank, self.steps = torch.distributed.get_rank(), 0
        self._dtype, self._seed, self._device = dtype, seed, torch.device(device)
        self._stale_after_step = False
        _init_model_parallel(layout, SEED)
        self.config = _transformer_config(name, self.hf_config, layout, dtype, mtp)
        self.model_chunks = self._build_chunks(use_distributed_optimizer=False)
        # Large enough to change a bfloat16 near 1.
        self.optimizer = self._build_optimizer(lr if dtype == torch.float32 else 2e-2, False, False)

    def _build_chunk(self, vpp_rank: int | None) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        block = _block_spec(self.family, self.hf_config, self.config)
        rope = getattr(self.hf_config, "rope_parameters", {})
        more: dict[str, Any] = {}
        if self.family == "llama3":
            more = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        if self.mtp:
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(
                self.config, block, use_transformer_engine=False
            )
        chunk = GPTModel(
            config=self.config,
            transformer_layer_spec=block,
            vocab_size=self.padded_vocab,
            max_sequence_length=self.hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,
            position_embedding_type="yarn" if self.family == "gpt_oss" else "rope",
            rotary_base=int(rope["rope_theta"]),
            rotary_percent=rope.get("partial_rotary_factor", 1.0),
            **more,
        )
        return chunk.to(self._device)

    def _load_initial_weights(self, chunks: list[Any]) -> None:
        state = hf_state(self.family, self._dtype, self.mtp, self._seed, **self._options)
        self.load(state, chunks)

    def logits(self, ids: Tensor) -> Tensor:
        """Without the layers of multi-token prediction, which Megatron runs with labels only."""
        models = [unwrap(chunk) for chunk in self.model_chunks]
        before = self.config.mtp_num_layers, [model.mtp_process for model in models]
        self.config.mtp_num_layers = None
        for model in models:
            model.mtp_process = False
        try:
            return super().logits(ids)
        finally:
            self.config.mtp_num_layers = before[0]
            for model, process in zip(models, before[1], strict=True):
                model.mtp_process = process

    def load(self, state: dict[str, Tensor], chunks: list[Any]) -> None:
        """Puts checkpoint tensors into the parameters of this rank."""
        from megatron.core import parallel_state as ps

        found = to_megatron.wholes(self.family, state, self.hf_config, self.padded_vocab)
        tp = ps.get_tensor_model_parallel_rank(), self.layout.tp
        etp = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
        experts = (self.config.num_moe_experts or 0) // self.layout.ep
        first = experts * ps.get_expert_model_parallel_rank()
        for chunk in chunks:
            live = [*chunk.named_parameters()]
            live += [(n, b) for n, b in chunk.named_buffers() if n.endswith("expert_bias")]
            for raw, tensor in live:
                if raw == "output_layer.weight" and self.hf_config.tie_word_embeddings:
                    raw = "embedding.word_embeddings.weight"  # the last stage's copy
                name = _LAYER.sub(
                    lambda m, c=chunk: (  # type: ignore[misc]
                        f"decoder.layers.{c.decoder.layers[int(m[1])].layer_number - 1}."
                    ),
                    raw,
                )
                is_expert = "local_experts" in name
                name = _EXPERT.sub(lambda m: str(int(m[1]) + first), name)
                value = found[name].shard(*(etp if is_expert else tp))
                assert value.shape == tensor.shape, (name, value.shape, tensor.shape)
                with torch.no_grad():
                    tensor.copy_(value)


def _transformer_config(name: str, c: Any, layout: Layout, dtype: torch.dtype, mtp: bool) -> Any:
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    family = FAMILIES[name]
    options: dict[str, Any] = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "ffn_hidden_size": getattr(c, "intermediate_size", None) or c.moe_intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "kv_channels": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": c.rms_norm_eps,
        "qk_layernorm": name in ("qwen3", "qwen3_moe", "qwen3_5_moe") or family.mla,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": name in ("qwen2_5", "glm4", "glm4_moe"),
        "rotary_interleaved": name == "glm4",
        "mtp_num_layers": 1 if mtp else None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": family.moe and layout.tp > 1,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if family.moe:
        options |= _moe_options(name, c)
    if name == "gpt_oss":
        options |= _gpt_oss_options(c)
    if name == "qwen3_5_moe":
        options |= {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(t == "linear_attention") for t in c.layer_types],
            "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
            "linear_key_head_dim": c.linear_key_head_dim,
            "linear_value_head_dim": c.linear_value_head_dim,
            "linear_num_key_heads": c.linear_num_key_heads,
            "linear_num_value_heads": c.linear_num_value_heads,
            # The plain torch form of the delta rule.
            "deterministic_mode": True,
        }
    rope = c.rope_parameters
    if name == "gpt_oss":
        return _yarn(TransformerConfig(**options), rope)
    if not family.mla:
        return TransformerConfig(**options)
    return MLATransformerConfig(
        **{
            **options,
            "kv_channels": c.v_head_dim,
            "q_lora_rank": c.q_lora_rank,
            "kv_lora_rank": c.kv_lora_rank,
            "qk_head_dim": c.qk_nope_head_dim,
            "qk_pos_emb_head_dim": c.qk_rope_head_dim,
            "v_head_dim": c.v_head_dim,
            "rope_type": "yarn",
            "rotary_base": rope["rope_theta"],
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope["beta_fast"],
            "beta_slow": rope["beta_slow"],
            "mscale": rope["mscale"],
            "mscale_all_dim": rope["mscale_all_dim"],
        }
    )


def _moe_options(name: str, c: Any) -> dict[str, Any]:
    experts = next(
        n
        for n in (
            getattr(c, k, None) for k in ("n_routed_experts", "num_experts", "num_local_experts")
        )
        if n
    )
    options: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(c, "moe_intermediate_size", None) or c.intermediate_size,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": False,
    }
    if hasattr(c, "n_shared_experts"):
        options |= {
            "moe_shared_expert_intermediate_size": c.moe_intermediate_size * c.n_shared_experts,
            "moe_layer_freq": [int(i > 0) for i in range(c.num_hidden_layers)],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-3,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": c.routed_scaling_factor,
        }
        if c.n_group > 1:
            options |= {
                "moe_router_num_groups": c.n_group,
                "moe_router_group_topk": c.topk_group,
            }
    if hasattr(c, "shared_expert_intermediate_size"):
        options |= {
            "moe_shared_expert_intermediate_size": c.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    return options


def _gpt_oss_options(c: Any) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": (c.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(t == "sliding_attention") for t in c.layer_types],
    }


def _yarn(config: Any, rope: dict[str, Any]) -> Any:
    """What GPTModel reads off the config, though it is no field of it."""
    config.yarn_rotary_scaling_factor = rope["factor"]
    config.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
    config.yarn_beta_fast, config.yarn_beta_slow = rope["beta_fast"], rope["beta_slow"]
    config.yarn_mscale = config.yarn_mscale_all_dim = None
    config.yarn_correction_range_round_to_int = rope["truncate"]
    return config


def _block_spec(name: str, c: Any, config: Any) -> Any:
    """Layers of this stage."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if name == "qwen3_5_moe":
        every = _qwen3_5_layers(c, config)
        offset, count = get_transformer_layer_offset(config), get_num_layers_to_build(config)
        return TransformerBlockSubmodules(
            layer_specs=every[offset : offset + count], layer_norm=ZeroCenteredNorm
        )
    if name == "glm4":
        spec = get_gpt_layer_local_spec(qk_layernorm=False, normalization="RMSNorm")
        spec.module = _sandwich_layer()
        return spec
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    if name == "gpt_oss":
        for spec in block.layer_specs:
            _submodules(_submodules(spec.submodules.mlp).experts).linear_fc2 = _own_output()
    return block


def _submodules(spec: Any) -> Any:
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _own_output() -> type:
    """Megatron adds the bias to the output in place, which autograd forbids where the output is a
    view: without TP, and not with TransformerEngine's layer."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class OwnOutput(RowParallelLinear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, bias = super().forward(x)
            return out.clone(), bias

    return OwnOutput


def _qwen3_5_layers(c: Any, config: Any) -> list[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm import gated_delta_net as gdn  # a module, and a package from 0.19 on
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    # flash-linear-attention is CUDA; the plain form needs this one function of it.
    for module in (gdn, getattr(gdn, "common", None), getattr(gdn, "gdn", None)):
        if module is not None:
            module.HAVE_FLA, module.l2norm = True, _l2norm

    def layer(kind: str) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
        )
        inner = spec.submodules
        inner.input_layernorm = inner.pre_mlp_layernorm = ZeroCenteredNorm
        if kind == "linear_attention":
            inner.self_attention = ModuleSpec(
                module=gdn.GatedDeltaNet,
                submodules=gdn.GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear,
                    out_norm=ZeroCenteredNorm,
                    out_proj=RowParallelLinear,
                ),
            )
        else:
            own = inner.self_attention.submodules
            own.q_layernorm = own.k_layernorm = ZeroCenteredNorm
        return spec

    return [layer(kind) for kind in c.layer_types]


def _let_attention_be_latent() -> None:
    """Without TransformerEngine, Megatron's own attention cannot be built for it."""
    from megatron.core.transformer import dot_product_attention

    from megatron_rdt.cpu import _dot_product_attention

    _dot_product_attention(dot_product_attention)


def _l2norm(x: Tensor, **_: Any) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ZeroCenteredNorm(nn.Module):
    """As TransformerEngine's RMSNorm with zero-centered gamma, which torch's cannot do."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


def _sandwich_layer() -> type:
    """GLM-4's layer, as frameworks add it to Megatron: a norm behind each block, too."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class SandwichLayer(TransformerLayer):
        def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, submodules, *args, **kwargs)
            for block, name in (
                ("self_attn", "post_self_attn_layernorm"),
                ("mlp", "post_mlp_layernorm"),
            ):
                norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)
                setattr(self, name, norm)
                setattr(self, f"{block}_bda", _normed(getattr(self, f"{block}_bda"), norm))

    return SandwichLayer


def _normed(add: Any, norm: Any) -> Any:
    def make(*options: Any) -> Any:
        plain = add(*options)

        def run(out_with_bias: Any, residual: Tensor, dropout: float) -> Tensor:
            out, bias = out_with_bias
            return plain((norm(out if bias is None else out + bias), None), residual, dropout)

        return run

    return make
