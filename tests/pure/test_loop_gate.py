"""Threads stand for the event loops, one per rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import pytest

from sglang_rdt.engine import loop_gate, loop_inbox
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.loop_inbox import LoopCall
from sglang_rdt.errors import DeadlineError, EngineStateError

from .ranks import Group, Loops, together

pytestmark = pytest.mark.usefixtures("empty_inbox")
LONG = 60.0  # never waited for unless something hangs


class Ring:
    """``size`` gates with their loops, and a record of what ran: (rank, what, thread)."""

    def __init__(self, size: int = 3, stall_s: float = LONG) -> None:
        self.group = Group(size)
        self.gates = [
            LoopGate(f"rank {r}", entry=r == 0, vote=partial(self.group.vote, r))
            for r in range(size)
        ]
        self.stall_s = stall_s
        self.ran: list[tuple[int, Any, str]] = []
        self.left: list[bool] = []
        self.loops = Loops([partial(self._handle, gate) for gate in self.gates])

    def _handle(self, gate: LoopGate, call: LoopCall) -> None:
        gate.handle(call)
        if gate.parked:
            self.left.append(gate.park(self.stall_s))

    def note(self, rank: int, what: Any) -> tuple[int, Any]:
        self.ran.append((rank, what, threading.current_thread().name))
        return rank, what

    def enter(self, what: str, timeout_s: float = LONG, ranks: tuple[int, ...] = ()) -> list[Any]:
        chosen = ranks or tuple(range(len(self.gates)))
        return together(
            [
                partial(self.gates[r].enter, what, partial(self.note, r, what), timeout_s)
                for r in chosen
            ]
        )

    def park(self) -> None:
        def begin(rank: int) -> None:
            self.gates[rank].will_park()

        calls = [
            partial(g.enter, "park", partial(begin, r), LONG) for r, g in enumerate(self.gates)
        ]
        assert together(calls) == [None] * len(self.gates)

    def command(self, what: str, rank: int = 0) -> Any:
        return self.gates[rank].command(partial(self.note, rank, what), LONG)

    def release(self) -> None:
        for gate in self.gates:
            gate.command(gate.release, LONG)
        until(lambda: not any(g.parked for g in self.gates))


def blocker(go: threading.Event) -> tuple[threading.Event, Callable[[], None]]:
    """Something to run that says when it started and ends when ``go`` is set."""
    started = threading.Event()

    def run() -> None:
        started.set()
        go.wait(LONG)

    return started, run


def until(done: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    if any(g.parked for g in made.gates):
        made.release()
    made.loops.stop()
    assert made.loops.crashes == []
    assert made.group.hangs == []


def test_a_call_runs_once_on_the_loop_of_every_rank(ring: Ring) -> None:
    assert ring.enter("a") == [(0, "a"), (1, "a"), (2, "a")]
    assert sorted(ring.ran) == [(r, "a", f"loop{r}") for r in range(3)]


def test_all_ranks_run_calls_in_one_order(ring: Ring) -> None:
    calls = [f"call{i}" for i in range(6)]
    together([partial(ring.enter, call) for call in calls])
    orders = [[what for rank, what, _ in ring.ran if rank == r] for r in range(3)]
    assert sorted(orders[0]) == calls
    assert orders[0] == orders[1] == orders[2]


def test_an_error_inside_reaches_its_caller_only(ring: Ring) -> None:
    def run(rank: int) -> int:
        if rank == 1:
            raise ValueError("mine")
        return rank

    calls = [partial(g.enter, "x", partial(run, r), LONG) for r, g in enumerate(ring.gates)]
    zero, one, two = together(calls)
    assert (zero, two) == (0, 2)
    assert isinstance(one, ValueError)
    assert ring.enter("y") == [(0, "y"), (1, "y"), (2, "y")]


def test_none_runs_if_one_call_is_missing(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_gate, "ARRIVAL_TIMEOUT_S", 1.0)
    outcomes = ring.enter("a", ranks=(0, 2))
    monkeypatch.setattr(loop_gate, "ARRIVAL_TIMEOUT_S", LONG)
    assert ring.ran == []
    for rank, error in zip((0, 2), outcomes, strict=True):
        assert isinstance(error, EngineStateError)
        assert f"rank {rank}: the call did not reach every rank" in str(error)
    # The one that comes too late does not run either, and nobody is stuck.
    (late,) = ring.enter("a", timeout_s=0.1, ranks=(1,))
    assert isinstance(late, DeadlineError)
    assert ring.enter("b") == [(0, "b"), (1, "b"), (2, "b")]
    assert [what for _, what, _ in ring.ran] == ["b"] * 3


def test_none_runs_if_the_entry_rank_was_not_called(ring: Ring) -> None:
    outcomes = ring.enter("a", timeout_s=0.1, ranks=(1, 2))
    assert all(isinstance(o, DeadlineError) for o in outcomes)
    assert ring.ran == []


def test_a_call_may_come_after_the_broadcast(ring: Ring) -> None:
    def later() -> Any:
        time.sleep(0.1)
        return ring.enter("a", ranks=(2,))[0]

    first, second = together([partial(ring.enter, "a", ranks=(0, 1)), later])
    assert [*first, second] == [(0, "a"), (1, "a"), (2, "a")]


def test_a_call_that_timed_out_never_runs(ring: Ring) -> None:
    go = threading.Event()
    running = [blocker(go) for _ in ring.gates]
    blocked = [
        partial(g.enter, "block", run, LONG)
        for g, (_, run) in zip(ring.gates, running, strict=True)
    ]
    waiting = threading.Thread(target=together, args=(blocked,))
    waiting.start()
    for started, _ in running:
        assert started.wait(LONG)
    results: list[Any] = []
    patient = threading.Thread(target=lambda: results.extend(ring.enter("a", ranks=(0, 1))))
    patient.start()
    (two,) = ring.enter("a", 0.05, (2,))  # one rank has no patience
    until(lambda: all("a" in g._calls for g in ring.gates))
    go.set()
    patient.join(LONG)
    waiting.join(LONG)
    zero, one = results
    assert isinstance(two, DeadlineError)
    assert "rank 2 did not finish 'reach the event loop' within 0.05 s" in str(two)
    assert isinstance(zero, EngineStateError)
    assert isinstance(one, EngineStateError)
    assert ring.ran == []
    assert ring.enter("b") == [(0, "b"), (1, "b"), (2, "b")]


def test_the_same_id_twice_at_once_is_refused() -> None:
    gate = LoopGate("rank 1", entry=False, vote=lambda opinion: opinion)
    results: list[Any] = []
    first = threading.Thread(
        target=lambda: results.extend(together([partial(gate.enter, "a", lambda: 1, LONG)]))
    )
    first.start()
    until(lambda: "a" in gate._calls)
    with pytest.raises(EngineStateError, match="rank 1: call a is under way already"):
        gate.enter("a", lambda: 2, LONG)
    gate.handle(LoopCall("a"))
    first.join(LONG)
    assert results == [1]


def test_only_the_entry_rank_posts() -> None:
    gate = LoopGate("rank 1", entry=False, vote=lambda opinion: opinion)
    with pytest.raises(DeadlineError):
        gate.enter("a", lambda: 1, 0.01)
    assert loop_inbox.add_loop_calls([]) == []
    gate = LoopGate("rank 0", entry=True, vote=lambda opinion: opinion)
    with pytest.raises(DeadlineError):
        gate.enter("a", lambda: 1, 0.01)
    assert loop_inbox.add_loop_calls([]) == [LoopCall("a")]


# Parked.


def test_commands_need_a_parked_loop(ring: Ring) -> None:
    with pytest.raises(EngineStateError, match="rank 0 is not in a weight sync; begin_sync first"):
        ring.command("early")
    ring.park()
    assert all(g.parked for g in ring.gates)
    assert ring.command("now") == (0, "now")
    ring.release()
    with pytest.raises(EngineStateError, match="begin_sync first"):
        ring.command("late")
    assert ring.left == [True] * 3
    assert [what for _, what, _ in ring.ran] == ["now"]


def test_commands_run_in_order_on_the_loop_thread(ring: Ring) -> None:
    ring.park()
    go = threading.Event()
    gate = ring.gates[1]
    started, run = blocker(go)
    first = threading.Thread(target=partial(gate.command, run, LONG))
    first.start()
    assert started.wait(LONG)
    results: list[Any] = []
    threads = []
    for i in range(5):
        threads.append(
            threading.Thread(target=lambda i=i: results.append(ring.command(f"c{i}", 1)))
        )
        threads[-1].start()
        until(lambda i=i: gate._commands.qsize() >= i + 1)
    go.set()
    for thread in (first, *threads):
        thread.join(LONG)
    assert ring.ran == [(1, f"c{i}", "loop1") for i in range(5)]


def test_a_new_call_waits_for_the_parked_loop(ring: Ring) -> None:
    ring.park()
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.extend(ring.enter("next")))
    other.start()
    time.sleep(0.1)
    assert ring.ran == []
    ring.release()
    other.join(LONG)
    assert results == [(r, "next") for r in range(3)]


def test_commands_behind_the_release_are_refused(ring: Ring) -> None:
    ring.park()
    go = threading.Event()
    gate = ring.gates[0]

    started, run = blocker(go)

    def last() -> None:
        run()
        gate.release()

    outcomes: list[Any] = []
    ending = threading.Thread(target=partial(gate.command, last, LONG))
    ending.start()
    assert started.wait(LONG)
    behind = threading.Thread(
        target=lambda: outcomes.extend(together([partial(ring.command, "behind")]))
    )
    behind.start()
    until(lambda: gate._commands.qsize() == 1)
    go.set()
    ending.join(LONG)
    behind.join(LONG)
    (error,) = outcomes
    assert isinstance(error, EngineStateError)
    assert "rank 0: the weight sync has ended" in str(error)
    assert ring.ran == []
    assert not gate.parked
    for other in ring.gates[1:]:
        other.command(other.release, LONG)


def test_a_command_that_timed_out_never_runs(ring: Ring) -> None:
    ring.park()
    go = threading.Event()
    gate = ring.gates[0]
    started, run = blocker(go)
    first = threading.Thread(target=partial(gate.command, run, LONG))
    first.start()
    assert started.wait(LONG)
    with pytest.raises(DeadlineError, match=r"rank 0 did not finish 'command' within 0\.05 s"):
        gate.command(partial(ring.note, 0, "impatient"), 0.05)
    go.set()
    first.join(LONG)
    ring.command("patient")
    assert [what for _, what, _ in ring.ran] == ["patient"]


def test_an_error_of_a_command_reaches_its_caller_and_the_loop_stays(ring: Ring) -> None:
    def fail(error: BaseException) -> None:
        raise error

    ring.park()
    for error in (KeyError("x"), TimeoutError("of its own"), FutureTimeout(), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            ring.gates[0].command(partial(fail, error), LONG)
        assert caught.value is error
    assert ring.command("still here") == (0, "still here")


def test_silence_unparks_the_loop_which_goes_on() -> None:
    ring = Ring(1, stall_s=0.2)
    try:
        ring.park()
        until(lambda: ring.left == [False])
        assert not ring.gates[0].parked
        assert ring.enter("a") == [(0, "a")]
        ring.stall_s = LONG
        ring.park()
        ring.release()
        assert ring.left == [False, True]
    finally:
        ring.loops.stop()
    assert ring.loops.crashes == []


def test_every_command_starts_the_clock_of_silence_again() -> None:
    gate = LoopGate("rank 0", entry=False, vote=lambda opinion: opinion)
    ran: list[int] = []
    timeouts: list[float] = []

    class Script(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert timeout is not None
            timeouts.append(timeout)
            return super().get(block=False)

    gate._commands = Script()  # type: ignore[assignment]
    for i in range(3):
        gate._commands.put(loop_gate._Call(partial(ran.append, i)))
    gate.will_park()
    assert gate.park(7.0) is False
    assert ran == [0, 1, 2]
    assert timeouts == [7.0] * 4
    assert not gate.parked


# The inbox.


def test_waiting_calls_are_added_once_behind_the_requests() -> None:
    loop_inbox.post(LoopCall("a"))
    loop_inbox.post(LoopCall("b"))
    assert loop_inbox.add_loop_calls(None) is None
    requests = ["request"]
    assert loop_inbox.add_loop_calls(requests) == ["request", LoopCall("a"), LoopCall("b")]
    assert requests == ["request"]
    assert loop_inbox.add_loop_calls(requests) is requests
    assert loop_inbox.add_loop_calls([]) == []


# Faults that there were.


def test_a_call_that_times_out_during_the_vote_never_runs() -> None:
    told = threading.Event()

    def slow_vote(opinion: bool) -> bool:
        told.wait(0.5)  # another rank takes longer to arrive than this caller's patience
        return opinion

    gate = LoopGate("rank 0", entry=False, vote=slow_vote)
    ran: list[str] = []
    outcome: list[Any] = []

    def caller() -> None:
        outcome.extend(together([partial(gate.enter, "a", partial(ran.append, "ran"), 0.1)]))
        told.set()

    thread = threading.Thread(target=caller)
    thread.start()
    gate.handle(LoopCall("a"))
    thread.join(LONG)
    # Either the caller learns that it ran, or it does not run.
    assert outcome == [None] or (isinstance(outcome[0], DeadlineError) and not ran)


def test_a_result_at_the_last_moment_is_returned() -> None:
    class LastMoment(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Any:
            if self.done():
                return super().result(timeout)
            self.set_result("done")
            raise FutureTimeout

    gate = LoopGate("rank 0", entry=False, vote=lambda opinion: opinion)
    call = loop_gate._Call(lambda: None, future=LastMoment())
    assert gate._wait(call, "command", 1.0) == "done"
