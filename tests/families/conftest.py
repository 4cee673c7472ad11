"""What passed, for the table in docs/families.md.

A test that proves something about a family says so with the fixture ``passed``; when it has passed,
a record of it goes into ``.families.json`` beside this file, and ``table.py`` makes the table of it.
A test that fails takes its records out again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.families import results

_PROPERTY = "families"
_collected = results.Collected()


@pytest.fixture
def passed(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``passed(family="qwen3", trainer="TP 2", engine="TP 2", bridge="mbridge", mode="direct",
    dtype="bfloat16", fp8="")``: what this test has proved, should it pass. As often as needed; what
    a test says nothing about is left out. ``mode``: ``direct``, ``bucketed`` or ``both``.
    """

    def note(**said: str) -> None:
        # Properties of the test travel from the processes of pytest-xdist.
        request.node.user_properties.append((_PROPERTY, results.checked(said)))

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collects what the tests said."""
    said: list[Any] = [value for name, value in report.user_properties if name == _PROPERTY]
    _collected.add(report.nodeid, report.when, report.outcome, said)


def pytest_sessionfinish() -> None:
    """Writes it down."""
    try:
        _collected.save(results.PATH)
    except OSError as error:  # a tree that cannot be written is no reason to fail
        warnings.warn(f"{results.PATH} was not written: {error}", stacklevel=1)
