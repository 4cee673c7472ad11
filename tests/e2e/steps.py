"""What the end-to-end tests have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.settings import Settings

# Deadlines that a broken test runs into within minutes, not hours.
SETTINGS = Settings(phase_timeout_s=60.0, connect_timeout_s=60.0, stall_timeout_s=120.0)


def assert_engine_holds(model: TinyModel, state: dict[str, Any], served: ServedEngine) -> None:
    """Every live parameter of every rank, bit for bit, against HF tensors put together by hand."""
    compared, differences = proof.unequal_parameters(
        model, state, served.weights(), served.engine.ranks
    )
    assert not differences
    assert compared >= 12


def assert_engine_serves(
    model: TinyModel,
    state: dict[str, Any],
    served: ServedEngine,
    version: str,
    folder: Path,
) -> None:
    """Its greedy tokens are transformers', and its replies carry ``version``."""
    tokens, label = served.generate(proof.PROMPT, proof.NEW_TOKENS)
    assert label == version
    model.save_checkpoint(folder, state)
    assert proof.same_tokens(model, folder, tokens) is None


def sync_and_check(
    model: TinyModel,
    group: Trainers,
    served: ServedEngine,
    folder: Path,
    steps: int = 2,
) -> list[Any]:
    """``steps`` optimizer steps, each followed by a sync from the step hook; reports."""
    reports = []
    for _ in range(steps):
        numbers, report = group.step()
        assert numbers["updated"]
        state = group.weights()
        assert_engine_holds(model, state, served)
        assert_engine_serves(model, state, served, report.version, folder / report.version)
        reports.append(report)
    return reports


def untouched(served: ServedEngine) -> tuple[Any, Any]:
    """Something to compare before and after a refusal: tokens with label, and states."""
    return served.generate(proof.PROMPT, 4), [s.state for s in served.engine.status()]
