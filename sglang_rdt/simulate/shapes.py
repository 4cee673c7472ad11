"""Model shapes: the HF tensors of a model, grouped by what becomes of them on either side.

Covered: Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE and DeepSeek-V3 (Kimi-K2) as they train: weights
in one dtype, no quantised blocks with scales. Left out: layers for multi-token prediction, LoRA,
vision towers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sglang_rdt.brief import brief
from sglang_rdt.plan.specs import TensorSpec
from sglang_rdt.simulate.errors import SimulateError

Kind = Literal["whole", "column", "row", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class Unit:
    """HF tensors that an engine keeps in one parameter.

    Args:
        kind: how tensor parallelism cuts it: "whole": not at all (several tensors are one below
            the other); "column": by rows of the tensor, which are the output; "row": by columns;
            "vocab": by rows, padded; "qkv": query, key and value, by groups of heads; "gate_up":
            both by rows, a rank's parts one below the other.
        param: the engine's parameter.
        tensors: in the order in which they lie in it.
    """

    kind: Kind
    param: str
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention.

    Args:
        q_rank: width that queries are compressed to; None: they are not.
        kv_rank: width that keys and values are compressed to.
        nope, rope: per head, without and with rotary embedding.
        v: width of a head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model.

    Args:
        name: what results call it.
        intermediate: width of a dense MLP.
        experts: routed experts per MoE layer; 0: the model is dense.
        moe_intermediate: width of one expert.
        shared_intermediate: width of all shared experts together; 0: there is none.
        dense_layers: so many layers at the beginning have no experts.
        router_bias: routers have a correction bias, in float32.
        qkv_bias, qk_norm: of attention other than MLA.
        tied: the output layer is the embedding.
        dtype: of everything but router biases.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    mla: Mla | None = None
    dtype: str = "bfloat16"

    @cached_property
    def embedding(self) -> Unit:
        """Of the first pipeline stage; where it is tied also of the last one."""
        return self._unit("vocab", "model.embed_tokens", (self.vocab, self.hidden))

    @cached_property
    def head(self) -> tuple[Unit, ...]:
        """Of the last pipeline stage; without the output layer where that is tied."""
        norm = self._unit("whole", "model.norm", (self.hidden,))
        if self.tied:
            return (norm,)
        return norm, self._unit("vocab", "lm_head", (self.vocab, self.hidden))

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def layer(self, number: int) -> tuple[Unit, ...]:
        """Everything in a layer but for its routed experts."""
        at, h = f"model.layers.{number}", self.hidden
        units = [self._unit("whole", f"{at}.input_layernorm", (h,))]
        units += self._mla(f"{at}.self_attn") if self.mla else self._gqa(f"{at}.self_attn")
        units.append(self._unit("whole", f"{at}.post_attention_layernorm", (h,)))
        if not self.is_moe(number):
            return (*units, *self._mlp(f"{at}.mlp", self.intermediate))
        units.append(self._unit("whole", f"{at}.mlp.gate", (self.experts, h)))
        if self.router_bias:
            name = f"{at}.mlp.gate.e_score_correction_bias"
            units.append(Unit("whole", name, (TensorSpec(name, (self.experts,), "float32"),)))
        if self.shared_intermediate:
            units += self._mlp(f"{at}.mlp.shared_experts", self.shared_intermediate)
        return tuple(units)

    def expert(self, layer: int, number: int) -> tuple[Unit, Unit]:
        """A routed expert's gate and up, and its down; their parameters hold all local experts."""
        at = f"model.layers.{layer}.mlp.experts"
        up, down = self._mlp(f"{at}.{number}", self.moe_intermediate)
        return (
            dataclasses.replace(up, param=f"{at}.w13_weight"),
            dataclasses.replace(down, param=f"{at}.w2_weight"),
        )

    def tensors(self) -> Iterator[TensorSpec]:
        """All HF tensors."""
        units = [self.embedding]
        for number in range(self.layers):
            units += self.layer(number)
            if self.is_moe(number):
                for e in range(self.experts):
                    units += self.expert(number, e)
        for unit in (*units, *self.head):
            yield from unit.tensors

    @property
    def parameters(self) -> int:
        """Elements of all HF tensors."""
        return sum(t.numel for t in self.tensors())

    def _unit(self, kind: Kind, name: str, *shapes: tuple[int, ...]) -> Unit:
        """A parameter that is called like its one tensor."""
        specs = tuple(TensorSpec(f"{name}.weight", s, self.dtype) for s in shapes)
        return Unit(kind, f"{name}.weight", specs)

    def _mlp(self, at: str, width: int) -> list[Unit]:
        up = [TensorSpec(f"{at}.{n}.weight", (width, self.hidden), self.dtype) for n in _GATE_UP]
        return [
            Unit("gate_up", f"{at}.gate_up_proj.weight", tuple(up)),
            self._unit("row", f"{at}.down_proj", (self.hidden, width)),
        ]

    def _gqa(self, at: str) -> list[Unit]:
        widths = [self.heads * self.head_dim] + [self.kv_heads * self.head_dim] * 2
        units = []
        for suffix, rest in (("weight", (self.hidden,)), ("bias", ())):
            if suffix == "weight" or self.qkv_bias:
                three = [
                    TensorSpec(f"{at}.{n}_proj.{suffix}", (width, *rest), self.dtype)
                    for n, width in zip("qkv", widths, strict=True)
                ]
                units.append(Unit("qkv", f"{at}.qkv_proj.{suffix}", tuple(three)))
        if self.qk_norm:
            units += [self._unit("whole", f"{at}.{n}_norm", (self.head_dim,)) for n in "qk"]
        units.append(self._unit("row", f"{at}.o_proj", (self.hidden, widths[0])))
        return units

    def _mla(self, at: str) -> list[Unit]:
        mla = self.mla
        assert mla is not None
        q_width, latent = self.heads * (mla.nope + mla.rope), mla.kv_rank + mla.rope
        kv_a = TensorSpec(f"{at}.kv_a_proj_with_mqa.weight", (latent, self.hidden), self.dtype)
        if mla.q_rank is None:
            units = [
                self._unit("column", f"{at}.q_proj", (q_width, self.hidden)),
                Unit("whole", kv_a.name, (kv_a,)),
            ]
        else:
            q_a = TensorSpec(f"{at}.q_a_proj.weight", (mla.q_rank, self.hidden), self.dtype)
            units = [
                Unit("whole", f"{at}.fused_qkv_a_proj_with_mqa.weight", (q_a, kv_a)),
                self._unit("whole", f"{at}.q_a_layernorm", (mla.q_rank,)),
                self._unit("column", f"{at}.q_b_proj", (q_width, mla.q_rank)),
            ]
        kv_b = (self.heads * (mla.nope + mla.v), mla.kv_rank)
        return [
            *units,
            self._unit("whole", f"{at}.kv_a_layernorm", (mla.kv_rank,)),
            self._unit("column", f"{at}.kv_b_proj", kv_b),
            self._unit("row", f"{at}.o_proj", (self.hidden, self.heads * mla.v)),
        ]


_GATE_UP = ("gate_proj", "up_proj")

# Sizes as in the models' own config.json.
NAMED: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama3-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 12288,
        "num_experts": 128,
        "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "intermediate_size": 10944,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "vocab_size": 151552,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "vocab_size": 163840,
    },
}
_GQA = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
_MLA = ("deepseek_v3", "kimi_k2")


# Of one size in a config.json, and of layers times experts: every matrix is simulated.
MAX_SIZE = 1 << 24
MAX_MATRICES = 1 << 20


def load_shape(text: str) -> ModelShape:
    """A named shape, or that of a folder with a ``config.json`` (or of such a file).

    Raises:
        SimulateError: there is no such model, or it is of a family that is not covered.
    """
    if text in NAMED:
        return from_config(text, NAMED[text])
    path = Path(text)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise SimulateError(
            f"--model {text}: neither one of {', '.join(NAMED)}, nor a folder with a config.json"
        )
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SimulateError(f"--model {text}: its config.json cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise SimulateError(f"--model {text}: its config.json is no JSON object")
    return from_config(config.resolve().parent.name, data)


def from_config(name: str, config: dict[str, Any]) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Raises:
        SimulateError: a family that is not covered, or a size that is missing or no number.
    """
    family = config.get("model_type")
    if family not in (*_GQA, *_MLA):
        raise SimulateError(
            f"{name}: model type {brief(family)} is not covered; there are {', '.join((*_GQA, *_MLA))}"
        )
    if family in ("llama", "qwen3", "qwen3_moe") and config.get("attention_bias"):
        raise SimulateError(f"{name}: biases on all of the attention are not covered")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise SimulateError(f"{name}: MoE models that skip layers are not covered")
    if config.get("moe_layer_freq", 1) != 1:
        raise SimulateError(f"{name}: MoE models that skip layers are not covered")

    def size(*keys: str, default: int | None = None) -> int:
        value = next((config[k] for k in keys if config.get(k) is not None), default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise SimulateError(
                f"{name}: config.json has {keys[0]} = {brief(value)}, expected a size"
            )
        return value

    def count(key: str) -> int:
        return size(key) if config.get(key) else 0

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    more: dict[str, Any] = {}
    if family in ("qwen3_moe", "glm4_moe", *_MLA):
        # transformers 5 writes the second name.
        more["experts"] = size("num_experts", "num_local_experts", "n_routed_experts")
        more["moe_intermediate"] = size("moe_intermediate_size")
    if family in ("glm4_moe", *_MLA):
        more["shared_intermediate"] = count("n_shared_experts") * more["moe_intermediate"]
        more["dense_layers"] = count("first_k_dense_replace")
        more["router_bias"] = True
    if family in _MLA:
        more["mla"] = Mla(
            size("q_lora_rank") if config.get("q_lora_rank") else None,
            size("kv_lora_rank"),
            size("qk_nope_head_dim"),
            size("qk_rope_head_dim"),
            size("v_head_dim"),
        )
    kv_heads = size("num_key_value_heads", default=heads)
    if family in _GQA and heads % kv_heads:
        raise SimulateError(f"{name}: {heads} attention heads, {kv_heads} key-value heads")
    layers = size("num_hidden_layers")
    if layers * more.get("experts", 1) > MAX_MATRICES:
        raise SimulateError(f"{name}: {layers} layers with {more.get('experts', 1)} experts each")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", default=max(hidden // heads, 1)),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        tied=bool(config.get("tie_word_embeddings", False)),
        **more,
    )


def total_bytes(shape: ModelShape) -> int:
    """Bytes of all HF tensors."""
    return sum(t.nbytes for t in shape.tensors())


def describe(shape: ModelShape) -> str:
    """``kimi-k2: 61 layers, 384 experts, 1026.4 B parameters``."""
    experts = f", {shape.experts} experts" if shape.experts else ""
    return (
        f"{shape.name}: {shape.layers} layers{experts}, {shape.parameters / 1e9:.1f} B parameters"
    )
