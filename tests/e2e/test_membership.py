"""Engines that come and go between syncs: real ones, killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_rdt import cpu
from sglang_rdt.coordinator.membership import is_dead
from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.errors import SyncError
from tests.e2e.conftest import DENSE_TP1, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, assert_engine_serves

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

MODEL = DENSE_TP1.model
PORT = 31900
# A stopped engine costs one deadline, which must be longer than a busy machine needs.
FAST = SETTINGS.replace(phase_timeout_s=10.0, connect_timeout_s=15.0, stall_timeout_s=60.0)


class Second:
    """The engine that comes and goes, always under the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.served: ServedEngine | None = None

    def start(self, model: TinyModel = MODEL) -> ServedEngine:
        model.save_random_checkpoint(self._folder, seed=300, dtype=torch.bfloat16)
        self.served = ServedEngine(cpu.engine_kwargs(str(self._folder), tp_size=1, port=PORT))
        return self.served

    @property
    def pid(self) -> int:
        """Of its only scheduler actor."""
        import ray

        assert self.served is not None
        ask = self.served.engine.actors[0].__ray_call__
        return int(ray.get(ask.remote(lambda actor: os.getpid()), timeout=30))

    def kill(self, pid: int | None = None) -> None:
        """Without a word to anybody; back when Ray knows."""
        assert self.served is not None
        os.kill(pid or self.pid, signal.SIGKILL)
        actor = self.served.engine.actors[0]
        deadline = time.monotonic() + 30
        while not is_dead(actor):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self.served.shutdown()


@pytest.fixture(scope="module")
def second(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    engine = Second(tmp_path_factory.mktemp("second"))
    yield engine
    if engine.served is not None:
        engine.served.shutdown()


def step_and_sync(group: Trainers) -> dict[str, Any]:
    """Optimizer step without a sync of its own; the new HF tensors."""
    group.step()
    return group.weights()


def sync(group: Trainers, version: str) -> Any:
    """One sync on all ranks; rank 0's report."""
    return group.on_all(lambda rank, v: rank.sync.sync(v), version)[0]


def sessions(group: Trainers) -> dict[str, str]:
    """Engine -> the connect session in which it prepared its reads."""

    def look(rank: Any) -> dict[str, str] | None:
        lead = rank.sync._link.coordinator
        return None if lead is None else dict(lead._connections)

    (found,) = [one for one in group.on_all(look) if one is not None]
    return found


def test_engines_come_and_go(
    engines: EnginePool,
    trainers: TrainerPool,
    second: Second,
    tmp_path: Path,
) -> None:
    a = engines.get(DENSE_TP1)
    group = trainers.get(MODEL, Layout(tp=2), seed=50)
    group.attach(FAST, on_step=False)  # all engines there are

    step_and_sync(group)
    assert sync(group, "1").engines == (a.address,)
    (first,) = sessions(group).values()

    # One joins: it is served at the next sync, and the other one's plan stays.
    b = second.start()
    assert b.generate(proof.PROMPT, 1)[1] == "default"
    state = step_and_sync(group)
    report = sync(group, "2")
    assert set(report.engines) == {a.address, b.address}
    for served in (a, b):
        assert_engine_holds(MODEL, state, served)
        assert_engine_serves(MODEL, state, served, "2", tmp_path / "2")
    before = sessions(group)
    assert before[a.address] == first
    assert set(sync(group, "2b").engines) == {a.address, b.address}
    assert sessions(group) == before

    # It dies: the next sync serves the others, and says so.
    instance = b.engine.instance
    second.kill()
    state = step_and_sync(group)
    assert sync(group, "3").engines == (a.address,)
    assert_engine_holds(MODEL, state, a)
    assert sessions(group) == {a.address: first}

    # It is back under its name: another engine, with old weights until it has been synced.
    b = second.start()
    assert b.address.endswith(f":{PORT}")
    assert b.engine.instance != instance
    assert b.generate(proof.PROMPT, 1)[1] == "default"
    state = step_and_sync(group)
    assert set(sync(group, "4").engines) == {a.address, b.address}
    assert_engine_serves(MODEL, state, b, "4", tmp_path / "4")
    before = sessions(group)
    assert before[a.address] == first

    # Its program calls it stale: it is connected anew, and only it.
    group.on_all(_mark_stale, b.address)
    assert set(sync(group, "5").engines) == {a.address, b.address}
    after = sessions(group)
    assert after[a.address] == first
    assert after[b.address] != before[b.address]


def _mark_stale(rank: Any, address: str) -> None:
    assert rank.sync.is_fresh()
    if not rank.sync._group.leads:  # one rank's word is enough
        rank.sync.mark_stale([address])
        assert not rank.sync.is_fresh()


@pytest.mark.long
def test_a_stopped_engine_holds_up_one_sync_and_no_more(
    engines: EnginePool, trainers: TrainerPool, second: Second, tmp_path: Path
) -> None:
    a = engines.get(DENSE_TP1)
    b = second.served or second.start()
    group = trainers.get(MODEL, Layout(tp=2), seed=51)
    group.attach(FAST, on_step=False, engines=[a.address, b.address])
    assert set(sync(group, "1").engines) == {a.address, b.address}
    pid = second.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        state = step_and_sync(group)
        began = time.monotonic()
        with pytest.raises(SyncError, match=b.address) as caught:
            sync(group, "2")
        assert list(caught.value.failures) == [b.address]
        assert_engine_holds(MODEL, state, a)
        assert_engine_serves(MODEL, state, a, "2", tmp_path / "2")
        # The next one only looks whether it is back.
        began = time.monotonic()
        with pytest.raises(SyncError, match="do not answer") as caught:
            sync(group, "3")
        assert time.monotonic() - began < FAST.phase_timeout_s
        assert list(caught.value.failures) == [b.address]
        assert a.generate(proof.PROMPT, 1)[1] == "3"
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while b.engine.state()[0] == "syncing" and time.monotonic() < deadline:
        time.sleep(0.5)
    state = step_and_sync(group)
    assert set(sync(group, "4").engines) == {a.address, b.address}
    for served in (a, b):
        assert_engine_holds(MODEL, state, served)
        assert_engine_serves(MODEL, state, served, "4", tmp_path / "4")


@pytest.mark.long
def test_failures_can_be_logged_instead(
    engines: EnginePool, trainers: TrainerPool, second: Second
) -> None:
    a = engines.get(DENSE_TP1)
    b = second.served or second.start()
    group = trainers.get(MODEL, Layout(), seed=52)
    group.attach(FAST.replace(mode="bucketed", engine_failures="log"), on_step=False)
    assert set(sync(group, "1").engines) == {a.address, b.address}
    pid = second.pid
    os.kill(pid, signal.SIGSTOP)
    state = step_and_sync(group)
    report = sync(group, "2")
    assert report.engines == (a.address,)
    assert list(report.failures) == [b.address]
    assert_engine_holds(MODEL, state, a)
    # Nobody has named it: now that it is dead, it is no failure any more, and has no bucket.
    second.kill(pid)
    report = sync(group, "2b")
    assert (report.engines, report.failures) == ((a.address,), {})
    assert group.on_all(lambda rank: len(rank.sync._link._senders)) == [1]

    # Back, with another model: that is its own trouble.
    c = second.start(TinyModel("dense", num_layers=1))
    state = step_and_sync(group)
    report = sync(group, "3")
    assert report.engines == (a.address,)
    assert_engine_holds(MODEL, state, a)
    assert "layers.1." in report.failures[c.address].text
    assert c.engine.state() == ("current", "")
    assert c.generate(proof.PROMPT, 1)[1] == "default"
