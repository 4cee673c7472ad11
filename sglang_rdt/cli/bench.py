"""``sglang-rdt bench``: the options; what they do is imported when they are used."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def bench(
    model: Annotated[
        str,
        typer.Option(
            help="tiny, tiny-moe, small, cpu-1gb, qwen3-8b, qwen3-30b-a3b (each also with :layers), "
            "or a folder with a config.json"
        ),
    ] = "tiny",
    trainer: Annotated[
        str, typer.Option(help="the trainer's layout")
    ] = "tp=1,pp=1,ep=1,etp=1,dp=1",
    engine: Annotated[str, typer.Option(help="an engine's layout")] = "tp=1",
    engines: Annotated[int, typer.Option(min=1, help="how many engines")] = 1,
    paths: Annotated[
        str, typer.Option(help="which ways to compare")
    ] = "direct,direct_checksum,bucketed,sglang_distributed,sglang_disk,peer_copy",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    syncs: Annotated[int, typer.Option(min=1, help="measured syncs of each path")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="syncs before them, after the first")] = 2,
    disk_syncs: Annotated[
        int | None, typer.Option(min=1, help="measured syncs of sglang_disk (default: --syncs)")
    ] = None,
    bucket_bytes: Annotated[
        str | None,
        typer.Option(help="bucket sizes to choose the best of, such as 512MiB,2GiB"),
    ] = None,
    trainer_gpus: Annotated[
        str | None, typer.Option(help="such as 0; ranks may share one (default: the first ones)")
    ] = None,
    engine_gpus: Annotated[
        str | None, typer.Option(help="such as 1 (default: the last ones)")
    ] = None,
    verify: Annotated[
        str, typer.Option(help="SGLANG_RDT_VERIFY of direct and bucketed: off, checksum, equal")
    ] = "off",
    ddp: Annotated[
        bool,
        typer.Option(
            help="parameters in Megatron's contiguous buffers (takes memory for gradients)"
        ),
    ] = False,
    train: Annotated[
        int,
        typer.Option(
            min=0, help="time nothing: train so many real steps, and prove the sync after each"
        ),
    ] = 0,
    disk_dir: Annotated[
        Path | None, typer.Option(help="where sglang_disk saves (default: a temporary folder)")
    ] = None,
    engine_args: Annotated[
        str | None,
        typer.Option(help='SGLang server arguments as JSON: {"mem_fraction_static": 0.6}'),
    ] = None,
    gap_ms: Annotated[
        float, typer.Option(min=0, help="pause between two syncs, as training makes one")
    ] = 100.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="deadline of every single wait")] = 600.0,
    calibrate: Annotated[
        bool, typer.Option(help="measure the planner's cost constants instead; --out is a file")
    ] = False,
    out: Annotated[Path, typer.Option(help="folder for the JSON file and the plot")] = Path("."),
) -> None:
    """Compare all ways to bring weights into an engine, side by side, on this machine."""
    from rich.console import Console

    from sglang_rdt.bench.machine import check_writable, pick_device
    from sglang_rdt.bench.options import BenchError, make_options

    try:
        kind, gpus = pick_device(device)
    except ValueError as error:
        raise BenchError(f"--device {device}: {error}") from None
    check_writable(out.parent if calibrate and not out.is_dir() else out, "--out")
    if disk_dir is not None:
        check_writable(disk_dir, "--disk-dir")
    console = Console(width=max(Console().width, 100))  # the table needs as much, also in a log
    if calibrate:
        from sglang_rdt.bench.calibrate import calibrate as run_calibration

        run_calibration(kind, out / "costs.json" if out.is_dir() else out, timeout_s, console)
        return
    options = make_options(
        model=model,
        trainer=trainer,
        engine=engine,
        engines=engines,
        paths=paths,
        device=kind,
        syncs=syncs,
        warmup=warmup,
        disk_syncs=disk_syncs,
        bucket_bytes=bucket_bytes,
        trainer_gpus=trainer_gpus,
        engine_gpus=engine_gpus,
        verify=verify,
        ddp=ddp,
        train=train,
        disk_dir=disk_dir,
        engine_args=engine_args,
        gap_ms=gap_ms,
        timeout_s=timeout_s,
        gpus=gpus,
        command=shlex.join(["sglang-rdt", *_without_folders(sys.argv[1:])]),
    )
    if train:
        from sglang_rdt.bench.trained import prove

        good = prove(options, gpus, out, console)
    else:
        from sglang_rdt.bench.run import run

        good = run(options, gpus, out, console)
    if not good:
        raise typer.Exit(1)


def _without_folders(words: list[str]) -> list[str]:
    """The command line as results show it: absolute paths by their last part."""
    return [Path(w).name if w.startswith("/") else w for w in words]
