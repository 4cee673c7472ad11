from __future__ import annotations

import pickle

import pytest

from sglang_rdt.coordinator import phases
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import PhaseTimer, SyncReport, human_bytes, slowest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    return clock


def test_times_add_up_per_phase(clock: Clock) -> None:
    timer = PhaseTimer()
    for seconds in (1.0, 2.0):
        with timer.phase("pull"):
            clock.now += seconds
        clock.now += 50  # between phases
    with timer.phase("stage"):
        clock.now += 4
    assert timer.seconds == {"pull": 3.0, "stage": 4.0}


def test_time_inside_counts_for_the_innermost_only(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer.phase("outer"):
        clock.now += 1
        with timer.phase("middle"):
            clock.now += 2
            with timer.phase("outer"):
                clock.now += 4
            clock.now += 8
        clock.now += 16
    assert timer.seconds == {"outer": 21.0, "middle": 10.0}
    assert sum(timer.seconds.values()) == 31


def test_phases_that_fail_are_counted_and_closed(clock: Clock) -> None:
    timer = PhaseTimer()

    def fail() -> None:
        with timer.phase("inner"):
            clock.now += 2
            raise ValueError

    with timer.phase("outer"), pytest.raises(ValueError):
        fail()
    clock.now += 8
    with timer.phase("outer"):
        clock.now += 1
    assert timer.seconds == {"inner": 2.0, "outer": 1.0}


def test_the_slowest_rank_counts_per_phase() -> None:
    assert slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0}, {}, {"c": 0.5}]) == {
        "a": 2.0,
        "b": 5.0,
        "c": 0.5,
    }
    assert slowest([]) == {}


REPORT = SyncReport(
    version="7",
    engines=("10.0.0.1:30000", "10.0.0.2:30000"),
    nbytes=16_400_000_000,
    seconds=0.2,
    phases={"version": 0.001, "pull": 0.1, "mystery": 0.003, "gather": 0.05, "pause": 0.002},
    verified="checksum",
)


def test_a_report_is_one_line_in_the_order_of_a_sync() -> None:
    line = REPORT.line()
    assert "\n" not in line
    assert line.startswith("weight sync '7': 2 engine(s), 16.4 GB, 200.0 ms (")
    assert line.endswith("; ms), verify checksum")
    named = ["pause 2.0", "gather 50.0", "pull 100.0", "version 1.0", "mystery 3.0"]
    assert [line.index(n) for n in named] == sorted(line.index(n) for n in named)
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT


def test_a_report_names_failures() -> None:
    failed = SyncReport("7", (), 0, 0.1, {}, {"10.0.0.1:30000": "dead"})
    assert failed.line().endswith("FAILED on 10.0.0.1:30000")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (16_400_000_000, "16.4 GB"),
        (5e15, "5000.0 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_a_second_pass_over_some_engines_joins_the_first() -> None:
    no = Failure("pause", "not connected", reconnect=True)
    dead = Failure("pull", "dead")
    first = SyncReport("7", ("a",), 10, 1.0, {"pull": 0.5}, {"b": no, "c": no, "d": dead})
    second = SyncReport("7", ("b",), 5, 3.0, {"pull": 0.25, "verify": 0.1}, {"c": dead})
    both = first.joined_by(second)
    assert (both.engines, both.nbytes, both.seconds) == (("a", "b"), 15, 3.0)
    assert both.failures == {"c": dead, "d": dead}
    assert both.phases == {"pull": 0.75, "verify": 0.1}
