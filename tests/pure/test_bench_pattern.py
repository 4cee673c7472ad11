from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_rdt.bench import pattern
from sglang_rdt.bench.shapes import NAMED
from sglang_rdt.demo.models import TinyModel

CPU = torch.device("cpu")
MODELS = [
    NAMED["tiny"],
    NAMED["tiny-moe"],
    TinyModel("dense", tied=True, qkv_bias=True, vocab=500),
]


def values(name: str, key: int, *shape: int) -> torch.Tensor:
    return pattern.fill(torch.empty(shape, dtype=torch.bfloat16), name, key).view(torch.int16)


def test_values_depend_on_name_element_and_key() -> None:
    a = values("a", 1, 64, 64)
    assert torch.equal(a, values("a", 1, 64, 64))
    assert torch.equal(a.view(-1), values("a", 1, 4096))
    assert a.unique().numel() > 3800
    assert (a == values("b", 1, 64, 64)).float().mean() < 0.01


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values("a", 7, 1000)
    monkeypatch.setattr(pattern, "_CPU_CHUNK", 33)
    assert torch.equal(whole, values("a", 7, 1000))


def test_every_byte_differs_between_keys() -> None:
    first = values("a", 1, 500).view(torch.uint8)
    for key in (0, 2, 3, 128, 200, 256):
        assert not (first == values("a", key, 500).view(torch.uint8)).any()


def test_rekeying_is_filling_anew() -> None:
    tensor = values("a", 3, 100)
    assert torch.equal(pattern.rekey(tensor, 3, 250), values("a", 250, 100))


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_an_engine_holds_layer_by_layer(model: TinyModel, tp_size: int) -> None:
    state = {
        name: pattern.fill(torch.empty(shape, dtype=torch.bfloat16), name, 5)
        for name, shape in model.hf_shapes().items()
    }
    for rank in range(tp_size):
        found = dict(pattern.expected(model, 5, tp_size, rank, CPU))
        wanted = model.engine_params(state, tp_size, rank)
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


def test_the_comparison_finds_everything() -> None:
    model = dataclasses.replace(NAMED["tiny"], num_layers=2)
    live = {n: t.clone() for n, t in pattern.expected(model, 9, 2, 1, CPU)}
    count, lines = pattern.differences(model, 9, 2, 1, live)
    assert (count, lines) == (len(live), [])
    # The other rank's, and the values before: nothing may be equal but what both ranks hold.
    assert len(pattern.differences(model, 8, 2, 1, live)[1]) == len(live)
    assert pattern.differences(model, 9, 2, 0, live)[1]

    live["model.norm.weight"].view(torch.int16)[3] ^= 1
    del live["model.layers.1.self_attn.o_proj.weight"]
    live["model.layers.0.mlp.down_proj.weight"] = live["model.layers.0.mlp.down_proj.weight"][:3]
    live["model.extra"] = torch.zeros(1)
    lines = pattern.differences(model, 9, 2, 1, live)[1]
    assert len(lines) == 4
    assert any("model.norm.weight: 1 of 128 bytes differ" in line for line in lines)
    assert any("o_proj.weight is not there" in line for line in lines)
    assert any("down_proj.weight is torch.bfloat16" in line for line in lines)
    assert any("model.extra was not expected" in line for line in lines)


def test_a_tied_head_need_not_be_there() -> None:
    model = TinyModel("dense", tied=True)
    live = dict(pattern.expected(model, 1, 1, 0, CPU))
    assert "lm_head.weight" not in live
    assert pattern.differences(model, 1, 1, 0, live)[1] == []
