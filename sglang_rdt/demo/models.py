"""Tiny random models, and what becomes of their weights in an SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

ROPE_THETA = 10000.0
NORM_EPS = 1e-6
EXPERTS_PER_TOKEN = 2
MAX_POSITIONS = 512
# Large enough that greedy tokens of a random model vary.
_WEIGHT_STD = 0.2
# SGLang pads the vocabulary to a multiple of this (of it times TP, where TP does not divide it).
_ENGINE_VOCAB_PADDING = 64


@dataclass(frozen=True)
class TinyModel:
    """Shape of a tiny Qwen model: Qwen3, Qwen3-MoE, or Qwen2 with ``qkv_bias``.

    Args:
        kind: "dense", or "moe": experts in every layer, two per token.
        intermediate: width of the dense MLP (unused by "moe").
        moe_intermediate: width of one expert (unused by "dense"). 64 is the least that an
            engine at TP 2 on a CPU does not pad.
        vocab: rows of the embedding in a checkpoint.
        padded_vocab: rows in the trainer, at least ``vocab``; None: ``vocab``.
        tied: no ``lm_head.weight`` in the checkpoint, the embedding serves.
        qkv_bias: biases on q, k, v and no q/k norms, as Qwen2 has it. Dense only.
    """

    kind: Literal["dense", "moe"]
    num_layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    experts: int = 4
    moe_intermediate: int = 64
    vocab: int = 512
    padded_vocab: int | None = None
    tied: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.qkv_bias and self.kind != "dense":
            raise ValueError("qkv_bias: only for the dense model (Qwen2 has it, Qwen3-MoE not)")
        if self.padded_vocab is not None and self.padded_vocab < self.vocab:
            raise ValueError(f"padded_vocab {self.padded_vocab} is less than vocab {self.vocab}")

    @property
    def moe(self) -> bool:
        return self.kind == "moe"

    def hf_config(self) -> Any:
        """The transformers config (Qwen3Config, Qwen3MoeConfig or Qwen2Config)."""
        from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

        common: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": self.tied,
            "initializer_range": _WEIGHT_STD,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        if self.moe:
            return Qwen3MoeConfig(
                **common,
                architectures=["Qwen3MoeForCausalLM"],
                attention_bias=False,
                num_experts=self.experts,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                moe_intermediate_size=self.moe_intermediate,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            )
        if self.qkv_bias:
            return Qwen2Config(**common, architectures=["Qwen2ForCausalLM"])
        return Qwen3Config(**common, architectures=["Qwen3ForCausalLM"], attention_bias=False)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensor names and shapes, in the order of the layers."""
        return dict(self._hf_shapes())

    def _hf_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            yield f"{prefix}input_layernorm.weight", (hidden,)
            for letter, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{attention}{letter}_proj.weight", (rows, hidden)
                if self.qkv_bias:
                    yield f"{attention}{letter}_proj.bias", (rows,)
            if not self.qkv_bias:
                yield f"{attention}q_norm.weight", (self.head_dim,)
                yield f"{attention}k_norm.weight", (self.head_dim,)
            yield f"{attention}o_proj.weight", (hidden, q)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
            if self.moe:
                yield f"{mlp}gate.weight", (self.experts, hidden)
                experts = [f"{mlp}experts.{e}." for e in range(self.experts)]
                width = self.moe_intermediate
            else:
                experts, width = [mlp], self.intermediate
            for expert in experts:
                yield f"{expert}gate_proj.weight", (width, hidden)
                yield f"{expert}up_proj.weight", (width, hidden)
                yield f"{expert}down_proj.weight", (hidden, width)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, hidden)

    def random_hf_state(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Random checkpoint tensors: weights and biases around 0, norms around 1.

        Everything is random, norms and biases too, so that no mix-up goes unnoticed. The same
        seed gives the same numbers, rounded to ``dtype``.
        """
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for name, shape in self._hf_shapes():
            numbers = torch.randn(shape, generator=generator) * _WEIGHT_STD
            state[name] = (numbers + 1 if "norm" in name else numbers).to(dtype)
        return state

    def save_random_checkpoint(
        self, path: str | Path, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Writes ``random_hf_state(seed, dtype)`` as a checkpoint: config.json and safetensors.

        An engine can start from it; there is no tokenizer.
        """
        self.save_checkpoint(path, self.random_hf_state(seed, dtype))

    def save_checkpoint(self, path: str | Path, state: Mapping[str, Tensor]) -> None:
        """Writes ``state`` (checkpoint names) as config.json and safetensors below ``path``."""
        from safetensors.torch import save_file

        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        config = self.hf_config()
        config.dtype = next(iter(state.values())).dtype
        config.save_pretrained(directory)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    def transformers_model(self, source: Mapping[str, Tensor] | str | Path) -> Any:
        """The transformers model of ``source``: a checkpoint folder, or checkpoint tensors.

        In eval mode, on the CPU, in the dtype of ``source``.

        Raises:
            ValueError: a tensor is missing, or none of the model's.
        """
        from transformers import AutoModelForCausalLM

        if isinstance(source, Mapping):
            source = dict(source)
            where: dict[str, Any] = {
                "pretrained_model_name_or_path": None,
                "config": self.hf_config(),
                "state_dict": source,
                "dtype": next(iter(source.values())).dtype,
            }
            auto = _model_class(self.hf_config())
        else:
            where = {"pretrained_model_name_or_path": str(source), "dtype": "auto"}
            auto = AutoModelForCausalLM
        model, info = auto.from_pretrained(**where, output_loading_info=True)
        if info["missing_keys"] or info["unexpected_keys"]:
            raise ValueError(
                f"missing {sorted(info['missing_keys'])}, "
                f"unexpected {sorted(info['unexpected_keys'])}"
            )
        return model.eval()

    def transformers_logits(self, source: Mapping[str, Tensor] | str | Path, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab], float32, by transformers for ``ids`` [batch, length]."""
        with torch.no_grad():
            return self.transformers_model(source)(ids).logits.float()

    def transformers_greedy(
        self, source: Mapping[str, Tensor] | str | Path, prompt_ids: Sequence[int], n: int
    ) -> list[int]:
        """The next ``n`` greedy tokens by transformers; the end-of-sequence token ends nothing."""
        model = self.transformers_model(source)
        ids = torch.tensor([list(prompt_ids)])
        with torch.no_grad():
            for _ in range(n):
                following = model(ids).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, following], dim=1)
        return ids[0, len(prompt_ids) :].tolist()

    def engine_params(
        self,
        state: Mapping[str, Tensor],
        tp_size: int,
        tp_rank: int,
        *,
        pp_size: int = 1,
        pp_rank: int = 0,
        attn_dp_size: int = 1,
        ep_size: int = 1,
    ) -> dict[str, Tensor]:
        """The parameters that one rank of an SGLang engine should hold for ``state``.

        Put together from the checkpoint tensors without SGLang's loader, to compare with a live
        engine.

        Args:
            state: checkpoint tensors by name.
            tp_size: TP ranks of the engine. ``kv_heads`` and it must divide one another.
            tp_rank: which of them.
            pp_size: pipeline stages of the engine; must divide the number of layers.
            pp_rank: which of them.
            attn_dp_size: data-parallel groups of DP attention, 1 without. MoE only.
            ep_size: into how many parts the experts are dealt out; what is left of ``tp_size`` cuts
                each of them.

        Returns:
            The tensors by SGLang's parameter names, in the dtype of ``state``. Shapes, with
            tp = tp_size: ``qkv_proj.weight`` [q/tp + 2 kv/tp, hidden] (a kv head that several
            ranks share is held by each of them), ``gate_up_proj.weight`` [2 I/tp, hidden],
            ``o_proj.weight`` [hidden, q/tp], ``down_proj.weight`` [hidden, I/tp],
            ``experts.w13_weight`` [E, 2 I/tp, hidden], ``experts.w2_weight`` [E, hidden, I/tp],
            ``embed_tokens.weight`` and ``lm_head.weight`` [padded vocab/tp, hidden], zero in the
            padding; norms, ``q_norm``, ``k_norm`` and ``mlp.gate`` whole. With DP attention the
            attention is cut by tp / attn_dp_size only, and the embedding is whole; with EP there are
            E/ep experts. A pipeline stage has its own layers, the first one the embedding, the last
            one ``norm`` and ``lm_head``.
        """
        if self.moe and self.tied:
            raise ValueError("SGLang's Qwen3-MoE never ties lm_head to the embedding")
        if attn_dp_size * ep_size > 1 and not self.moe:
            raise ValueError("DP attention and EP: only for the MoE model")
        if self.num_layers % pp_size or tp_size % attn_dp_size or tp_size % ep_size:
            raise ValueError("the sizes do not divide one another")
        attn_tp, moe_tp = tp_size // attn_dp_size, tp_size // ep_size
        attn_rank, moe_rank, ep_rank = tp_rank % attn_tp, tp_rank % moe_tp, tp_rank // moe_tp
        mlp_tp, mlp_rank = (moe_tp, moe_rank) if self.moe else (tp_size, tp_rank)

        def rows(tensor: Tensor) -> Tensor:
            return tensor.chunk(attn_tp, dim=0)[attn_rank]

        def columns(tensor: Tensor, size: int = mlp_tp, rank: int = mlp_rank) -> Tensor:
            return tensor.chunk(size, dim=1)[rank]

        def kv_rows(tensor: Tensor) -> Tensor:
            if self.kv_heads >= attn_tp:
                return rows(tensor)
            head = attn_rank // (attn_tp // self.kv_heads)
            return tensor.chunk(self.kv_heads, dim=0)[head]

        def gate_up(prefix: str) -> Tensor:
            gate, up = state[f"{prefix}gate_proj.weight"], state[f"{prefix}up_proj.weight"]
            return torch.cat([one.chunk(mlp_tp, dim=0)[mlp_rank] for one in (gate, up)])

        def vocabulary(tensor: Tensor, tp_size: int, tp_rank: int) -> Tensor:
            size = _round_up(self.vocab, _ENGINE_VOCAB_PADDING)
            if size % tp_size:
                size = _round_up(self.vocab, _ENGINE_VOCAB_PADDING * tp_size)
            padding = tensor.new_zeros(size - self.vocab, self.hidden)
            return torch.cat([tensor, padding]).chunk(tp_size, dim=0)[tp_rank]

        params = {}
        embedding = state["model.embed_tokens.weight"]
        if pp_rank == 0:
            cut = (1, 0) if attn_dp_size > 1 else (tp_size, tp_rank)
            params["model.embed_tokens.weight"] = vocabulary(embedding, *cut)
        layers = self.num_layers // pp_size
        for layer in range(pp_rank * layers, (pp_rank + 1) * layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
                q, k, v = (state[f"{attention}{letter}_proj.{kind}"] for letter in "qkv")
                params[f"{attention}qkv_proj.{kind}"] = torch.cat([rows(q), kv_rows(k), kv_rows(v)])
            params[f"{attention}o_proj.weight"] = columns(
                state[f"{attention}o_proj.weight"], attn_tp, attn_rank
            )
            whole = [f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"]
            if not self.qkv_bias:
                whole += [f"{attention}q_norm.weight", f"{attention}k_norm.weight"]
            if self.moe:
                whole.append(f"{mlp}gate.weight")
                mine = range(
                    ep_rank * self.experts // ep_size, (ep_rank + 1) * self.experts // ep_size
                )
                experts = [f"{mlp}experts.{expert}." for expert in mine]
                params[f"{mlp}experts.w13_weight"] = torch.stack([gate_up(e) for e in experts])
                params[f"{mlp}experts.w2_weight"] = torch.stack(
                    [columns(state[f"{e}down_proj.weight"]) for e in experts]
                )
            else:
                params[f"{mlp}gate_up_proj.weight"] = gate_up(mlp)
                params[f"{mlp}down_proj.weight"] = columns(state[f"{mlp}down_proj.weight"])
            params.update({name: state[name] for name in whole})
        if pp_rank == pp_size - 1:
            params["model.norm.weight"] = state["model.norm.weight"]
            if not self.tied or pp_size > 1:
                head = embedding if self.tied else state["lm_head.weight"]
                params["lm_head.weight"] = vocabulary(head, tp_size, tp_rank)
        return params


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _model_class(config: Any) -> Any:
    import transformers

    return getattr(transformers, config.architectures[0])
