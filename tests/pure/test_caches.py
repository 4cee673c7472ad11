"""Copies of weights that a model keeps from its first forward pass on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt.engine import caches, runners
from sglang_rdt.engine.scheduler_control import SchedulerControl

from .test_runners import real_session, scheduler

__all__ = ["real_session"]


class Gate(nn.Module):
    """As the router of GLM-4.5 in SGLang 0.5.16 to 0.5.18."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return x @ self._weight_fp32.T


def test_a_copy_is_filled_again_where_it_is() -> None:
    model = nn.Sequential(Gate(), nn.Linear(4, 4))
    assert caches.refresh(model) == []  # there is none yet
    model[0](torch.ones(3))
    at = model[0]._weight_fp32.data_ptr()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert caches.refresh(model) == ["0._weight_fp32"]
    assert model[0](torch.ones(3)).tolist() == [1.5] * 4
    assert model[0]._weight_fp32.data_ptr() == at


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.usefixtures("real_session")
def test_the_end_of_a_session_does_so(changed: bool) -> None:
    made = scheduler()
    gates: list[Any] = [model for _, model, _ in runners.models(made, "both")]
    assert len(gates) == 2
    control = SchedulerControl(made, "engine tp0", label_replies=False)
    control.begin_session("all")
    written(*gates)
    control.end_session(changed=changed)
    for model in gates:
        assert model.gate(torch.ones(3)).tolist() == [1.5] * 4


@pytest.mark.parametrize("changed", [False, True])
def test_so_does_sglang_that_has_no_sessions(
    changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what has such copies."""
    derived: list[Any] = []
    module = SimpleNamespace(loader=SimpleNamespace(_post_load_weights=derived.append))
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    model: Any = nn.Linear(4, 4)
    made = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        weight_updater=SimpleNamespace(),
    )
    control = SchedulerControl(made, "engine tp0", label_replies=False)
    written(model)
    control.end_session(changed=changed)
    assert model.gate(torch.ones(3)).tolist() == [1.5] * 4
    assert derived == [model] * changed


def written(*models: Any) -> None:
    """Gives each a router that has run once, and writes its weight."""
    for model in models:
        model.gate = Gate()
        model.gate(torch.ones(3))
        with torch.no_grad():
            model.gate.weight.fill_(0.5)
