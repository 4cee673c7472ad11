"""Every step of a sync x every way to fail in it, on ranks that are threads: what is left is whole.

The real processes are killed in ``tests/faults``; here are the cells that only the state machine
decides, all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_rdt.engine import live_weights
from sglang_rdt.errors import RdtError, TransportError
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.specs import TensorSpec
from tests.faults.cells import CORE, PHASES, SUITE, VICTIMS, all_cells, impossible

from .builders import rect
from .ranks import Engine

pytestmark = pytest.mark.usefixtures("empty_inbox", "pulls")

SPECS = [TensorSpec("w", (4, 3), "float32"), TensorSpec("e", (2, 2), "float32")]
OLD, NEW = 3.0, 7.0
# Step -> what the scheduler is told in it, in order.
STEPS = {
    "begin": ["pause retract", "flush", "drain", "begin_session"],
    "pull": ["pull"],
    "finalise": ["synchronize", "end_session"],
    "commit": ["version new"],
}
ORDER = list(STEPS)
CELLS = [(step, what) for step, whats in STEPS.items() for what in whats]
# Nothing is changed by an engine that refuses to begin.
CLEAN = ("begin",)


@pytest.fixture(scope="module")
def pulls() -> Iterator[None]:
    def pull(ref: list[Any], targets: list[torch.Tensor], timeout_s: float) -> None:
        for value, target in zip(ref, targets, strict=True):
            if isinstance(value, Exception):
                raise value
            target.fill_(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_weights.nixl, "pull", pull)
        patch.setattr(live_weights.nixl, "register", lambda tensors: len(list(tensors)))
        yield


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(2)
    yield made
    made.stop()
    assert made.loops.crashes == []
    assert made.group.hangs == []


def run(engine: Engine, step: str, sync: str, label: str, bad: int | None = None) -> list[Any]:
    """One step on all ranks; a pull on rank ``bad`` fails after its first tensor."""
    if step == "begin":
        return engine.begin(sync, stall_timeout_s=20.0)
    if step == "pull":
        outcomes = []
        for rank in range(engine.size):
            ref = [NEW, TransportError("link down") if rank == bad else NEW]
            where = Target("e", rect((3, 2), (0, 2)), "float32", 0)
            outcomes += engine.call("pull_weights", [ref], ["w", where], sync, ranks=[rank])
        return outcomes
    if step == "finalise":
        return engine.call("finalise", sync, False)
    return engine.call("end_sync", sync, label)


def good(outcomes: list[Any]) -> bool:
    return not any(isinstance(o, Exception) for o in outcomes)


def whole_sync(engine: Engine, sync: str, label: str) -> None:
    for step in ORDER:
        assert good(run(engine, step, sync, label)), step
    engine.settle()


def start(engine: Engine) -> None:
    """Whole, labelled ``old``, with old weights."""
    assert good(engine.begin("c", "connect", pause_mode="in_place", flush=False))
    assert good(engine.call("record_load", "c", SPECS))
    assert good(engine.call("end_sync", "c", None))
    engine.settle()
    whole_sync(engine, "s0", "old")
    for r in engine.ranks:
        r.model.w.data.fill_(OLD)


def check(engine: Engine, clean: bool) -> None:
    """One state on all ranks; never a new label; what runs is what was there."""
    engine.settle()
    assert engine.states == ["current" if clean else "dirty"] * 2
    assert engine.paused == [not clean] * 2
    for r in engine.ranks:
        assert r.control.version == r.status.version == "old"
        assert not r.gate.parked
        assert r.session.request is None
        if clean:
            assert (r.model.w == OLD).all()
            assert not r.control.session_open
        else:
            assert r.status.detail


def check_repair(engine: Engine) -> None:
    whole_sync(engine, "s9", "repaired")
    assert engine.states == ["current"] * 2
    assert engine.paused == [False] * 2
    for r in engine.ranks:
        assert r.control.version == r.status.version == "repaired"
        assert (r.model.w == NEW).all()
        assert not r.control.session_open


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("step", "what"), CELLS)
def test_a_rank_that_fails(engine: Engine, step: str, what: str, victim: int) -> None:
    start(engine)
    for one in ORDER[: ORDER.index(step)]:
        assert good(run(engine, one, "s1", "new"))
    if what != "pull":
        engine.ranks[victim].control.fail[what] = RuntimeError("a bug")
    outcomes = run(engine, step, "s1", "new", bad=victim)
    assert isinstance(outcomes[victim], RdtError)
    engine.call("abort_sync", "s1", "the coordinator heard of it")
    check(engine, clean=step in CLEAN)
    check_repair(engine)


@pytest.mark.parametrize("after", ORDER[:-1])
def test_a_driver_that_dies(engine: Engine, after: str) -> None:
    start(engine)
    request: dict[str, Any] = {"stall_timeout_s": 0.3}
    assert good(engine.begin("s1", **request))
    for one in ORDER[1 : ORDER.index(after) + 1]:
        assert good(run(engine, one, "s1", "new"))
    deadline = time.monotonic() + 30
    while any(r.session.request for r in engine.ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    check(engine, clean=after == "begin")
    check_repair(engine)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", ORDER[1:])
def test_a_call_that_reaches_one_rank_only(engine: Engine, step: str, victim: int) -> None:
    """The connection to one rank breaks; the coordinator gives the sync up on the other, too."""
    start(engine)
    for one in ORDER[: ORDER.index(step)]:
        assert good(run(engine, one, "s1", "new"))
    if step == "pull":  # has no vote: each rank pulls for itself
        engine.call("pull_weights", [[NEW]], ["w"], "s1", ranks=[1 - victim])
        assert good(engine.call("abort_sync", "s1", "lost one"))
    else:
        from .ranks import together

        method, arguments = {
            "finalise": ("finalise", ("s1", False)),
            "commit": ("end_sync", ("s1", "new")),
        }[step]
        # The other rank waits in its vote until the abort of this one joins in.
        together(
            [
                lambda: getattr(engine.ranks[1 - victim].actor, method)(*arguments),
                lambda: engine.ranks[victim].actor.abort_sync("s1", "lost one"),
            ]
        )
    check(engine, clean=False)
    check_repair(engine)


def test_the_suite_has_every_phase_and_every_victim_of_the_matrix() -> None:
    cells = all_cells()
    assert set(SUITE) <= set(cells)
    assert len(SUITE) >= len(cells) / 3
    assert {cell.phase for cell in CORE} == set(PHASES)
    assert {cell.victim for cell in CORE} == set(VICTIMS)


def test_every_phase_and_victim_is_a_cell_or_has_a_reason() -> None:
    cells = {(cell.phase, cell.victim) for cell in all_cells()}
    for phase in PHASES:
        for victim in VICTIMS:
            assert ((phase, victim) in cells) == (impossible(phase, victim) is None)
