"""A picture of a result: one bar per path, its phases stacked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_rdt.bench.report import ordered
from sglang_rdt.coordinator.phases import human_bytes

MISSING = "no plot: matplotlib is not installed (pip install 'sglang-rdt[bench]')"


def segments(path: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The phases of a path, and ``other``: what of the whole no phase accounts for.

    Phases are medians of the slowest rank each, so they may add up to more than the whole; they
    are then drawn smaller, in proportion.
    """
    total = float(path["total_ms"]["median"])
    phases = [(name, float(ms)) for name, ms in path["phases_ms"].items() if ms > 0]
    held = sum(ms for _, ms in phases)
    if held > total > 0:
        return [(name, ms * total / held) for name, ms in phases]
    return [*phases, ("other", total - held)] if total > held else phases


def save(result: Mapping[str, Any], path: Path) -> bool:
    """Writes a PNG; False if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = ordered(result["paths"])
    names = list(dict.fromkeys(n for _, p in bars for n, _ in segments(p)))
    height = max(1.5 + 0.6 * len(bars), 1.0 + 0.22 * len(names))
    figure, axes = pyplot.subplots(figsize=(11, height))
    colours = {n: pyplot.get_cmap("tab20")(i % 20) for i, n in enumerate(names)}
    longest = max(p["total_ms"]["median"] for _, p in bars)
    for row, (_, p) in enumerate(bars):
        left = 0.0
        for name, ms in segments(p):
            axes.barh(row, ms, left=left, color=colours[name], label=name)
            left += ms
        text = f" {p['total_ms']['median']:.1f} ms" + ("" if p["equal"] else ", NOT EQUAL")
        axes.text(left, row, text, va="center")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.2)
    axes.set_xlabel("ms, median")
    axes.set_title(f"{result['model']}, {human_bytes(result['bytes'])} a sync, {result['machine']}")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(
        once.values(), once.keys(), fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
