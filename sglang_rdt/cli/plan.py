"""``sglang-rdt plan``: the options; what they do is imported when they are used."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

# Into a file or a pipe, nothing is cut.
_WIDE = 220


def plan(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="plan for a cluster on paper, and predict its speed")
    ] = False,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="show what a live sync does, from the file that SGLANG_RDT_PLAN_REPORT wrote",
        ),
    ] = None,
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
    """Show the plan of a live sync (--report), or make one for a cluster that exists on paper only
    and predict how long it takes (--simulate)."""
    if report_file is not None and not simulate:
        show(report_file)
        return
    if report_file is not None or not simulate:
        typer.echo("sglang-rdt plan: give either --report FILE or --simulate", err=True)
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


def show(path: Path) -> None:
    """Prints a report: what goes which way, and then all parameters of all engine ranks.

    Raises:
        RdtError: there is no such file, or it is no report.
    """
    from rich.console import Console
    from rich.table import Table

    from sglang_rdt.coordinator.phases import human_bytes
    from sglang_rdt.errors import RdtError
    from sglang_rdt.plan import report

    try:
        found = report.load(path)
    except OSError as error:
        raise RdtError(f"--report {path}: {error.strerror}") from None
    except ValueError as error:
        raise RdtError(f"--report {error}") from None
    totals = Table("way", "parameters", "bytes", title=f"A live plan ({found.mode})")
    for way, (count, nbytes) in found.totals().items():
        totals.add_row(way, str(count), human_bytes(nbytes))
    totals.add_row("[bold]over links[/]", "", f"[bold]{human_bytes(found.moved)}[/]")
    lines = Table("engine rank", "parameter", "way", "bytes", "dtype", "from", title="Parameters")
    for line in found.lines:
        what = f"{line.dtype} ({line.cast})" if line.cast else line.dtype
        sources = ", ".join(line.sources) + (f" ({line.why})" if line.why else "")
        lines.add_row(line.rank, line.param, line.way, human_bytes(line.nbytes), what, sources)
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDE)
    for rank, models in found.models.items():
        if models != "target":
            console.print(f"{rank} has: {models}", highlight=False)
    if found.unused:
        console.print(f"kept, and without a place on any engine: {', '.join(found.unused)}")
    console.print(lines)
    console.print(totals)
