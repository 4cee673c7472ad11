"""``sglang-rdt plan``: the options; what they do is imported when they are used."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def plan(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="of a cluster on paper; there is nothing else yet")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="kimi-k2, deepseek-v3, qwen3-235b-a22b, qwen3-30b-a3b, qwen3-8b, glm-4.5-air, "
            "llama3-70b, llama3-8b, or a folder with a config.json"
        ),
    ] = "qwen3-8b",
    trainer: Annotated[
        str, typer.Option(help="Megatron's layout, of tp, pp, ep, etp, dp, cp, vpp (etp: tp)")
    ] = "tp=1",
    stages: Annotated[
        str | None, typer.Option(help="layers of each pipeline stage, such as 16,15,15,15")
    ] = None,
    trainer_gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    engines: Annotated[int, typer.Option(min=1, help="how many engines")] = 1,
    engine: Annotated[str, typer.Option(help="an engine's layout, of tp, ep, pp, dp")] = "tp=1",
    engine_gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    placement: Annotated[
        str, typer.Option(help="separate: nodes of their own; packed: engines share the trainer's")
    ] = "separate",
    nvlink_gbps: Annotated[
        float, typer.Option(help="GB/s of a GPU inside its node, each direction")
    ] = 396.0,
    nic_gbps: Annotated[
        float, typer.Option(help="GB/s of a GPU to other nodes, each direction (50: 400 Gb/s)")
    ] = 50.0,
    node_nic_gbps: Annotated[
        float | None, typer.Option(help="GB/s of all NICs of a node (default: no other limit)")
    ] = None,
    fixed_ms: Annotated[
        float, typer.Option(min=0, help="ms of all phases but the pull; assumed, not measured")
    ] = 10.0,
    costs: Annotated[
        Path | None, typer.Option(help="a file of sglang-rdt bench --calibrate")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Plan a direct sync for a cluster that exists on paper only, and predict how long it takes."""
    if not simulate:
        typer.echo("sglang-rdt plan: only --simulate exists for now", err=True)
        raise typer.Exit(2)
    import datetime

    from rich.console import Console

    from sglang_rdt.plan.costs import LinkCosts
    from sglang_rdt.simulate import layouts, report
    from sglang_rdt.simulate.errors import SimulateError
    from sglang_rdt.simulate.predict import Links
    from sglang_rdt.simulate.run import Job
    from sglang_rdt.simulate.run import simulate as run
    from sglang_rdt.simulate.shapes import load_shape

    if placement not in ("separate", "packed"):
        raise SimulateError(f"--placement {placement}: expected separate or packed")
    try:
        known = LinkCosts.load(costs) if costs else LinkCosts()
    except OSError as error:
        raise SimulateError(f"--costs {costs}: {error.strerror}") from None
    job = Job(
        shape=load_shape(model),
        trainer=layouts.parse_trainer(trainer, stages),
        engine=layouts.parse_engine(engine),
        engines=engines,
        placement=layouts.Placement(
            trainer_gpus_per_node,
            engine_gpus_per_node,
            "packed" if placement == "packed" else "separate",
        ),
        links=Links(
            nvlink_gbps * 1e9,
            nic_gbps * 1e9,
            None if node_nic_gbps is None else node_nic_gbps * 1e9,
            known,
            fixed_ms / 1e3,
        ),
    )
    if out:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SimulateError(f"--out {out}: {error.strerror}") from None
    outcome = run(job)
    console = Console(soft_wrap=True)
    for table in report.tables(outcome):
        console.print(table)
    if out:
        words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        report.save(report.as_dict(outcome, shlex.join(["sglang-rdt", *words]), date), out)
