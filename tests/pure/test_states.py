"""Every state and every event: what follows, and what never does."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from sglang_rdt.engine.states import (
    LABELLING,
    SHOWN,
    TRANSITIONS,
    Event,
    Stage,
    State,
    WeightState,
    of_engine,
)
from sglang_rdt.engine.sync_request import RankStatus
from sglang_rdt.errors import EngineStateError

STAGES: tuple[Stage, ...] = get_args(Stage)
EVENTS: tuple[Event, ...] = get_args(Event)
# Nothing longer leads anywhere new: there are six stages.
LONGEST = 6


def fire(state: WeightState, event: Event, version: str = "new") -> None:
    state.on(event, version=version if event in LABELLING else None, detail=f"why {event}")


def paths() -> list[tuple[tuple[Event, ...], WeightState]]:
    """Every sequence of events that can happen, up to LONGEST, with where it leads."""
    found: list[tuple[tuple[Event, ...], WeightState]] = []
    frontier: list[tuple[Event, ...]] = [()]
    for _ in range(LONGEST):
        following = []
        for path, event in itertools.product(frontier, EVENTS):
            state = WeightState("old")
            try:
                for n, step in enumerate((*path, event)):
                    fire(state, step, f"v{n}")
            except EngineStateError:
                continue
            following.append((*path, event))
            found.append(((*path, event), state))
        frontier = following
    return found


PATHS = paths()


def test_the_table_knows_only_stages_and_events() -> None:
    assert set(SHOWN) == set(STAGES)
    assert set(SHOWN.values()) == set(get_args(State))
    for (stage, event), target in TRANSITIONS.items():
        assert stage in STAGES
        assert event in EVENTS
        assert target in STAGES


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_pair(stage: Stage, event: Event) -> None:
    state = WeightState("old", stage, "torn before" if stage == "dirty" else "")
    target = TRANSITIONS.get((stage, event))
    if target is None:
        before = (state.version, state.stage, state.detail)
        with pytest.raises(EngineStateError, match=f"{stage} cannot {event}"):
            fire(state, event)
        assert (state.version, state.stage, state.detail) == before
        return
    fire(state, event)
    assert state.stage == target
    assert state.state == SHOWN[target]
    assert state.version == ("new" if event in LABELLING else "old")
    if target == "dirty":
        assert state.detail == ("torn before" if stage == "dirty" else f"why {event}")
    if target == "current":
        assert state.detail == ""


@pytest.mark.parametrize("event", EVENTS)
def test_a_label_belongs_to_commit_and_accept_alone(event: Event) -> None:
    stage = next(s for (s, e) in TRANSITIONS if e == event)
    state = WeightState("old", stage)
    with pytest.raises(EngineStateError, match="needs"):
        state.on(event, version=None if event in LABELLING else "new")
    assert (state.version, state.stage) == ("old", stage)


def test_all_stages_are_reached() -> None:
    assert {state.stage for _, state in PATHS} == set(STAGES)
    assert len(PATHS) > 300


def test_the_label_moves_once_per_sync_and_only_after_finalise() -> None:
    for path, state in PATHS:
        moved = [n for n, event in enumerate(path) if event in LABELLING]
        assert state.version == (f"v{moved[-1]}" if moved else "old")
        for n in moved:
            since = max((i for i in range(n) if path[i] == "begin"), default=-1)
            if path[n] == "commit":
                assert path[n - 1] == "finalise"
                assert not any(event in LABELLING for event in path[since:n])


def test_what_landed_is_current_only_after_commit_or_the_users_word() -> None:
    for path, state in PATHS:
        landed = [n for n, event in enumerate(path) if event in ("land", "finalise", "tear")]
        if landed and state.state == "current":
            assert any(event in LABELLING for event in path[landed[-1] :]), path


def test_a_dirty_engine_stays_dirty_until_a_whole_sync() -> None:
    for path, _ in PATHS:
        state = WeightState("old", "dirty", "torn before")
        try:
            for n, event in enumerate(path):
                fire(state, event, f"v{n}")
        except EngineStateError:
            continue
        healed = any(event in LABELLING for event in path)
        assert state.state != "current" or healed, path
        if not healed:
            assert state.version == "old"
            assert state.detail == "torn before"


def test_gone_is_the_end() -> None:
    for path, state in PATHS:
        assert (state.stage == "gone") == ("die" in path)
        if "die" in path:
            assert set(path[path.index("die") :]) == {"die"}


# An engine is what its ranks are.


def rank(state: State = "current", version: str = "1", **more: Any) -> RankStatus:
    return RankStatus(state=state, version=version, **more)


@pytest.mark.parametrize(
    ("ranks", "expected", "why"),
    [
        ([rank(), rank()], "current", ""),
        ([rank(), rank(version="2")], "dirty", "its ranks disagree: a serves '1', b serves '2'"),
        ([rank(), rank("syncing", sync_id="s1")], "syncing", "b: s1"),
        ([rank("syncing"), rank("dirty", detail="torn")], "dirty", "b: torn"),
        ([rank("dirty"), RuntimeError("the actor is dead")], "gone", "b: the actor is dead"),
        ([rank("gone"), rank("dirty")], "gone", "a: gone"),
        ([], "gone", "it has no ranks"),
    ],
)
def test_an_engine_is_what_its_worst_rank_is(ranks: list[Any], expected: State, why: str) -> None:
    assert of_engine(dict(zip("ab", ranks, strict=False))) == (expected, why)
