from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rdt.sources import GeneratorSource
from megatron_rdt.sources.mbridge import te_name, unwrap
from sglang_rdt.coordinator import phases
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.plan.specs import TensorSpec


class Program:
    """A user's generator; counts its runs and how far each got."""

    def __init__(self) -> None:
        self.runs = 0
        self.yielded: list[str] = []

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.runs += 1
        for name, tensor in {
            "a": torch.full((2, 3), float(self.runs)),
            "b": torch.ones(4, dtype=torch.bfloat16),
            "c": torch.zeros((), dtype=torch.int64),
        }.items():
            self.yielded.append(name)
            yield name, tensor


def test_specs_are_learned_once_in_order() -> None:
    program = Program()
    source = GeneratorSource(program)
    assert program.runs == 0
    expected = [
        TensorSpec("a", (2, 3), "float32"),
        TensorSpec("b", (4,), "bfloat16"),
        TensorSpec("c", (), "int64"),
    ]
    assert list(source.specs()) == expected
    assert list(source.specs()) == expected
    assert program.runs == 1


def test_every_export_is_a_fresh_run_one_tensor_at_a_time() -> None:
    program = Program()
    source = GeneratorSource(program)
    for run in (1, 2):
        program.yielded.clear()
        exported = source.export(PhaseTimer())
        name, tensor = next(exported)
        # The next one is not made before it is asked for: the tensor may be reused.
        assert program.yielded == ["a"]
        assert (name, tensor[0, 0].item()) == ("a", float(run))
        assert [n for n, _ in exported] == ["b", "c"]


def test_lists_will_do() -> None:
    pairs = [("a", torch.ones(1))]
    source = GeneratorSource(lambda: pairs)
    assert list(source.export(PhaseTimer())) == pairs
    assert list(GeneratorSource(list).specs()) == []


def test_only_the_generators_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    monkeypatch.setattr(phases, "time", Clock)

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            now[0] += 1
            yield name, torch.ones(1)

    timer = PhaseTimer()
    for _ in GeneratorSource(make).export(timer):
        now[0] += 100  # staging, sending
    assert timer.seconds == {"convert": 3.0}


def test_errors_of_the_generator_pass() -> None:
    def make() -> Iterator[Any]:
        yield "a", torch.ones(1)
        raise KeyError("layer 7")

    exported = GeneratorSource(make).export(PhaseTimer())
    next(exported)
    with pytest.raises(KeyError, match="layer 7"):
        next(exported)


MOE = {"3"}


@pytest.mark.parametrize(
    ("local", "te"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("output_layer.weight", "output_layer.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.0.input_layernorm.weight",
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.12.pre_mlp_layernorm.weight",
            "decoder.layers.12.mlp.linear_fc1.layer_norm_weight",
        ),
        # Before a mixture of experts the norm stays a module of its own.
        ("decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.3.input_layernorm.weight",
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.linear_fc1.weight5",
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.15.linear_fc2.bias",
            "decoder.layers.3.mlp.experts.linear_fc2.bias15",
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight7",
            "decoder.layers.3.mlp.experts.linear_fc1.weight7",
        ),
        ("decoder.layers.3.mlp.router.weight", "decoder.layers.3.mlp.router.weight"),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            "decoder.layers.1.self_attention.linear_qkv.weight",
        ),
        (
            "decoder.layers.1.self_attention.q_layernorm.weight",
            "decoder.layers.1.self_attention.q_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        ),
    ],
)
def test_te_names(local: str, te: str) -> None:
    assert te_name(local, MOE) == te
    assert te_name(te, MOE) == te  # names that are TE's already stay


@pytest.mark.parametrize(
    ("local", "te"),
    [
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.3.input_layernorm.weight"),
        (
            "decoder.layers.3.self_attention.q_layernorm.weight",
            "decoder.layers.3.self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (
            "decoder.layers.3.self_attention.kv_layernorm.weight",
            "decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
        (
            "mtp.layers.0.mtp_model_layer.self_attention.kv_layernorm.weight",
            "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ],
)
def test_te_names_of_latent_attention(local: str, te: str) -> None:
    assert te_name(local, MOE, latent=True) == te
    assert te_name(te, MOE, latent=True) == te


def test_unwrap() -> None:
    class Wrapper:
        def __init__(self, module: Any) -> None:
            self.module = module

    inner = object()
    assert unwrap(Wrapper(Wrapper(inner))) is inner
    assert unwrap(inner) is inner
