"""Pipeline stages as threads, each with an event loop of the shape of SGLang's event_loop_pp."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_rdt.engine import loop_inbox, pipeline
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.loop_inbox import LoopCall
from sglang_rdt.engine.pipeline import Pipeline
from sglang_rdt.errors import EngineStateError

from .ranks import Group, together

pytestmark = pytest.mark.usefixtures("empty_inbox", "schedule_batch")
LONG = 60.0


@pytest.fixture
def schedule_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one name that is taken from SGLang."""
    module = ModuleType("sglang.srt.managers.schedule_batch")
    module.NextBatchPlan = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Stage:
    """One stage: ``work`` microbatches are always there to be begun."""

    def __init__(self, line: Line, rank: int) -> None:
        self.line, self.rank = line, rank
        self.pp_loop_size = line.loop_size
        self.mbs: list[Any] = [None] * self.pp_loop_size
        self.turn = 0
        self.begun: list[int] = []
        self._engine_paused = False
        self.gate = LoopGate(f"stage {rank}", entry=rank == 0, vote=partial(line.group.vote, rank))
        self.pipeline = Pipeline(self, self._on_call)
        self.under_way_in_calls: list[int] = []
        self.turns_of_calls: list[int] = []

    def _on_call(self, call: LoopCall) -> None:
        self.under_way_in_calls.append(pipeline.under_way(self))
        self.turns_of_calls.append(self.turn)
        self.gate.handle(call)
        if self.gate.parked:
            self.gate.park(LONG)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        return SimpleNamespace(batch_to_run=self.turn, running_batch=running_batch)

    def loop(self) -> None:
        size, line = self.pp_loop_size, self.line
        while not line.over(self):
            mb = self.turn % size
            if self.rank == 0:
                calls = loop_inbox.add_loop_calls([])
            else:
                calls = line.requests[self.rank].get(timeout=LONG)
            for call in calls or []:
                self.pipeline.later(call)
            if self.rank + 1 < line.stages_count:
                line.requests[self.rank + 1].put(calls)
            plan = self.get_next_batch_to_run(running_batch=None, last_batch=None)
            self.mbs[mb] = plan.batch_to_run
            if plan.batch_to_run is not None:
                self.begun.append(self.turn)
                # Its activations come from the stage before, its tokens from the last one.
                if self.rank:
                    assert line.activations[self.rank].get(timeout=LONG) == plan.batch_to_run
                if self.rank + 1 < line.stages_count:
                    line.activations[self.rank + 1].put(plan.batch_to_run)
                else:
                    line.tokens.put(plan.batch_to_run)
            following = (mb + 1) % size
            if self.rank == 0 and self.mbs[following] is not None:
                assert line.tokens.get(timeout=LONG) == self.mbs[following]
            self.turn += 1


class Line:
    def __init__(self, stages: int, depth: int = 0) -> None:
        self.stages_count, self.loop_size = stages, stages + depth
        self.group = Group(stages)
        self.requests = [queue.Queue[Any]() for _ in range(stages)]
        self.activations = [queue.Queue[Any]() for _ in range(stages)]
        self.tokens: queue.Queue[Any] = queue.Queue()
        self.last_turn: int | None = None
        self.stages = [Stage(self, rank) for rank in range(stages)]
        self.crashes: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._run, args=(s,), daemon=True) for s in self.stages
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, stage: Stage) -> None:
        try:
            stage.loop()
        except BaseException as error:
            self.crashes.append(error)

    def over(self, stage: Stage) -> bool:
        return self.last_turn is not None and stage.turn >= self.last_turn

    def enter(self, name: str, run: Any) -> list[Any]:
        return together([partial(s.gate.enter, name, partial(run, s), LONG) for s in self.stages])

    def stop(self) -> None:
        self.last_turn = max(s.turn for s in self.stages) + 50
        for thread in self.threads:
            thread.join(LONG)
        assert self.crashes == []
        assert self.group.hangs == []


@pytest.fixture(
    params=[(2, 0), (3, 0), (2, 2), (4, 1)], ids=lambda p: f"{p[0]} stages, depth {p[1]}"
)
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    made = Line(*request.param)
    yield made
    made.stop()


def test_all_stages_run_a_call_in_the_same_turn_with_nothing_under_way(line: Line) -> None:
    for name in ("one", "two"):
        assert line.enter(name, lambda stage: stage.rank) == list(range(line.stages_count))
    for stage in line.stages:
        assert stage.under_way_in_calls == [0, 0]
    assert len({tuple(s.turns_of_calls) for s in line.stages}) == 1


def test_no_microbatch_begins_while_the_loops_are_parked(line: Line) -> None:
    line.enter("park", lambda stage: stage.gate.will_park())
    begun = [list(s.begun) for s in line.stages]
    assert begun[0] == begun[-1]  # they stopped at the same one
    assert together([partial(s.gate.command, lambda: "done", LONG) for s in line.stages]) == (
        ["done"] * line.stages_count
    )
    assert [s.begun for s in line.stages] == begun
    for stage in line.stages:
        stage.gate.command(stage.gate.release, LONG)


def test_a_paused_stage_begins_nothing(line: Line) -> None:
    def pause(paused: bool, stage: Stage) -> None:
        stage._engine_paused = paused

    line.enter("pause", partial(pause, True))
    begun = [list(s.begun) for s in line.stages]
    line.enter("later", lambda stage: None)
    assert [s.begun for s in line.stages] == begun
    line.enter("go on", partial(pause, False))
    until_begun = threading.Event()
    for _ in range(600):
        if all(len(s.begun) > len(b) for s, b in zip(line.stages, begun, strict=True)):
            return
        until_begun.wait(0.1)
    pytest.fail("no stage went on")


def test_one_stage_that_has_no_call_keeps_the_others_from_running_theirs(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_rdt.engine import loop_gate

    monkeypatch.setattr(loop_gate, "ARRIVAL_TIMEOUT_S", 0.2)
    said = together([partial(s.gate.enter, "half", lambda: "ran", LONG) for s in line.stages[:-1]])
    for error in said:
        assert isinstance(error, EngineStateError)
    assert line.enter("whole", lambda stage: "ran") == ["ran"] * line.stages_count


class Request:
    pass


def _batch(*reqs: Request, chunked: Request | None = None) -> Any:
    return SimpleNamespace(reqs=list(reqs), chunked_req=chunked)


def test_every_request_is_retracted_once() -> None:
    a, b, c, d, e, waiting = (Request() for _ in range(6))
    running = [_batch(a, b), _batch(c)]
    scheduler = SimpleNamespace(
        running_mbs=running,
        # b was merged and stays in the prefill; e is a chunk, of which an older one stays, too.
        last_mbs=[_batch(b, d, e, chunked=e), running[1]],
        waiting_queue=[waiting],
        chunked_req=e,
        running_batch=None,
        last_batch=None,
    )
    retracted: list[Any] = []

    def pause() -> None:  # what SGLang's does
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None:
                retracted.extend(batch.reqs)
        if scheduler.chunked_req is not None:
            retracted.append(scheduler.chunked_req)
        scheduler.running_batch.reqs = []
        scheduler.last_batch = scheduler.chunked_req = None

    pipeline.retract_all(scheduler, pause)
    assert {id(r) for r in retracted} == {id(r) for r in (a, b, c, d, e)}
    assert len(retracted) == 5
    assert scheduler.last_mbs == [None, None]
