"""One benchmark, from the command line's options to files."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_rdt.bench import engine_side, engines, machine, plot, report
from sglang_rdt.bench.measure import Measurement, empty_call_ms, one_line
from sglang_rdt.bench.options import Options
from sglang_rdt.bench.paths.base import Context
from sglang_rdt.bench.trainer import BenchTrainers


class Progress:
    """Lines with the time since the start, out at once."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()

    def __call__(self, line: str) -> None:
        self._console.print(
            f"[{time.monotonic() - self._started:6.1f} s] {line}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def run(options: Options, gpus: int, out: Path, console: Console) -> bool:
    """Measures every path that was asked for; True if all worked and everything was equal.

    The result is written anew after each path: a run that is killed leaves what it has.

    Args:
        gpus: how many this machine has.
        out: folder for the JSON file and the plot.
    """
    log = Progress(console)
    engines.environment(options)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    log("starting a Ray cluster on this machine")
    with (
        engines.cluster(options, gpus),
        tempfile.TemporaryDirectory(prefix="sglang-rdt-bench-") as temporary,
    ):
        folder = Path(temporary)
        model = folder / "model"
        options.model.model.hf_config().save_pretrained(model)
        log(f"starting {options.engines} engine(s) at TP {options.engine_tp}: {options.model.name}")
        with engines.running(options, model, gpus) as served:
            log(f"starting {options.trainer.world} Megatron rank(s): {options.layout['trainer']}")
            trainers = BenchTrainers(options)
            try:
                nbytes = sum(
                    n
                    for one in served
                    for n in engine_side.on_ranks(
                        one.engine,
                        engine_side.parameter_bytes,
                        timeout_s=options.timeout_s,
                        phase="describe",
                    )
                )
                context = Context(options, trainers, served, nbytes, folder)
                return _measure(context, out, console, log)
            finally:
                trainers.stop()


def _measure(context: Context, out: Path, console: Console, log: Progress) -> bool:
    from sglang_rdt.bench import paths

    options = context.options
    result = blank(options, context.trainers.all("device_name"), context.nbytes)
    actor = context.engines[0].engine.actors[0]
    result["empty_ray_call_ms"] = round(context.trainers.lead(empty_call_ms, actor), 3)
    measurement = Measurement(context, log)
    failed: dict[str, str] = {}
    path = None
    for name in options.paths:
        log(f"{name} ...")
        try:
            result["paths"][name] = measurement.run(paths.make(name))
        except Exception as error:
            failed[name] = one_line(error)
            log(f"{name} FAILED: {failed[name]}")
        if name == "peer_copy" and name in result["paths"]:
            result["limit_gbps"] = result["paths"][name]["gbps"]
        if failed:
            result["failed"] = failed
        result["load_average"]["after"] = round(os.getloadavg()[0], 2)
        path = report.save(result, out)
    finish(result, path, console)
    return not failed and all(p["equal"] for p in result["paths"].values())


def finish(result: dict[str, Any], path: Path | None, console: Console) -> None:
    """The table, and the plot beside the file."""
    if path is None or not result["paths"]:
        return
    console.print(report.table(result))
    for line in report.details(result):
        console.print(line, highlight=False, soft_wrap=True)
    picture = path.with_suffix(".png")
    drawn = str(picture) if plot.save(result, picture) else plot.MISSING
    for line in (str(path), drawn):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def blank(options: Options, device_names: list[str], nbytes: int) -> dict[str, Any]:
    """A result without paths."""
    used = len(set(options.trainer_gpus) | set(options.engine_gpus))
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.slug(device_names, used),
        "command": options.command,
        "model": options.model.name,
        "bytes": nbytes,
        "layout": options.layout,
        "limit_gbps": None,
        "paths": {},
        "verify": options.verify,
        "gap_ms": options.gap_s * 1e3,
        "parameter_buffers": options.ddp,
        "load_average": {"before": round(os.getloadavg()[0], 2)},
        **machine.describe(device_names),
    }
