"""Dense Qwen3 into a TP 2 engine, from every trainer layout that two processes can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_rdt.coordinator import engine_at, find_engines, resolve_actor
from sglang_rdt.demo import proof
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.engine.names import actor_name, parse
from sglang_rdt.errors import EngineNotFoundError
from sglang_rdt.transport import nixl
from tests.e2e.conftest import DENSE_TP2, NAMESPACE, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, assert_engine_serves, sync_and_check

pytestmark = pytest.mark.e2e

MODEL = DENSE_TP2.model
OVERLAP = {"distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 20000}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2-to-tp2": (Layout(tp=2), {}),
    "pp2-to-tp2": (Layout(pp=2), {}),
    "dp2-distributed-optimizer": (Layout(dp=2), {"distributed_optimizer": True}),
    "dp2-overlap-param-gather": (Layout(dp=2), OVERLAP),
    "tp1-to-tp2": (Layout(), {}),
}


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_reaches_the_engine(
    case: str, mode: Any, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    layout, options = CASES[case]
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, layout, seed=len(case), **options)
    group.attach(SETTINGS.replace(mode=mode), engines=[served.address])
    first, second = sync_and_check(MODEL, group, served, tmp_path)
    assert (first.version, second.version) == ("1", "2")
    # 25 HF tensors; norms are replicated over the engine's two ranks.
    assert first.nbytes == second.nbytes > 270_000
    assert not first.failures


def test_small_buckets_cut_large_tensors_and_stay_small(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=5)
    bucket = 10_000  # the embedding alone is 32768 bytes per engine rank
    settings = SETTINGS.replace(mode="bucketed", bucket_bytes=bucket, verify="equal")
    group.attach(settings, engines=[served.address])
    (report,) = sync_and_check(MODEL, group, served, tmp_path, steps=1)
    assert report.verified == "equal"
    staging = group.on_all(
        lambda rank: (rank.sync.staging_bytes, len(rank.sync._link._mover._senders))
    )
    assert sum(senders for _, senders in staging) == 2
    for nbytes, senders in staging:
        assert nbytes <= bucket * senders


def test_fifty_syncs_register_nothing_new(engines: EnginePool, trainers: TrainerPool) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=6)
    group.attach(SETTINGS, on_step=False, engines=[served.address])

    def registered() -> Any:
        return (
            [s.registrations for s in served.engine.status()],
            group.on_all(lambda rank: nixl.registrations()),
        )

    group.on_all(lambda rank: rank.sync.sync("warm-up"))
    before = registered()
    addresses = [[p.storage for p in ps] for ps in _describe(served)]
    for i in range(50):
        group.on_all(lambda rank, v: rank.sync.sync(v), f"round-{i}")
    assert registered() == before
    assert [[p.storage for p in ps] for ps in _describe(served)] == addresses
    assert {s.version for s in served.engine.status()} == {"round-49"}


def _describe(served: Any) -> list[Any]:
    return served.engine.call("describe", timeout_s=60.0, phase="describe")


def test_describe_tells_names_shapes_and_bytes(engines: EnginePool) -> None:
    served = engines.get(DENSE_TP2)
    for specs, live in zip(_describe(served), served.weights(), strict=True):
        assert {s.name for s in specs} == set(live)
        for spec in specs:
            tensor = live[spec.name]
            assert spec.shape == tuple(tensor.shape)
            assert f"torch.{spec.dtype}" == str(tensor.dtype)
            assert spec.nbytes == tensor.numel() * tensor.element_size()


def test_a_users_own_generator_is_a_source(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=8)
    group.attach(
        SETTINGS,
        on_step=False,
        engines=[served.engine],  # by handle
        generator=lambda rank: rank.trainer.reference_hf_state().items(),
    )
    group.on_all(lambda rank: rank.sync.sync("generated"))
    state = group.weights()
    assert_engine_holds(MODEL, state, served)
    assert_engine_serves(MODEL, state, served, "generated", tmp_path / "hf")


def test_requests_in_flight_finish_on_the_new_weights(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=9)
    group.attach(SETTINGS, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.connect())
    running = served.start_generate(proof.PROMPT, 200)
    group.on_all(lambda rank: rank.sync.sync("meanwhile"))
    tokens, version = served._get(running)
    assert len(tokens) == 200
    assert version in ("meanwhile", "generated")
    assert served.generate(proof.PROMPT, 1)[1] == "meanwhile"


def test_every_actor_can_be_found_by_its_names(engines: EnginePool) -> None:
    import ray

    served = engines.get(DENSE_TP2)
    node, port = served.address.rsplit(":", 1)
    for tp, rank in enumerate(served.engine.ranks):
        name = actor_name(node, int(port), tp=tp)
        assert rank.actor_name == name
        assert ray.get_actor(name, namespace=NAMESPACE) is not None
        released = parse(rank.released_name)
        assert released is not None
        assert released.group is not None
        by_released = resolve_actor(rank.released_name)
        assert by_released._actor_id == served.engine.actors[tp]._actor_id
        assert resolve_actor(name)._actor_id == served.engine.actors[tp]._actor_id
    assert engine_at(f"localhost:{port}").instance == served.engine.instance
    assert engine_at().name == served.address
    with pytest.raises(EngineNotFoundError, match=f"there are: {served.address}"):
        find_engines([f"{node}:1"])
    with pytest.raises(EngineNotFoundError, match="In other namespaces"):
        find_engines(namespace="nobody-is-here")


def test_weights_are_really_pulled(engines: EnginePool, trainers: TrainerPool) -> None:
    """Guards the checks above: an engine that was not synced does not hold the weights."""
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=10)
    _, differences = proof.unequal_parameters(MODEL, group.weights(), served.weights())
    assert len(differences) == 38
    assert torch.is_tensor(served.weights()[0]["lm_head.weight"])
