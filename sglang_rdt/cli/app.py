"""Commands of ``sglang-rdt``. Heavy imports happen inside of them."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_rdt import settings as settings_module
from sglang_rdt.cli.bench import bench
from sglang_rdt.cli.plan import plan

app = typer.Typer(
    help="Weight sync from Megatron-core to SGLang over NIXL and Ray Direct Transport.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import sglang_rdt

        typer.echo(sglang_rdt.__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")
    ] = False,
) -> None:
    """Weight sync from Megatron-core to SGLang over NIXL and Ray Direct Transport."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="dense, moe or both")] = "both",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps, each followed by a sync")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    check_weight_update_equal: Annotated[
        bool,
        typer.Option(
            help="overwrite engine weights before each sync, and compare every byte after it"
        ),
    ] = False,
) -> None:
    """Train, serve and sync on this machine, with real parts, and prove every byte."""
    from rich.console import Console

    from sglang_rdt.demo.run import CASES, run

    if model not in (*CASES, "both"):
        raise typer.BadParameter(f"expected one of {', '.join(CASES)}, both")
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("expected float32 or bfloat16")
    kinds = list(CASES) if model == "both" else [model]
    settings = settings_module.load()
    if check_weight_update_equal:
        settings = settings.replace(verify="equal")
    if not run(kinds, steps, dtype, settings, Console()):
        raise typer.Exit(1)


app.command()(bench)
app.command()(plan)


@app.command()
def doctor() -> None:
    """What is installed, whether it is supported, and whether every patch fits."""
    from sglang_rdt.cli.doctor import diagnose

    raise typer.Exit(0 if diagnose() else 1)


@app.command()
def engines(
    address: Annotated[
        str | None, typer.Option(help="Ray cluster (default: SGLANG_RDT_RAY_ADDRESS)")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Ray namespace (default: SGLANG_RDT_NAMESPACE)")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(help="host:port of a dirty engine that shall serve the torn weights it has"),
    ] = None,
    current: Annotated[
        bool,
        typer.Option("--current", help="only the addresses of those that requests may go to"),
    ] = False,
    label: Annotated[
        str | None,
        typer.Option(
            help="with --accept: the weight version that its replies carry then; "
            "with --current: only those that serve it"
        ),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", help="those of every Ray namespace")
    ] = False,
) -> None:
    """The engines in a running Ray cluster, with state and weight version of each rank."""
    from sglang_rdt.cli.engines import accept as accept_weights
    from sglang_rdt.cli.engines import show, show_current

    if accept is not None and (label is None or current):
        raise typer.BadParameter("--accept needs --label, and no --current")
    if label is not None and accept is None and not current:
        raise typer.BadParameter("--label goes with --accept or --current")
    if accept is not None and label is not None:
        accept_weights(accept, label, address, namespace)
    elif current:
        show_current(address, namespace, all_namespaces, label)
    else:
        show(address, namespace, all_namespaces)


@app.command()
def settings(
    markdown: Annotated[bool, typer.Option(help="as a Markdown table")] = False,
) -> None:
    """Every environment variable, its default and meaning."""
    rows = settings_module.table()
    if markdown:
        typer.echo("| variable | default | meaning |\n| --- | --- | --- |")
        for name, default, meaning in rows:
            typer.echo(f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("variable", "default", "meaning")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
