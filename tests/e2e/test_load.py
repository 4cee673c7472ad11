"""Hundreds of syncs under load: every token is labelled with the weights that made it, nothing is
lost, and nothing piles up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.engine.sync_request import SyncRequest
from sglang_rdt.errors import SyncError, TransportError
from tests.e2e import traffic
from tests.e2e.conftest import EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds
from tests.e2e.traffic import KEY, SETS, Footprint, Judge, footprint, on_engine, on_host

pytestmark = pytest.mark.e2e

DIRECT = SETTINGS.replace(mode="direct")
MB = 1 << 20
CLIENTS = 4
# Allocators keep some of what they have had; a leak of one bucket or one tensor list a sync is more.
RSS_SLACK = 4 * MB
# gRPC's own pools come and go by one or two; each kind of failure happens four times while we look.
THREADS_SLACK = 3


@pytest.fixture(autouse=True)
def calm(engines: EnginePool) -> Iterator[None]:
    """Other tests use the same engine."""
    yield
    on_host(engines.get(KEY), traffic.calm_down)


class Watch:
    """What engine, its host and trainer hold at some moments; and the cluster's actors."""

    def __init__(self, served: ServedEngine, group: Trainers) -> None:
        self._served, self._group = served, group
        self.moments: list[dict[str, Footprint]] = []
        self.actors: list[int] = []

    def look(self) -> None:
        """Now."""
        self.moments.append(
            {
                "engine": on_engine(self._served, footprint),
                "host": on_host(self._served, footprint),
                "trainer": self._group.on_all(footprint)[0],
            }
        )
        self.actors.append(traffic.living_actors())

    def assert_nothing_piled_up(self) -> None:
        """Counts are as they were at first; memory has not grown since the middle."""
        assert len(set(self.actors)) == 1
        first, last = self.moments[0], self.moments[-1]
        middle = self.moments[len(self.moments) // 2]
        for who in first:
            for what in ("refs", "registrations"):
                assert getattr(last[who], what) == getattr(first[who], what), (who, what)
            assert last[who].threads <= first[who].threads + THREADS_SLACK, who
            if who != "host":  # it keeps the replies
                assert last[who].rss - middle[who].rss < RSS_SLACK, who


def assert_right(judge: Judge, served: ServedEngine, syncs: list[traffic.Synced]) -> None:
    """All requests have a reply, and every token is of its label's version, which was current."""
    replies, errors = on_host(served, traffic.finish_traffic, True)
    assert not errors
    assert len(replies) > len(syncs) / 4
    wrong = [
        objection
        for reply in replies
        for objection in (
            *judge.objections(reply),
            *traffic.staleness_objections(reply, syncs),
        )
    ]
    assert not wrong
    # It was a race: some replies began under one version and ended under another.
    assert sum(len(reply.spans) > 1 for reply in replies) > 5
    # A judge who calls everything a tie proves nothing.
    assert judge.ties <= len(replies) / 100


def load(judge: Judge) -> list[list[tuple[tuple[int, ...], int]]]:
    """Short and long requests for each client."""
    return [[(p, n) for p in judge.prompts(4) for n in (1, 8, 1)] for _ in range(CLIENTS)]


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("direct", 150),
        pytest.param("direct", 500, marks=pytest.mark.long),
        pytest.param("bucketed", 500, marks=pytest.mark.long),
    ],
)
def test_syncs_under_load(
    mode: Any,
    count: int,
    engines: EnginePool,
    trainers: TrainerPool,
    record_property: Callable[[str, object], None],
) -> None:
    served, group = traffic.attached(engines, trainers, SETTINGS.replace(mode=mode))
    states = traffic.states_of(group)
    judge = Judge(KEY.model, states)
    group.on_all(traffic.sync_number, 0)
    on_host(served, traffic.start_traffic, load(judge), True)
    syncs = group.on_all(traffic.sync_numbers, 1, 51)[0]  # warm-up
    watch = Watch(served, group)
    watch.look()
    for first in range(51, count + 1, 50):
        syncs += group.on_all(traffic.sync_numbers, first, first + 50)[0]
        watch.look()
    assert_right(judge, served, syncs)
    watch.assert_nothing_piled_up()
    # What benchmarks/sync_growth.py compares.
    record_property("early_s", [s.seconds for s in syncs[50:150]])
    record_property("late_s", [s.seconds for s in syncs[-100:]])
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", f"v{count}")}
    assert_engine_holds(KEY.model, states[count % SETS], served)


# --- failures -------------------------------------------------------------------------------------


def fails(rank: Any, number: int) -> str:
    """A sync that must fail; how it did."""
    traffic.use_set(rank, number)
    try:
        rank.sync.sync(traffic.version_name(number))
    except SyncError as error:
        return str(error)
    return ""


def wrong_checksum(rank: Any, number: int) -> str:
    """The trainer finds another checksum than the engine."""
    sums = rank.sync._link._mover._sums
    run = sums.result

    def one_off() -> Any:
        values = run()
        key = next(iter(values))
        return {**values, key: values[key] ^ 1}

    sums.result = one_off
    try:
        return fails(rank, number)
    finally:
        sums.result = run


def failing_trainer(rank: Any, number: int) -> str:
    """The trainer fails while the engine reads."""

    def broken() -> Any:
        raise RuntimeError("no sums today")

    rank.sync._link._mover._sums.result = broken  # a new connection has a new mover
    return fails(rank, number)


def failing_read(actor: Any) -> None:
    """The next read ends in an error of NIXL's, with all bytes there. A new connection reads anew."""
    reader = actor._session.weights._reader

    def read(timeout_s: float, *landed: Any) -> int:
        type(reader).read(reader, timeout_s, *landed)
        raise TransportError("NIXL_ERR_REMOTE_DISCONNECT")

    reader.read = read


def fail_once(kind: int, number: int, served: ServedEngine, group: Trainers) -> None:
    """A sync to ``number`` fails in one of four ways; the engine keeps its label."""
    before = {s.version for s in served.engine.status()}
    if kind == 0:
        mine = served.engine.status()[0].connection
        other = SyncRequest(f"other-{number}", "host-a:1", "sync", connection=mine)
        served.engine.call("begin_sync", other, timeout_s=60, phase="begin")
        (message,) = group.on_all(fails, number)
        served.engine.call("abort_sync", other.sync_id, "test", timeout_s=60, phase="abort")
    elif kind == 1:
        (message,) = group.on_all(wrong_checksum, number)
    elif kind == 2:
        (message,) = group.on_all(failing_trainer, number)
    else:
        on_engine(served, failing_read)
        (message,) = group.on_all(fails, number)
    expected = (
        f"is in sync other-{number} of host-a:1",
        "checksums differ after the sync",
        "no sums today",
        "NIXL_ERR_REMOTE_DISCONNECT",
    )
    assert expected[kind] in message
    states = {s.state for s in served.engine.status()}
    assert states == {"current" if kind == 0 else "dirty"}
    assert {s.version for s in served.engine.status()} == before


@pytest.mark.parametrize("tenths", [8, pytest.param(20, marks=pytest.mark.long)])
def test_syncs_of_which_every_tenth_fails(
    tenths: int, engines: EnginePool, trainers: TrainerPool
) -> None:
    served, group = traffic.attached(engines, trainers, DIRECT)
    states = traffic.states_of(group)
    judge = Judge(KEY.model, states)
    group.on_all(traffic.sync_number, 0)
    on_host(served, traffic.start_traffic, load(judge), True)
    watch = Watch(served, group)
    syncs: list[traffic.Synced] = []
    for tenth in range(tenths):
        first = 10 * tenth + 1
        syncs += group.on_all(traffic.sync_numbers, first, first + 9)[0]
        fail_once(tenth % 4, first + 9, served, group)
        if tenth % 4 == 3:  # every kind has been
            syncs += group.on_all(traffic.sync_numbers, first + 9, first + 10)[0]
            watch.look()
    last = 10 * tenths + 1
    syncs += group.on_all(traffic.sync_number, last)
    assert_right(judge, served, syncs)
    watch.assert_nothing_piled_up()
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", f"v{last}")}
    assert_engine_holds(KEY.model, states[last % SETS], served)
