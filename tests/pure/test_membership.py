"""Who joined, who is gone, who is back: against a table of names that the tests write."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util

from megatron_rdt.link import EngineLink
from sglang_rdt.coordinator import calls, discovery, membership
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.membership import Membership, refusals
from sglang_rdt.coordinator.roster import current_engines, roster
from sglang_rdt.engine import names
from sglang_rdt.engine.sync_request import RankStatus
from sglang_rdt.errors import AmbiguousEngineError, DeadlineError, EngineNotFoundError, RdtError
from sglang_rdt.plan.specs import RankId

from .builders import engine_rank
from .wire import get, settle

A, B = "10.0.0.1:30000", "10.0.0.2:30000"


class Actor:
    """An actor handle."""

    ids = iter(range(10**6))

    def __init__(self, identity: Any) -> None:
        self.identity = identity
        self._actor_id = next(Actor.ids)
        self.state = 2
        self.silent = False
        self.asked = 0
        self.status = RankStatus("current", "default")

    def _get_local_state(self) -> int:
        return self.state

    def _answer(self, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.silent:
            future.set_result(value)
        return future

    def __getattr__(self, name: str) -> Any:
        if name == "rdt_identity":
            return Method(self._identify)
        if name == "rdt_status":
            return Method(lambda: self._answer(self.status))
        if name == "accept_weights":
            return Method(lambda version: self._answer(self.accepted(version)))
        raise AttributeError(name)

    def _identify(self) -> Future[Any]:
        self.asked += 1
        return self._answer(self.identity)


class Method:
    def __init__(self, remote: Any) -> None:
        self.remote = remote


class Table:
    """Ray's table of named actors."""

    def __init__(self) -> None:
        self.actors: dict[tuple[str, str], Actor] = {}

    def start(
        self, engine: str, instance: str = "one", size: int = 2, space: str = "rl"
    ) -> list[Actor]:
        host, port = names.split_address(engine)
        actors = []
        for tp in range(size):
            name = names.actor_name(host, port, tp=tp)
            identity = replace(
                engine_rank(tp, tp_size=size),
                engine=engine,
                actor_name=name,
                namespace=space,
                instance=instance,
            )
            actors.append(Actor(identity))
            self.actors[space, name] = actors[-1]
        return actors

    def end(self, engine: str, ranks: int | None = None) -> None:
        gone = [k for k, a in self.actors.items() if a.identity.engine == engine][:ranks]
        for key in gone:
            self.actors.pop(key).state = 4

    def listed(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": space} for space, name in self.actors]

    def get(self, name: str, namespace: str) -> Actor:
        if (namespace, name) not in self.actors:
            raise ValueError(name)
        return self.actors[namespace, name]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(ray.util, "list_named_actors", made.listed)
    monkeypatch.setattr(ray, "get_actor", made.get)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(calls, "settle", settle)
    monkeypatch.setattr(membership, "_ANSWER_S", 0.05)
    monkeypatch.setattr(membership, "_FIRST_S", 0.1)
    return made


def known(engines: Any) -> dict[str, Any]:
    return {e.name: e for e in engines}


def test_nothing_changes(table: Table) -> None:
    first = table.start(A)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    asked = [a.asked for a in first]
    for _ in range(3):
        assert not members.look(now)
    assert [a.asked for a in first] == asked  # those that are known are not asked again


def test_one_joins(table: Table) -> None:
    table.start(A)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    table.start(B)
    news = members.look(now)
    assert [e.name for e in news.joined] == [B]
    assert not news.lost
    assert not members.look({**now, **known(news.joined)})


def test_one_that_starts_joins_when_it_is_whole_and_nobody_waits_for_it(table: Table) -> None:
    table.start(A)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    starting = table.start(B)
    key = next(k for k, a in table.actors.items() if a is starting[1])
    late = table.actors.pop(key)
    news = members.look(now)
    assert not news
    assert "has 2 ranks, but only 1 answer" in news.waiting[B]
    assert not news.missing
    late.silent = True
    table.actors[key] = late
    assert "do not answer" in members.look(now).waiting[B]
    asked = late.asked
    began = time.monotonic()
    for _ in range(20):
        assert not members.look(now)
    assert time.monotonic() - began < 20 * membership._ANSWER_S
    assert late.asked == asked
    late.silent = False
    table.end(B)
    table.start(B)
    assert [e.name for e in members.look(now).joined] == [B]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_dies(table: Table, ranks: int) -> None:
    table.start(A)
    table.start(B)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    members.connected(now)
    table.end(B, ranks)
    news = members.look(now)
    assert list(news.lost) == [B]
    assert "its actors are dead" in news.lost[B]
    # What is left of it serves nobody knows what: that is said until it is gone.
    assert (B in news.missing) == (ranks == 1)
    del now[B]
    assert (B in members.look(now).missing) == (ranks == 1)
    table.end(B)
    assert not members.look(now).missing


def test_one_is_back_under_its_name(table: Table) -> None:
    table.start(A)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    table.end(A)
    again = table.start(A, "two")
    news = members.look(now)
    assert list(news.lost) == [A]
    assert [e.instance for e in news.joined] == ["two"]
    assert news.joined[0].actors == tuple(again)


def test_engines_that_were_named_are_missed_and_others_are_not_taken(table: Table) -> None:
    table.start(A)
    table.start(B)
    table.start("10.0.0.3:30000")
    members = Membership([A, B], "rl")
    now = known(members.find().joined)
    assert list(now) == [A, B]
    table.end(B)
    news = members.look(now)
    assert list(news.missing) == [B]
    del now[B]
    assert members.look(now).missing == {B: "it is not there"}
    table.start(B, "two")
    assert [e.name for e in members.look(now).joined] == [B]


def test_one_that_could_not_be_connected_is_tried_less_and_less_often(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.start(A)
    table.start(B)
    members = Membership(None, "rl")
    now = known(members.find().joined)
    members.connected(now)
    b = now.pop(B)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for pause in (10, 20, 40):
        members.failed(b)
        clock[0] += pause - 1
        news = members.look(now)
        assert not news.joined
        assert "is tried again in 1 s" in news.missing[B]
        clock[0] += 2
        assert [e.name for e in members.look(now).joined] == [B]
    # Another one of that name starts anew.
    members.failed(b)
    table.end(B)
    table.start(B, "two")
    assert [e.name for e in members.look(now).joined] == [B]


def test_a_silent_engine_does_not_keep_the_others_from_being_found(table: Table) -> None:
    table.start(A)
    for actor in table.start(B):
        actor.silent = True
    assert [e.name for e in Membership(None, "rl").find().joined] == [A]
    with pytest.raises(EngineNotFoundError, match=f"{B.split(':')[0]}.*did not finish 'identity'"):
        discovery.find_engines([A, B], namespace="rl", timeout_s=0.1)
    table.end(A)
    with pytest.raises(EngineNotFoundError, match="do not answer"):
        Membership(None, "rl").find()


def test_namespaces_do_not_see_one_another_unless_asked(table: Table) -> None:
    table.start(A)
    table.start(B, space="other")
    assert [e.name for e in discovery.find_engines(namespace="rl")] == [A]
    assert [e.name for e in discovery.find_engines(namespace="*")] == [A, B]
    assert not Membership(None, "rl").look(known(discovery.find_engines(namespace="rl")))
    with pytest.raises(EngineNotFoundError, match=r"in other namespaces: .*'other'"):
        discovery.find_engines([B], namespace="rl")
    table.start(A, space="other")
    with pytest.raises(AmbiguousEngineError, match="are in namespaces other, rl; name one"):
        discovery.find_engines([A], namespace="*")


def test_no_engine_at_all() -> None:
    with pytest.raises(EngineNotFoundError, match="names no engine"):
        Membership([], None)


def test_routers_get_the_current_ones_of_a_version(table: Table) -> None:
    table.start(A)
    second = table.start(B)
    third = table.start("10.0.0.3:30000")
    assert current_engines(namespace="rl") == [A, B, "10.0.0.3:30000"]
    for actor in second:
        actor.status = RankStatus("current", "7")
    third[0].status = RankStatus("dirty", "default", detail="torn")
    for actor in table.start("10.0.0.4:30000"):
        actor.silent = True
    assert current_engines(namespace="rl", timeout_s=0.1) == [A, B]
    assert current_engines("7", namespace="rl", timeout_s=0.1) == [B]
    standings = roster("rl", timeout_s=0.1)
    assert standings["10.0.0.3:30000"].state == "dirty"
    assert "torn" in standings["10.0.0.3:30000"].why
    assert standings["10.0.0.4:30000"].state == "gone"


def test_who_refuses_and_who_is_silent() -> None:
    problems: dict[str, BaseException] = {
        "no": RdtError("I follow another one"),
        "dead": calls.CallFailures("status", {"r": ray.exceptions.ActorDiedError()}),
        "silent": calls.CallFailures("status", {"r": DeadlineError("r", "status", 1)}),
        "one of each": calls.CallFailures(
            "record_load", {"r": RdtError("cat"), "s": DeadlineError("s", "record_load", 1)}
        ),
    }
    assert list(refusals(problems)) == ["no"]


@pytest.mark.parametrize("named", [True, False])
def test_connecting_from_the_beginning_misses_who_was_connected(table: Table, named: bool) -> None:
    table.start(A)
    second = table.start(B)
    members = Membership([A, B] if named else None, "rl")
    members.connected(e.name for e in members.find().joined)
    for actor in second:
        actor.silent = True
    news = members.find()  # parameters have moved, say
    assert [e.name for e in news.joined] == [A]
    assert list(news.missing) == [B]
    table.end(B)
    news = members.find()
    assert [e.name for e in news.joined] == [A]
    assert list(news.missing) == ([B] if named else [])
    table.end(A)
    with pytest.raises(EngineNotFoundError, match="it is not there" if named else "no engine"):
        members.find()


def linked(coordinator: Any, members: Any, planned: tuple[str, ...]) -> EngineLink:
    """Rank 0's end, as far as it looks before a sync."""
    link = object.__new__(EngineLink)
    link._holdings, link._stale = None, frozenset()
    link.coordinator, link._membership = coordinator, members
    link._plan = SimpleNamespace(engines=planned)  # type: ignore[assignment]
    return link


def test_a_plan_that_is_about_somebody_who_has_failed_is_made_anew(table: Table) -> None:
    table.start(A)
    members = Membership(None, "rl")
    lead = SimpleNamespace(engines=known(members.find().joined))
    assert not linked(lead, members, (A,))._notice().changed
    # It failed in the last sync and is dead since: no news, but it must get no bucket any more.
    assert linked(lead, members, (A, B))._notice().changed


def test_only_the_replicas_that_are_dirty_accept_their_weights(table: Table) -> None:
    calls_: list[int] = []
    actors = table.start(A)
    for dp, actor in enumerate(actors):
        actor.status = RankStatus("dirty" if dp else "current", "1")
        actor.accepted = lambda version, dp=dp: calls_.append(dp)  # type: ignore[attr-defined]
    ranks = tuple(
        replace(a.identity, rank=RankId(dp, 0, 0), dp_size=2, tp_size=1)
        for dp, a in enumerate(actors)
    )
    Engine(ranks, tuple(actors)).accept("torn", 1.0)
    assert calls_ == [1]
    tensor_parallel = tuple(a.identity for a in actors)
    calls_.clear()
    Engine(tensor_parallel, tuple(actors)).accept("torn", 1.0)
    assert calls_ == [0, 1]  # they vote
