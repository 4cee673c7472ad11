"""The states of a weight sync, on several ranks whose loops, votes and barriers are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rdt.engine import live_weights, loop_gate
from sglang_rdt.engine.sync_request import Connection, Trainer
from sglang_rdt.errors import (
    DeadlineError,
    EngineBusyError,
    EngineStateError,
    ReconnectError,
    SlicesError,
    TransportError,
)
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.specs import EngineRank, TensorSpec

from .builders import rect
from .ranks import Engine, Hang, together

pytestmark = pytest.mark.usefixtures("empty_inbox", "pulls")

SPECS = [TensorSpec("w", (4, 3), "float32"), TensorSpec("e", (2, 2), "float32")]
NEW_W, NEW_E = torch.full((4, 3), 7.0), torch.full((2, 2), 8.0)
# In one connect or sync, rank 0's scheduler is told:
SYNC = ["pause retract", "flush", "drain", "begin_session"]
DONE = ["synchronize", "end_session", "synchronize", "version v1", "resume"]


def pull(ref: list[Any], targets: list[torch.Tensor], timeout_s: float) -> None:
    """Copies; an exception in the reference is raised where its turn comes."""
    for value, target in zip(ref, targets, strict=True):
        if isinstance(value, Exception):
            raise value
        target.copy_(value)


@pytest.fixture(scope="module")
def pulls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_weights.nixl, "pull", pull)
        patch.setattr(live_weights.nixl, "register", lambda tensors: len(list(tensors)))
        yield


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(2)
    yield made
    made.stop()
    assert made.loops.crashes == []
    assert made.group.hangs == []


@pytest.fixture
def fragile() -> Iterator[Engine]:
    """An engine to break: how it ends is up to the test."""
    made = Engine(2)
    yield made
    made.stop()


def connect(engine: Engine) -> None:
    assert good(engine.begin("c", "connect", pause_mode="in_place", flush=False))
    assert good(engine.call("record_load", "c", SPECS))
    assert good(engine.call("end_sync", "c", None))
    engine.settle()
    for rank in range(engine.size):
        engine.log(rank)


def good(outcomes: list[Any]) -> bool:
    return not any(isinstance(o, Exception) for o in outcomes)


def send(engine: Engine, sync_id: str = "s1", ranks: tuple[int, ...] = ()) -> list[Any]:
    """Everything that a rank needs, by name and by slice."""
    where = Target("e", rect((3, 2), (0, 2)), "float32", 0)
    return engine.call("pull_weights", [[NEW_W, NEW_E]], ["w", where], sync_id, ranks=ranks or None)


def tear(engine: Engine, rank: int = 1, sync_id: str = "s1") -> Any:
    """A pull that fails on ``rank`` after its first tensor."""
    ref = [NEW_W, TransportError("link down")]
    where = Target("e", rect((3, 2), (0, 2)), "float32", 0)
    (outcome,) = engine.call("pull_weights", [ref], ["w", where], sync_id, ranks=[rank])
    assert isinstance(outcome, TransportError)
    return outcome


def full_sync(engine: Engine, sync_id: str = "s1", version: str = "v1") -> None:
    assert good(engine.begin(sync_id))
    assert good(send(engine, sync_id))
    assert good(engine.call("finalise", sync_id, False))
    assert good(engine.call("end_sync", sync_id, version))
    engine.settle()


def make_dirty(engine: Engine, sync_id: str = "s0") -> None:
    assert good(engine.begin(sync_id))
    tear(engine, 1, sync_id)
    assert engine.call("abort_sync", sync_id, "link down") == ["dirty", "dirty"]
    engine.settle()
    assert engine.states == ["dirty", "dirty"]


def check_running(engine: Engine, version: str = "v0") -> None:
    """Current, unparked, not paused, no session of any kind open, on all ranks."""
    engine.settle()
    assert engine.states == ["current"] * engine.size
    assert engine.paused == [False] * engine.size
    for r in engine.ranks:
        assert not r.gate.parked
        assert not r.control.session_open
        assert r.session.request is None
        assert r.control.version == r.status.version == version
        assert (r.status.sync_id, r.status.owner, r.status.detail) == (None, None, "")


def check_dirty(engine: Engine, version: str = "v0") -> None:
    """Dirty, unparked, paused, with the old label, on all ranks."""
    engine.settle()
    assert engine.states == ["dirty"] * engine.size
    assert engine.paused == [True] * engine.size
    for r in engine.ranks:
        assert not r.gate.parked
        assert r.session.request is None
        assert r.control.version == r.status.version == version
        assert r.status.detail


# The way it should go.


def test_a_sync_changes_weights_and_version_on_every_rank(engine: Engine) -> None:
    connect(engine)
    for r in engine.ranks:
        r.model.e.fill_(3)
    identities = engine.begin()
    assert all(isinstance(i, EngineRank) and i.state == "syncing" for i in identities)
    assert engine.states == ["syncing", "syncing"]
    assert engine.paused == [True, True]
    assert [r.status.sync_id for r in engine.ranks] == ["s1", "s1"]
    assert [r.status.owner for r in engine.ranks] == ["trainer:1", "trainer:1"]
    assert send(engine) == [64, 64]
    assert [r.status.bytes_landed for r in engine.ranks] == [64, 64]
    assert engine.call("finalise", "s1", False) == [{}, {}]
    assert [r.control.version for r in engine.ranks] == ["v0", "v0"]
    assert engine.paused == [True, True]
    after = engine.call("end_sync", "s1", "v1")
    assert [i.weight_version for i in after] == ["v1", "v1"]
    check_running(engine, "v1")
    for rank, r in enumerate(engine.ranks):
        assert torch.equal(r.model.w, NEW_W)
        assert torch.equal(r.model.e, torch.cat([NEW_E, torch.zeros(1, 2)]))  # the padding too
        assert engine.log(rank) == [*SYNC, *DONE]
        assert r.status.syncs == 1


def test_checksums_come_with_the_end_of_the_session(engine: Engine) -> None:
    connect(engine)
    assert good(engine.begin())
    send(engine)
    before = engine.call("checksum", "s1")
    sums = engine.call("finalise", "s1", True)
    assert sums == before
    assert set(sums[0]) == {"w", "e"}
    assert sums[0] == sums[1]
    engine.call("end_sync", "s1", "v1")
    check_running(engine, "v1")


def test_several_syncs_in_a_row(engine: Engine) -> None:
    connect(engine)
    for i in range(1, 4):
        full_sync(engine, f"s{i}", f"v{i}")
        check_running(engine, f"v{i}")
    assert [r.status.syncs for r in engine.ranks] == [3, 3]


def test_connecting_writes_nothing(engine: Engine) -> None:
    outcomes = engine.begin("c", "connect", pause_mode="in_place", flush=False)
    assert good(outcomes)
    (one, two) = engine.call("record_load", "c", SPECS)
    assert one == two
    assert engine.call("register_weights", "c") == [2, 2]
    assert good(engine.call("end_sync", "c", None))
    check_running(engine)
    assert engine.log() == [
        "pause in_place",
        "drain",
        "begin_session",
        "end_session",
        "resume",
    ]
    assert not engine.ranks[0].model.w.any()
    assert engine.ranks[0].status.syncs == 0


def test_a_connect_session_must_not_write(engine: Engine) -> None:
    assert good(engine.begin("c", "connect"))
    for outcomes in (
        send(engine, "c"),
        engine.call("finalise", "c", False),
        engine.call("end_sync", "c", "v1"),
    ):
        for error in outcomes:
            assert isinstance(error, EngineStateError)
            assert "c was begun to connect, not to write" in str(error)
    assert good(engine.call("end_sync", "c", None))
    check_running(engine)


def test_a_writing_sync_is_not_left_like_a_connect(engine: Engine) -> None:
    assert good(engine.begin())
    for error in engine.call("end_sync", "s1", None):
        assert "commit or abort it" in str(error)
    assert engine.call("abort_sync", "s1", "done") == ["current", "current"]
    check_running(engine)


def test_older_sglang_has_no_session() -> None:
    engine = Engine(2, has_session=False)
    try:
        connect(engine)
        full_sync(engine)
        check_running(engine, "v1")
        assert engine.log() == [
            "pause retract",
            "flush",
            "drain",
            "synchronize",
            "post_load",
            "synchronize",
            "version v1",
            "resume",
        ]
        assert good(engine.begin("s2"))
        engine.call("abort_sync", "s2", "changed its mind")
        check_running(engine, "v1")
        assert good(engine.begin("s3"))
        tear(engine, 0, "s3")
        engine.call("abort_sync", "s3", "link down")
        check_dirty(engine, "v1")
        full_sync(engine, "s4", "v4")
        check_running(engine, "v4")
    finally:
        engine.stop()


def test_flush_is_left_out_where_the_request_says_so(engine: Engine) -> None:
    assert good(engine.begin(flush=False, pause_mode="in_place"))
    engine.call("abort_sync", "s1", "x")
    assert engine.log()[:2] == ["pause in_place", "drain"]


# Failures before anything landed.

BEFORE = ["unsupported", "pause retract", "flush", "drain"]


@pytest.mark.parametrize("where", BEFORE)
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_refused_begin_changes_nothing(
    engine: Engine, where: str, ranks: tuple[int, ...]
) -> None:
    for rank in ranks:
        engine.ranks[rank].control.fail[where] = EngineBusyError(f"{where} on {rank}")
    # What a model is made of is looked at once, when a trainer connects.
    purpose = "connect" if where == "unsupported" else "sync"
    for rank, error in enumerate(engine.begin("s1", purpose)):
        if rank in ranks:
            assert isinstance(error, EngineBusyError)
            assert f"{where} on {rank}" in str(error)
        else:
            assert isinstance(error, EngineStateError)
            assert "another rank of the engine refused the sync" in str(error)
    check_running(engine)
    full_sync(engine)
    check_running(engine, "v1")


def test_an_unforeseen_error_is_wrapped_and_named(engine: Engine) -> None:
    engine.ranks[1].control.fail["flush"] = ZeroDivisionError("oh")
    outcomes = engine.begin()
    assert isinstance(outcomes[1], EngineStateError)
    assert "engine tp1: begin failed: ZeroDivisionError: oh" in str(outcomes[1])
    check_running(engine)


def test_somebody_elses_session_is_respected(engine: Engine) -> None:
    for r in engine.ranks:
        r.control.session_open = True
    for error in engine.begin():
        assert "somebody else has a weight-update session open" in str(error)
    assert [r.control.session_open for r in engine.ranks] == [True, True]
    assert engine.paused == [False, False]
    for r in engine.ranks:
        r.control.session_open = False
    full_sync(engine)
    check_running(engine, "v1")


def test_released_memory_is_refused(engine: Engine) -> None:
    engine.ranks[0].control.scheduler.weight_updater.offload_tags = {"weights", "kv_cache"}
    error = engine.begin()[0]
    assert "memory is released (kv_cache, weights); resume it first" in str(error)
    check_running(engine)


def test_moved_parameters_are_refused(engine: Engine) -> None:
    connect(engine)
    model = engine.ranks[1].model
    model.w = torch.nn.Parameter(model.w.clone(), requires_grad=False)
    outcomes = engine.begin()
    assert "1 parameters moved since the trainer connected (w); connect again" in str(outcomes[1])
    check_running(engine)


def test_a_clean_abort_leaves_the_old_weights_running(engine: Engine) -> None:
    connect(engine)
    assert good(engine.begin())
    assert engine.call("abort_sync", "s1", "trainer changed its mind") == ["current", "current"]
    check_running(engine)
    for rank, r in enumerate(engine.ranks):
        assert engine.log(rank) == [*SYNC, "end_session", "resume"]
        assert not r.model.w.any()
    full_sync(engine, "s2")
    check_running(engine, "v1")


def test_a_bad_slice_is_refused_while_the_weights_are_whole(engine: Engine) -> None:
    assert good(engine.begin())
    bad = [
        ("nothing", "has no parameter 'nothing'"),
        (Target("nothing", rect((1,)), "float32", 0), "has no parameter 'nothing'"),
        (Target("w", rect((5, 3)), "float32", 0), "reaches element 14"),
        (Target("w", rect((4, 3)), "bfloat16", 0), "w is float32, not bfloat16"),
    ]
    for what, why in bad:
        (error,) = engine.call("pull_weights", [[NEW_W, NEW_W]], ["w", what], "s1", ranks=[0])
        assert isinstance(error, SlicesError)
        assert why in str(error)
    assert [r.status.bytes_landed for r in engine.ranks] == [0, 0]
    assert engine.call("abort_sync", "s1", "bad plan") == ["current", "current"]
    check_running(engine)
    assert not engine.ranks[0].model.w.any()


# Failures after something landed.


@pytest.mark.parametrize("torn", [0, 1])
def test_bytes_on_one_rank_make_every_rank_dirty(engine: Engine, torn: int) -> None:
    connect(engine)
    assert good(engine.begin())
    tear(engine, torn)
    assert engine.call("abort_sync", "s1", "link down") == ["dirty", "dirty"]
    check_dirty(engine)
    assert "resume" not in engine.log()
    for r in engine.ranks:
        assert "s1" in r.status.detail
        assert "link down" in r.status.detail


def test_a_pull_that_failed_before_its_first_byte_counts_as_landed(engine: Engine) -> None:
    # Nobody can tell how far a transfer got.
    assert good(engine.begin())
    engine.call("pull_weights", [[TransportError("x")]], ["w"], "s1", ranks=[0])
    assert engine.call("abort_sync", "s1", "x") == ["dirty", "dirty"]
    check_dirty(engine)


def test_a_full_sync_ends_dirty(engine: Engine) -> None:
    connect(engine)
    make_dirty(engine)
    engine.log()
    full_sync(engine)
    check_running(engine, "v1")
    # Its session is still open, and it is paused already.
    assert engine.log() == ["flush", "drain", *DONE]
    assert torch.equal(engine.ranks[1].model.w, NEW_W)


def test_dirty_ranks_say_so_during_the_next_sync(engine: Engine) -> None:
    make_dirty(engine)
    assert good(engine.begin("s1"))
    assert all(state in ("dirty", "syncing") for state in engine.states)
    assert [r.status.sync_id for r in engine.ranks] == ["s1", "s1"]
    engine.call("abort_sync", "s1", "x")


def test_connecting_does_not_end_dirty(engine: Engine) -> None:
    make_dirty(engine)
    detail = engine.ranks[0].status.detail
    connect(engine)
    check_dirty(engine)
    assert engine.ranks[0].status.detail == detail
    full_sync(engine)
    check_running(engine, "v1")


def test_an_empty_abort_does_not_end_dirty(engine: Engine) -> None:
    make_dirty(engine)
    assert good(engine.begin("s1"))
    assert engine.call("abort_sync", "s1", "changed its mind") == ["dirty", "dirty"]
    check_dirty(engine)
    assert good(engine.begin("c", "connect"))
    assert engine.call("abort_sync", "c", "changed its mind") == ["dirty", "dirty"]
    check_dirty(engine)


@pytest.mark.parametrize("where", ["flush", "drain"])
def test_a_refused_begin_does_not_end_dirty(engine: Engine, where: str) -> None:
    make_dirty(engine)
    engine.ranks[1].control.fail[where] = EngineBusyError("busy")
    assert not any(isinstance(o, EngineRank) for o in engine.begin("s1"))
    check_dirty(engine)


def test_dirty_after_the_session_was_ended(engine: Engine) -> None:
    # Verification failed: SGLang's session is closed, the bytes are wrong.
    connect(engine)
    assert good(engine.begin("s0"))
    send(engine, "s0")
    assert good(engine.call("finalise", "s0", False))
    assert engine.call("abort_sync", "s0", "checksums differ") == ["dirty", "dirty"]
    check_dirty(engine)
    connect(engine)
    check_dirty(engine)
    full_sync(engine)
    check_running(engine, "v1")


@pytest.mark.parametrize("where", ["synchronize", "end_session"])
def test_a_failed_end_of_the_session_leaves_dirty(engine: Engine, where: str) -> None:
    assert good(engine.begin())
    send(engine)
    for r in engine.ranks:
        r.control.fail[where] = EngineStateError(f"{where} failed")
    for error in engine.call("finalise", "s1", False):
        assert f"{where} failed" in str(error)
    check_dirty(engine)  # the ranks gave it up together, without being told
    full_sync(engine, "s2", "v2")
    check_running(engine, "v2")


def test_a_failed_version_leaves_dirty(engine: Engine) -> None:
    assert good(engine.begin())
    send(engine)
    engine.call("finalise", "s1", False)
    for r in engine.ranks:
        r.control.fail["version v1"] = RuntimeError("no socket")
    assert not good(engine.call("end_sync", "s1", "v1"))
    check_dirty(engine)
    full_sync(engine, "s2", "v2")
    check_running(engine, "v2")


# The user's own pause.


def test_an_engine_that_the_user_paused_stays_paused(engine: Engine) -> None:
    for r in engine.ranks:
        r.control.paused = True

    def check(version: str) -> None:
        engine.settle()
        assert engine.states == ["current", "current"]
        assert engine.paused == [True, True]
        assert engine.ranks[0].control.version == version
        assert not {"resume", "pause retract"} & {*engine.log(0), *engine.log(1)}

    connect(engine)
    check("v0")
    full_sync(engine, "s1", "v1")
    check("v1")
    assert good(engine.begin("s2"))
    engine.call("abort_sync", "s2", "x")
    check("v1")
    engine.ranks[0].control.fail["flush"] = EngineBusyError("busy")
    engine.begin("s3")
    check("v1")
    make_dirty(engine, "s4")
    full_sync(engine, "s5", "v5")
    check("v5")
    # And the pause is forgotten with the user's own resume.
    for r in engine.ranks:
        r.control.paused = False
    full_sync(engine, "s6", "v6")
    check_running(engine, "v6")


# Owners, ids, order.


def test_a_second_owner_is_refused_by_name(engine: Engine) -> None:
    assert good(engine.begin("s1", owner="first:11"))
    for purpose in ("sync", "connect"):
        for error in engine.begin("s2", purpose, owner="second:22"):
            assert isinstance(error, EngineStateError)
            assert "is in sync s1 of first:11" in str(error)
    send(engine)
    assert good(engine.call("finalise", "s1", False))
    assert good(engine.call("end_sync", "s1", "v1"))
    check_running(engine, "v1")


def test_two_owners_at_the_same_moment_get_one_sync_each_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_gate, "ARRIVAL_TIMEOUT_S", 1.0)
    engine = Engine(2, phase_timeout_s=4.0)
    try:
        outcomes: dict[str, list[Any]] = {}

        def run(sync_id: str) -> None:
            outcomes[sync_id] = engine.begin(sync_id, owner=f"owner of {sync_id}")
            if good(outcomes[sync_id]):
                send(engine, sync_id)
                engine.call("finalise", sync_id, False)
                assert good(engine.call("end_sync", sync_id, sync_id))

        together([partial(run, "s1"), partial(run, "s2")])
        done = [sync_id for sync_id in ("s1", "s2") if good(outcomes[sync_id])]
        for sync_id in {"s1", "s2"} - set(done):
            assert not any(isinstance(o, EngineRank) for o in outcomes[sync_id])
        assert [r.status.syncs for r in engine.ranks] == [len(done)] * 2
        monkeypatch.setattr(loop_gate, "ARRIVAL_TIMEOUT_S", 60.0)
        for r in engine.ranks:
            r.actor._phase_timeout_s = 60.0
        full_sync(engine, "s3", "v3")
        check_running(engine, "v3")
    finally:
        engine.stop()
    assert engine.loops.crashes == []
    assert engine.group.hangs == []


CALLS: dict[str, tuple[Any, ...]] = {
    "pull_weights": ([[NEW_W]], ["w"], "other"),
    "compare_weights": ([[NEW_W]], ["w"], "other"),
    "finalise": ("other", False),
    "checksum": ("other",),
    "record_load": ("other", SPECS),
    "register_weights": ("other",),
    "end_sync": ("other", "v1"),
    "abort_sync": ("other", "why"),
}


def test_calls_of_another_sync_are_refused(engine: Engine) -> None:
    assert good(engine.begin())
    for method, args in CALLS.items():
        for error in engine.call(method, *args):
            assert isinstance(error, EngineStateError), method
            assert "is in sync s1, not in other" in str(error)
    assert engine.call("abort_sync", "s1", "x") == ["current", "current"]
    check_running(engine)


def test_calls_outside_of_a_sync_are_refused(engine: Engine) -> None:
    for method, args in CALLS.items():
        for error in engine.call(method, *args):
            assert isinstance(error, EngineStateError), method
            assert "is not in a weight sync; begin_sync first" in str(error)
    (error, _) = engine.call("pull_weights", [[NEW_W]], ["w"])
    assert isinstance(error, EngineStateError)
    check_running(engine)


def test_the_sync_id_may_be_left_out_inside_of_one(engine: Engine) -> None:
    assert good(engine.begin())
    assert engine.call("pull_weights", [[NEW_W]], ["w"]) == [48, 48]
    assert engine.call("compare_weights", [[NEW_W]], ["w"]) == [[], []]
    different = NEW_W.clone()
    different[0, 0] = -1
    for lines in engine.call("compare_weights", [[different]], ["w"]):
        (line,) = lines
        assert "w: " in line
        assert "of 48 bytes differ" in line
    engine.call("abort_sync", "s1", "x")


# Ranks that do different things.

MOVES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "finalise": ("finalise", ("s1", False)),
    "commit": ("end_sync", ("s1", "v1")),
    "leave": ("end_sync", ("s1", None)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("aborting", [0, 1])
@pytest.mark.parametrize("torn", [False, True])
def test_one_rank_that_aborts_takes_the_others_along(
    engine: Engine, move: str, aborting: int, torn: bool
) -> None:
    if move == "leave" and torn:
        make_dirty(engine)
    assert good(engine.begin("s1", "connect" if move == "leave" else "sync"))
    if torn and move != "leave":
        send(engine, ranks=(0,))
    method, args = MOVES[move]
    moving, leaving = engine.ranks[1 - aborting].actor, engine.ranks[aborting].actor
    moved, left = together(
        [partial(getattr(moving, method), *args), partial(leaving.abort_sync, "s1", "deadline")]
    )
    if move != "leave":  # leaving is what both wanted
        assert isinstance(moved, EngineStateError)
        said = (
            "not finalised" if move == "commit" else "another rank of the engine gave the sync up"
        )
        assert said in str(moved)
    if torn:
        assert left == "dirty"
        check_dirty(engine)
    else:
        assert left == "current"
        check_running(engine)
    full_sync(engine, "s9", "v9")
    check_running(engine, "v9")


@pytest.mark.parametrize("torn", [False, True])
def test_a_rank_that_failed_before_its_vote_is_joined_by_an_abort(torn: bool) -> None:
    # finalise() fails on rank 1 before it votes; rank 0 waits in its vote until the abort comes.
    engine = Engine(2)
    try:
        assert good(engine.begin())
        if torn:
            send(engine, ranks=(1,))
        outcomes = engine.call("finalise", "s1", True)  # no load was recorded: no checksums
        assert all("no load was recorded" in str(o) for o in outcomes)
        engine.ranks[0].actor._phase_timeout_s = 0.3
        (zero,) = engine.call("finalise", "s1", False, ranks=[0])
        engine.ranks[0].actor._phase_timeout_s = 60.0
        assert isinstance(zero, DeadlineError)
        (left,) = engine.call("abort_sync", "s1", "finalise failed", ranks=[1])
        assert left == ("dirty" if torn else "current")
        (check_dirty if torn else check_running)(engine)
        full_sync(engine, "s2", "v2")
        check_running(engine, "v2")
    finally:
        engine.stop()
    assert engine.loops.crashes == []
    assert engine.group.hangs == []


@pytest.mark.parametrize("torn", [False, True])
def test_a_driver_that_disappears(torn: bool) -> None:
    engine = Engine(3)
    try:
        silence = 2.0 if torn else 0.3
        assert good(engine.begin("s1", stall_timeout_s=silence))
        if torn:
            tear(engine, 2)
        engine.settle()
        until = time.monotonic() + 30
        while "syncing" in engine.states and time.monotonic() < until:
            time.sleep(0.01)
        if torn:
            check_dirty(engine)
            assert "nothing was heard of its driver for 2 s" in engine.ranks[0].status.detail
        else:
            check_running(engine)
        (error, *_) = engine.call("finalise", "s1", False)
        assert isinstance(error, EngineStateError)
        full_sync(engine, "s2", "v2")
        check_running(engine, "v2")
    finally:
        engine.stop()
    assert engine.loops.crashes == []
    assert engine.group.hangs == []


def test_the_status_is_a_copy(engine: Engine) -> None:
    status = engine.ranks[0].status
    status.state = "dirty"
    assert engine.states == ["current", "current"]
    assert engine.ranks[0].actor.rdt_status().state == "current"
    assert engine.ranks[0].actor.rdt_identity().weight_version == "v0"


# Any order of events.

EVENTS = ("begin", "busy", "connect", "send", "torn", "finalise", "commit", "leave", "abort")


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.sampled_from(EVENTS), max_size=12),
    st.integers(0, 1),
    st.booleans(),
)
def test_ranks_agree_whatever_happens(events: list[str], odd: int, user_paused: bool) -> None:
    """After any calls: all ranks in one state; running exactly if current and not paused by the
    user; a session open only where a sync is under way or the engine is dirty."""
    engine = Engine(2)
    try:
        for r in engine.ranks:
            r.control.paused = user_paused
        current: tuple[str, str] | None = None  # (sync, purpose)
        dirty = landed = finalised = False
        version = "v0"
        for n, event in enumerate(events):
            sync_id = current[0] if current else f"s{n}"
            if event in ("begin", "busy", "connect"):
                if event == "busy" and current is None:
                    engine.ranks[odd].control.fail["flush"] = EngineBusyError("busy")
                purpose = "connect" if event == "connect" else "sync"
                begun = good(engine.begin(f"s{n}", purpose))
                assert begun == (current is None and event != "busy")
                if begun:
                    current, landed, finalised = (f"s{n}", purpose), False, False
            elif event == "send" and not finalised:
                landed |= good(send(engine, sync_id))
            elif event == "torn" and current and current[1] == "sync" and not finalised:
                tear(engine, odd, sync_id)
                landed = True
            elif event == "finalise" and not finalised:
                finalised = good(engine.call("finalise", sync_id, False))
            elif event == "commit" and finalised:
                assert good(engine.call("end_sync", sync_id, f"v{n}"))
                current, dirty, finalised, version = None, False, False, f"v{n}"
            elif event == "leave" and current and current[1] == "connect":
                assert good(engine.call("end_sync", sync_id, None))
                current = None
            elif event == "abort" and current:
                dirty = dirty or landed or finalised
                state = "dirty" if dirty else "current"
                assert engine.call("abort_sync", sync_id, "x") == [state, state]
                current, finalised = None, False
            if current is None:
                engine.settle()
                assert engine.states == ["dirty" if dirty else "current"] * 2
                assert engine.paused == [dirty or user_paused] * 2
                assert dirty or not any(r.control.session_open for r in engine.ranks)
            else:
                assert all(r.gate.parked for r in engine.ranks)
                assert engine.paused == [True, True]
            assert [r.control.version for r in engine.ranks] == [version, version]
    finally:
        engine.stop()
    assert engine.loops.crashes == []
    assert engine.group.hangs == []


# Faults that there were.


def test_a_session_that_sglang_refuses_leaves_the_engine_running(fragile: Engine) -> None:
    for r in fragile.ranks:
        r.control.fail["begin_session"] = EngineStateError("SGLang refused the session")
    for error in fragile.begin():
        assert "SGLang refused the session" in str(error)
    check_running(fragile)


def test_after_a_refused_session_the_next_sync_resumes(fragile: Engine) -> None:
    for r in fragile.ranks:
        r.control.fail["begin_session"] = EngineStateError("SGLang refused the session")
    assert not good(fragile.begin("s0"))
    full_sync(fragile)
    check_running(fragile, "v1")


def test_a_session_that_fails_on_one_rank_begins_on_none(fragile: Engine) -> None:
    fragile.ranks[1].control.fail["begin_session"] = EngineStateError("cannot restore weights")
    outcomes = fragile.begin()
    assert not any(isinstance(o, EngineRank) for o in outcomes)
    assert not any(isinstance(o, Hang) for o in fragile.call("abort_sync", "s1", "begin failed"))
    check_running(fragile)


@pytest.mark.parametrize("where", ["synchronize", "constants"])
def test_a_finalise_that_fails_on_one_rank_hangs_nobody(fragile: Engine, where: str) -> None:
    connect(fragile)
    assert good(fragile.begin())
    send(fragile)
    if where == "synchronize":
        fragile.ranks[1].control.fail[where] = RuntimeError("CUDA error")
    else:
        fragile.ranks[1].session.weights.apply_constants = lambda: 1 / 0  # type: ignore
    outcomes = fragile.call("finalise", "s1", False)
    assert not good(outcomes)
    fragile.call("abort_sync", "s1", "finalise failed")
    assert fragile.group.hangs == []
    check_dirty(fragile)


def test_a_commit_that_fails_on_one_rank_commits_on_none(fragile: Engine) -> None:
    assert good(fragile.begin())
    send(fragile)
    fragile.call("finalise", "s1", False)
    fragile.ranks[1].control.fail["version v1"] = RuntimeError("no socket")
    assert not good(fragile.call("end_sync", "s1", "v1"))
    fragile.call("abort_sync", "s1", "no label")
    assert fragile.group.hangs == []
    check_dirty(fragile)


@pytest.mark.parametrize("way", ["abort", "leave"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_sync_that_cannot_be_left_cleanly_is_left_dirty(
    fragile: Engine, way: str, ranks: tuple[int, ...]
) -> None:
    assert good(fragile.begin("s1", "connect" if way == "leave" else "sync"))
    for r in (fragile.ranks[rank] for rank in ranks):
        r.control.fail["end_session"] = EngineStateError("post-load processing failed")
    if way == "leave":
        fragile.call("end_sync", "s1", None)
    else:
        fragile.call("abort_sync", "s1", "x")
    fragile.settle()
    assert [r.gate.parked for r in fragile.ranks] == [False, False]
    assert fragile.states == ["dirty", "dirty"]


def test_a_pause_that_fails_half_way_is_undone(fragile: Engine) -> None:
    for r in fragile.ranks:

        def pause(mode: str, control: Any = r.control) -> None:
            control.paused = True
            raise RuntimeError("retracting failed")

        r.control.pause = pause  # type: ignore[method-assign]
    assert not good(fragile.begin())
    check_running(fragile)


def test_a_commit_needs_a_finalised_session(fragile: Engine) -> None:
    assert good(fragile.begin())
    tear(fragile, 1)
    for error in fragile.call("end_sync", "s1", "v1"):
        assert isinstance(error, EngineStateError)


def test_a_refused_begin_does_not_touch_the_sync_under_way(fragile: Engine) -> None:
    from sglang_rdt.engine.sync_request import SyncRequest

    assert good(fragile.begin())
    second = SyncRequest("s2", "second:22", "sync")
    refused = together(
        [partial(r.gate.command, partial(r.session.begin, second), 2.0) for r in fragile.ranks]
    )
    assert all("is in sync s1 of trainer:1" in str(error) for error in refused)
    assert fragile.call("abort_sync", "s1", "x") == ["current", "current"]
    check_running(fragile)


def test_a_dirty_rank_keeps_its_first_cause(fragile: Engine) -> None:
    make_dirty(fragile, "s0")
    assert good(fragile.begin("c", "connect"))
    fragile.call("abort_sync", "c", "changed its mind")
    check_dirty(fragile)
    assert "s0" in fragile.ranks[0].status.detail
    assert "c failed after bytes had landed" not in fragile.ranks[0].status.detail


# Faults that there are.


def test_parameters_that_a_session_moves_are_refused(fragile: Engine) -> None:
    """A model that unpacks into new memory in every session: refused by name, and put back."""
    for r in fragile.ranks:

        def begin(selector: str = "all", r: Any = r, begin: Any = r.control.begin_session) -> None:
            if not r.control.session_open:
                r.model.w.data = r.model.w.data.t().contiguous()
            begin(selector)

        def end(r: Any = r, end: Any = r.control.end_session, **how: Any) -> None:
            end(**how)
            r.model.w.data = r.model.w.data.t().contiguous()

        r.model.w.data = r.model.w.data.t().contiguous()  # at rest: packed
        r.control.begin_session, r.control.end_session = begin, end  # type: ignore[method-assign]
    connect(fragile)
    packed = fragile.ranks[0].model.w.data.clone()
    for error in fragile.begin():
        assert "1 parameters moved since the trainer connected (w)" in str(error)
    check_running(fragile)
    assert torch.equal(fragile.ranks[0].model.w.data, packed)


def test_a_begin_that_cannot_be_undone_does_not_run_on_an_open_session(fragile: Engine) -> None:
    fragile.ranks[1].control.fail["flush"] = EngineBusyError("busy")
    fragile.ranks[0].control.fail["end_session"] = EngineStateError("post-load processing failed")
    assert not any(isinstance(o, EngineRank) for o in fragile.begin())
    for r in fragile.ranks:
        assert r.control.paused or not r.control.session_open
    full_sync(fragile)
    check_running(fragile, "v1")


def test_nothing_is_pulled_after_the_end_of_the_session(fragile: Engine) -> None:
    assert good(fragile.begin())
    send(fragile)
    assert good(fragile.call("finalise", "s1", False))
    for error in send(fragile):
        assert isinstance(error, EngineStateError)


# Who is connected.

ME, OTHER = Trainer("me", "host:1"), Trainer("other", "host:2")


def join(engine: Engine, trainer: Trainer, name: str, replaces: str | None = None) -> list[Any]:
    """A connect session of ``trainer`` from begin to end, or the outcomes of its begin."""
    made = Connection(name, trainer)
    outcomes = engine.begin(
        f"c-{name}", "connect", pause_mode="in_place", connection=made, replaces=replaces
    )
    if good(outcomes):
        assert good(engine.call("record_load", f"c-{name}", SPECS))
        assert good(engine.call("end_sync", f"c-{name}", None))
        engine.settle()
    return outcomes


def test_an_engine_follows_one_trainer(engine: Engine) -> None:
    assert good(join(engine, ME, "a"))
    for outcome in join(engine, OTHER, "b"):
        assert "connected to trainer host:1; close that one first" in str(outcome)
    # It was refused before anything changed.
    assert good(engine.begin("s1", connection=Connection("a", ME)))
    assert engine.call("abort_sync", "s1", "x") == ["current", "current"]
    engine.settle()
    assert good(join(engine, OTHER, "b", replaces="me"))
    for outcome in engine.begin("s2", connection=Connection("a", ME)):
        assert isinstance(outcome, EngineStateError)
        assert not isinstance(outcome, ReconnectError)
        assert "connected to trainer host:2 since, and takes nothing from host:1" in str(outcome)
    assert good(engine.begin("s3", connection=Connection("b", OTHER)))
    assert engine.call("abort_sync", "s3", "x") == ["current", "current"]
    check_running(engine)


def test_a_sync_by_hand_is_refused_while_a_trainer_is_connected(engine: Engine) -> None:
    assert good(engine.begin("s0"))  # nobody is connected yet
    assert engine.call("abort_sync", "s0", "x") == ["current", "current"]
    engine.settle()
    assert good(join(engine, ME, "a"))
    for outcome in engine.begin("s1"):
        assert "takes nothing from trainer:1" in str(outcome)
    check_running(engine)


@pytest.mark.parametrize("how", ["disconnect", "memory", "failed connect"])
def test_a_lost_connection_says_why_and_that_connecting_helps(engine: Engine, how: str) -> None:
    assert good(join(engine, ME, "a"))
    if how == "disconnect":
        assert engine.call("disconnect", "me") == [None, None]
        why = "its trainer has closed the connection"
    elif how == "memory":
        # SGLang handles the request on the event loop, on every rank.
        for rank in engine.ranks:
            rank.session.memory_released()
        why = "its weights' memory was released since"
    else:
        assert good(engine.begin("c-b", "connect", connection=Connection("b", ME)))
        assert engine.call("abort_sync", "c-b", "no plan") == ["current", "current"]
        engine.settle()
        why = "another connect did not come to its end"
    for outcome in engine.begin("s1", connection=Connection("a", ME)):
        assert isinstance(outcome, ReconnectError)
        assert why in str(outcome)
    check_running(engine)
    assert good(join(engine, ME, "c"))
    assert good(engine.begin("s2", connection=Connection("c", ME)))
    assert engine.call("abort_sync", "s2", "x") == ["current", "current"]


def test_a_connect_that_is_given_up_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = []
    for rank in engine.ranks:
        forget = rank.session.weights.forget
        monkeypatch.setattr(
            rank.session.weights, "forget", lambda r=rank, f=forget: (forgotten.append(r), f())
        )
    assert good(engine.begin("c", "connect", connection=Connection("a", ME)))
    assert good(engine.call("record_load", "c", SPECS))
    assert engine.call("abort_sync", "c", "no plan") == ["current", "current"]
    engine.settle()
    assert forgotten == engine.ranks or forgotten == engine.ranks[::-1]
    assert all(rank.session.weights.recording is None for rank in engine.ranks)
    assert good(join(engine, ME, "b"))


def test_only_the_connected_trainer_can_disconnect(engine: Engine) -> None:
    assert good(join(engine, ME, "a"))
    assert engine.call("disconnect", "other") == [None, None]
    assert [r.status.connection for r in engine.ranks] == [Connection("a", ME)] * 2


def test_a_connection_outlives_dirty(engine: Engine) -> None:
    assert good(join(engine, ME, "a"))
    assert good(engine.begin("s1", connection=Connection("a", ME)))
    tear(engine)
    assert engine.call("abort_sync", "s1", "x") == ["dirty", "dirty"]
    engine.settle()
    assert good(join(engine, ME, "b"))
    check_dirty(engine)
    assert [r.status.connection for r in engine.ranks] == [Connection("b", ME)] * 2


# What the user decides.


def test_accepting_torn_weights(engine: Engine) -> None:
    make_dirty(engine)
    engine.log()
    assert good(engine.call("accept_weights", "torn"))
    check_running(engine, "torn")
    assert engine.log() == ["end_session", "version torn", "resume"]
    full_sync(engine, "s1", "v1")
    check_running(engine, "v1")


def test_what_is_not_dirty_cannot_be_accepted(engine: Engine) -> None:
    for outcome in engine.call("accept_weights", "torn"):
        assert isinstance(outcome, EngineStateError)
    check_running(engine)


@pytest.mark.parametrize("where", ["end_session", "version torn"])
def test_accepting_is_for_all_ranks_or_none(engine: Engine, where: str) -> None:
    make_dirty(engine)
    engine.ranks[1].control.fail[where] = RuntimeError("no")
    assert not any(isinstance(o, EngineRank) for o in engine.call("accept_weights", "torn"))
    check_dirty(engine)
    full_sync(engine)
    check_running(engine, "v1")


# Overwritten first.


def test_overwriting_leaves_nothing_of_the_old_bytes(engine: Engine) -> None:
    connect(engine)
    full_sync(engine, "s1", "v1")
    assert good(engine.begin("s2", overwrite=True))
    assert engine.states == ["syncing"] * 2
    for r in engine.ranks:
        assert (r.model.w.view(torch.uint8) == 0xA5).all()
        assert (r.model.e[:2].view(torch.uint8) == 0xA5).all()
        assert not r.model.e[2:].any()
    assert engine.call("abort_sync", "s2", "x") == ["dirty", "dirty"]
    check_dirty(engine, "v1")


def test_an_engine_that_cannot_go_on_says_so_and_keeps_the_new_label(engine: Engine) -> None:
    assert good(engine.begin("s1"))
    assert good(send(engine))
    assert good(engine.call("finalise", "s1", False))
    engine.ranks[1].control.fail["resume"] = RuntimeError("no")
    fine, error = engine.call("end_sync", "s1", "v1")
    assert isinstance(fine, EngineRank)
    assert "holds version 'v1', but could not go on (RuntimeError: no)" in str(error)
    engine.settle()
    assert engine.states == ["current", "current"]
    assert [r.control.version for r in engine.ranks] == ["v1", "v1"]
    assert engine.paused == [False, True]


@pytest.mark.parametrize("mode", ["", "abort", "retract ", "x" * 1000])
def test_a_pause_mode_that_does_not_exist_is_refused(engine: Engine, mode: str) -> None:
    for outcome in engine.begin(pause_mode=mode):
        assert isinstance(outcome, EngineStateError)
        assert "a sync request with pause_mode" in str(outcome)
    check_running(engine)


def test_weights_that_are_released_are_refused_and_a_released_cache_is_not(engine: Engine) -> None:
    tags = [r.control.scheduler.weight_updater.offload_tags for r in engine.ranks]
    for each in tags:
        each.update({"weights", "kv_cache"})
    for outcome in engine.begin():
        assert "memory is released (kv_cache, weights); resume it first" in str(outcome)
    check_running(engine)
    for each in tags:
        each.discard("weights")
    full_sync(engine)
    check_running(engine, "v1")


def test_nothing_begins_while_a_read_that_was_given_up_may_still_land(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dirty(engine)
    late = ["trainer rank 1"]
    monkeypatch.setattr(live_weights.unfinished, "unfinished", lambda: list(late))
    for outcome in engine.begin("s1"):
        assert "transfers from trainer rank 1 were given up and are still under way" in str(outcome)
    check_dirty(engine)
    for outcome in engine.call("accept_weights", "torn"):
        assert "are still under way" in str(outcome)
    check_dirty(engine)
    late.clear()
    full_sync(engine, "s2", "v2")
    check_running(engine, "v2")


def test_a_rank_that_loses_the_others_is_gone(fragile: Engine) -> None:
    assert good(fragile.begin("s1"))

    def lost(opinion: bool) -> bool:
        raise RuntimeError("Connection closed by peer\nwith more lines")

    fragile.ranks[0].control.vote = lost  # type: ignore[method-assign]
    (outcome,) = fragile.call("abort_sync", "s1", "x", ranks=[0])
    assert isinstance(outcome, EngineStateError)
    assert str(outcome) == (
        "engine tp0: another rank of the engine is gone (Connection closed by peer)"
    )
    assert fragile.states[0] == "gone"


# A name filter


def connect_filtered(engine: Engine, sync_id: str, *kept: str) -> None:
    assert good(engine.begin(sync_id, "connect", pause_mode="in_place", flush=False))
    assert good(engine.call("record_load", sync_id, SPECS, kept))
    assert good(engine.call("end_sync", sync_id, None))
    engine.settle()


def half_sync(engine: Engine, sync_id: str, version: str) -> None:
    """Of ``e`` alone."""
    where = Target("e", rect((3, 2), (0, 2)), "float32", 0)
    assert good(engine.begin(sync_id))
    assert good(engine.call("pull_weights", [[NEW_E]], [where], sync_id))
    assert good(engine.call("finalise", sync_id, False))
    assert good(engine.call("end_sync", sync_id, version))
    engine.settle()


def test_a_filter_keeps_nothing_that_is_torn(engine: Engine) -> None:
    connect(engine)
    make_dirty(engine)
    connect_filtered(engine, "c2", "w")
    for error in engine.begin("s2"):
        assert isinstance(error, EngineStateError)
        assert "the name filter keeps w, which cannot be relied on: sync s0 failed" in str(error)
    assert engine.states == ["dirty", "dirty"]
    # All of it once makes it whole; then the filter may keep what it wants.
    connect_filtered(engine, "c3")
    full_sync(engine, "s3")
    connect_filtered(engine, "c4", "w")
    half_sync(engine, "s4", "v2")
    assert engine.states == ["current", "current"]


def test_parameters_that_stay_by_their_own_name_must_be_whole(engine: Engine) -> None:
    def begun(sync_id: str) -> list[Any]:
        connect = f"c-{sync_id}"
        assert good(engine.begin(connect, "connect", pause_mode="in_place", flush=False))
        recordings = engine.call("record_load", connect, SPECS, (), ("e",))
        assert all(r.kept.params == {"e"} for r in recordings)
        assert good(engine.call("end_sync", connect, None))
        engine.settle()
        return engine.begin(sync_id)

    assert good(begun("s1"))
    assert good(engine.call("abort_sync", "s1", "enough"))
    engine.settle()
    for rank in engine.ranks:
        rank.session._unsound.add(None, "checksums differ")  # of what was written, not of these
    assert good(begun("s2"))
    assert good(engine.call("abort_sync", "s2", "enough"))
    engine.settle()
    for rank in engine.ranks:
        rank.session._unsound.add(None, "the engine was started with load_format dummy", own=True)
        rank.session._unsound.add(None, "the engine was torn after that")
    for error in begun("s3"):
        assert isinstance(error, EngineStateError)
        assert "SGLANG_RDT_KEEP keeps e, which cannot be relied on: the engine was torn" in str(
            error
        )
        assert "restart the engine with its real weights" in str(error)


def test_what_a_filtered_sync_tears_the_next_one_mends(engine: Engine) -> None:
    connect_filtered(engine, "c1", "w")
    assert good(engine.begin("s1"))
    where = Target("e", rect((3, 2), (0, 2)), "float32", 0)
    (torn,) = engine.call("pull_weights", [[TransportError("link down")]], [where], "s1", ranks=[1])
    assert isinstance(torn, TransportError)
    assert engine.call("abort_sync", "s1", "torn") == ["dirty", "dirty"]
    # Only ``e`` was being written: a filter that keeps that one instead is refused.
    connect_filtered(engine, "c2", "e")
    for error in engine.begin("s2"):
        assert "the name filter keeps e, which cannot be relied on" in str(error)
    connect_filtered(engine, "c3", "w")
    half_sync(engine, "s3", "v2")
    assert engine.states == ["current", "current"]


def test_post_load_processing_that_fails_leaves_nothing_to_be_kept(engine: Engine) -> None:
    connect_filtered(engine, "c1", "w")
    engine.ranks[0].control.fail["end_session"] = RuntimeError("packing")
    assert good(engine.begin("s1"))
    assert not good(engine.call("finalise", "s1", False))
    assert engine.states == ["dirty", "dirty"]
    for error in engine.begin("s2"):
        assert "the name filter keeps w, which cannot be relied on" in str(error)


@pytest.mark.parametrize("backed_up", [False, True])
def test_a_filter_keeps_nothing_whose_memory_was_released(engine: Engine, backed_up: bool) -> None:
    connect(engine)
    full_sync(engine, "s1")
    for rank in engine.ranks:
        rank.control.backs_weights_up = backed_up
        rank.session.memory_released()
    connect_filtered(engine, "c2", "w")
    if not backed_up:
        for error in engine.begin("s2"):
            assert "w, which cannot be relied on: their memory was released" in str(error)
        connect_filtered(engine, "c3")
        full_sync(engine, "s3")
        connect_filtered(engine, "c4", "w")
    half_sync(engine, "s5", "v2")


def test_an_engine_without_weights_needs_all_of_them_once(engine: Engine) -> None:
    for rank in engine.ranks:
        rank.session._unsound.add(None, "the engine was started with load_format dummy")
    connect_filtered(engine, "c1", "w")
    for error in engine.begin("s1"):
        assert "load_format dummy. Sync once without a filter" in str(error)
    connect_filtered(engine, "c2")
    full_sync(engine, "s2")
