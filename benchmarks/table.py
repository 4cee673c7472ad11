"""The table of results in README.md, made from ``benchmarks/results/*.json``.

    python benchmarks/table.py           # writes it between the two markers
    python benchmarks/table.py --check   # fails if it is not up to date

Files of ``sglang-rdt bench`` and ``sglang-rdt plan --simulate``, and one of an earlier script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- results: made by benchmarks/table.py, do not edit -->"
END = "<!-- end of results -->"
PATHS = {
    "peer_copy": "raw copy",
    "direct": "direct",
    "bucketed": "bucketed",
    "sglang_distributed": "SGLang, broadcast",
    "sglang_disk": "SGLang, disk",
}


@dataclass
class Row:
    """One result: a cell per path, and what has to be said about it."""

    file: str
    title: str
    layout: str
    cells: dict[str, str]
    notes: list[str] = field(default_factory=list)


def rows(results: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[Row], list[str]]:
    """Rows of the table, and lines about results that have no place in it.

    Raises:
        ValueError: a file of no known kind.
    """
    table, lines = [], []
    for file, result in results:
        if isinstance(result.get("trained"), dict):
            lines.append(_trained(file, result))
        elif result.get("simulated"):
            lines += _simulated(file, result)
        elif "paths" in result:
            table.append(_row(file, result))
        elif "steps" in result:
            lines.append(_old_steps(file, result))
        else:
            raise ValueError(f"{file}: no result that this script knows")
    return table, lines


def _row(file: str, result: Mapping[str, Any]) -> Row:
    layout, notes = result["layout"], []
    cells = {}
    for name, path in result["paths"].items():
        total = path["total_ms"]["median"]
        rate = result["bytes"] / total / 1e6
        if name == "direct_checksum":
            notes.append(f"direct with checksums: {total:.0f} ms")
            continue
        cells[name] = _cell(total, rate)
        if not path["equal"]:
            notes.append(f"{PATHS[name]}: BYTES DIFFERED")
    if result.get("verify", "off") != "off":
        notes.append(f"direct and bucketed with `{result['verify']}` verification")
    notes += [f"{PATHS[name]}: failed" for name in result.get("failed", {})]
    gpus = layout.get("trainer_gpus")
    if gpus and layout["trainer"].count("=1") < layout["trainer"].count("=") and len(gpus) == 1:
        notes.append("all trainer ranks on one GPU")
    engines = layout.get("engines", 1)
    return Row(
        file,
        f"{result['model']}, {_size(result['bytes'])}, {result['machine']}",
        f"{_ranks(layout['trainer'])} to {'' if engines == 1 else f'{engines} × '}{_ranks(layout['engine'])}",
        cells,
        notes,
    )


def _ranks(layout: str) -> str:
    """``tp=2,pp=1`` as ``TP 2``: what is not 1."""
    parts = [p.split("=") for p in layout.split(",")]
    named = [f"{k.upper()} {v}" for k, v in parts if v != "1" and k != "etp"]
    etp = [f"ETP {v}" for k, v in parts if k == "etp" and v != dict(parts).get("tp")]
    return " ".join(named + etp) or "TP 1"


def _trained(file: str, result: Mapping[str, Any]) -> str:
    parts = []
    for mode, steps in result["trained"].items():
        wrong = sum(len(s["differences"]) for s in steps)
        compared = sum(s["compared"] for s in steps)
        verdict = f"{wrong} DIFFERENCES" if wrong else "all equal"
        parts.append(f"{mode}: {len(steps)} steps, {compared} parameters compared, {verdict}")
    where = f"{result['model']}, {result['machine']}"
    return (
        f"[{where}]({_link(file)}), trained with Megatron's optimizer, a sync after each step: "
        + "; ".join(parts)
        + "."
    )


def _old_steps(file: str, result: Mapping[str, Any]) -> str:
    wrong = sum(len(s["differences"]) for s in result["steps"])
    compared = sum(s["compared"] for s in result["steps"])
    verdict = f"{wrong} DIFFERENCES" if wrong else "all equal"
    return (
        f"[A small Qwen3, 2×H200]({_link(file)}), trained with Megatron's optimizer, a bucketed sync "
        f"after each step: {len(result['steps'])} steps, {compared} parameters compared, {verdict}."
    )


def _simulated(file: str, result: Mapping[str, Any]) -> list[str]:
    """On paper: predicted by ``sglang-rdt plan --simulate``, beside what others have measured."""
    runs = result.get("runs", [result])
    # The layout that was asked for, and the best; the others are in the file.
    chosen = [runs[0], min(runs, key=lambda r: r["predicted"]["sync_worst_ms"])]
    lines = []
    for run in {id(r): r for r in chosen}.values():
        layout, predicted = run["layout"], run["predicted"]
        worst = max(b["worst_over_mean"] for b in run["balance"])
        least, most = (predicted[k] / 1e3 for k in ("sync_ms", "sync_worst_ms"))
        seconds = f"{least:.1f} s" if most - least < 0.05 else f"{least:.1f} to {most:.1f} s"
        lines.append(
            f"**On paper**, [{run['model']}]({_link(file)}), {_ranks(layout['trainer'])} on "
            f"{layout['trainer_ranks']} ranks to {layout['engines']} × {_ranks(layout['engine'])}, "
            f"{run['links']['nic_gbps']:g} GB/s per GPU: planned in {run['planning']['seconds']:.1f} s, "
            f"{run['bytes'] / 1e12:.1f} TB, {run['largest_engine_rank_bytes'] / 1e9:.0f} GB on an "
            f"engine GPU, worst link {worst:g} of the mean, predicted {seconds}."
        )
    if len(runs) > 2:
        slowest = max(r["predicted"]["sync_worst_ms"] for r in runs) / 1e3
        planned = max(r["planning"]["seconds"] for r in runs)
        lines.append(
            f"On paper, the other {len(runs) - len(chosen)} layouts of that file: up to "
            f"{slowest:.1f} s, planned in up to {planned:.1f} s. What an engine GPU holds is what the "
            "layout asks for, whether such a GPU exists or not."
        )
    published = [
        f"{o['who']}, {o['seconds']} s ({o['conditions']})" for o in result.get("published", [])
    ]
    if published:
        lines.append(f"Measured by others, for comparison: {'; '.join(published)}.")
    return lines


def _cell(milliseconds: float, rate: float) -> str:
    ms = f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"
    if milliseconds < 1:
        ms = f"{milliseconds:.3f}"
    return f"{ms} ms, {rate:.1f} GB/s" if rate >= 0.05 else f"{ms} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e3:.0f} kB"


def _link(file: str) -> str:
    return f"benchmarks/results/{file}"


def render(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The Markdown between the markers."""
    table, lines = rows(results)
    out = [
        "| model, bytes a sync, machine | trainer to engine | " + " | ".join(PATHS.values()) + " |",
        "| --- " * (2 + len(PATHS)) + "|",
    ]
    notes: list[str] = []
    for row in table:
        marks = ""
        if row.notes:
            notes.append("; ".join(row.notes))
            marks = f" ({len(notes)})"
        cells = [row.cells.get(p, "not measured") for p in PATHS]
        out.append(
            f"| [{row.title}]({_link(row.file)}){marks} | {row.layout} | {' | '.join(cells)} |"
        )
    out += [
        "",
        "Medians, from the call until generation goes on. Unless a note says otherwise, every engine "
        "parameter was compared byte for byte after the last sync of each path but the raw copy, with "
        "values that neither a bridge nor a loader had made, and all were equal.",
    ]
    if notes:
        out += ["", *(f"{i}. {note[0].upper()}{note[1:]}." for i, note in enumerate(notes, 1))]
    if lines:
        out += ["", *(f"- {line}" for line in lines)]
    out += ["", f"Not measured: {_missing(table)}."]
    return "\n".join(out)


def _missing(table: Sequence[Row]) -> str:
    never = [label for path, label in PATHS.items() if not any(path in r.cells for r in table)]
    # Every result so far is from one host, and the benchmark has no way to be anything else.
    return ", ".join([*(f"{label} (anywhere)" for label in never), "several nodes"])


def load(folder: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """``(file name, content)`` of every result, newest first."""
    files = sorted(folder.glob("*.json"), reverse=True)
    return [(f.name, json.loads(f.read_text(encoding="utf-8"))) for f in files]


def replaced(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with ``table`` between its markers.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{begin!r} and after it {end!r} must be there, once each")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="README's table of results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is old")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = replaced(old, render(load(ROOT / "benchmarks" / "results")))
    if args.check:
        if old != new:
            print("README.md is not up to date: run python benchmarks/table.py", file=sys.stderr)
        return int(old != new)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
