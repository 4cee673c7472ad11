from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.calls import CallFailures, gather, settle, short, unwrap
from sglang_rdt.errors import DeadlineError, EngineStateError

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nEngineStateError: not in a sync'


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("pull_weights", TRACE, cause)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineStateError("not in a sync"), "not in a sync"),
        (DeadlineError("e1", "pull", 2), "e1 did not finish 'pull' within 2 s"),
        (task_error(EngineStateError("not in a sync")), "EngineStateError: not in a sync"),
        (task_error(KeyError("w")), "KeyError: 'w'"),
        (ActorDiedError(), "the actor is dead"),
        (ValueError("odd"), "ValueError: odd"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=repr,
)
def test_one_clear_line(error: Exception, text: str) -> None:
    assert short(error) == text
    assert "\n" not in short(error)


def test_errors_of_this_package_out_of_an_actor() -> None:
    # What ray.get really raises: an instance of both classes, with the traceback as its text.
    both = task_error(EngineStateError("not in a sync")).as_instanceof_cause()
    assert isinstance(both, EngineStateError)
    assert isinstance(both, RayTaskError)
    assert short(both) == "not in a sync"
    cause = unwrap(both)
    assert type(cause) is EngineStateError
    assert str(cause) == "not in a sync"


def test_unwrap_leaves_other_errors_alone() -> None:
    error = ValueError("x")
    assert unwrap(error) is error
    assert type(unwrap(task_error(KeyError("w")))) is KeyError


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """References are their own results; returns the timeouts that ray.get was given."""
    timeouts: list[float] = []

    def get(ref: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    return timeouts


def test_settle_waits_for_all_and_names_each(fake_ray: list[float]) -> None:
    refs = {
        "a": 1,
        "b": GetTimeoutError(),
        "c": task_error(EngineStateError("x")).as_instanceof_cause(),
        "d": ActorDiedError(),
        "e": 2,
    }
    results, failures = settle(refs, 5.0, "pause")
    assert results == {"a": 1, "e": 2}
    assert list(failures) == ["b", "c", "d"]
    assert str(failures["b"]) == "b did not finish 'pause' within 5 s"
    assert type(failures["c"]) is EngineStateError
    assert all(0 < t <= 5 for t in fake_ray)


def test_settle_nothing(fake_ray: list[float]) -> None:
    assert settle({}, 5.0, "pause") == ({}, {})


def test_gather_returns_all_or_raises_all(fake_ray: list[float]) -> None:
    assert gather({"a": 1, "b": 2}, 5.0, "pause") == {"a": 1, "b": 2}
    with pytest.raises(CallFailures) as caught:
        gather({"a": 1, "b": GetTimeoutError(), "c": ValueError("odd")}, 5.0, "pause")
    assert str(caught.value) == (
        "pause failed: b: b did not finish 'pause' within 5 s; c: ValueError: odd"
    )
    assert set(caught.value.failures) == {"b", "c"}
    assert caught.value.phase == "pause"


def test_a_deadline_is_shared_by_all_calls(
    fake_ray: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])

    def wait(refs: list[Any], num_returns: int, timeout: float) -> None:
        now[0] += timeout

    monkeypatch.setattr(ray, "wait", wait)
    settle({"a": 1, "b": 2}, 5.0, "pause")
    assert fake_ray == [0.001, 0.001]  # the time is up: only what is there already


def test_several_engines_that_are_silent_cost_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(refs: Any, num_returns: int, timeout: float) -> Any:
        waited.append(timeout)
        return [], refs

    def get(ref: Any, timeout: float) -> Any:
        waited.append(timeout)
        if ref is None:
            raise GetTimeoutError
        return ref

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    started = {"e0": {"r0": 1, "r1": 2}, "e1": {"r0": None, "r1": 3}, "e2": {"r0": None}}
    results, failures = calls.settle_each(started, 5.0, "pull")
    assert results == {"e0": {"r0": 1, "r1": 2}}
    assert {e: list(f) for e, f in failures.items()} == {"e1": ["r0"], "e2": ["r0"]}
    assert str(failures["e2"]["r0"]) == "r0 did not finish 'pull' within 5 s"
    assert waited[0] == 5.0
    assert max(waited[1:]) <= 5.0
    assert len(waited) == 6  # one wait for all
