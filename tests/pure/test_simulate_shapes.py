"""Model shapes: as many parameters as their authors say, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_rdt.simulate.errors import SimulateError
from sglang_rdt.simulate.shapes import NAMED, describe, from_config, load_shape, total_bytes

# In billions, as the model cards say (GLM and DeepSeek without multi-token prediction; Kimi-K2's
# says 1 T), and the exact number where one is published with the checkpoint.
PUBLISHED = {
    "llama3-8b": (8.03, 8_030_261_248),
    "llama3-70b": (70.6, 70_553_706_496),
    "qwen3-8b": (8.2, 8_190_735_360),
    "qwen3-30b-a3b": (30.5, 30_532_122_624),
    "qwen3-235b-a22b": (235, 235_093_634_560),
    "glm-4.5-air": (106, None),
    "deepseek-v3": (671, None),
    "kimi-k2": (1000, None),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    billions, exact = PUBLISHED[name]
    shape = load_shape(name)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.03)
    if exact is not None:
        assert shape.parameters == exact


def test_names_are_unique_and_bytes_add_up() -> None:
    shape = load_shape("qwen3-8b")
    tensors = list(shape.tensors())
    assert len(tensors) == len({t.name for t in tensors}) == 399
    assert total_bytes(shape) == 2 * shape.parameters == 16_381_470_720
    assert describe(shape) == "qwen3-8b: 36 layers, 8.2 B parameters"


def test_names_are_those_of_checkpoints() -> None:
    names = {t.name for t in load_shape("kimi-k2").tensors()}
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.60.mlp.experts.383.down_proj.weight",
        "model.layers.60.mlp.gate.e_score_correction_bias",
        "model.layers.60.mlp.shared_experts.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= names
    assert "model.layers.0.mlp.gate.weight" not in names


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    config = {**NAMED["qwen3-8b"], "tie_word_embeddings": True, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    assert (shape.name, shape.layers, shape.tied) == (tmp_path.name, 2, True)
    assert shape == load_shape(str(tmp_path / "config.json"))
    assert "lm_head.weight" not in {t.name for t in shape.tensors()}


def test_mla_without_compressed_queries() -> None:
    shape = from_config("m", {**NAMED["deepseek-v3"], "q_lora_rank": None, "num_hidden_layers": 1})
    names = {u.param for u in shape.layer(0)}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not covered"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"attention_bias": True}, "biases on all of the attention"),
        ({"mlp_only_layers": [0]}, "skip layers"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulateError, match=message):
        from_config("m", {**NAMED["qwen3-30b-a3b"], **change})


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SimulateError, match="neither one of"):
        load_shape("gpt-2")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SimulateError, match="cannot be read"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SimulateError, match="no JSON object"):
        load_shape(str(tmp_path))
