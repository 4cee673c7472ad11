"""A representative third of the fault matrix, with real processes; ``python -m tests.faults`` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import PHASES, SUITE, VICTIMS, Cell, all_cells, impossible
from tests.faults.run import run_cell
from tests.faults.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One cluster and engine A for all cells."""
    made = World(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


@pytest.mark.e2e
@pytest.mark.faults
@pytest.mark.parametrize("cell", SUITE, ids=lambda cell: cell.name)
def test_cell(cell: Cell, world: World) -> None:
    at = SUITE.index(cell)
    result = run_cell(world, cell, SUITE[at + 1] if at + 1 < len(SUITE) else None)
    assert result.ok, "\n".join([*result.problems, *result.errors, str(result.states)])


def test_the_suite_has_every_phase_and_every_victim_of_the_matrix() -> None:
    cells = all_cells()
    assert set(SUITE) <= set(cells)
    assert len(SUITE) >= len(cells) / 3
    assert {cell.phase for cell in SUITE} == set(PHASES)
    assert {cell.victim for cell in SUITE} == set(VICTIMS)


def test_every_phase_and_victim_is_a_cell_or_has_a_reason() -> None:
    cells = {(cell.phase, cell.victim) for cell in all_cells()}
    for phase in PHASES:
        for victim in VICTIMS:
            assert ((phase, victim) in cells) == (impossible(phase, victim) is None)
