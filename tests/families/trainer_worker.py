"""Trains the families' models in one layout, exports them, and says what it found.

Run by ``test_trainer_models.py``, in processes of its own: Megatron's CPU stand-ins replace parts of
torch, and transformers, which judges, shall have the real one.

    python -m tests.families.trainer_worker OUT WORLD RANK PORT JOB...

A job is ``family:tp=2,ep=2,mtp``. OUT gets ``{job: Finding}`` from rank 0.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

# Megatron compiles what it fuses: half a minute, and for nothing.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist

from megatron_rdt.sources.holds import Holdings
from megatron_rdt.sources.mbridge import MBridgeSource
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.demo.trainer import Layout, init_distributed
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.plan.specs import TrainerRank

State = dict[str, torch.Tensor]


# Without a repr: pytest would print every tensor of a failure, for minutes.
@dataclass(repr=False)
class Finding:
    """What a job came to.

    Args:
        started: exported before any training.
        trained: exported after it.
        logits: of Megatron's own forward then, for ``ids``.
        losses: of the steps.
        held: put together from what all ranks hold in live memory.
        ranks: each rank as it describes itself to the planner, and copies of its blocks; where the
            job says ``memory``.
        error: a traceback, if something went wrong.
    """

    started: State = field(default_factory=dict)
    trained: State = field(default_factory=dict)
    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    losses: list[float] = field(default_factory=list)
    held: State = field(default_factory=dict)
    ranks: list[tuple[TrainerRank, list[torch.Tensor]]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def parse(job: str) -> tuple[str, Layout, dict[str, Any]]:
    """Family, layout, and the rest."""
    family, _, options = job.partition(":")
    numbers, more = {}, {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key in ("tp", "pp", "ep", "etp", "dp"):
            numbers[key] = int(value)
        elif key == "dtype":
            more["dtype"] = getattr(torch, value)
        else:
            more[key] = True
    return family, Layout(**numbers), more


def exported(source: MBridgeSource) -> State:
    """HF tensors of all ranks; those that several have must agree in every bit."""
    timer = PhaseTimer()
    specs = {s.name: (s.shape, torch_dtype(s.dtype)) for s in source.specs()}
    mine = {name: tensor.clone() for name, tensor in source.export(timer)}
    assert specs == {n: (tuple(t.shape), t.dtype) for n, t in mine.items()}, "specs are others"
    whole: State = {}
    for theirs in _everybody(mine):
        for name, tensor in theirs.items():
            assert same(whole.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return whole


def held(holdings: Holdings, like: State) -> State:
    """HF tensors put together from live memory, every element of which some rank must hold."""
    mine = []
    for hold in holdings.holds:
        memory = holdings.tensors[hold.block].view(torch.uint8)
        dtype = torch_dtype(hold.dtype)
        memory = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        s = hold.local
        mine.append((hold.source, hold.hf, memory.as_strided(s.shape, s.stride, s.offset).clone()))
    whole = {n: torch.zeros_like(t).flatten() for n, t in like.items()}
    count = {n: torch.zeros(t.numel(), dtype=torch.bool) for n, t in like.items()}
    for theirs in _everybody(mine):
        for name, at, values in theirs:
            whole[name].as_strided(at.shape, at.stride, at.offset).copy_(values)
            count[name].as_strided(at.shape, at.stride, at.offset).fill_(True)
    missing = [n for n, c in count.items() if not bool(c.all())]
    assert not missing, f"held by nobody, at least in part: {missing}"
    return {n: t.view(like[n].shape) for n, t in whole.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In every bit."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def _everybody(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def run(job: str) -> Finding:
    """One job, on every rank."""
    from .megatron_models import FamilyTrainer

    finding = Finding()
    began = time.monotonic()
    trainer = None
    try:
        family, layout, more = parse(job)
        memory = more.pop("memory", False)
        trainer = FamilyTrainer(family, layout, **more)
        source = MBridgeSource(trainer.model_chunks, trainer.hf_config)
        finding.started = exported(source)
        # As a connection does it: once, and before the training whose weights are read.
        holdings = source.holds()
        finding.losses = [trainer.step()["loss"] for _ in range(2)]
        finding.trained = exported(source)
        generator = torch.Generator().manual_seed(1)
        finding.ids = torch.randint(0, trainer.model.vocab, (2, 12), generator=generator)
        finding.logits = trainer.logits(finding.ids)
        assert source.addresses() == holdings.addresses
        source.refresh()
        finding.held = held(holdings, finding.trained)
        if memory:
            rank, specs = dist.get_rank(), tuple(source.specs())
            me = TrainerRank(rank, f"10.1.0.{rank}", specs, {}, holdings.blocks, holdings.holds)
            finding.ranks = _everybody((me, [t.clone() for t in holdings.tensors]))
    except Exception:
        finding.error = traceback.format_exc()
    finally:
        if trainer is not None:
            trainer.close()
        else:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
    finding.seconds = time.monotonic() - began
    errors = [e for e in _everybody(finding.error) if e]
    finding.error = "\n".join(errors)
    return finding


def main() -> None:
    out, world, rank, port, *jobs = sys.argv[1:]
    torch.set_num_threads(1)
    from megatron_rdt import cpu

    cpu.install()
    init_distributed(int(rank), int(world), "127.0.0.1", int(port), timeout_s=120)
    findings = {}
    for job in jobs:
        findings[job] = run(job)
        if rank == "0":
            print(job, f"{findings[job].seconds:.1f}s", findings[job].losses, flush=True)
            print(findings[job].error, flush=True)
    if rank == "0":
        torch.save(findings, out)
    dist.barrier()


if __name__ == "__main__":
    # Not this module's own Finding: who reads it knows the package's.
    from tests.families import trainer_worker

    trainer_worker.main()
