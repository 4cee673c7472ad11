"""Other ways to start the two sides: torchrun ranks, SGLang's HTTP server, the patched sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_rdt import cpu
from sglang_rdt.coordinator.discovery import engine_at
from sglang_rdt.demo import proof
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, free_port
from sglang_rdt.errors import EngineNotFoundError
from tests.e2e.conftest import DENSE_TP1, DENSE_TP2, NAMESPACE, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, assert_engine_serves

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
API_KEY, ADMIN_KEY = "key-of-a-user", "key-of-an-admin"
MODEL = DENSE_TP2.model

# A training program as users write it: stock Megatron, two lines of ours.
TORCHRUN_PROGRAM = """
import sys, torch
import megatron_rdt
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

torch.set_num_threads(1)
init_distributed()
trainer = TinyTrainer(TinyModel("dense"), Layout(tp=2), seed=77, distributed_optimizer=True)
for _ in range(4):
    trainer.step()
state = trainer.reference_hf_state()
if trainer.rank == 0:
    torch.save(state, sys.argv[1])
torch.distributed.barrier()
"""


def test_torchrun_ranks_join_the_cluster_and_sync_by_environment_alone(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    """Plain torchrun processes; the program does not even mention engines."""
    import ray

    served = engines.get(DENSE_TP2)
    trainers.stop()  # their processes would only be in the way
    MODEL.save_random_checkpoint(tmp_path / "hf", seed=1)
    (tmp_path / "train.py").write_text(TORCHRUN_PROGRAM)
    environ = {
        **os.environ,
        **cpu.environment(2),
        "SGLANG_RDT_RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "SGLANG_RDT_NAMESPACE": NAMESPACE,
        "SGLANG_RDT_VERIFY": "equal",
        "MEGATRON_RDT_HF_CONFIG": str(tmp_path / "hf"),
        "MEGATRON_RDT_EXPORT_EVERY": "2",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(tmp_path / "train.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "state.pt")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import torch

    state = torch.load(tmp_path / "state.pt")
    assert_engine_holds(MODEL, state, served)
    # Steps 2 and 4 were synced, so the label is 4.
    assert_engine_serves(MODEL, state, served, "4", tmp_path / "end")


@contextmanager
def http_server(model: Path, port: int, log: Path) -> Iterator[None]:
    """``python -m sglang.launch_server --use-ray`` in the tests' cluster; nothing imports us there."""
    import ray

    environ = {
        **os.environ,
        **cpu.environment(2),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_NAMESPACE": NAMESPACE,
        "SGLANG_RDT_NAMESPACE": NAMESPACE,
    }
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += cpu.launch_args(str(model), tp_size=1, port=port)
    # The sync goes over Ray alone: no trainer knows these.
    command += ["--api-key", API_KEY, "--admin-api-key", ADMIN_KEY]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_the_entry_point_alone_serves_an_http_server(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    engines.stop()
    MODEL.save_random_checkpoint(tmp_path / "hf", seed=3)
    port = free_port()
    with http_server(tmp_path / "hf", port, tmp_path / "server.log"):
        deadline = time.monotonic() + 180
        engine = None
        while engine is None and time.monotonic() < deadline:
            try:
                engine = engine_at(f"0.0.0.0:{port}")
                _post(port, {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}})
            except (EngineNotFoundError, OSError):
                engine = None
                time.sleep(1.0)
        assert engine is not None, (tmp_path / "server.log").read_text()[-3000:]
        group = trainers.get(MODEL, Layout(tp=2), seed=12)
        group.attach(SETTINGS, on_step=False, engines=[f"localhost:{port}"])
        group.on_all(lambda rank: rank.sync.sync("over-http"))
        state = group.weights()
        live = engine.call("read_weights", timeout_s=60, phase="read_weights")
        assert proof.unequal_parameters(MODEL, state, live) == (19, [])
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        reply = _post(port, {"input_ids": list(proof.PROMPT), "sampling_params": sampling})
        assert reply["meta_info"]["weight_version"] == "over-http"
        MODEL.save_checkpoint(tmp_path / "end", state)
        assert proof.same_tokens(MODEL, tmp_path / "end", reply["output_ids"]) is None
        info = urllib.request.Request(
            f"http://127.0.0.1:{port}/get_model_info",
            headers={"Authorization": f"Bearer {API_KEY}"},
        )
        with urllib.request.urlopen(info, timeout=60) as answer:
            assert json.load(answer)["weight_version"] == "over-http"
    # SGLang prints its arguments; what this package says has no key in it.
    ours = [line for line in (tmp_path / "server.log").read_text().splitlines() if "_rdt" in line]
    assert not [line for line in ours if API_KEY in line or ADMIN_KEY in line]


def patched_tree(folder: Path) -> Path:
    """A copy of the installed SGLang and Megatron-core with the patch set applied."""
    site = Path(sysconfig.get_paths()["purelib"])
    target = folder / "site"
    target.mkdir()
    for package in ("sglang", "megatron"):
        shutil.copytree(site / package, target / package, symlinks=True)
    for pattern in ("sglang-*.dist-info", "megatron_core-*.dist-info"):
        for info in site.glob(pattern):
            shutil.copytree(info, target / info.name)
    done = subprocess.run(
        ["bash", str(ROOT / "apply.sh"), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_the_patched_sources_work_without_the_monkey_patch(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    engines.stop()
    trainers.stop()
    site = patched_tree(tmp_path)
    environ = {"SGLANG_RDT_MONKEYPATCH": "0"}
    path = os.pathsep.join([str(site), str(ROOT)])
    MODEL.save_random_checkpoint(tmp_path / "hf", seed=4)
    served = ServedEngine(
        cpu.engine_kwargs(str(tmp_path / "hf"), tp_size=1, port=31900),
        environ=environ,
        python_path=path,
    )
    try:
        state = served._get(served.host.call.remote(_where_patched))
        assert state["file"].startswith(str(site))
        assert state["marker"] is True
        assert state["state"]["scheduler_actor"] == "off"
        from sglang_rdt.demo.workers import Trainers

        group = Trainers(DENSE_TP1.model, Layout(tp=2), seed=13, environ=environ, python_path=path)
        try:
            group.attach(SETTINGS.replace(monkeypatch=False), engines=[served.address])
            _, report = group.step()  # the hook in the patched optimizer
            assert report.version == "1"
            weights = group.weights()
            assert_engine_holds(MODEL, weights, served)
            assert_engine_serves(MODEL, weights, served, "1", tmp_path / "end")
        finally:
            group.stop()
    finally:
        served.shutdown()


def _where_patched(_host: Any) -> dict[str, Any]:
    import sglang.srt.ray.engine as module

    from sglang_rdt import activation

    return {
        "file": module.__file__,
        "marker": getattr(module, "_SGLANG_RDT_PATCHED", False),
        "state": activation.state(),
    }
