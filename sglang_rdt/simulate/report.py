"""A simulation as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_rdt.coordinator.phases import human_bytes
from sglang_rdt.simulate.run import Outcome
from sglang_rdt.simulate.shapes import describe, total_bytes

if TYPE_CHECKING:
    from rich.table import Table

# Published for the same model by others, measured by themselves; none is this plan's topology.
PUBLISHED: dict[str, list[dict[str, str | float]]] = {
    "kimi-k2": [
        {
            "who": "Perplexity, 2025-09",
            "seconds": 1.3,
            "conditions": "256 trainer GPUs in BF16 (FSDP) to 128 inference GPUs in FP8, half the "
            "bytes; gathering, fusing and quantising on the trainer, RDMA writes and barriers "
            "included; how many copies of the model the 128 GPUs hold was not found; the "
            "paper reports up to 400 Gb/s for its transfer engine",
            "source": "https://research.perplexity.ai/articles/"
            "weight-transfer-for-rl-post-training-in-under-2-seconds, "
            "https://le.qun.ch/en/blog/2025/09/17/rl-weight-transfer-2, arXiv:2510.27656",
        },
        {
            "who": "vLLM sharded_rdt",
            "seconds": 7.53,
            "conditions": "BF16, 32 trainer and 16 inference nodes, 7.9 TB; its authors give 1.25 s "
            "as the ideal for these bytes, 5 s with pipeline stages one after the other",
            "source": "vllm-project/vllm-project.github.io#312",
        },
        {
            "who": "miles, P2P over Mooncake",
            "seconds": 7.227,
            "conditions": "32 trainer and 32 inference nodes; 0.88 s of it after loading; dtype not known here",
            "source": "radixark/miles#976, docs/advanced/p2p-weight-transfer.md",
        },
    ]
}


def as_dict(outcome: Outcome, command: str, date: str) -> dict[str, Any]:
    """Plain data for a JSON file. Times in ms or s as the names say, sizes in bytes.

    Args:
        command: the command line.
        date: ISO 8601.
    """
    job, plan, found = outcome.job, outcome.plan, outcome.prediction
    links = job.links
    speed = found.bottleneck.bytes_per_s
    return {
        "simulated": True,
        "date": date,
        "command": command,
        "model": job.shape.name,
        "parameters": job.shape.parameters,
        "model_bytes": total_bytes(job.shape),
        "layout": {
            "trainer": str(job.trainer),
            "trainer_ranks": job.trainer.world,
            "trainer_gpus_per_node": job.placement.trainer_gpus,
            "engine": str(job.engine),
            "engines": job.engines,
            "engine_ranks": job.engines * job.engine.world,
            "engine_gpus_per_node": job.placement.engine_gpus,
            "placement": job.placement.how,
        },
        "links": {
            "nvlink_gbps": links.nvlink_bytes_per_s / 1e9,
            "nic_gbps": links.nic_bytes_per_s / 1e9,
            "node_nic_gbps": links.node_nic_bytes_per_s and links.node_nic_bytes_per_s / 1e9,
            "costs": dataclasses.asdict(links.costs),
            "fixed_ms": links.fixed_s * 1e3,
        },
        "planning": {
            "seconds": round(outcome.plan_s, 3),
            "cpu_seconds": round(outcome.plan_cpu_s, 3),
            "peak_rss_bytes": outcome.peak_rss_bytes,
            "build_seconds": round(outcome.build_s, 3),
            "predict_seconds": round(outcome.predict_s, 3),
            "load_average": outcome.load_average,
            "shared_specs": "equal contents of ranks are one object here, not in a live cluster",
        },
        "bytes": plan.nbytes,
        "held_bytes": outcome.held_bytes,
        "padding_bytes": outcome.padding_bytes,
        "equal": plan.nbytes == outcome.held_bytes,
        "staged_bytes": plan.staged_bytes,
        "largest_engine_rank_bytes": outcome.largest_engine_rank,
        "inside_node_bytes": found.node_bytes,
        "balance": [
            {
                "links": one.kind,
                "count": one.links,
                "worst_bytes": one.worst_bytes,
                "mean_bytes": round(one.mean_bytes),
                "worst_over_mean": round(one.ratio, 4),
            }
            for one in found.balances
        ],
        "predicted": {
            "sync_ms": round(found.sync_s * 1e3, 3),
            "sync_worst_ms": round(found.sync_worst_s * 1e3, 3),
            "pull_ms": round(found.pull_s * 1e3, 3),
            "pull_worst_ms": round(found.pull_worst_s * 1e3, 3),
            "link_ms": round(found.link_s * 1e3, 3),
            "post_ms": round(found.post_s * 1e3, 3),
            "staging_ms": round(found.staging_s * 1e3, 3),
            "fixed_ms": round(found.fixed_s * 1e3, 3),
            "descriptors": found.descriptors,
            "engine_ranks_looked_at": found.looked_at,
            "bottleneck": found.bottleneck.name,
            "bottleneck_bytes": found.bottleneck.nbytes,
            "bottleneck_gbps": speed / 1e9 if math.isfinite(speed) else None,
        },
        "published": PUBLISHED.get(job.shape.name, []),
    }


def save(result: dict[str, Any], path: Path) -> None:
    """Writes a JSON file; its folder is made.

    Raises:
        OSError: as open() does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tables(outcome: Outcome) -> list[Table]:
    """What a person wants to see: the sync, and the load of the links."""
    from rich.table import Table

    job, found = outcome.job, outcome.prediction
    sync = Table(title=f"{describe(job.shape)}, predicted, not measured", show_header=False)
    sync.add_column()
    sync.add_column(justify="right")
    sync.add_row("trainer", f"{job.trainer.world} ranks: {job.trainer}")
    sync.add_row("engines", f"{job.engines} of {job.engine.world} ranks: {job.engine}")
    sync.add_row("bytes moved", human_bytes(outcome.plan.nbytes))
    same = "the same" if outcome.held_bytes == outcome.plan.nbytes else "NOT THE SAME"
    sync.add_row("bytes that the engines hold", f"{human_bytes(outcome.held_bytes)}, {same}")
    sync.add_row("engine rank with most", human_bytes(outcome.largest_engine_rank))
    sync.add_row("staged", human_bytes(outcome.plan.nbytes - outcome.plan.staged_bytes["direct"]))
    sync.add_row("slowest link", found.bottleneck.name)
    sync.add_row("its time", _ms(found.link_s))
    sync.add_row(
        f"posting {found.descriptors} descriptors",
        f"{_ms(found.post_s)} ({found.looked_at} of {len(outcome.plan.targets)} ranks counted)",
    )
    sync.add_row("pull", f"{_ms(found.pull_s)} to {_ms(found.pull_worst_s)}")
    sync.add_row("staging", _ms(found.staging_s))
    sync.add_row("other phases (assumed)", _ms(found.fixed_s))
    sync.add_row("[bold]sync[/]", f"[bold]{_ms(found.sync_s)} to {_ms(found.sync_worst_s)}[/]")
    sync.add_row("planning", f"{outcome.plan_s:.2f} s, {outcome.plan_cpu_s:.2f} s of CPU")
    sync.add_row("peak memory", human_bytes(outcome.peak_rss_bytes))
    for one in PUBLISHED.get(job.shape.name, []):
        sync.add_row(f"published: {one['who']}", f"{one['seconds']} s")
        sync.caption = f"{sync.caption or ''}{one['who']}: {one['conditions']}.\n"
    links = Table("links", "count", "mean", "worst", "worst / mean", title="Load of the links")
    for kind in found.balances:
        links.add_row(
            kind.kind,
            str(kind.links),
            human_bytes(round(kind.mean_bytes)),
            human_bytes(kind.worst_bytes),
            f"{kind.ratio:.3f}",
        )
    return [sync, links]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
