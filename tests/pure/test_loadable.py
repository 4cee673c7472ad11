"""Weights that no session of SGLang makes loadable are refused before one is opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt.engine.loadable import why_not
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.errors import EngineStateError


class QuantizeMethodBase:
    """As SGLang's: both do nothing."""

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def restore_weights_before_loading(self, layer: Any) -> None: ...


class UnquantizedLinearMethod(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None: ...


class Idle(QuantizeMethodBase): ...


class Restoring(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None: ...

    def restore_weights_before_loading(self, layer: Any) -> None: ...


class AWQMarlin(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None: ...


class PackWeightMethod:
    def process_weights_after_loading(self, layer: Any) -> None: ...


class Fp8LinearMethod(AWQMarlin):
    def __init__(self, serialised: bool, block: bool) -> None:
        self.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=serialised)
        self.block_quant = block


class Fp8MoEMethod(Fp8LinearMethod): ...


class Scheme(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None: ...


def model(method: Any, **attributes: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    for name, value in {"quant_method": method, **attributes}.items():
        setattr(layer, name, value)
    return nn.Sequential(nn.Linear(2, 2), layer)


@pytest.mark.parametrize(
    "one",
    [
        nn.Linear(2, 2),
        model(UnquantizedLinearMethod()),
        model(Idle()),
        model(Restoring()),
        model(Restoring(), scheme=Restoring()),
    ],
)
def test_loadable(one: nn.Module) -> None:
    assert why_not(one) is None


@pytest.mark.parametrize(
    ("one", "named"),
    [
        (model(AWQMarlin()), r"\(AWQMarlin\)"),
        (model(PackWeightMethod()), r"\(PackWeightMethod\)"),
        (model(Restoring(), scheme=Scheme()), r"\(Restoring\)"),
        (model(UnquantizedLinearMethod(), use_intel_amx_backend=True), "Method packed for AMX"),
        (model(Fp8LinearMethod(False, False)), r"\(Fp8LinearMethod of an unquantised checkpoint\)"),
        (model(Fp8LinearMethod(False, True)), "of an unquantised checkpoint"),
        (model(Fp8LinearMethod(True, False)), "with one scale per tensor"),
        (model(Fp8MoEMethod(True, True)), r"\(Fp8MoEMethod for unknown\)"),
        # On a CPU, SGLang packs the blocks.
        (model(Fp8LinearMethod(True, True)), "with repacked blocks or scales"),
    ],
)
def test_not_loadable(one: nn.Module, named: str) -> None:
    why = why_not(one)
    assert why is not None
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(why)


def test_flash_rl() -> None:
    one = nn.Linear(2, 2)
    one.flash_rl_initial_load_complete = True  # type: ignore[assignment]
    assert "flash_rl" in str(why_not(one))


def test_what_sglang_itself_refuses() -> None:
    def no(op: str) -> None:
        raise RuntimeError(f"[weight_cache] {op} is not supported")

    updater = SimpleNamespace(_assert_weight_cache_inactive=no)
    assert why_not(nn.Linear(2, 2), updater) == "[weight_cache] a weight sync is not supported"


def test_the_control_names_the_model_and_asks_once() -> None:
    target, draft = model(UnquantizedLinearMethod()), model(AWQMarlin())
    asked: list[str] = []
    runner = SimpleNamespace(
        model=target,
        weight_updater=SimpleNamespace(_assert_weight_cache_inactive=asked.append),
    )
    worker = SimpleNamespace(
        weight_update_runners=lambda: [("draft", SimpleNamespace(model=draft))]
    )
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        weight_updater=SimpleNamespace(draft_worker=worker, begin_weight_update=print),
    )
    control = SchedulerControl(scheduler, "engine tp0", label_replies=False)
    for _ in range(2):
        control.refuse_unsupported_model()
    assert asked == ["a weight sync"]
    for synced in ("draft", "both"):
        with pytest.raises(EngineStateError, match=r"tp0: its draft cannot .*\(AWQMarlin\)"):
            control.refuse_unsupported_model(synced)


def test_before_there_were_sessions() -> None:
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model(AWQMarlin()))),
        weight_updater=SimpleNamespace(),
    )
    control = SchedulerControl(scheduler, "engine tp0", label_replies=False)
    with pytest.raises(EngineStateError, match=r"AWQMarlin.* needs SGLang 0\.5\.21"):
        control.refuse_unsupported_model()


def test_blocks_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    layer = nn.Module()
    layer.quant_method = Fp8LinearMethod(True, True)  # type: ignore[assignment]
    weight = torch.zeros(128, 128, device="cuda").to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.ones(1, 1, device="cuda"), requires_grad=False)
    assert why_not(layer) is None
    layer.weight_scale_inv.format_ue8m0 = True  # type: ignore[attr-defined]
    assert "repacked" in str(why_not(layer))
