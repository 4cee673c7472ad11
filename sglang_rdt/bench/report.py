"""Results: what is in the file, and the table on the terminal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# In the order of the table: from the limit down to the slowest.
ORDER = (
    "peer_copy",
    "direct",
    "direct_checksum",
    "bucketed",
    "sglang_distributed",
    "sglang_disk",
)
_TOP = {
    "date": str,
    "machine": str,
    "command": str,
    "model": str,
    "bytes": int,
    "layout": dict,
    "limit_gbps": (int, float, type(None)),
    "paths": dict,
}


def problems(result: Mapping[str, Any]) -> list[str]:
    """What about ``result`` is not as the schema wants it; more keys are welcome."""
    found = []
    for key, kind in _TOP.items():
        if key not in result:
            found.append(f"{key} is missing")
        elif not isinstance(result[key], kind):  # type: ignore[arg-type]
            found.append(f"{key} is a {type(result[key]).__name__}")
    paths = result.get("paths")
    for name, path in paths.items() if isinstance(paths, dict) else ():
        if name not in ORDER:
            found.append(f"paths.{name}: there is no such path")
        found += [f"paths.{name}.{line}" for line in _path_problems(path)]
    return found


def _path_problems(path: Mapping[str, Any]) -> list[str]:
    found = []
    for key, fields in (
        ("total_ms", ("median", "min", "max")),
        ("extra_bytes", ("trainer", "engine")),
    ):
        for field in fields:
            if not isinstance(path.get(key, {}).get(field), int | float):
                found.append(f"{key}.{field} is no number")
    phases = path.get("phases_ms")
    if not isinstance(phases, dict) or not all(isinstance(v, int | float) for v in phases.values()):
        found.append("phases_ms is no dictionary of numbers")
    if not isinstance(path.get("equal"), bool):
        found.append("equal is neither true nor false")
    return found


def file_name(result: Mapping[str, Any]) -> str:
    """``<date>-<machine>-<model>``, in characters that every file system takes."""
    parts = (result["date"][:10], result["machine"], result["model"])
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)


def save(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``result`` below ``folder``; a file of the same name is replaced in one step.

    Raises:
        ValueError: it is not as the schema wants it.
    """
    wrong = problems(result)
    if wrong:
        raise ValueError(f"not a result: {'; '.join(wrong)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name(result)}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def ordered(paths: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """``(name, path)`` in the order of the table."""
    return sorted(paths.items(), key=lambda item: ORDER.index(item[0]))


def table(result: Mapping[str, Any]) -> Table:
    """The table for the terminal."""
    from rich.table import Table

    from sglang_rdt.coordinator.phases import human_bytes

    found = Table(
        title=f"{result['model']}, {human_bytes(result['bytes'])} a sync, {result['machine']}",
        caption="medians; trainer, engine: peak memory beyond the model, on the rank with most",
    )
    found.add_column("path", no_wrap=True)
    for column in ("ms", "min", "max", "GB/s", "limit", "trainer", "engine", "equal"):
        found.add_column(column, justify="right", no_wrap=True)
    for name, path in ordered(result["paths"]):
        total, rate, limit = path["total_ms"], path.get("gbps", 0.0), result["limit_gbps"]
        found.add_row(
            name,
            *(f"{total[k]:.1f}" for k in ("median", "min", "max")),
            f"{rate:.2f}",
            f"{100 * rate / limit:.0f} %" if limit else "",
            human_bytes(path["extra_bytes"]["trainer"]),
            human_bytes(path["extra_bytes"]["engine"]),
            "yes" if path["equal"] else "[bold red]NO[/]",
        )
    return found


def details(result: Mapping[str, Any]) -> list[str]:
    """A line per path: its bucket size and its phases."""
    lines = []
    for name, path in ordered(result["paths"]):
        bucket = path.get("bucket_bytes")
        size = f" (buckets of {bucket / (1 << 20):g} MiB)" if bucket else ""
        phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in path["phases_ms"].items())
        lines.append(f"{name}{size}, ms: {phases}")
    return lines
