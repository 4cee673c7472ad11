"""The coordinator, the senders and the actors of two ranks, without Ray: one whole sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_rdt.sender import RouteSender
from sglang_rdt.coordinator import trainers
from sglang_rdt.coordinator.calls import CallFailures
from sglang_rdt.coordinator.coordinator import Coordinator, compare_checksums
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.engine.sync_request import Trainer
from sglang_rdt.errors import EngineBusyError, EngineStateError, PlanError, TransportError
from sglang_rdt.plan.planner import Plan
from sglang_rdt.plan.specs import TrainerRank
from sglang_rdt.settings import Settings

from .builders import copy, engine_rank, layout, param, spec, trainer
from .ranks import Engine
from .wire import Wire, connect, handles

pytestmark = pytest.mark.usefixtures("empty_inbox")

W, E = spec("w", (4, 3)), spec("e", (2, 2))
TRAINERS = [trainer(0, [W, E]), trainer(1, [W, E])]
SETTINGS = Settings(
    bucket_bytes=24, connect_timeout_s=60.0, phase_timeout_s=60.0, allow_padding=True
)


ME = Trainer("me", "host:1")


def connected(
    coordinator: Coordinator, engines: Sequence[Any], trainers: Sequence[TrainerRank]
) -> Plan:
    """What the trainer's link does on rank 0."""
    specs = {spec.name: spec for t in trainers for spec in t.exports}
    for problem in coordinator.meet(engines, list(specs.values())).values():
        raise problem
    try:
        plan = coordinator.plan(trainers)
    except PlanError as error:
        coordinator.give_up(dict.fromkeys(coordinator.connecting, error))
        raise
    assert coordinator.leave() == {}
    return plan


@dataclass
class World:
    engine: Engine
    found: Any
    coordinator: Coordinator
    wire: Wire
    name: str

    def connect(self, trainers: Sequence[TrainerRank] = TRAINERS) -> Plan:
        return connected(self.coordinator, [self.found], trainers)

    def hf(self, fill: float) -> dict[str, torch.Tensor]:
        return {"w": torch.arange(12.0).view(4, 3) + fill, "e": torch.arange(4.0).view(2, 2) - fill}

    def senders(self, plan: Plan) -> list[RouteSender]:
        found = self.coordinator.engines[self.name]
        actors = dict(zip(found.ranks, found.actors, strict=True))
        return [RouteSender(r, actors[r.target], torch.device("cpu"), 5.0) for r in plan.routes]

    def move(self, senders: list[RouteSender], sync_id: str, hf: dict[str, torch.Tensor]) -> None:
        for sender in senders:
            sender.start(sync_id, "pull", checksum=True, timer=PhaseTimer())
            for name, tensor in hf.items():
                sender.offer(name, tensor)
            sender.finish()

    def state(self) -> tuple[list[str], list[bool]]:
        self.engine.settle()
        return self.engine.states, self.engine.paused


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    wire = connect(monkeypatch)
    engine = Engine(2)
    with ThreadPoolExecutor(8) as pool:
        found = handles(engine, pool)
        yield World(engine, found, Coordinator(SETTINGS, ME), wire, found.name)
        engine.stop()
    assert engine.loops.crashes == []
    assert engine.group.hangs == []


def test_a_whole_sync(world: World) -> None:
    plan = world.connect()
    assert world.state() == (["current"] * 2, [False] * 2)
    assert {(r.source, r.target.rank.tp) for r in plan.routes} == {(0, 0), (1, 1)}
    senders = world.senders(plan)
    puts = world.wire.puts
    for n in (1, 2):
        hf = world.hf(n * 100.0)
        sync_id = world.coordinator.new_sync_id(f"sync-{n}")
        assert world.coordinator.begin(sync_id) == {}
        world.move(senders, sync_id, hf)
        sums, failures = world.coordinator.finalise(sync_id, [world.name], checksum=True)
        assert failures == {}
        expected = {(str(s.route.target), p): v for s in senders for p, v in s.sums.items()}
        engines = {str(r): world.name for r in world.coordinator.engines[world.name].ranks}
        assert compare_checksums(expected, sums, engines) == {}
        assert world.coordinator.commit(sync_id, f"v{n}", [world.name]) == {}
        assert world.state() == (["current"] * 2, [False] * 2)
        for r in world.engine.ranks:
            assert r.control.version == f"v{n}"
            assert torch.equal(r.model.w, hf["w"])
            assert torch.equal(r.model.e[:2], hf["e"])
        assert sum(s.nbytes for s in senders) == plan.nbytes == 128
    assert world.wire.puts == puts  # references are put once
    registered = len(world.wire.registered)
    for sender in senders:
        sender.close()
    assert registered - len(world.wire.registered) == len(senders)


def test_sync_ids_are_unique_and_readable(world: World) -> None:
    ids = {world.coordinator.new_sync_id("sync-7") for _ in range(100)}
    assert len(ids) == 100
    assert all(i.startswith("sync-7-") for i in ids)


def test_a_failed_pull_leaves_dirty_and_the_next_sync_repairs(world: World) -> None:
    plan = world.connect()
    senders = world.senders(plan)
    world.wire.fail_pulls[world.wire.pulls + 1] = TransportError("link down")
    assert world.coordinator.begin("s1") == {}
    with pytest.raises(TransportError, match="link down"):
        world.move(senders, "s1", world.hf(1))
    (state,) = world.coordinator.abort("s1", {world.name: "link down"}).values()
    assert state.startswith("dirty: ")
    assert world.state() == (["dirty"] * 2, [True] * 2)
    assert world.coordinator.begin("s2") == {}
    world.move(senders, "s2", world.hf(2))
    assert world.coordinator.finalise("s2", [world.name], checksum=True)[1] == {}
    assert world.coordinator.commit("s2", "v2", [world.name]) == {}
    assert world.state() == (["current"] * 2, [False] * 2)
    assert torch.equal(world.engine.ranks[1].model.w, world.hf(2)["w"])


def test_a_refused_begin_is_reported_by_rank(world: World) -> None:
    world.connect()
    world.engine.ranks[1].control.fail["flush"] = EngineBusyError("3 running")
    failures = world.coordinator.begin("s1")
    assert list(failures) == [world.name]
    assert failures[world.name].phase == "pause"
    assert not failures[world.name].reconnect
    assert f"{world.name} dp0_pp0_tp1: 3 running" in str(failures[world.name])
    states = world.coordinator.abort("s1", failures)
    assert states[world.name] == "current"
    assert world.state() == (["current"] * 2, [False] * 2)


def test_an_abort_before_any_byte_is_current(world: World) -> None:
    world.connect()
    assert world.coordinator.begin("s1") == {}
    assert world.coordinator.abort("s1", {world.name: "x"}) == {world.name: "current"}


def test_a_sync_without_a_connection_says_that_connecting_helps(world: World) -> None:
    world.coordinator.engines[world.name] = world.found
    world.coordinator.take_part()
    (failure,) = world.coordinator.begin("s1").values()
    assert failure.reconnect
    assert "is not connected to host:1; connect again" in failure.text
    world.connect()
    assert world.coordinator.begin("s2") == {}
    assert world.coordinator.abort("s2", {world.name: "x"}) == {world.name: "current"}


def another(world: World, **changes: Any) -> Coordinator:
    """A coordinator of another trainer, of the same engines."""
    return Coordinator(SETTINGS.replace(**changes), Trainer("other", "host:2"))


def test_two_trainers_on_one_engine_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connect()
    monkeypatch.setattr(trainers, "is_there", lambda trainer: True)
    with pytest.raises(EngineStateError, match=r"connected to trainer host:1, which still runs"):
        connected(another(world), [world.found], TRAINERS)
    # The first is not disturbed.
    assert world.coordinator.begin("s1") == {}
    assert world.coordinator.abort("s1", {world.name: "x"}) == {world.name: "current"}


@pytest.mark.parametrize("how", ["gone", "taken over", "closed"])
def test_another_trainer_may_follow(
    how: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connect()
    monkeypatch.setattr(trainers, "is_there", lambda trainer: how != "gone")
    if how == "closed":
        world.coordinator.disconnect()
    other = another(world, takeover=how == "taken over")
    connected(other, [world.found], TRAINERS)
    # Whoever was there before hears of it, and does not take the engine back by itself.
    (failure,) = world.coordinator.begin("s1").values()
    assert not failure.reconnect
    assert "is connected to trainer host:2 since, and takes nothing from host:1" in failure.text
    world.coordinator.disconnect()  # means nothing to the engine any more
    assert other.begin("s2") == {}
    assert other.abort("s2", {world.name: "x"}) == {world.name: "current"}
    assert world.state() == (["current"] * 2, [False] * 2)


def test_an_engine_that_was_overwritten_first_is_dirty_until_it_is_whole(world: World) -> None:
    plan = world.connect()
    senders = world.senders(plan)
    assert world.coordinator.begin("s1", overwrite=True) == {}
    world.move(senders, "s1", world.hf(2))
    assert world.coordinator.finalise("s1", [world.name], checksum=False)[1] == {}
    assert world.coordinator.commit("s1", "v1", [world.name]) == {}
    for r in world.engine.ranks:
        assert torch.equal(r.model.w, world.hf(2)["w"])
        assert not r.model.e[2:].any()  # the padding row
    assert world.coordinator.begin("s2", overwrite=True) == {}
    assert not torch.equal(world.engine.ranks[0].model.w, world.hf(2)["w"])
    (state,) = world.coordinator.abort("s2", {world.name: "x"}).values()
    assert state.startswith("dirty: ")


def test_a_plan_that_does_not_fit_leaves_the_engine_running(world: World) -> None:
    with pytest.raises(PlanError, match="extra"):
        world.connect([trainer(0, [W, E, spec("extra", (3,))])])
    assert world.state() == (["current"] * 2, [False] * 2)


def test_padding_that_the_model_does_not_ask_for_is_refused(world: World) -> None:
    coordinator = Coordinator(SETTINGS.replace(allow_padding=False), ME)
    with pytest.raises(PlanError, match="SGLANG_RDT_ALLOW_PADDING=1"):
        connected(coordinator, [world.found], TRAINERS)
    assert world.state() == (["current"] * 2, [False] * 2)


def test_a_loader_that_refuses_leaves_the_engine_running(world: World) -> None:
    with pytest.raises(CallFailures, match=r"record_load failed.*KeyError: 'e'"):
        world.connect([trainer(0, [W])])
    assert world.state() == (["current"] * 2, [False] * 2)


def test_a_trainer_without_tensors_is_refused(world: World) -> None:
    with pytest.raises(PlanError, match="exports no tensor"):
        world.connect([TrainerRank(0, "node", ())])


def test_engines_fail_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch)

    class Fake:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        def start(self, method: str, *args: Any) -> dict[str, Any]:
            return {f"{self.name} tp0": self}

        def result(self, timeout: float) -> Any:
            if self.error:
                raise self.error
            return {"w": 1}

    some = [Fake("a"), Fake("b", EngineStateError("gone")), Fake("c")]
    coordinator = Coordinator(Settings(), ME)
    coordinator.engines = {one.name: one for one in some}  # type: ignore[misc]
    coordinator.take_part()
    assert coordinator.begin("s") == {"b": Failure("pause", "b tp0: gone")}
    sums, failures = coordinator.finalise("s", ["a", "c"], checksum=True)
    assert (sums, failures) == ({"a tp0": {"w": 1}, "c tp0": {"w": 1}}, {})
    assert coordinator.commit("s", "v", ["b", "c"]) == {"b": Failure("version", "b tp0: gone")}


# Checksums.

RANKS = {"e0 tp0": "e0", "e0 tp1": "e0", "e1 tp0": "e1"}


def test_equal_checksums() -> None:
    expected = {("e0 tp0", "w"): 5, ("e0 tp1", "w"): 6, ("e1 tp0", "w"): 7}
    found = {"e0 tp0": {"w": 5}, "e0 tp1": {"w": 6}, "e1 tp0": {"w": 7}}
    assert compare_checksums(expected, found, RANKS) == {}


def test_every_difference_is_named() -> None:
    expected = {("e0 tp0", "w"): 5, ("e0 tp0", "b"): 1, ("e0 tp1", "w"): 6, ("e1 tp0", "w"): 7}
    found = {"e0 tp0": {"w": 5, "extra": 3}, "e0 tp1": {"w": 66}, "e1 tp0": {"w": 7}}
    different = compare_checksums(expected, found, RANKS)
    assert list(different) == ["e0"]
    assert different["e0"].phase == "verify"
    for line in ("e0 tp0: b is not held", "e0 tp0: extra was not sent", "e0 tp1: w differs"):
        assert line in different["e0"].text
    assert "e0 tp0: w" not in different["e0"].text


def test_two_parameters_of_one_shape_that_were_swapped_differ() -> None:
    expected = {("e0 tp0", "q"): 5, ("e0 tp0", "k"): 6}
    different = compare_checksums(expected, {"e0 tp0": {"q": 6, "k": 5}}, {"e0 tp0": "e0"})
    assert "e0 tp0: k differs" in different["e0"].text
    assert "e0 tp0: q differs" in different["e0"].text


def test_ranks_that_failed_before_are_not_compared() -> None:
    ranks = {rank: engine for rank, engine in RANKS.items() if engine == "e1"}
    expected = {("e0 tp0", "w"): 5, ("e1 tp0", "w"): 7}
    assert compare_checksums(expected, {"e1 tp0": {"w": 7}}, ranks) == {}


def test_nothing_reported_is_not_equal() -> None:
    for expected, found, side in (
        ({("e1 tp0", "w"): 7}, {}, "engine"),
        ({}, {"e1 tp0": {"w": 7}}, "trainer"),
        ({}, {"e1 tp0": {}}, "trainer"),
        ({}, {}, "engine"),
    ):
        different = compare_checksums(expected, found, {"e1 tp0": "e1"})
        assert f"e1 tp0: the {side} reports no checksum" in different["e1"].text


# Faults that there were.


def test_a_connect_whose_begin_fails_leaves_nobody_parked(world: World) -> None:
    world.engine.settle_s = 10.0
    world.found.actors[1].lost.add("begin_sync")
    with pytest.raises(CallFailures):
        world.connect()
    assert world.state() == (["current"] * 2, [False] * 2)


def test_no_engines_means_none(world: World) -> None:
    world.connect()
    assert world.coordinator.begin("s1") == {}
    assert world.coordinator.finalise("s1", [], checksum=True) == ({}, {})
    world.coordinator.abort("s1", {world.name: "x"})


def test_a_sync_that_was_given_up_does_not_begin_late(world: World) -> None:
    world.connect()
    # The engine was stopped: it gets the calls after everybody has given up, the abort first.
    (state,) = world.coordinator.abort("s1", {world.name: "too late"}).values()
    assert state == "current"
    (failure,) = world.coordinator.begin("s1").values()
    assert "sync s1 was given up" in failure.text
    assert world.state() == (["current"] * 2, [False] * 2)
    assert world.coordinator.begin("s2") == {}
    assert world.coordinator.abort("s2", {world.name: "x"}) == {world.name: "current"}


def test_one_that_began_late_is_given_up_when_it_is_met_again(world: World) -> None:
    world.connect()
    assert world.coordinator.begin("s1") == {}
    world.coordinator.forget([world.name])
    world.connect()
    assert world.state() == (["current"] * 2, [False] * 2)
    assert world.coordinator.begin("s2") == {}
    assert world.coordinator.abort("s2", {world.name: "x"}) == {world.name: "current"}


def test_an_engine_that_was_forgotten_is_told_all_the_same(world: World) -> None:
    world.connect()
    world.coordinator.forget([world.name])
    world.coordinator.disconnect()
    assert world.found.status()[0].connection is None


def test_one_rank_that_must_be_connected_again_is_enough(world: World) -> None:
    world.connect()
    world.engine.ranks[1].actor._session._connection = None
    (failure,) = world.coordinator.begin("s1").values()
    assert failure.reconnect
    assert "another rank of the engine refused" in failure.text
    world.connect()
    world.engine.ranks[1].actor._session._connection = None
    world.engine.ranks[0].control.fail["flush"] = EngineBusyError("3 running")
    (failure,) = world.coordinator.begin("s2").values()
    assert not failure.reconnect  # connecting again does not help the other one


def test_ranks_that_nothing_is_sent_to_are_known() -> None:
    coordinator = Coordinator(SETTINGS, ME)
    to = param("w", (4, 3))
    some, none = layout([to], [copy(to, W)]), layout([to], [], rank=engine_rank(1))
    coordinator.take_back({"e": [some, none]})
    assert coordinator.untouched() == {str(none.rank)}
