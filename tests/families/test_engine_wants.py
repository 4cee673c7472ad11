"""SGLang's own model, loader and post-load steps of every family, without a server: synced to
another checkpoint, it is in every byte what SGLang's own loading of that checkpoint gives.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import engine_world
from tests.families.zoo import FAMILIES

pytest.importorskip("sglang")
pytestmark = [pytest.mark.families, pytest.mark.e2e]

Results = dict[str, list[dict[str, Any]]]
Passed = Callable[..., None]


def start(folder: Path, cases: list[dict[str, Any]], tp: int = 1, ep: int = 1) -> Results:
    """Runs ``cases`` on an engine of ``tp`` ranks; case -> what each rank found."""
    from sglang_rdt.cpu import environment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"tp": tp, "ep": ep, "port": port, "cases": cases}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.families.engine_world", str(path)]
    root = Path(__file__).parents[2]
    env = {**os.environ, **environment(tp), "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(tp):
        with (folder / f"log-{rank}").open("w") as log:
            ranks.append(
                subprocess.Popen([*command, str(rank)], cwd=root, env=env, stdout=log, stderr=log)
            )
    results: Results = {}
    try:
        for rank, process in enumerate(ranks):
            code = process.wait(timeout=600)
            assert code == 0, (folder / f"log-{rank}").read_text()[-3000:]
            for line in (folder / f"result-{rank}.jsonl").read_text().splitlines():
                found = json.loads(line)
                results.setdefault(found["case"], []).append(found)
    finally:
        for process in ranks:
            process.kill()
    return results


def one(family: str, **more: Any) -> dict[str, Any]:
    return {"family": family, **more}


# More of a family than its plain shape.
MORE = [
    one("qwen2_5", overrides={"tie_word_embeddings": True}),
    one("qwen3", overrides={"num_key_value_heads": 1}),
    one("qwen3", trainer_dtype="float32"),
    one("qwen3_moe", engine_dtype="float32"),
    one("deepseek_v3", overrides={"q_lora_rank": None}),
    one("qwen3_5_moe", engine_dtype="float16"),
]
BROKEN = [
    one("qwen3", overrides={"num_hidden_layers": 1}, breakage="stale"),
    one("glm4_moe_lite", overrides={"vocab_size": 512}, breakage="no post-load"),
    one("qwen3_5_moe", overrides={"vocab_size": 512}, breakage="no compute"),
]
# Quantised by SGLang after loading; and checkpoints that are quantised already.
FP8 = {"fp8": {"server": {"quantization": "fp8"}}, "block FP8": {"blocks": 16}}
IN_BLOCKS = ["qwen3", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]
QUANTISED = [("fp8", name) for name in FAMILIES] + [("block FP8", name) for name in IN_BLOCKS]
CASES = [
    *(one(name) for name in FAMILIES),
    *MORE,
    *BROKEN,
    *(one(name, **FP8[how]) for how, name in QUANTISED),
]


@pytest.fixture(scope="module")
def tp1(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return start(tmp_path_factory.mktemp("tp1"), CASES)


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return start(tmp_path_factory.mktemp("tp2"), CASES, tp=2)


@pytest.fixture(scope="module")
def ep2(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = [one(name) for name in WITH_EP]
    return start(tmp_path_factory.mktemp("ep2"), cases, tp=2, ep=2)


# SGLang itself cannot load GPT-OSS in bfloat16 with its experts dealt out.
WITH_EP = [name for name, f in FAMILIES.items() if f.moe and name != "gpt_oss"]


def found(results: Results, case: str, ranks: int = 1) -> list[dict[str, Any]]:
    here = results[case]
    assert len(here) == ranks
    for result in here:
        assert "error" not in result, result["error"]
    return here


def check(results: Results, case: str, ranks: int) -> None:
    """In every byte as SGLang's own loading has it, after a bucketed and after a direct sync."""
    for result in found(results, case, ranks):
        assert result["different"] == {}
        # All of it by copies of slices, each of which is one transfer; but Qwen3.5's norms keep their
        # weight plus one in a buffer.
        plus_one = [n for one in result["computed"] for n in one["params"]]
        assert all(name.endswith(".gemma_weight") for name in plus_one)
        assert len(plus_one) == (11 if result["family"] == "qwen3_5_moe" else 0)
        assert result["transfers"] == result["wants"]
        # What is derived of the weights is derived once per sync.
        if FAMILIES[result["family"]].mla:
            assert result["post_loads"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank(tp1: Results, family: str, passed: Passed) -> None:
    check(tp1, family, 1)
    passed(family=family, engine="TP 1", mode="both", dtype="bfloat16")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks(tp2: Results, family: str, passed: Passed) -> None:
    check(tp2, family, 2)
    passed(family=family, engine="TP 2", mode="both", dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("family", WITH_EP)
def test_experts_dealt_out(ep2: Results, family: str, passed: Passed) -> None:
    check(ep2, family, 2)
    passed(family=family, engine="TP 2, EP 2", mode="both", dtype="bfloat16")


@pytest.mark.parametrize(("how", "family"), QUANTISED)
def test_quantised_engines(
    tp1: Results, tp2: Results, how: str, family: str, passed: Passed
) -> None:
    case = engine_world.Case(family, **FP8[how]).name
    check(tp1, case, 1)
    check(tp2, case, 2)
    for tp in (1, 2):
        # What the trainer quantises lies nowhere before.
        mode = "both" if how == "fp8" else "bucketed"
        passed(family=family, engine=f"TP {tp}", mode=mode, dtype="bfloat16", fp8=how)


@pytest.mark.parametrize(
    "case", ["qwen2_5 tie_word_embeddings=True", "qwen3 num_key_value_heads=1"]
)
def test_tied_weights_and_repeated_heads(tp1: Results, tp2: Results, case: str) -> None:
    check(tp1, case, 1)
    check(tp2, case, 2)


def test_queries_without_a_low_rank(tp1: Results, tp2: Results) -> None:
    # Moonlight; there SGLang fuses nothing.
    check(tp1, "deepseek_v3 q_lora_rank=None", 1)
    check(tp2, "deepseek_v3 q_lora_rank=None", 2)


@pytest.mark.parametrize(
    "case",
    ["qwen3 float32->bfloat16", "qwen3_moe bfloat16->float32", "qwen3_5_moe bfloat16->float16"],
)
def test_other_dtypes_are_rounded_as_the_loader_does(tp1: Results, tp2: Results, case: str) -> None:
    check(tp1, case, 1)
    check(tp2, case, 2)


def test_a_tensor_that_stays_is_noticed(tp1: Results) -> None:
    (result,) = found(tp1, "qwen3 num_hidden_layers=1")
    assert result["different"] == {"bucketed": ["model.embed_tokens.weight"]}


def test_weights_that_are_not_derived_again_are_noticed(tp1: Results) -> None:
    (result,) = found(tp1, "glm4_moe_lite vocab_size=512")
    assert result["different"] == {
        "bucketed": [f"model.layers.{i}.self_attn.w_{k}c" for i in (0, 1) for k in ("k", "v")]
    }


def test_what_the_loader_does_not_compute_again_is_noticed(tp1: Results) -> None:
    (result,) = found(tp1, "qwen3_5_moe vocab_size=512")
    plus_one = [name for one in result["computed"] for name in one["params"]]
    assert sorted(result["different"]["bucketed"]) == sorted(plus_one)
    assert len(plus_one) == 11
