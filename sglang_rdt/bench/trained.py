"""``bench --train N``: real optimizer steps, a sync after each, and proof of every one.

After each sync every engine parameter is compared byte for byte with weights that are put together
without any bridge, and at the end the engine's greedy tokens with those of transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sglang_rdt import settings as settings_module
from sglang_rdt.bench import engines, report
from sglang_rdt.bench.options import BenchError, Options
from sglang_rdt.bench.run import Progress, blank
from sglang_rdt.bench.trainer import BenchTrainers

if TYPE_CHECKING:
    from sglang_rdt.bench.trainer import BenchRank


def prove(options: Options, gpus: int, out: Path, console: Console) -> bool:
    """Trains and syncs with ``direct`` and ``bucketed``, whichever were asked for.

    Writes ``<date>-<machine>-<model>-trained.json`` below ``out``.

    Returns:
        Whether everything was equal.
    """
    modes = [p for p in options.paths if p in ("direct", "bucketed")]
    if not modes:
        raise BenchError("--train: --paths names neither direct nor bucketed")
    log = Progress(console)
    engines.environment(options)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = options.model.model
    with (
        engines.cluster(options, gpus),
        tempfile.TemporaryDirectory(prefix="sglang-rdt-bench-") as temporary,
    ):
        folder = Path(temporary)
        model.save_random_checkpoint(folder / "start", seed=1)
        log(f"starting {options.engines} engine(s) at TP {options.engine_tp}: {options.model.name}")
        with engines.running(options, folder / "start", gpus, load_format="auto") as served:
            log(f"starting {options.trainer.world} Megatron rank(s): {options.layout['trainer']}")
            trainers = BenchTrainers(options)
            try:
                result = blank(options, trainers.all("device_name"), options.model.nbytes)
                result.update(verify="equal", trained={})
                for mode in modes:
                    steps = _steps(mode, options, trainers, served, folder, log)
                    result["trained"][mode] = steps
            finally:
                trainers.stop()
    path = out / f"{report.file_name(result)}-trained.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(str(path))
    return all(not s["differences"] for steps in result["trained"].values() for s in steps)


def _steps(
    mode: str, options: Options, trainers: Any, served: list[Any], folder: Path, log: Progress
) -> list[dict[str, Any]]:
    from sglang_rdt.demo import proof

    model = options.model.model
    settings = settings_module.load().replace(mode=mode, verify="equal")
    trainers.all("attach", settings, [one.address for one in served])
    if mode == "direct" and set(trainers.call(_mode)) != {"direct"}:
        raise BenchError("direct mode was asked for, and the WeightSync does not do it")
    rows = []
    for step in range(options.train):
        version = f"{mode}-{step}"
        numbers, report_ = trainers.call(_train, version)[0]
        state = trainers.call(_weights)[0]
        compared, differences = 0, []
        for one in served:
            count, lines = proof.unequal_parameters(model, state, one.weights())
            compared += count
            differences += lines
        if step == options.train - 1:
            checkpoint = folder / f"end-{mode}"
            model.save_checkpoint(checkpoint, state)
            for one in served:
                tokens, label = one.generate(proof.PROMPT, proof.NEW_TOKENS)
                wrong = proof.same_tokens(model, checkpoint, tokens)
                differences += [wrong] if wrong else []
                differences += [f"replies say {label}"] if label != version else []
        log(f"{report_.line()}; loss {numbers['loss']:.3f}; {compared} compared, {differences}")
        rows.append(
            {
                "loss": numbers["loss"],
                "compared": compared,
                "differences": differences,
                "line": report_.line(),
            }
        )
    trainers.all("detach")
    return rows


def _train(rank: BenchRank, version: str) -> tuple[dict[str, Any], Any]:
    numbers = rank.trainer.step()
    return numbers, rank.sync.sync(version)


def _weights(rank: BenchRank) -> dict[str, Any] | None:
    state = rank.trainer.reference_hf_state()
    return {n: t.cpu() for n, t in state.items()} if rank.args.rank == 0 else None


def _mode(rank: BenchRank) -> str:
    return str(getattr(rank.sync, "mode", "bucketed"))
