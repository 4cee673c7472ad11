"""Syncs that meet requests, other syncs, and what users do to an engine meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.engine.sync_request import SyncRequest
from sglang_rdt.errors import RdtError, SyncError
from tests.e2e import traffic
from tests.e2e.conftest import EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds
from tests.e2e.traffic import KEY, SETS, Judge, Kept, on_engine, on_host

pytestmark = pytest.mark.e2e

DIRECT = SETTINGS.replace(mode="direct")
# Several passes long, and some over after the pass that a sync interrupts.
LENGTHS = (1, 2, 3, 8)


@pytest.fixture(scope="module")
def judge(cluster: None, trainers: TrainerPool) -> Judge:
    """Knows every set; made once."""
    group = trainers.get(KEY.model, Layout(), dtype=torch.float32)
    group.on_all(traffic.make_sets)
    return Judge(KEY.model, traffic.states_of(group))


@pytest.fixture(autouse=True)
def calm(engines: EnginePool) -> Iterator[None]:
    """Other tests use the same engine."""
    yield
    on_host(engines.get(KEY), traffic.calm_down)


# --- what is watched in the engine ----------------------------------------------------------------


def watch(actor: Any) -> None:
    """Notes when forward passes and pulls into live parameters begin and end."""
    from sglang_rdt.engine.direct_reader import DirectReader

    watched: dict[str, list[tuple[float, float]]] = {"forward": [], "pull": []}

    def timed(what: str, run: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return run(*args, **kwargs)
            finally:
                watched[what].append((began, time.monotonic()))

        return wrapper

    runner, weights = actor.scheduler.tp_worker.model_runner, actor._session.weights
    read = DirectReader.read
    runner.forward = timed("forward", runner.forward)
    weights.pull = timed("pull", weights.pull)
    DirectReader.read = timed("pull", read)  # type: ignore[method-assign]

    def unwatch() -> None:
        del runner.forward, weights.pull
        DirectReader.read = read  # type: ignore[method-assign]

    actor.watched, actor.unwatch = watched, unwatch


def passes(actor: Any) -> int:
    """Forward passes since :func:`watch`."""
    return len(actor.watched["forward"])


def unwatch(actor: Any) -> dict[str, list[tuple[float, float]]]:
    """Ends :func:`watch`; what was seen."""
    actor.unwatch()
    return actor.watched


@pytest.fixture
def watched(engines: EnginePool) -> Iterator[ServedEngine]:
    """The engine, watched."""
    served = engines.get(KEY)
    on_engine(served, watch)
    yield served
    on_engine(served, lambda actor: actor.unwatch())


def tokens_so_far(actor: Any) -> list[int]:
    """Of each running request."""
    return [len(req.output_ids) for req in list(actor.scheduler.running_batch.reqs)]


def until_running(served: ServedEngine, requests: int) -> None:
    """Waits until so many requests are in the middle of their tokens."""
    deadline = time.monotonic() + 30
    while sum(n >= 2 for n in on_engine(served, tokens_so_far)) < requests:
        assert time.monotonic() < deadline


def user(host: Any, what: str, mode: str = "") -> None:
    """The user pauses or continues generation, while requests run."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = host.engine.tokenizer_manager
    action = (
        manager.pause_generation(PauseGenerationReqInput(mode=mode))
        if what == "pause"
        else manager.continue_generation(ContinueGenerationReqInput())
    )
    asyncio.run_coroutine_threadsafe(action, host.engine.loop).result(30)


def assert_stands_still(served: ServedEngine) -> None:
    """No forward pass happens."""
    before = on_engine(served, passes)
    time.sleep(0.3)
    assert on_engine(served, passes) == before


def assert_finished(served: ServedEngine, judge: Judge, kept: Kept, count: int) -> Any:
    """All requests have a reply, and every token is its version's; the replies."""
    replies, errors = on_host(served, traffic.finish_traffic, False)
    assert not errors
    assert len(replies) == count
    assert not [o for reply in replies for o in judge.objections(reply, kept)]
    return replies


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
def test_a_pull_never_overlaps_a_forward_pass(
    mode: Any, watched: ServedEngine, engines: EnginePool, trainers: TrainerPool, judge: Judge
) -> None:
    served, group = traffic.attached(engines, trainers, SETTINGS.replace(mode=mode))
    group.on_all(traffic.sync_number, 0)
    jobs = [(prompt, 8) for prompt in judge.prompts(4)]
    on_host(served, traffic.start_traffic, [jobs] * 4, True)
    group.on_all(traffic.sync_numbers, 1, 40)
    _, errors = on_host(served, traffic.finish_traffic, True)
    assert not errors
    seen = on_engine(served, lambda actor: actor.watched)
    assert len(seen["pull"]) >= 40
    assert len(seen["forward"]) >= 40
    both = sorted([(*i, "pull") for i in seen["pull"]] + [(*i, "forward") for i in seen["forward"]])
    overlaps = [(one, other) for one, other in itertools.pairwise(both) if other[0] < one[1]]
    assert not overlaps


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_requests_in_flight_are_labelled_token_by_token(
    pause_mode: Any, engines: EnginePool, trainers: TrainerPool, judge: Judge
) -> None:
    """Without a flush: what the engine remembers of a request is then of several versions, and so
    is what transformers is asked to remember."""
    served, group = traffic.attached(engines, trainers, DIRECT)
    group.on_all(traffic.sync_number, 0)  # with a flush: nothing is remembered of other tests
    settings = DIRECT.replace(pause_mode=pause_mode, flush=False)
    group.attach(settings, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.connect())
    jobs = [(p, LENGTHS[i // 4 % len(LENGTHS)]) for i, p in enumerate(judge.prompts(400))]
    on_host(served, traffic.start_traffic, [jobs[i::4] for i in range(4)], False)
    syncs = group.on_all(traffic.sync_numbers, 1, 60)[0]
    kept: Kept = "all" if pause_mode == "in_place" else "prefilled"
    replies = assert_finished(served, judge, kept, len(jobs))
    assert not [o for reply in replies for o in traffic.staleness_objections(reply, syncs)]
    assert sum(len(reply.spans) > 1 for reply in replies) >= 5
    assert (sum(reply.retractions for reply in replies) > 0) == (pause_mode == "retract")


# --- other syncs ----------------------------------------------------------------------------------


def race(rank: Any, numbers: list[int], start: float) -> list[tuple[int, float, str]]:
    """Syncs one version after another; number, when it returned, and why it failed if it did."""
    time.sleep(max(start - time.monotonic(), 0))
    done = []
    for number in numbers:
        traffic.use_set(rank, number)
        why = ""
        try:
            rank.sync.sync(traffic.version_name(number))
        except RdtError as error:
            why = str(error)
        done.append((number, time.monotonic(), why))
    return done


@pytest.mark.parametrize("mode", ["direct", pytest.param("bucketed", marks=pytest.mark.long)])
def test_two_trainers_at_once(
    mode: Any, engines: EnginePool, trainers: TrainerPool, judge: Judge
) -> None:
    """Both told to take the engine over from the other: who comes too late is refused."""
    settings = SETTINGS.replace(mode=mode, takeover=True)
    served, group = traffic.attached(engines, trainers, settings)
    states = traffic.states_of(group)
    other = Trainers(KEY.model, Layout(), dtype=torch.float32)
    try:
        other.on_all(traffic.make_sets)
        other.attach(settings, on_step=False, engines=[served.address])
        other.on_all(traffic.sync_number, 3)
        group.on_all(traffic.sync_number, 0)
        jobs = [(prompt, n) for prompt in judge.prompts(4) for n in (1, 8)]
        on_host(served, traffic.start_traffic, [jobs] * 2, True)
        # One has sets 0 and 1, the other 2 and 3.
        numbers = (
            [n for n in range(4, 64) if n % SETS < 2],
            [n for n in range(4, 64) if n % SETS > 1],
        )
        refs = [
            trainer.ranks[0].call.remote(race, mine, time.monotonic() + 0.5)
            for trainer, mine in zip((group, other), numbers, strict=True)
        ]
        done = ray.get(refs, timeout=150)
        replies, errors = on_host(served, traffic.finish_traffic, True)
        assert not errors
        assert not [o for reply in replies for o in judge.objections(reply)]
        for mine in done:
            for _, _, why in mine:
                # The owner by host and process, or that the other has connected since.
                told = ("is in sync", "takes nothing from", "close that one first")
                assert not why or any(text in why for text in told), why
        assert any(why for mine in done for _, _, why in mine), "they never met"
        last, _, _ = max((d for mine in done for d in mine if not d[2]), key=lambda d: d[1])
        (status,) = served.engine.status()
        assert (status.state, status.version) == ("current", traffic.version_name(last))
        assert_engine_holds(KEY.model, states[last % SETS], served)
        # Neither is left with anything broken.
        for trainer, number in ((group, 100), (other, 103)):
            # The first may find that the other has connected since.
            (done,) = trainer.on_all(race, [number, number], 0.0)
            assert not done[1][2]
        assert_engine_holds(KEY.model, states[3], served)
        other.all("detach")
    finally:
        other.stop()


# --- users ----------------------------------------------------------------------------------------


def test_a_sync_while_weights_are_released(engines: EnginePool, trainers: TrainerPool) -> None:
    served, group = traffic.attached(engines, trainers, DIRECT)
    states = traffic.states_of(group)
    group.on_all(traffic.sync_number, 0)
    registered = served.engine.status()[0].registrations
    on_host(served, lambda host: host.engine.release_memory_occupation(["weights"]))
    try:
        # What was registered there has been given back first.
        assert served.engine.status()[0].registrations == 0
        with pytest.raises(SyncError, match=r"memory is released \(weights\); resume it first"):
            group.on_all(traffic.sync_number, 1)
        assert {(s.state, s.version) for s in served.engine.status()} == {("current", "v0")}
    finally:
        on_host(served, lambda host: host.engine.resume_memory_occupation(["weights"]))
    assert_engine_holds(KEY.model, states[0], served)
    group.on_all(traffic.sync_number, 2)
    assert_engine_holds(KEY.model, states[2], served)
    assert served.generate((5, 6, 7), 2)[1] == "v2"
    # Released and resumed between two syncs: connected again within the second.
    on_host(served, lambda host: host.engine.release_memory_occupation(["weights"]))
    on_host(served, lambda host: host.engine.resume_memory_occupation(["weights"]))
    group.on_all(traffic.sync_number, 3)
    assert_engine_holds(KEY.model, states[3], served)
    assert served.engine.status()[0].registrations == registered


def test_a_sync_while_only_the_cache_is_released(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    """As colocated trainers do: weights are back before the cache is."""
    served, group = traffic.attached(engines, trainers, DIRECT)
    states = traffic.states_of(group)
    on_host(served, lambda host: host.engine.release_memory_occupation(["kv_cache"]))
    try:
        group.on_all(traffic.sync_number, 1)
        assert_engine_holds(KEY.model, states[1], served)
    finally:
        on_host(served, lambda host: host.engine.resume_memory_occupation(["kv_cache"]))
    assert served.generate((5, 6, 7), 2)[1] == "v1"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_the_users_own_pause_outlives_a_sync(
    mode: str, watched: ServedEngine, engines: EnginePool, trainers: TrainerPool, judge: Judge
) -> None:
    # What was paused in place holds cache, and cannot be flushed.
    settings = DIRECT.replace(flush=mode == "retract")
    served, group = traffic.attached(engines, trainers, DIRECT)
    group.on_all(traffic.sync_number, 0)
    group.attach(settings, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.connect())
    clients = [[(prompt, 80)] for prompt in judge.prompts(4)]
    on_host(served, traffic.start_traffic, clients, False)
    until_running(served, 4)
    on_host(served, user, "pause", mode)
    group.on_all(traffic.sync_number, 1)
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", "v1")}
    assert_stands_still(served)
    on_host(served, user, "continue")
    kept: Kept = "all" if mode == "in_place" else "nothing"
    for reply in assert_finished(served, judge, kept, 4):
        assert [version for version, _, _ in reply.spans] == ["v0", "v1"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_user_who_continues_during_a_sync_waits_for_its_end(
    paused: bool,
    watched: ServedEngine,
    engines: EnginePool,
    trainers: TrainerPool,
    judge: Judge,
) -> None:
    served, group = traffic.attached(engines, trainers, DIRECT)
    group.on_all(traffic.sync_number, 0)
    on_host(served, traffic.start_traffic, [[(p, 80)] for p in judge.prompts(4)], False)
    until_running(served, 4)
    if paused:
        on_host(served, user, "pause", "retract")
    mine = served.engine.status()[0].connection
    held = SyncRequest(f"held-{paused}", "host-a:1", "sync", connection=mine)
    served.engine.call("begin_sync", held, timeout_s=60, phase="begin")
    try:
        on_host(served, user, "continue")
        assert_stands_still(served)
    finally:
        served.engine.call("abort_sync", held.sync_id, "test", timeout_s=60, phase="abort")
    for reply in assert_finished(served, judge, "nothing", 4):
        assert [version for version, _, _ in reply.spans] == ["v0"]
