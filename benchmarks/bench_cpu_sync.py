"""What one weight sync costs on a CPU: real Megatron-core ranks, one real SGLang engine, NIXL.

Starts a Ray cluster of its own. Prints a table and writes a JSON file; benchmarks/README.md says
what the numbers mean.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_rdt import cpu
from sglang_rdt.activation import installed_version
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.settings import Settings

NAMESPACE = "sglang-rdt-bench"
ENGINE_TP = 2
TRAINER_TP = 2
TARGET_S = 0.5
REPEATS = 200
PACKAGES = ("sglang-rdt", "sglang", "megatron-core", "mbridge", "ray", "nixl", "torch")


# These run in a trainer rank: ``rank`` is sglang_rdt.demo.workers.TrainerRank.


def connect(rank: Any) -> float:
    """Seconds to find, describe and register everything."""
    started = time.perf_counter()
    rank.sync.connect()
    return time.perf_counter() - started


def sync(rank: Any, version: str) -> Any:
    """One sync; its report."""
    return rank.sync.sync(version)


def staging(rank: Any) -> tuple[int, int]:
    """Bytes of staging memory, and engine ranks served."""
    return rank.sync.staging_bytes, len(rank.sync._senders)


def process(_rank: Any) -> tuple[int, int]:
    """NIXL registrations, and process id."""
    from sglang_rdt.transport import nixl

    return nixl.registrations(), os.getpid()


def memcpy_seconds(_rank: Any, nbytes: int, repeats: int) -> float:
    """Median seconds of one copy of ``nbytes`` in memory."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def empty_call_seconds(_rank: Any, actor: Any, repeats: int) -> float:
    """Median seconds of a Ray call that does nothing, from this process to ``actor``."""
    import ray

    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        ray.get(actor.__ray_ready__.remote())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# These run in the driver.


def resident_bytes(pid: int) -> int:
    """Resident memory of a process of this machine."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine_pids(served: Any) -> list[int]:
    """Process ids of the engine's scheduler actors, in rank order."""
    import ray

    by_name = {a["Name"]: a["Pid"] for a in ray._private.state.actors().values()}
    return [int(by_name[rank.actor_name]) for rank in served.engine.ranks]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile, least and most."""
    return {
        "median": statistics.median(seconds),
        "p90": statistics.quantiles(seconds, n=10, method="inclusive")[8],
        "min": min(seconds),
        "max": max(seconds),
    }


def state_of(group: Any, served: Any) -> dict[str, Any]:
    """Registrations and resident memory of all processes on both sides."""
    trainers = group.on_all(process)
    return {
        "nixl_registrations": {
            "trainer": [count for count, _ in trainers],
            "engine": [status.registrations for status in served.engine.status()],
        },
        "resident_bytes": {
            "trainer": [resident_bytes(pid) for _, pid in trainers],
            "engine": [resident_bytes(pid) for pid in engine_pids(served)],
        },
    }


def measure(group: Any, served: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All numbers, with a running engine and trainers that have their WeightSync."""
    connected = max(group.on_all(connect))
    first = group.on_all(sync, "first")[0]
    for i in range(args.warmup):
        group.on_all(sync, f"warmup-{i}")
    before = state_of(group, served)
    load_before = os.getloadavg()[0]
    reports = [group.on_all(sync, f"round-{i}")[0] for i in range(args.syncs)]
    load_after = os.getloadavg()[0]
    after = state_of(group, served)

    nbytes = reports[0].nbytes
    # One rank at a time: the other must not copy or call at the same moment.
    lead = group.ranks[0]
    copying = group._get_one(lead, memcpy_seconds, nbytes, REPEATS)
    calling = group._get_one(lead, empty_call_seconds, served.engine.actors[0], REPEATS)
    seconds = spread([r.seconds for r in reports])
    names = [name for name, _ in reports[0].ordered_phases()]
    return {
        "connect_seconds": connected,
        "first_sync_seconds": first.seconds,
        "bytes_per_sync": nbytes,
        "sync_seconds": seconds,
        "phase_seconds": {n: spread([r.phases.get(n, 0.0) for r in reports]) for n in names},
        "target_seconds": TARGET_S,
        "target_met": seconds["p90"] < TARGET_S,
        "memcpy_seconds": copying,
        "sync_over_memcpy": seconds["median"] / copying,
        "empty_ray_call_seconds": calling,
        "sync_over_empty_ray_call": seconds["median"] / calling,
        "staging": [
            {
                "trainer_rank": i,
                "bytes": nbytes,
                "engine_ranks_served": served_ranks,
                "limit": args.bucket_bytes * served_ranks,
            }
            for i, (nbytes, served_ranks) in enumerate(group.on_all(staging))
        ],
        "before": before,
        "after": after,
        "load_average": {"before": load_before, "after": load_after},
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts everything, measures, stops everything."""
    os.environ.update(cpu.environment(ENGINE_TP))
    os.environ.pop("RAY_ADDRESS", None)
    import ray
    import torch

    from sglang_rdt.demo.workers import ServedEngine, Trainers, free_port

    class Group(Trainers):
        """Trainers, and a call to one of them."""

        def _get_one(self, rank: Any, run: Any, *values: Any) -> Any:
            return ray.get(rank.call.remote(run, *values), timeout=self._timeout_s)

    ray.init(
        num_cpus=8,
        num_gpus=ENGINE_TP,  # nothing is behind them
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-rdt-bench-") as folder:
            model = TinyModel(
                "dense",
                num_layers=args.layers,
                hidden=args.hidden,
                intermediate=2 * args.hidden,
                vocab=args.vocab,
            )
            dtype = torch.bfloat16
            model.save_random_checkpoint(Path(folder), seed=1, dtype=dtype)
            served = ServedEngine(cpu.engine_kwargs(folder, tp_size=ENGINE_TP, port=free_port()))
            try:
                group = Group(model, Layout(tp=TRAINER_TP), seed=2, dtype=dtype)
                try:
                    settings = Settings(bucket_bytes=args.bucket_bytes, verify=args.verify)
                    group.attach(settings, on_step=False, engines=[served.address])
                    return measure(group, served, args)
                finally:
                    group.stop()
            finally:
                served.shutdown()
    finally:
        ray.shutdown()


def machine() -> dict[str, Any]:
    """What it ran on."""
    found = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": found[0] if found else platform.processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def show(result: dict[str, Any]) -> None:
    """The table that benchmarks/README.md explains."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("phase", "median, ms", "p90, ms")
    rows = [*result["phase_seconds"].items(), ("whole sync", result["sync_seconds"])]
    for name, numbers in rows:
        table.add_row(name, f"{numbers['median'] * 1e3:.1f}", f"{numbers['p90'] * 1e3:.1f}")
    console.print(table)
    console.print(
        f"{result['bytes_per_sync']} bytes a sync; "
        f"{result['sync_over_empty_ray_call']:.1f} empty Ray calls, "
        f"{result['sync_over_memcpy']:.0f} memcpys of the same bytes"
    )
    for side in ("nixl_registrations", "resident_bytes"):
        console.print(f"{side}: {result['before'][side]} -> {result['after'][side]}")
    console.print(f"staging: {result['staging']}")
    verdict = "met" if result["target_met"] else "MISSED"
    console.print(f"target: p90 under {TARGET_S} s: {verdict}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--verify", choices=("off", "checksum", "equal"), default="checksum")
    parser.add_argument("--bucket-bytes", type=int, default=Settings().bucket_bytes)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--out", type=Path, help="default: results/<date>-cpu-sync.json")
    args = parser.parse_args()

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {
        "command": " ".join(["python benchmarks/bench_cpu_sync.py", *sys.argv[1:]]),
        "date": today,
        "versions": {
            "python": platform.python_version(),
            **{p: installed_version(p) for p in PACKAGES},
        },
        "machine": machine(),
        "setup": {
            "model": f"Qwen3, {args.layers} layers, hidden {args.hidden}, vocabulary {args.vocab}, bfloat16",
            "trainer": f"TP {TRAINER_TP}",
            "engine": f"TP {ENGINE_TP}",
            "syncs": args.syncs,
            "warmup": args.warmup,
            "verify": args.verify,
            "bucket_bytes": args.bucket_bytes,
        },
        **run(args),
    }
    out = args.out or Path(__file__).parent / "results" / f"{today}-cpu-sync.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
