"""MoE, TP 1 engines, and the corners of vocabulary, tying and biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from tests.e2e.steps import SETTINGS, assert_engine_holds, sync_and_check

pytestmark = pytest.mark.e2e

CASES: dict[str, tuple[EngineKey, Layout]] = {
    "moe-ep2-to-tp2": (MOE_TP2, Layout(ep=2, dp=2)),
    "moe-tp2-ep2-etp1-to-tp2": (MOE_TP2, Layout(tp=2, ep=2, etp=1)),
    "moe-tp2-etp2-to-tp2": (MOE_TP2, Layout(tp=2)),
    "tied-padded-biased-tp2-to-tp2": (TIED_TP2, Layout(tp=2)),
    "tied-padded-biased-pp2-to-tp2": (TIED_TP2, Layout(pp=2)),
    "dense-tp2-to-tp1": (DENSE_TP1, Layout(tp=2)),
    "dense-pp2-to-tp1": (DENSE_TP1, Layout(pp=2)),
    "dense-tp2-pp2-to-tp1": (DENSE_TP1, Layout(tp=2, pp=2)),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.long) if CASES[c][1].world > 2 else c for c in CASES],
)
def test_a_step_reaches_the_engine(
    case: str, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    key, layout = CASES[case]
    served = engines.get(key)
    group = trainers.get(key.model, layout, seed=len(case), dtype=getattr(torch, key.dtype))
    group.attach(SETTINGS.replace(verify="equal"), engines=[served.address])
    first, second = sync_and_check(key.model, group, served, tmp_path)
    assert first.nbytes == second.nbytes


@pytest.mark.long
def test_context_parallel_ranks_share_the_load(engines: EnginePool, trainers: TrainerPool) -> None:
    """They hold the same weights, as Megatron's own state says; its attention cannot train so."""
    served = engines.get(DENSE_TP1)
    group = trainers.get(DENSE_TP1.model, Layout(tp=2, cp=2), seed=60)
    group.attach(SETTINGS, on_step=False, engines=[served.address])
    for seed in (61, 62):
        group.on_all(_set_weights, seed)
        group.on_all(lambda rank, version: rank.sync.sync(version), str(seed))
        assert_engine_holds(DENSE_TP1.model, DENSE_TP1.model.random_hf_state(seed), served)
    sent = group.on_all(lambda rank: len(rank.sync._link._mover._summed))
    # What is this small is not cut, but it does not all come from the first ones either.
    assert any(sent[:2]), sent
    assert any(sent[2:]), sent


def _set_weights(rank: Any, seed: int) -> None:
    rank.trainer._seed = seed
    rank.trainer._load_initial_weights(rank.trainer.model_chunks)
