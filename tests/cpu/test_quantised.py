"""Weights that SGLang's own FP8 methods quantise after loading, synced into the served parameters.

The methods are the released ones; only their check for AMX, which their kernels need and their
quantising does not, is switched off.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt.engine import quantised
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.recorder import record_load
from sglang_rdt.errors import EngineStateError, RecordError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.specs import EngineRankLayout, TensorSpec
from tests.pure.builders import engine_rank

HIDDEN, SIZES, EXPERTS, WIDTH = 32, [64, 16], 3, 24
SHAPES = {
    "up.0": (SIZES[0], HIDDEN),
    "up.1": (SIZES[1], HIDDEN),
    "up.bias": (sum(SIZES),),
    "norm": (HIDDEN,),
    "w13": (EXPERTS, 2 * WIDTH, HIDDEN),
    "w2": (EXPERTS, HIDDEN, WIDTH),
}
SPECS = [TensorSpec(name, shape, "bfloat16") for name, shape in SHAPES.items()]


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module, patched by the package, on a platform where it only quantises."""
    module = pytest.importorskip("sglang.srt.layers.quantization.fp8")
    monkeypatch.setattr(module, "_is_cpu", False)
    # A kernel, of which the same file has a version in PyTorch.
    monkeypatch.setattr(module, "scaled_fp8_quant", module.input_to_float8, raising=False)
    return module


class Model(nn.Module):
    """A merged linear layer, a norm, and experts; loaded by slices, as SGLang's models are."""

    def __init__(self, fp8: Any) -> None:
        super().__init__()
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=False, activation_scheme="dynamic")
        self.up = nn.Module()
        self.up.quant_method = fp8.Fp8LinearMethod(config)
        self.up.quant_method.create_weights(
            self.up, HIDDEN, SIZES, HIDDEN, sum(SIZES), torch.bfloat16, weight_loader=_load
        )
        self.up.bias = nn.Parameter(torch.zeros(sum(SIZES), dtype=torch.bfloat16))
        self.up.bias.weight_loader = _load  # type: ignore[attr-defined]
        self.norm = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))
        self.experts = nn.Module()
        method = fp8.Fp8MoEMethod.__new__(fp8.Fp8MoEMethod)  # its runner wants a server
        method.quant_config, method.block_quant, method.use_mxfp8 = config, False, False
        self.experts.quant_method = method
        self.experts.moe_tp_size, self.experts.num_local_experts = 1, EXPERTS
        self.experts.moe_runner_config = types.SimpleNamespace(is_gated=True)
        fp8.Fp8MoEMethod.create_fp8_moe_weight_(
            self.experts,
            EXPERTS,
            HIDDEN,
            WIDTH,
            block_quant=False,
            quant_config=config,
            use_mxfp8=False,
            is_checkpoint_fp8_serialized=False,
            is_fp4_expert=False,
            params_dtype=torch.bfloat16,
            weight_loader=_load,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        first = SIZES[0]
        places: dict[str, Callable[[], torch.Tensor]] = {
            "up.0": lambda: self.up.weight.data[:first],
            "up.1": lambda: self.up.weight.data[first:],
            "up.bias": lambda: self.up.bias.data,
            "norm": lambda: self.norm.data,
            "w13": lambda: self.experts.w13_weight.data,
            "w2": lambda: self.experts.w2_weight.data,
        }
        for name, tensor in weights:
            places[name]().copy_(tensor)

    def process(self) -> None:
        """What a session ends with."""
        for layer in (self.up, self.experts):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr]


def _load(parameter: nn.Parameter, weight: torch.Tensor, *_: Any) -> None:
    parameter.data.copy_(weight)


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    made["w2"][1] = 0  # an expert that has not learned anything
    return made


def loaded(fp8: Any, seed: int) -> Model:
    """A model that SGLang's own way brought there."""
    model = Model(fp8)
    model.load_weights(values(seed).items())
    model.process()
    return model


def contents(model: nn.Module) -> dict[str, list[int]]:
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        for name, tensor in model.named_parameters()
    }


def sync(weights: LiveWeights, model: Model, seed: int, *, session: bool) -> None:
    """What a sync does between begin and verify; the bytes come out of ``values(seed)``."""
    state = values(seed)
    assert weights.recording is not None
    for want in weights.recording.wants:
        source = state[want.source]
        part = source.as_strided(want.src.shape, want.src.stride, want.src.offset)
        weights.view(want.param, want.dst).copy_(part)
    weights.apply_constants()
    with weights.quantising():
        if session:
            model.process()


@pytest.mark.parametrize("session", [True, False], ids=["session", "before 0.5.21"])
def test_each_sync_gives_what_sglang_gives(fp8: Any, session: bool) -> None:
    model = loaded(fp8, 0)
    assert model.up.weight.dtype == torch.float8_e4m3fn
    assert model.experts.w2_weight.dtype == torch.float8_e4m3fn
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    weights = LiveWeights(model, "here")
    assert quantised.problems(model) == []
    weights.record(SPECS)
    for seed in (1, 2, 2, 0):
        sync(weights, model, seed, session=session)
        assert contents(model) == contents(loaded(fp8, seed))
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
        assert all(objects[name] is p for name, p in model.named_parameters())
        assert not any(p.float().isnan().any() for p in model.parameters())
        weights.check_addresses()


def test_all_of_it_is_covered_and_nothing_is_served_that_was_not_synced(fp8: Any) -> None:
    model = loaded(fp8, 0)
    weights = LiveWeights(model, "here")
    recording = weights.record(SPECS)
    layout = EngineRankLayout(engine_rank(), tuple(weights.specs.values()), recording)
    specs = {spec.name: spec for spec in SPECS}
    assert coverage.check_rank(layout, specs) == []
    assert coverage.check_dtypes(layout, specs, allow_cast=False) == ([], [])
    short = EngineRankLayout(
        layout.rank,
        layout.params,
        replace(recording, wants=tuple(w for w in recording.wants if w.source != "up.1")),
    )
    assert any("up.weight" in problem for problem in coverage.check_rank(short, specs))


def test_a_name_filter_leaves_whole_layers_alone_and_nothing_less(fp8: Any) -> None:
    model = loaded(fp8, 0)
    weights = LiveWeights(model, "here")
    before = contents(model)
    weights.record(SPECS, ["w13", "w2", "norm"])
    sync(weights, model, 1, session=True)
    new, now = contents(loaded(fp8, 1)), contents(model)
    assert {name for name in now if now[name] == before[name]} == {
        "norm",
        *(name for name in now if name.startswith("experts.")),
    }
    assert {name for name in now if now[name] == new[name]} >= {"up.weight", "up.weight_scale"}
    for part in (["up.1"], ["w2"]):
        with pytest.raises(RecordError, match=r"quantises as a whole: (up|experts): sync all of"):
            weights.record(SPECS, part)
    # A bias is not quantised.
    weights.record(SPECS, ["up.0", "up.1"])
    sync(weights, model, 2, session=True)
    assert contents(model)["up.weight"] == new["up.weight"]
    assert contents(model)["up.bias"] == contents(loaded(fp8, 2))["up.bias"]


def test_a_session_that_loads_nothing_changes_nothing(fp8: Any) -> None:
    model = loaded(fp8, 3)
    before = contents(model)
    model.process()
    LiveWeights(model, "here").record(SPECS)
    model.process()
    assert contents(model) == before


def test_the_loadable_form_has_memory_only_while_a_trainer_is_connected(fp8: Any) -> None:
    model = loaded(fp8, 0)
    weights = LiveWeights(model, "here")
    loadable = quantised.Loadable(model)
    kept = [p for _, _, notes in loadable.layers for p in (notes.before[n] for n in notes.forms)]
    assert loadable.nbytes == 2 * (sum(SIZES) * HIDDEN + 3 * EXPERTS * WIDTH * HIDDEN) + 8 * EXPERTS
    assert sum(p.numel() for p in kept if p is not None) == 0
    weights.record(SPECS)
    assert sum(p.nbytes for p in kept if p is not None) == loadable.nbytes
    weights.forget()
    assert sum(p.numel() for p in kept if p is not None) == 0
    assert weights.specs["up.weight"].dtype == "float8_e4m3fn"
    weights.record(SPECS)
    sync(weights, model, 5, session=True)
    assert contents(model) == contents(loaded(fp8, 5))


def test_a_sync_that_fails_while_quantising_leaves_the_served_objects(
    fp8: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(fp8, 0)
    objects = dict(model.named_parameters())
    weights = LiveWeights(model, "here")
    weights.record(SPECS)
    with monkeypatch.context() as patched:
        patched.setattr(fp8, "input_to_float8", _no_kernel)
        with pytest.raises(RuntimeError, match="no kernel"):
            sync(weights, model, 1, session=True)
    assert all(objects[name] is p for name, p in model.named_parameters())
    weights.check_addresses()
    sync(weights, model, 1, session=True)
    assert contents(model) == contents(loaded(fp8, 1))


def _no_kernel(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel")


def test_a_result_of_another_shape_is_named(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(fp8, 0)
    weights = LiveWeights(model, "here")
    weights.record(SPECS)
    quantise = fp8.input_to_float8
    monkeypatch.setattr(fp8, "input_to_float8", lambda w: quantise(w[:-1]))
    with pytest.raises(EngineStateError, match=r"up\.weight was quantised to float8_e4m3fn"):
        sync(weights, model, 1, session=True)


def test_other_quantised_weights_are_refused_by_name(fp8: Any) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8LinearMethod

    model = nn.Module()
    model.plain, model.amx = nn.Module(), nn.Module()
    model.packed, model.late = nn.Module(), nn.Module()
    model.plain.quant_method = model.amx.quant_method = UnquantizedLinearMethod()
    model.amx.use_intel_amx_backend = True
    model.packed.quant_method = W8A8Int8LinearMethod(W8A8Int8Config())
    model.late.quant_method = fp8.Fp8LinearMethod(
        fp8.Fp8Config(is_checkpoint_fp8_serialized=False, activation_scheme="dynamic")
    )
    amx, packed, late = quantised.problems(model)
    assert amx.startswith("amx: UnquantizedLinearMethod packs weights for AMX")
    assert packed.startswith("packed: W8A8Int8LinearMethod changes weights after loading")
    assert late == (
        "late: Fp8LinearMethod was loaded without the patch quantised_weights: start the engine with "
        "SGLANG_RDT_PATCH_QUANTISED_WEIGHTS=1"
    )


@pytest.mark.parametrize("how", ["parameter", "data"])
def test_a_parameter_that_is_repacked_where_it_lies_is_refused(
    fp8: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = Model(fp8)

    def shuffled(weight: torch.Tensor) -> Any:
        # SGLang's copy_or_rebind_param does it by way of ``data``, which leaves the version alone.
        bias = model.up.bias if how == "parameter" else model.up.bias.data
        bias.add_(1)
        return quantise(weight)

    quantise = fp8.input_to_float8
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(fp8, "input_to_float8", shuffled)
        model.process()
    (problem,) = quantised.problems(model)
    assert problem == "up: Fp8LinearMethod repacks bias in place"


def test_unquantised_models_have_none_of_it() -> None:
    model = nn.Linear(4, 4)
    weights = LiveWeights(model, "here")
    model.load_weights = lambda named: [  # type: ignore[assignment]
        getattr(model, name).data.copy_(tensor) for name, tensor in named
    ]
    specs = [TensorSpec("weight", (4, 4), "float32"), TensorSpec("bias", (4,), "float32")]
    assert weights.record(specs) == record_load(model, specs)
    assert quantised.Loadable(model).layers == []


class Latent(nn.Module):
    """Of one projection SGLang derives two, of the form in which it is loaded."""

    def __init__(self, fp8: Any) -> None:
        super().__init__()
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=False, activation_scheme="dynamic")
        self.attn = nn.Module()
        self.attn.w_kc = torch.zeros(HIDDEN, HIDDEN)
        self.attn.kv_b_proj = layer = nn.Module()
        layer.quant_method = fp8.Fp8LinearMethod(config)
        layer.quant_method.create_weights(
            layer, HIDDEN, [HIDDEN], HIDDEN, HIDDEN, torch.bfloat16, weight_loader=_load
        )
        self.norm = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_what_more_is_derived_of_cannot_be_left_out(fp8: Any) -> None:
    model = Latent(fp8)
    layer = model.attn.kv_b_proj
    assert LiveWeights(model, "here").derivable
    layer.quant_method.process_weights_after_loading(layer)
    weights = LiveWeights(model, "here")
    assert not weights.derivable
    name = "attn.kv_b_proj.weight"
    specs = [
        TensorSpec(name, (HIDDEN, HIDDEN), "bfloat16"),
        TensorSpec("norm", (HIDDEN,), "bfloat16"),
    ]
    with pytest.raises(RecordError, match=r"attn.kv_b_proj: what SGLang derives of it"):
        weights.record(specs, [name])
    weights.record(specs, ["norm"])


def test_a_method_that_leaves_a_part_to_fp8_is_another_one(fp8: Any) -> None:
    class Mxfp4MarlinMoEMethod:
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            inner.process_weights_after_loading(layer)
            layer.bias.data = layer.bias.data.flip(0)  # type: ignore[operator, union-attr]

    model = Model(fp8)
    inner = model.up.quant_method
    model.up.quant_method = Mxfp4MarlinMoEMethod()
    model.process()
    (problem,) = quantised.problems(model)
    assert problem.startswith("up: Mxfp4MarlinMoEMethod changes weights after loading")


def test_memory_that_is_not_enough_is_given_back(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(fp8, 0)
    weights = LiveWeights(model, "here")
    loadable = quantised.Loadable(model)

    def none_left(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        second = loadable.layers[1][2]
        patched.setattr(second, "allocate", none_left)
        with pytest.raises(torch.OutOfMemoryError):
            weights.record(SPECS)
    kept = [p for _, _, notes in loadable.layers for p in (notes.before[n] for n in notes.forms)]
    assert sum(p.numel() for p in kept if p is not None) == 0
