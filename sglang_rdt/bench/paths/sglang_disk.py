"""SGLang's ``update_weights_from_disk``: the trainer saves a checkpoint, the engines load it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench.paths import sglang_calls
from sglang_rdt.bench.paths.base import Context, Timing

if TYPE_CHECKING:
    from sglang_rdt.bench.trainer import BenchRank

_KEY = "sglang_disk"
# Bytes per file, and gathered at a time.
_FILE_BYTES = 2 << 30


class DiskPath:
    """Through files. The trainer saves while generation goes on; the engines load while paused."""

    name = "sglang_disk"
    writes_engines = True
    about = "save, pause, load, flush, continue; not synced to a physical disk"

    def __init__(self) -> None:
        self._folder: Path | None = None

    def sizes(self, context: Context) -> tuple[int, ...]:
        """None."""
        return ()

    def start(self, context: Context, size: int | None) -> dict[str, Any]:
        """A folder of its own with the model's config."""
        folder = (context.options.disk_dir or context.folder) / f"sglang-rdt-bench-{time.time_ns()}"
        folder.mkdir(parents=True)
        self._folder = folder
        context.options.model.model.hf_config().save_pretrained(folder)
        context.trainers.call(_start, context.hosts, str(folder))
        return {}

    def sync(self, context: Context, version: str) -> Timing:
        """One sync on all ranks; rank 0 measures it."""
        return context.trainers.call(_sync, version)[0]

    def staging_bytes(self, context: Context) -> int:
        """Nothing in memory (but see where the folder is)."""
        return 0

    def stop(self, context: Context) -> None:
        """Removes the files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        context.trainers.call(_stop)


def _start(rank: BenchRank, hosts: Sequence[Any], folder: str) -> None:
    from sglang_rdt.bench.paths.export import Export

    rank.state[_KEY] = (Export(rank, gather_bytes=_FILE_BYTES), list(hosts), Path(folder))


def _sync(rank: BenchRank, version: str) -> Timing:
    import ray
    from safetensors.torch import save_file

    from sglang_rdt.coordinator.phases import PhaseTimer, slowest

    export, hosts, folder = rank.state[_KEY]
    timer = PhaseTimer()

    def on_hosts(run: Any, *args: Any) -> None:
        ray.get([h.call.remote(run, *args) for h in hosts], timeout=rank.args.timeout_s)

    started = time.perf_counter()
    saved = 0
    for index, (bucket, _) in enumerate(export.buckets(timer, _FILE_BYTES)):
        with timer.phase("save"):
            tensors = {name: tensor.contiguous().cpu() for name, tensor in bucket}
            path = folder / f"model-{rank.args.rank:05d}-{index:05d}.safetensors"
            save_file(tensors, path, {"format": "pt"})
        saved += sum(t.numel() * t.element_size() for t in tensors.values())
        del bucket, tensors
    everyone = export.group.gather((timer.seconds, saved))

    def load() -> None:
        with timer.phase("pause"):
            on_hosts(sglang_calls.pause, False)
        try:
            with timer.phase("load"):
                on_hosts(sglang_calls.load_from_disk, str(folder), version)
        finally:
            with timer.phase("finalise"):
                on_hosts(sglang_calls.resume, False)

    export.group.lead(load)
    seconds = time.perf_counter() - started
    phases = slowest([timer.seconds, *(phases for phases, _ in everyone)])
    return Timing(seconds, phases, sum(count for _, count in everyone) * len(hosts))


def _stop(rank: BenchRank) -> None:
    export, _, _ = rank.state.pop(_KEY, (None, None, None))
    if export is not None:
        export.close()
