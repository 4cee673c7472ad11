"""Model shapes by name, or out of a folder with a ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rdt.demo.models import TinyModel


@dataclass(frozen=True)
class Shape:
    """A model and what it is called in results."""

    name: str
    model: TinyModel

    @property
    def nbytes(self) -> int:
        """Bytes of all HF tensors in bfloat16."""
        return 2 * sum(math.prod(shape) for shape in self.model.hf_shapes().values())


NAMED: dict[str, TinyModel] = {
    "tiny": TinyModel("dense"),
    "tiny-moe": TinyModel("moe"),
    "small": TinyModel(
        "dense",
        num_layers=4,
        hidden=512,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate=1536,
        vocab=8192,
    ),
    "cpu-1gb": TinyModel(
        "dense",
        num_layers=8,
        hidden=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=6144,
        vocab=32768,
    ),
    "qwen3-8b": TinyModel(
        "dense",
        num_layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12288,
        vocab=151936,
    ),
    "qwen3-30b-a3b": TinyModel(
        "moe",
        num_layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        experts=128,
        moe_intermediate=768,
        vocab=151936,
    ),
}
_KINDS = {"qwen2": "dense", "qwen3": "dense", "qwen3_moe": "moe"}


def parse_model(text: str, vocab_multiple: int = 1) -> Shape:
    """A named shape, ``name:layers`` (the same with fewer layers), or a folder.

    Args:
        vocab_multiple: the trainer pads its vocabulary to a multiple of this.

    Raises:
        ValueError: there is no such model; says which there are.
    """
    name, colon, layers = text.partition(":")
    if name in NAMED:
        model = NAMED[name]
        if colon:
            if not layers.isdecimal() or not 1 <= int(layers) <= model.num_layers:
                raise ValueError(f"{text!r}: {name} has 1 to {model.num_layers} layers")
            model = dataclasses.replace(model, num_layers=int(layers))
            name = f"{name}-{layers}layers"
    else:
        folder = Path(text)
        config = folder if folder.is_file() else folder / "config.json"
        if not config.is_file():
            raise ValueError(
                f"{text!r} is neither one of {', '.join(NAMED)} (with :layers if need be), "
                "nor a folder with a config.json"
            )
        name, model = config.resolve().parent.name, from_config(json.loads(config.read_text()))
    padded = -(-model.vocab // vocab_multiple) * vocab_multiple
    if padded != model.vocab:
        model = dataclasses.replace(model, padded_vocab=padded)
    return Shape(name, model)


def from_config(config: dict[str, Any]) -> TinyModel:
    """The shape that a Hugging Face ``config.json`` describes.

    Raises:
        ValueError: not a family that the benchmark can build.
    """
    family = config.get("model_type")
    if family not in _KINDS:
        raise ValueError(f"model type {family!r}: the benchmark builds {', '.join(_KINDS)}")
    kind = _KINDS[family]
    heads = int(config["num_attention_heads"])
    sizes: dict[str, Any] = {}
    if kind == "moe":
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("the benchmark builds MoE models with experts in every layer only")
        sizes = {
            # transformers 5 writes the second name.
            "experts": int(config.get("num_experts") or config["num_local_experts"]),
            "moe_intermediate": int(config["moe_intermediate_size"]),
        }
    return TinyModel(
        kind,  # type: ignore[arg-type]
        num_layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        **sizes,
    )
