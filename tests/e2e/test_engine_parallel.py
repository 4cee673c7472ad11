"""Engines in other shapes than one TP group: pipeline stages, replicas, DP attention, EP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.errors import SyncError
from tests.e2e.conftest import EngineKey, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, assert_engine_serves

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

DIRECT = SETTINGS.replace(mode="direct")
BUCKETED = SETTINGS.replace(mode="bucketed")
DENSE = TinyModel("dense")
MOE = TinyModel("moe")


@dataclass(frozen=True)
class Shape:
    """An engine, the trainer that it follows, and how many of its ranks can be asked."""

    key: EngineKey
    layout: Layout
    replicas: int = 1

    @property
    def model(self) -> TinyModel:
        return self.key.model


SHAPES = {
    "pp 2": Shape(EngineKey(DENSE, 1, more=(("pp_size", 2),)), Layout(tp=2)),
    "dp 2": Shape(EngineKey(DENSE, 1, more=(("dp_size", 2),)), Layout(tp=2), replicas=2),
    "dp attention": Shape(
        EngineKey(MOE, 2, more=(("dp_size", 2), ("enable_dp_attention", True))),
        Layout(dp=2, ep=2, etp=1),
        replicas=2,
    ),
}


@pytest.fixture(scope="module")
def shape(request: pytest.FixtureRequest) -> Shape:
    """Of the module, so that all tests of one shape follow each other: one engine start each."""
    return SHAPES[request.param]


def shapes(*suite: str) -> pytest.MarkDecorator:
    """All shapes; those that are not in ``suite`` take too long for every run."""
    params = [pytest.param(s, marks=() if s in suite else pytest.mark.long) for s in SHAPES]
    return pytest.mark.parametrize("shape", params, indirect=True, scope="module")


def _check(shape: Shape, group: Trainers, served: ServedEngine, version: str, folder: Path) -> None:
    """All ranks hold what the trainer holds, and every replica serves it under its label."""
    state = group.weights()
    assert_engine_holds(shape.model, state, served)
    assert_engine_serves(shape.model, state, served, version, folder / version)
    for replica in range(shape.replicas if shape.replicas > 1 else 0):
        tokens, label = served.generate(proof.PROMPT, proof.NEW_TOKENS, replica)
        assert label == version
        assert proof.same_tokens(shape.model, folder / version, tokens) is None
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", version)}


def _on_last_rank(served: ServedEngine, run: Callable[[Any], Any]) -> Any:
    return ray.get(served.engine.actors[-1].__ray_call__.remote(run), timeout=30)


def _refuse(actor: Any) -> None:
    actor._session.weights.unfinished = lambda: ["somewhere"]


def _allow(actor: Any) -> None:
    del actor._session.weights.unfinished


def _sync(group: Trainers, version: str) -> list[str]:
    """What each trainer rank was told of a sync."""

    def sync(rank: Any) -> str:
        try:
            rank.sync.sync(version)
        except SyncError as error:
            return str(error)
        return ""

    return list(group.on_all(sync))


def _refuse_one_sync(group: Trainers, served: ServedEngine) -> None:
    """The last rank refuses a sync, which changes no rank, and takes the next one, "again"."""
    before = served.weights()
    _on_last_rank(served, _refuse)
    for message in _sync(group, "refused"):
        assert "could land in newer weights" in message
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", "fine")}
    after = served.weights()
    assert all((b[n] == a[n]).all() for b, a in zip(before, after, strict=True) for n in b)
    assert served.generate(proof.PROMPT, 2)[1] == "fine"
    _on_last_rank(served, _allow)
    assert _sync(group, "again") == ["", ""]


@shapes(*SHAPES)
def test_direct(shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path) -> None:
    served = engines.get(shape.key)
    ranks = [r.rank for r in served.engine.ranks]
    assert len(ranks) == 2
    group = trainers.get(shape.model, shape.layout, seed=51)
    group.attach(DIRECT, engines=[served.address])
    for _ in range(2):
        numbers, report = group.step()
        assert numbers["updated"]
        _check(shape, group, served, report.version, tmp_path)


@shapes("dp attention")
def test_bucketed(shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path) -> None:
    served = engines.get(shape.key)
    group = trainers.get(shape.model, shape.layout, seed=52)
    group.attach(BUCKETED, on_step=False, engines=[served.address])
    assert _sync(group, "in buckets") == ["", ""]
    _check(shape, group, served, "in buckets", tmp_path)


@shapes("pp 2")
@pytest.mark.parametrize("pause", ["retract", pytest.param("in_place", marks=pytest.mark.long)])
def test_requests_that_run_go_on_with_the_new_weights(
    pause: Any, shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    """With pipeline stages, several microbatches are under way."""
    served = engines.get(shape.key)
    group = trainers.get(shape.model, shape.layout, seed=53)
    group.attach(
        DIRECT.replace(pause_mode=pause, flush=pause == "retract"),
        on_step=False,
        engines=[served.address],
    )
    assert _sync(group, "before") == ["", ""]

    def generate(host: Any) -> Any:
        return host.engine.generate(
            input_ids=[[*proof.PROMPT, i] for i in range(4)],
            sampling_params={"temperature": 0, "max_new_tokens": 300, "ignore_eos": True},
        )

    running = served.host.call.remote(generate)
    time.sleep(0.5)
    for version in ("during 1", "during 2"):
        assert _sync(group, version) == ["", ""]
    assert not ray.wait([running], timeout=0)[0]  # or the syncs met nobody
    replies = ray.get(running, timeout=120)
    assert [len(r["output_ids"]) for r in replies] == [300] * 4
    assert {r["meta_info"]["weight_version"] for r in replies} == {"during 2"}
    assert _sync(group, "after") == ["", ""]
    _check(shape, group, served, "after", tmp_path)


@shapes("dp 2")
def test_a_sync_that_one_rank_refuses_changes_no_rank(
    shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(shape.key)
    group = trainers.get(shape.model, shape.layout, seed=54)
    # Replicas do not vote with each other: who begins them one by one can take it back.
    group.attach(BUCKETED, on_step=False, engines=[served.address])
    assert _sync(group, "fine") == ["", ""]
    _refuse_one_sync(group, served)
    _check(shape, group, served, "again", tmp_path)


@pytest.mark.parametrize("shape", ["dp 2"], indirect=True, scope="module")
def test_no_replica_reads_before_all_have_begun(
    shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    """Direct mode, in which each rank otherwise begins and reads in one call."""
    served = engines.get(shape.key)
    group = trainers.get(shape.model, shape.layout, seed=57)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    assert _sync(group, "fine") == ["", ""]
    _refuse_one_sync(group, served)
    _check(shape, group, served, "again", tmp_path)


@shapes("pp 2")
def test_a_sync_that_breaks_on_one_rank_leaves_all_dirty_until_the_next(
    shape: Shape, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(shape.key)
    group = trainers.get(shape.model, shape.layout, seed=55)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    assert _sync(group, "fine") == ["", ""]

    def fail(actor: Any) -> None:
        def end_session(**_: Any) -> None:
            del actor._control.end_session  # once
            raise RuntimeError("the weights cannot be packed")

        actor._control.end_session = end_session

    _on_last_rank(served, fail)
    for message in _sync(group, "broken"):
        assert "the weights cannot be packed" in message
    assert {(s.state, s.version) for s in served.engine.status()} == {("dirty", "fine")}
    waiting = served.start_generate(proof.PROMPT, 2)
    assert not ray.wait([waiting], timeout=2)[0]  # nobody serves torn weights
    assert _sync(group, "whole") == ["", ""]
    assert ray.get(waiting, timeout=60)[1] == "whole"
    _check(shape, group, served, "whole", tmp_path)


@pytest.mark.long
def test_experts_that_are_dealt_out(engines: EnginePool, trainers: TrainerPool) -> None:
    """Weights only: without a GPU, SGLang's experts cannot tell whose token is not theirs."""
    served = engines.get(EngineKey(MOE, 2, more=(("ep_size", 2),)))
    assert {r.ep_size for r in served.engine.ranks} == {2}
    for mode, layout in ((DIRECT, Layout(dp=2, ep=2, etp=1)), (BUCKETED, Layout(tp=2))):
        group = trainers.get(MOE, layout, seed=56)
        group.attach(mode, on_step=False, engines=[served.address])
        for version in ("1", "2"):
            group.all("step")
            assert _sync(group, version) == ["", ""]
            assert_engine_holds(MOE, group.weights(), served)
            assert {(s.state, s.version) for s in served.engine.status()} == {("current", version)}
