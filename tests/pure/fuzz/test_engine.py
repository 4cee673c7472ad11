"""What an engine rank receives: transfers, targets, times, calls; and memory to read from."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.engine import live_weights, sync_request
from sglang_rdt.engine.direct_reader import DirectReader
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.loop_inbox import LoopCall
from sglang_rdt.errors import EngineStateError, RdtError, SlicesError, TransportError
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.direct import make_direct_plan
from sglang_rdt.plan.specs import TensorSpec
from sglang_rdt.plan.transfers import check_target_transfers, wanted_elements
from sglang_rdt.transport.agent import RemoteMemory
from sglang_rdt.transport.memory import checked

from ..builders import elements, rect
from ..ranks import Engine, TinyModel
from . import strategies as hostile

SPECS = [TensorSpec("w", (4, 3), "float32"), TensorSpec("e", (2, 2), "float32")]


@hostile.examples(200)
@given(st.data())
def test_any_transfers_are_complete_or_refused(data: st.DataObject) -> None:
    one = hostile.layouts()[0]
    good = tuple(make_direct_plan(hostile.trainers(), hostile.layouts()).transfers(0))
    transfers = data.draw(hostile.mutated(good))
    if not isinstance(transfers, tuple):
        return
    wanted = wanted_elements(one.recording.wants)
    try:
        with hostile.quickly():
            check_target_transfers(one.params, transfers, wanted)
    except SlicesError as error:
        hostile.check_sentence(error)
        return
    written: dict[str, list[int]] = {}
    for t in transfers:
        written.setdefault(t.param, []).extend(elements(t.dst))
    for name, count in wanted.items():
        p = hostile.specs_of(one.params)[name]
        here = written.get(name, [])
        assert len(here) == len(set(here)) == count
        assert not here or max(here) < p.extent


# Pulls.


@pytest.fixture(scope="module")
def pulls() -> Iterator[None]:
    def pull(ref: list[torch.Tensor], targets: list[torch.Tensor], timeout_s: float) -> None:
        for value, target in zip(ref, targets, strict=True):
            target.copy_(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_weights.nixl, "pull", pull)
        patch.setattr(live_weights.nixl, "register", lambda tensors: 0)
        patch.setattr(live_weights.nixl, "deregister", lambda tensors: None)
        yield


GOOD = (
    "w",
    Target("e", rect((3, 2), (0, 1)), "float32", 0),
    Target("e", rect((3, 2), (1, 2)), "float32", 8),
)


@pytest.fixture(scope="module")
def weights(pulls: None) -> LiveWeights:
    made = LiveWeights(TinyModel(), "engine tp0")
    made.record(SPECS)
    return made


@hostile.examples(150)
@given(data=st.data())
def test_any_targets_are_disjoint_places_or_refused(weights: LiveWeights, data: Any) -> None:
    items = data.draw(hostile.mutated(GOOD))
    try:
        with hostile.quickly():
            views = weights.resolve(items)
    except SlicesError as error:
        hostile.check_sentence(error)
    else:
        places = [a for v in views for a in addresses(v)]
        assert len(places) == len(set(places))
        live = {a for t in weights._tensors.values() for a in addresses(t)}
        assert live.issuperset(places)
    # What refused works as before.
    new = [torch.full((4, 3), 5.0), torch.ones(1, 2), torch.ones(1, 2)]
    assert weights.pull(new, GOOD, 1.0) == 64


def addresses(t: torch.Tensor) -> list[int]:
    index = np.indices(tuple(t.shape)).reshape(t.dim(), -1)
    steps = np.array(t.stride()).reshape(-1, 1) if t.dim() else np.zeros((0, 1))
    return (
        (t.data_ptr() + t.element_size() * (index * steps).sum(axis=0)).astype(int).ravel().tolist()
    )


@pytest.mark.parametrize(
    ("items", "why"),
    [
        (("w", "w"), "elements in common"),
        (("e", GOOD[1]), "elements in common"),
        ((Target("w", rect((4, 3), (0, 3)), "float32", 0), Target("w", rect((4, 3), (2, 4)), "float32", 0)), "elements in common"),
        ((Target("w", rect((4, 3)).__class__(0, (2, 3), (0, 1)), "float32", 0),), "repeats elements"),
        ("we", "no list"),
        (None, "no list"),
    ],
)  # fmt: skip
def test_targets_that_overlap(weights: LiveWeights, items: Any, why: str) -> None:
    with pytest.raises(SlicesError, match=why):
        weights.resolve(items)


# An engine whose ranks are threads.


@pytest.fixture
def engine(pulls: None, empty_inbox: None) -> Iterator[Engine]:
    made = Engine(2)
    yield made
    made.stop()
    assert made.loops.crashes == []
    assert made.group.hangs == []


def check_serves(engine: Engine, sync_id: str) -> None:
    """Nothing of what was refused is left: a sync goes through, and the engine runs on."""
    engine.settle()
    assert engine.states == ["current", "current"]
    assert engine.paused == [False, False]
    assert not any(r.gate.parked or r.gate._calls for r in engine.ranks)
    new = [torch.full((4, 3), 5.0), torch.ones(1, 2), torch.ones(1, 2)]
    for outcomes in (
        engine.begin(sync_id),
        engine.call("pull_weights", [new], list(GOOD), sync_id),
        engine.call("finalise", sync_id, False),
        engine.call("end_sync", sync_id, sync_id),
    ):
        assert not any(isinstance(o, Exception) for o in outcomes), outcomes
    engine.settle()
    assert [r.status.version for r in engine.ranks] == [sync_id, sync_id]


TIMES = [math.nan, math.inf, -math.inf, -1.0, 0, 1e300, 10**400, None, "x", True, 1j]


@pytest.mark.parametrize("time_s", TIMES, ids=lambda t: str(t)[:8])
def test_times_that_cannot_be_begin_nothing(engine: Engine, time_s: Any) -> None:
    for error in engine.begin("s1", begin_timeout_s=time_s):
        assert isinstance(error, EngineStateError)
        hostile.check_sentence(error)
    check_serves(engine, "s2")


@pytest.mark.parametrize("time_s", TIMES, ids=lambda t: str(t)[:8])
def test_an_event_loop_outlives_any_stall_timeout(engine: Engine, time_s: Any) -> None:
    # Refused, where the request itself is looked at; if not, waited for as long as is usual.
    begun = engine.begin("s1", stall_timeout_s=time_s)
    if not any(isinstance(o, Exception) for o in begun):
        assert engine.call("abort_sync", "s1", "x") == ["current", "current"]
    check_serves(engine, "s2")


@pytest.mark.parametrize("sync_id", ["", None, 7, b"s", ("s",)])
def test_syncs_without_a_name_begin_nothing(engine: Engine, sync_id: Any) -> None:
    for error in engine.begin(sync_id):
        assert isinstance(error, EngineStateError)
    check_serves(engine, "s2")


@pytest.mark.parametrize("items", [["w", "w"], ["x"], [GOOD[1], "e"], "w", None, [None], [3]])
def test_a_refused_pull_leaves_the_engine_clean(engine: Engine, items: Any) -> None:
    assert not any(isinstance(o, Exception) for o in engine.begin("s1"))
    new = [torch.ones(4, 3)] * 2
    for error in engine.call("pull_weights", [new], items, "s1"):
        assert isinstance(error, SlicesError)
    assert engine.call("abort_sync", "s1", "x") == ["current", "current"]
    assert not any(r.model.w.any() for r in engine.ranks)  # type: ignore[operator]
    check_serves(engine, "s2")


@hostile.examples(100)
@given(st.one_of(st.none(), st.floats(), hostile.ANYTHING), hostile.ANYTHING)
def test_any_call_with_any_time(time_s: Any, call_id: Any) -> None:
    gate = LoopGate("rank 0", entry=False, vote=lambda opinion: opinion)
    for call in (
        lambda: gate.enter(call_id if not isinstance(call_id, str) else "", int, time_s),
        lambda: gate.command(int, time_s),
    ):
        with pytest.raises(EngineStateError) as caught:
            call()
        hostile.check_sentence(caught.value)
    assert not gate._calls
    assert gate._commands.empty()


@hostile.examples(50)
@given(hostile.ANYTHING.filter(lambda v: not isinstance(v, str)))
def test_any_loop_call_is_handled(call_id: Any) -> None:
    votes: list[bool] = []

    def vote(opinion: bool) -> bool:
        votes.append(opinion)
        return opinion

    gate = LoopGate("rank 0", entry=False, vote=vote)
    gate.handle(LoopCall(call_id))
    assert votes == [False]  # the others are not left waiting
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(gate.enter("a", lambda: 3, 30.0)))
    thread.start()
    gate.handle(LoopCall("a"))
    thread.join(30)
    assert done == [3]


@pytest.mark.skipif(not hasattr(sync_request, "check"), reason="requests are not checked yet")
@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": "steal"},
        {"purpose": None},
        {"pause_mode": "nonsense"},
        {"pause_mode": "x" * 100_000},
        {"flush": "no"},
        {"owner": None},
        {"owner": "a\nb"},
        *({"stall_timeout_s": t} for t in TIMES),
        *({"phase_timeout_s": t} for t in TIMES),
    ],
    ids=lambda c: str(c)[:40],
)
def test_requests_that_cannot_be_begin_nothing(engine: Engine, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    for error in engine.begin("s1", changes.pop("purpose", "sync"), **changes):
        assert isinstance(error, EngineStateError)
        hostile.check_sentence(error)
    check_serves(engine, "s2")


@pytest.mark.skipif(not hasattr(sync_request, "check_version"), reason="labels are not checked yet")
@hostile.examples(100)
@given(hostile.ANYTHING)
def test_any_label_is_one_line_that_json_can_carry_or_refused(version: Any) -> None:
    try:
        sync_request.check_version(version)  # type: ignore[attr-defined]
    except RdtError as error:
        hostile.check_sentence(error)
    else:
        assert version
        assert version.isprintable()
        assert len(version.encode()) < 10_000


# Memory of trainers.


@hostile.examples(200)
@given(st.lists(hostile.ANYTHING, max_size=3), st.lists(hostile.ANYTHING, max_size=3))
def test_any_memory_is_memory_or_refused(addresses: list[Any], sizes: list[Any]) -> None:
    memory = RemoteMemory("agent", tuple(addresses), tuple(sizes), 0, "cpu")
    try:
        assert checked(memory, "trainer rank 0") is memory
    except TransportError as error:
        hostile.check_sentence(error)
        return
    assert len(addresses) == len(sizes)
    numbers = np.array(addresses, np.uint64), np.array(sizes, np.int64)
    assert all(int(a) + int(n) <= 1 << 64 for a, n in zip(*numbers, strict=True))


ROW = st.tuples(*[st.one_of(st.integers(-2, 9), st.integers(-(1 << 52), 1 << 52))] * 3)


@hostile.examples(200)
@given(st.lists(ROW, min_size=1, max_size=4), st.lists(st.integers(0, 1 << 48), max_size=3))
def test_reads_stay_in_their_block(rows: list[Any], sizes: list[int]) -> None:
    class Reader(DirectReader):
        def __init__(self) -> None:
            self._weights = type("Weights", (), {"who": "engine tp0"})()  # type: ignore[assignment]

    memory = RemoteMemory("agent", tuple([4096] * len(sizes)), tuple(sizes), 0, "cpu")
    block, at, nbytes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    fits = all(0 <= b < len(sizes) and a >= 0 and n > 0 and a + n <= sizes[b] for b, a, n in rows)
    try:
        Reader()._check(0, memory, block, at, nbytes)
    except SlicesError as error:
        hostile.check_sentence(error)
        assert not fits
    else:
        assert fits
