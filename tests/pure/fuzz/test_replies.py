"""What comes back from engines: errors of any class, results of any type."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.calls import CallFailures
from sglang_rdt.errors import DeadlineError, EngineStateError, PlanError, SlicesError

from . import strategies as hostile

MAX = 16_100


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Held(Exception):
    """An error that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = lambda: text


TEXTS = st.one_of(hostile.TEXTS, st.sampled_from(["a\n  - b\n  - c", "x" * 1_000_000, "\n" * 999]))
CAUSES = st.one_of(
    st.builds(ValueError, TEXTS),
    st.builds(Held, TEXTS),
    st.builds(EngineStateError, TEXTS),
    st.builds(SlicesError, TEXTS),
    st.builds(lambda t: PlanError("bad", [t] * 300), TEXTS),
    st.builds(KeyError, hostile.ANYTHING),
    st.builds(Mute),
    st.builds(OSError, st.integers(0, 200), TEXTS),
    st.just(GetTimeoutError("inner")),
    st.just(TimeoutError()),
    st.just(MemoryError()),
    st.just(RecursionError("x")),
)
ERRORS = st.one_of(
    CAUSES,
    st.builds(lambda c: RayTaskError("f", "Traceback\nX", c), CAUSES),
    st.builds(lambda c: RayTaskError("f", "Traceback\nX", c).as_instanceof_cause(), CAUSES),
    st.builds(lambda: RayTaskError("f", "", ValueError(""))),
    st.builds(ActorDiedError),
    st.just(ray.exceptions.OutOfMemoryError("a\nb")),
    st.just(ray.exceptions.TaskCancelledError()),
)


@pytest.fixture(scope="module")
def fake_ray() -> Iterator[None]:
    def get(ref: Any, timeout: float) -> Any:
        if isinstance(ref, BaseException):
            raise ref
        return ref

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", get)
        patch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
        yield


@hostile.examples(200)
@given(ERRORS)
def test_any_error_is_one_bounded_line(error: BaseException) -> None:
    text = calls.short(error)
    assert text
    assert text.isprintable()
    assert len(text) <= MAX


@hostile.examples(150)
@given(st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(), ERRORS), min_size=1))
def test_any_mixture_is_settled(fake_ray: None, refs: dict[str, Any]) -> None:
    results, failures = calls.settle(refs, 5.0, "pull")
    assert set(results) | set(failures) == set(refs)
    assert not set(results) & set(failures)
    assert results == {who: v for who, v in refs.items() if isinstance(v, int)}
    # What an actor raised is no deadline of ours.
    for who, error in failures.items():
        assert isinstance(error, DeadlineError) == (type(refs[who]) is GetTimeoutError)
    if not failures:
        assert calls.gather(refs, 5.0, "pull") == results
        return
    with pytest.raises(CallFailures) as caught:
        calls.gather(refs, 5.0, "pull")
    text = str(caught.value)
    assert text.startswith("pull failed: ")
    assert "\n" not in text
    assert len(text) <= MAX * len(refs)
    # It crosses to the other trainer ranks.
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
