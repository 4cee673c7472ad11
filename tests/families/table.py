"""The table in docs/families.md, made from what the tests wrote down when they passed.

python -m tests.families.table           # writes it between the two markers
python -m tests.families.table --check   # fails if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import replaced
from tests.families import results

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN = "<!-- families: made by tests/families/table.py, do not edit -->"
END = "<!-- end of families -->"
COLUMNS = (
    "family",
    "trainer",
    "engine",
    "bridge",
    "bucketed",
    "direct",
    "dtype",
    "FP8",
)
# What a row is about; how it moved is in two columns of their own.
_ROW = ("family", "trainer", "engine", "bridge", "dtype", "fp8")


def render(records: Sequence[results.Record]) -> str:
    """The Markdown between the markers: one row per family and way, never a claim without a test."""
    if not records:
        return "No test of a family has passed yet."
    modes: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for record in records:
        mode = record["mode"]
        modes[tuple(record[name] for name in _ROW)] |= (
            {"direct", "bucketed"} if mode == "both" else {mode}
        )
    out = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for row in sorted(modes):
        family, trainer, engine, bridge, dtype, fp8 = row
        moved = ["yes" if way in modes[row] else "" for way in ("bucketed", "direct")]
        cells = [family, trainer, engine, bridge, *moved, dtype, fp8]
        out.append("| " + " | ".join(cell or "–" for cell in cells) + " |")
    with_versions: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for package, version in record["versions"].items():
            with_versions[package].add(version)
    used = ", ".join(
        f"{package} {' and '.join(sorted(found))}" for package, found in with_versions.items()
    )
    dates = sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return "\n".join([*out, "", f"{len(records)} records of {when}, with {used}."])


def main(argv: Sequence[str] | None = None, page: Path = PAGE, path: Path = results.PATH) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="the table in docs/families.md")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is old")
    args = parser.parse_args(argv)
    old = page.read_text(encoding="utf-8")
    new = replaced(old, render(results.load(path)), BEGIN, END)
    if args.check:
        if old != new:
            print(
                f"{page.name} is not up to date: run python -m tests.families.table",
                file=sys.stderr,
            )
        return int(old != new)
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
