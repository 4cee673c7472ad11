"""``sglang-rdt demo``: Megatron-core trains, SGLang serves, weights travel, and it is proved."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.settings import Settings

NAMESPACE = "sglang-rdt-demo"
ENGINE_TP = 2


@dataclass(frozen=True)
class Case:
    """One model and how it is trained."""

    name: str
    model: TinyModel
    layout: Layout
    port: int


CASES = {
    "dense": Case("Qwen3, trained at TP 2", TinyModel("dense"), Layout(tp=2), 30100),
    "moe": Case("Qwen3-MoE, trained at EP 2", TinyModel("moe"), Layout(ep=2, dp=2), 30200),
}


@dataclass
class Outcome:
    """What a case showed. Empty ``differences`` is success."""

    case: Case
    rows: list[tuple[str, ...]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def run(kinds: list[str], steps: int, dtype: str, settings: Settings, console: Console) -> bool:
    """Runs the demo; True if everything was equal.

    Args:
        kinds: keys of :data:`CASES`.
        steps: optimizer steps, each followed by a sync.
        dtype: of trainer and engine.
    """
    from sglang_rdt import cpu

    os.environ.update(cpu.environment(ENGINE_TP))
    import ray
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    started = time.monotonic()
    console.print("starting a Ray cluster on this machine ...")
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=8,
        num_gpus=ENGINE_TP,  # nothing is behind them on a CPU; SGLang reserves one per rank
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        outcomes = [run_case(CASES[kind], steps, dtype, settings, console) for kind in kinds]
    finally:
        ray.shutdown()
    wrong = [f"{o.case.name}, {line}" for o in outcomes for line in o.differences]
    for line in wrong:
        console.print(f"[bold red]DIFFERENT[/] {line}")
    verdict = "[bold red]FAILED[/]" if wrong else "[bold green]everything is equal[/]"
    console.print(f"{verdict} ({time.monotonic() - started:.0f} s)")
    return not wrong


def run_case(case: Case, steps: int, dtype: str, settings: Settings, console: Console) -> Outcome:
    """Starts an engine on other random weights, trains, syncs after each step, proves it."""
    import torch

    from sglang_rdt import cpu
    from sglang_rdt.demo.workers import ServedEngine, Trainers

    console.rule(case.name)
    outcome = Outcome(case)
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory(prefix="sglang-rdt-demo-") as folder:
        start = Path(folder, "start")
        case.model.save_random_checkpoint(start, seed=1, dtype=kind)
        console.print(f"starting a real SGLang engine at TP {ENGINE_TP} on random weights ...")
        serving = ServedEngine(
            cpu.engine_kwargs(str(start), tp_size=ENGINE_TP, dtype=dtype, port=case.port)
        )
        try:
            names = ", ".join(r.actor_name for r in serving.engine.ranks)
            console.print(f"engine {serving.address}: {names}")
            console.print(
                f"starting {case.layout.world} real Megatron-core ranks, {case.layout} ..."
            )
            trainers = Trainers(case.model, case.layout, seed=2, dtype=kind)
            try:
                trainers.attach(settings, engines=[serving.address])
                _check(outcome, "", start, serving, None, "")
                for _ in range(steps):
                    _step(outcome, trainers, serving, Path(folder))
            finally:
                trainers.stop()
        finally:
            serving.shutdown()
    console.print(_table(outcome))
    return outcome


def _step(outcome: Outcome, trainers: Any, serving: Any, folder: Path) -> None:
    from sglang_rdt.demo import proof

    model = outcome.case.model
    numbers, report = trainers.step()
    state = proof.through_transformers(model, trainers.weights())
    compared, differences = proof.unequal_parameters(model, state, serving.weights())
    outcome.differences += [f"version {report.version}: {d}" for d in differences]
    checkpoint = folder / f"step{report.version}"
    model.save_checkpoint(checkpoint, state)
    equal = f"{compared - len(differences)} of {compared}"
    _check(outcome, f"{numbers['loss']:.3f}", checkpoint, serving, report, equal)


def _check(
    outcome: Outcome,
    loss: str,
    checkpoint: Path,
    serving: Any,
    report: Any,
    equal: str,
) -> None:
    from sglang_rdt.demo import proof

    tokens, version = serving.generate(proof.PROMPT, proof.NEW_TOKENS)
    wrong = proof.same_tokens(outcome.case.model, checkpoint, tokens)
    if wrong:
        outcome.differences.append(f"version {version}: {wrong}")
    if report is not None and version != report.version:
        outcome.differences.append(f"replies are labelled {version}, not {report.version}")
    outcome.rows.append(
        (
            version,
            loss,
            equal,
            "NO" if wrong else "yes",
            " ".join(map(str, tokens)),
            str(report.nbytes) if report else "",
            f"{report.seconds * 1e3:.0f}" if report else "",
            ", ".join(f"{n} {s * 1e3:.0f}" for n, s in report.ordered_phases()) if report else "",
        )
    )


def _table(outcome: Outcome) -> Table:
    table = Table(title=outcome.case.name)
    for column in (
        "version",
        "loss",
        "parameters equal",
        "tokens equal",
        "engine's greedy tokens",
        "bytes",
        "sync, ms",
        "phases, ms",
    ):
        table.add_column(column, overflow="fold")
    for row in outcome.rows:
        table.add_row(*row)
    return table
