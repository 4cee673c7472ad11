"""From Megatron's parameters to SGLang's, family by family: trained ranks on one side, an engine's own
model, loader and post-load steps on the other, and between them the plans that a sync is made of.

Two runs, one after the other: both hosts keep what they know of themselves in globals.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.families.test_engine_wants import FP8, Results, found, one, start
from tests.families.test_trainer_models import run_jobs, said
from tests.families.zoo import FAMILIES

pytestmark = pytest.mark.families
pytest.importorskip("sglang")

# At the other TP size than the engine's: nothing fits by itself.
JOBS = {
    name: f"{name}:dtype=bfloat16,memory," + ("tp=2,ep=2,etp=1" if family.moe else "tp=2")
    for name, family in FAMILIES.items()
}
# Megatron's side is untied.
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    folder = tmp_path_factory.mktemp("megatron")
    run_jobs(folder, 2, list(JOBS.values()))
    more = {"findings": str(folder / "findings.pt"), "overrides": UNTIED}
    cases = [one(name, job=job, **more) for name, job in JOBS.items()]
    quantised = [one(name, job=JOBS[name], **more, **FP8["fp8"]) for name in FAMILIES]
    return {
        1: start(tmp_path_factory.mktemp("tp1"), cases),
        2: start(tmp_path_factory.mktemp("tp2"), [*cases, *quantised], tp=2),
    }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_trained_weights_arrive(
    name: str, tp: int, engines: dict[int, Results], passed: Callable[..., None]
) -> None:
    mine = {case: ranks for case, ranks in engines[tp].items() if ranks[0]["family"] == name}
    assert len(mine) == tp  # at TP 2 also quantised
    for case in mine:
        for result in found(mine, case, tp):
            assert result["different"] == {}, case
            assert set(result["sources"]) <= {0, 1}
        fp8 = "fp8" if "quantization" in case else ""
        passed(**{**said(JOBS[name]), "engine": f"TP {tp}", "fp8": fp8})
