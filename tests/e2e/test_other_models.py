"""MoE, TP 1 engines, and the corners of vocabulary, tying and biases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_rdt.demo.trainer import Layout
from tests.e2e.conftest import (
    DENSE_TP1,
    MOE_TP2,
    TIED_TP2,
    EngineKey,
    EnginePool,
    TrainerPool,
)
from tests.e2e.steps import SETTINGS, sync_and_check

pytestmark = pytest.mark.e2e

CASES: dict[str, tuple[EngineKey, Layout]] = {
    "moe-ep2-to-tp2": (MOE_TP2, Layout(ep=2, dp=2)),
    "moe-tp2-ep2-etp1-to-tp2": (MOE_TP2, Layout(tp=2, ep=2, etp=1)),
    "moe-tp2-etp2-to-tp2": (MOE_TP2, Layout(tp=2)),
    "tied-padded-biased-tp2-to-tp2": (TIED_TP2, Layout(tp=2)),
    "tied-padded-biased-pp2-to-tp2": (TIED_TP2, Layout(pp=2)),
    "dense-tp2-to-tp1": (DENSE_TP1, Layout(tp=2)),
    "dense-pp2-to-tp1": (DENSE_TP1, Layout(pp=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reaches_the_engine(
    case: str, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    key, layout = CASES[case]
    served = engines.get(key)
    group = trainers.get(key.model, layout, seed=len(case), dtype=getattr(torch, key.dtype))
    group.attach(SETTINGS.replace(verify="equal"), engines=[served.address])
    first, second = sync_and_check(key.model, group, served, tmp_path)
    assert first.nbytes == second.nbytes
