"""SGLang's own model, loader and post-load steps of every family, without a server: synced to
another checkpoint, it is in every byte what SGLang's own loading of that checkpoint gives.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.families.zoo import FAMILIES

pytest.importorskip("sglang")
pytestmark = [pytest.mark.families, pytest.mark.e2e]

Results = dict[str, list[dict[str, Any]]]


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
            code = process.wait(timeout=300)
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
]
CASES = [*(one(name) for name in FAMILIES), *MORE, *BROKEN]


@pytest.fixture(scope="module")
def tp1(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return start(tmp_path_factory.mktemp("tp1"), CASES)


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return start(tmp_path_factory.mktemp("tp2"), CASES, tp=2)
