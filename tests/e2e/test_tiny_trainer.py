"""The demo trainer's own export agrees with transformers in every kind of layout.

Two processes train all layouts one after the other (importing Megatron costs more than all of
them); this process, without the CUDA stand-ins, then checks what they left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_rdt.cpu import boot
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout

pytestmark = pytest.mark.e2e

boot.activate()  # transformers imports torchvision, which may be a CUDA build

SEED = 7
STEPS = 2
IDS = torch.tensor([[1, 10, 20, 30, 40, 50, 60], [9, 8, 7, 6, 5, 4, 3]])


@dataclass(frozen=True)
class Case:
    model: TinyModel
    layout: Layout
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


DENSE = TinyModel("dense", num_layers=4)
MOE = TinyModel("moe")
SHARDED = {"distributed_optimizer": True}
CASES = {
    "tp2": Case(DENSE, Layout(tp=2)),
    "tp2-qkv-bias": Case(TinyModel("dense", qkv_bias=True), Layout(tp=2)),
    "tp2-bf16": Case(DENSE, Layout(tp=2), torch.bfloat16),
    "pp2": Case(DENSE, Layout(pp=2)),
    "pp2-tied-padded": Case(
        TinyModel("dense", vocab=500, padded_vocab=512, tied=True), Layout(pp=2)
    ),
    "pp2-vpp2": Case(DENSE, Layout(pp=2, vpp=2)),
    "dp2-sharded": Case(DENSE, Layout(dp=2), options=SHARDED),
    # Small buckets: several gathers are left to the next forward.
    "dp2-overlap": Case(
        DENSE, Layout(dp=2), options={**SHARDED, "overlap_param_gather": True, "bucket_size": 20000}
    ),
    "moe-ep2": Case(MOE, Layout(ep=2, dp=2)),
    "moe-tp2-etp2": Case(MOE, Layout(tp=2)),
    "moe-tp2-ep2": Case(MOE, Layout(tp=2, ep=2, etp=1), options=SHARDED),
}


def _train(case: Case) -> dict[str, Any]:
    from sglang_rdt.demo.trainer import TinyTrainer

    trainer = TinyTrainer(case.model, case.layout, dtype=case.dtype, seed=SEED, **case.options)
    before = trainer.reference_hf_state()
    steps = [trainer.step() for _ in range(STEPS)]
    # How one copy of the embedding differs from another right after a step.
    embedding = next(trainer.model_chunks[0].parameters()).detach().clone()
    after = trainer.reference_hf_state()
    logits = trainer.logits(IDS)
    trainer.close()
    return {
        "before": before,
        "steps": steps,
        "embedding": embedding,
        "after": after,
        "logits": logits,
    }


def _worker(rank: int, port: int, folder: Path) -> None:
    from sglang_rdt.demo.trainer import init_distributed

    torch.set_num_threads(1)
    init_distributed(rank, 2, "127.0.0.1", port, timeout_s=120)
    torch.save(len(os.listdir("/proc/self/task")), folder / f"threads.{rank}.pt")
    for name, case in CASES.items():
        try:
            outcome: Any = _train(case)
        except Exception:
            # The other rank fails too, or waits for this one: the rest would be noise.
            (folder / f"{name}.error").write_text(traceback.format_exc())
            raise
        outcome["threads"] = len(os.listdir("/proc/self/task"))
        torch.save(outcome, folder / f"{name}.{rank}.pt")
    torch.save(_uneven_collectives(rank), folder / f"uneven.{rank}.pt")


def _uneven_collectives(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What expert TP across expert-parallel ranks needs; in a whole model that takes 4 ranks."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    rows, sizes = torch.arange(10.0).view(5, 2), [3, 2]
    mine = rows.split(sizes)[rank]
    gathered = mappings._gather_along_first_dim(mine, dist.group.WORLD, sizes)
    scattered = mappings._reduce_scatter_along_first_dim(rows, dist.group.WORLD, sizes)
    return gathered, scattered


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank found in each case."""
    folder = tmp_path_factory.mktemp("trained")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_worker, args=(rank, port, folder)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=180)  # 10 s where nothing else runs
        if worker.is_alive():
            worker.kill()
    return folder


@pytest.mark.parametrize("name", CASES)
def test_reference_state(name: str, outcomes: Path) -> None:
    case = CASES[name]
    errors = [path.read_text() for path in outcomes.glob("*.error")]
    assert not errors, errors[0]
    ours, other = (torch.load(outcomes / f"{name}.{rank}.pt") for rank in range(2))

    # Every rank has the whole state, and it starts from the seed's weights in every layout.
    initial = case.model.random_hf_state(SEED, case.dtype)
    assert list(ours["before"]) == list(initial)
    assert list(ours["after"]) == list(initial)
    for key, tensor in initial.items():
        assert torch.equal(ours["before"][key], tensor), key
        assert torch.equal(ours["after"][key], other["after"][key]), key
        assert ours["after"][key].dtype == case.dtype
        assert not torch.equal(ours["after"][key], tensor), f"{key} was not trained"

    assert ours["steps"] == other["steps"]
    assert all(step["updated"] and step["grad_norm"] > 0 for step in ours["steps"])

    # What Megatron computes with its weights is what transformers computes with the export.
    logits = case.model.transformers_logits(ours["after"], IDS)
    difference = (logits - ours["logits"]).abs().max().item()
    assert difference < (2e-5 if case.dtype == torch.float32 else 0.15)
    assert torch.equal(ours["logits"], other["logits"])


@pytest.mark.parametrize(
    "names",
    [
        ("tp2", "pp2", "pp2-vpp2"),
        ("dp2-sharded", "dp2-overlap"),
        ("moe-tp2-etp2", "moe-tp2-ep2"),
    ],
    ids="/".join,
)
def test_layouts_train_alike(names: tuple[str, ...], outcomes: Path) -> None:
    """Same data, same loss, same gradients: no communication is mixed up."""
    runs = [torch.load(outcomes / f"{name}.0.pt")["steps"] for name in names]
    for key in ("loss", "grad_norm"):
        first, *others = ([step[key] for step in steps] for steps in runs)
        assert all(other == pytest.approx(first, rel=1e-5) for other in others)


def test_what_is_closed_leaves_no_threads(outcomes: Path) -> None:
    """Three for each group of Megatron's, which poll: tests that build a hundred trainers in a process
    were twice as slow for it. With overlapped gathers a trainer goes when the next one does."""
    for rank in range(2):
        before = torch.load(outcomes / f"threads.{rank}.pt")
        after = [torch.load(outcomes / f"{name}.{rank}.pt")["threads"] for name in CASES]
        many = [f"{name}: {n}" for name, n in zip(CASES, after, strict=True) if n > before + 15]
        assert [m.split(":")[0] for m in many] in ([], ["dp2-overlap"]), (before, many)


def test_overlapped_gather_leaves_stale_parameters(outcomes: Path) -> None:
    """Else the trainer would be no test for a sync that must force the gather."""
    one, other = (torch.load(outcomes / f"dp2-overlap.{rank}.pt")["embedding"] for rank in range(2))
    assert not torch.equal(one, other)


def test_uneven_collectives(outcomes: Path) -> None:
    rows = torch.arange(10.0).view(5, 2)
    for rank in range(2):
        gathered, scattered = torch.load(outcomes / f"uneven.{rank}.pt")
        assert torch.equal(gathered, rows)
        assert torch.equal(scattered, 2 * rows.split([3, 2])[rank])
