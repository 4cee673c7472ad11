"""A third of the fault matrix, with real processes, the larger part of it not marked ``long``;
``python -m tests.faults`` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import CORE, MORE, SUITE, Cell
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
@pytest.mark.parametrize(
    "cell", [*CORE, *(pytest.param(c, marks=pytest.mark.long) for c in MORE)], ids=lambda c: c.name
)
def test_cell(cell: Cell, world: World) -> None:
    following = dict(zip(SUITE, [*CORE[1:], None, *MORE[1:], None], strict=True))
    result = run_cell(world, cell, following[cell])
    assert result.ok, "\n".join([*result.problems, *result.errors, str(result.states)])
