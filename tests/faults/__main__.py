"""``python -m tests.faults``: the whole matrix with real processes, as a table.

Ends with status 1 if any cell is not as promised.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.cells import PHASES, SUITE, VICTIMS, Cell, all_cells, impossible
from tests.faults.run import Result, run_cell
from tests.faults.world import World


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for."""
    cells = list(SUITE) if options.suite else all_cells()
    return [
        cell
        for cell in cells
        if (not options.phase or cell.phase in options.phase)
        and (not options.victim or cell.victim in options.victim)
        and (not options.mode or cell.mode == options.mode)
    ]


def table(results: Sequence[Result]) -> Table:
    """One row per cell."""
    shown = Table(show_lines=True)
    for title in ("phase", "victim", "mode", "promised", "what happened", "after", "A", "B", ""):
        shown.add_column(title, overflow="fold")
    for r in results:
        errors = sorted({e.split(": ", 2)[1] for e in r.errors})
        what = ", ".join(errors) + "".join(f"\n- {p}" for p in r.problems)
        shown.add_row(
            r.cell.phase,
            r.cell.victim,
            r.cell.mode,
            r.cell.promise,
            what,
            "" if r.seconds is None else f"{r.seconds:.1f} s",
            r.states.get("A", "?"),
            r.states.get("B", "?"),
            "[green]ok[/]" if r.ok else "[red]NOT[/]",
        )
    return shown


def matrix(results: Sequence[Result]) -> Table:
    """Phases by victims; ``-`` where there is no such cell."""
    shown = Table("victim", *PHASES)
    by_cell: dict[tuple[str, str], list[str]] = {}
    for r in results:
        mark = "[green]ok[/]" if r.ok else "[red]NOT[/]"
        by_cell.setdefault((r.cell.phase, r.cell.victim), []).append(mark)
    for victim in VICTIMS:
        row = [
            "-" if impossible(phase, victim) else " ".join(by_cell.get((phase, victim), [""]))
            for phase in PHASES
        ]
        shown.add_row(victim, *row)
    return shown


def reasons() -> list[str]:
    """Why some cells are ``-``, each reason once."""
    found: dict[str, list[str]] = {}
    for victim in VICTIMS:
        for phase in PHASES:
            why = impossible(phase, victim)
            if why:
                found.setdefault(f"{victim}: {why}", []).append(phase)
    return [f"- {why} ({', '.join(phases)})" for why, phases in found.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--phase", action="append", choices=PHASES, help="only this one (again: more)"
    )
    parser.add_argument("--victim", action="append", choices=VICTIMS, help="only this one")
    parser.add_argument("--mode", choices=("direct", "bucketed"), help="only this one")
    parser.add_argument("--suite", action="store_true", help="only the cells of the test suite")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there, too")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    cells = chosen(options)
    if options.list:
        for cell in cells:
            console.print(f"{cell.phase:9} {cell.victim:16} {cell.mode:9} {cell.promise}")
        return 0
    results: list[Result] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rdt-faults-") as folder:
        world = World(Path(folder), say=lambda text: console.print(text, style="dim"))
        try:
            for i, cell in enumerate(cells):
                result = run_cell(world, cell, cells[i + 1] if i + 1 < len(cells) else None)
                results.append(result)
                console.print(
                    f"{i + 1}/{len(cells)} {cell.phase}, {cell.victim}, {cell.mode}: "
                    f"{'ok' if result.ok else 'NOT'} ({result.took_s:.0f} s)"
                    + "".join(f"\n    {p}" for p in result.problems),
                    markup=False,
                )
                if options.json:
                    options.json.write_text(json.dumps([r.as_json() for r in results], indent=1))
        finally:
            world.close()
    console.print(table(results))
    console.print(matrix(results))
    for line in reasons():
        console.print(line, markup=False)
    bad = sum(not r.ok for r in results)
    console.print(
        f"{len(results) - bad} of {len(results)} cells are as promised "
        f"({time.monotonic() - began:.0f} s)"
    )
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
