"""Bad input: one clear sentence that names the culprit, and the engine serves what it served."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_rdt.coordinator import discovery, engine_of
from sglang_rdt.demo import proof
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.errors import (
    AmbiguousEngineError,
    EngineNotFoundError,
    EngineStateError,
    NotRayBackendError,
    PlanError,
    RecordError,
    SyncError,
)
from tests.e2e.conftest import DENSE_TP2, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, untouched

pytestmark = pytest.mark.e2e

MODEL = DENSE_TP2.model
LAST = "model.layers.1.mlp.down_proj.weight"


def _without(rank: Any) -> Any:
    return [(n, t) for n, t in rank.trainer.reference_hf_state().items() if n != LAST]


def _with_more(rank: Any) -> Any:
    extra = ("model.layers.1.mlp.more.weight", torch.zeros(4, 4, dtype=torch.bfloat16))
    return [*rank.trainer.reference_hf_state().items(), extra]


def _wrong_shape(rank: Any) -> Any:
    state = rank.trainer.reference_hf_state()
    state[LAST] = state[LAST][:, :-2].contiguous()
    return state.items()


def _wrong_dtype(rank: Any) -> Any:
    state = rank.trainer.reference_hf_state()
    state[LAST] = state[LAST].float()
    return state.items()


REFUSALS: dict[str, tuple[Callable[[Any], Any], tuple[type[Exception], ...], str]] = {
    "missing tensor": (
        _without,
        (PlanError,),
        r"dp0_pp0_tp1: model\.layers\.1\.mlp\.down_proj\.weight .* is covered by no HF tensor",
    ),
    # Which of the two it is depends on whether the model's loader objects or skips.
    "extra tensor": (_with_more, (PlanError, RecordError), r"model\.layers\.1\.mlp\.more"),
    # On a CPU SGLang's loader fills up what is missing; elsewhere it objects.
    "wrong shape": (
        _wrong_shape,
        (PlanError, RecordError),
        r"down_proj\.weight: the loader fills 128 elements .* too small|load_weights does not accept",
    ),
    "wrong dtype": (
        _wrong_dtype,
        (PlanError,),
        r"down_proj\.weight is float32, .*down_proj\.weight is bfloat16; set SGLANG_RDT_ALLOW_CAST=1",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_trainer_that_does_not_fit_is_refused(
    case: str, engines: EnginePool, trainers: TrainerPool
) -> None:
    generator, errors, message = REFUSALS[case]
    served = engines.get(DENSE_TP2)
    before = untouched(served)
    group = trainers.get(MODEL, Layout(tp=2), seed=1)
    group.attach(SETTINGS, on_step=False, engines=[served.address], generator=generator)
    with pytest.raises(errors, match=message):
        group.on_all(lambda rank: rank.sync.sync("refused"))
    assert untouched(served) == before


def test_a_lossless_cast_needs_no_permission_and_a_lossy_one_does(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=2)
    allowed = SETTINGS.replace(allow_cast=True)
    group.attach(allowed, on_step=False, engines=[served.address], generator=_wrong_dtype)
    group.on_all(lambda rank: rank.sync.sync("cast"))
    assert_engine_holds(MODEL, group.weights(), served)  # the float32 values were bf16 ones


def test_no_engine_there(engines: EnginePool, trainers: TrainerPool) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=3)
    group.attach(SETTINGS, on_step=False, engines=["127.0.0.1:9"])
    with pytest.raises(
        EngineNotFoundError, match=rf"no engine at 127\.0\.0\.1:9 .*{served.address}"
    ):
        group.on_all(lambda rank: rank.sync.connect())


def test_an_engine_without_the_ray_back_end() -> None:
    plain = types.SimpleNamespace(_scheduler_init_result=types.SimpleNamespace())
    with pytest.raises(NotRayBackendError, match="RayEngine"):
        engine_of(plain)


def test_several_engines_and_none_named(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engines.get(DENSE_TP2).engine
    monkeypatch.setattr(discovery, "find_engines", lambda *a, **k: [one, one])
    with pytest.raises(AmbiguousEngineError, match="2 engines are running"):
        discovery.engine_at()


def test_pull_weights_outside_of_a_sync_is_refused(engines: EnginePool) -> None:
    import ray

    served = engines.get(DENSE_TP2)
    with pytest.raises(EngineStateError, match="not in a weight sync"):
        ray.get(served.engine.actors[0].pull_weights.remote([None], ["lm_head.weight"]), timeout=60)


def test_a_second_owner_is_refused_by_name(engines: EnginePool, trainers: TrainerPool) -> None:
    import ray

    from sglang_rdt.engine.sync_request import SyncRequest

    served = engines.get(DENSE_TP2)
    first = SyncRequest("one", "host-a:1", "sync")
    served.engine.call("begin_sync", first, timeout_s=60, phase="begin")
    try:
        second = SyncRequest("two", "host-b:2", "sync")
        with pytest.raises(EngineStateError, match="is in sync one of host-a:1"):
            ray.get(served.engine.actors[0].begin_sync.remote(second), timeout=60)
    finally:
        states = served.engine.call("abort_sync", "one", "test", timeout_s=60, phase="abort")
    assert states == ["current", "current"]
    assert len(served.generate(proof.PROMPT, 2)[0]) == 2


def _other_bytes_every_time(rank: Any) -> Any:
    """A source that cannot pass verify=equal: it yields other bytes each time."""
    count = rank.__dict__.setdefault("exports", 0)
    rank.exports = count + 1
    state = rank.trainer.reference_hf_state()
    state[LAST] = state[LAST] + count
    return state.items()


def _user_continues(host: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    manager = host.engine.tokenizer_manager
    host.engine.loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))


def _raises_on_rank_1(rank: Any) -> Any:
    count = rank.__dict__.setdefault("exports", 0)
    rank.exports = count + 1
    for i, item in enumerate(rank.trainer.reference_hf_state().items()):
        if count and i == 5 and rank.trainer.rank == 1:
            raise ValueError("no more today")
        yield item


def test_an_export_that_raises_on_one_rank_is_named_on_all(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=5)
    group.attach(SETTINGS, on_step=False, engines=[served.address], generator=_raises_on_rank_1)
    with pytest.raises(
        SyncError, match="export failed on trainer rank 1: ValueError: no more today"
    ):
        group.on_all(lambda rank: rank.sync.sync("half"))
    group.attach(SETTINGS, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("again"))
    assert_engine_holds(MODEL, group.weights(), served)
    assert served.generate(proof.PROMPT, 1)[1] == "again"


def test_bytes_that_differ_leave_a_dirty_engine_that_only_a_full_sync_heals(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    label = served.generate(proof.PROMPT, 1)[1]
    group = trainers.get(MODEL, Layout(tp=2), seed=4)
    strict = SETTINGS.replace(verify="equal")
    group.attach(strict, on_step=False, engines=[served.address], generator=_other_bytes_every_time)
    with pytest.raises(SyncError, match=r"down_proj\.weight at element 0: \d+ of \d+ bytes differ"):
        group.on_all(lambda rank: rank.sync.sync("torn"))
    for status in served.engine.status():
        assert status.state == "dirty"
        assert status.version == label
        assert "sync-torn" in status.detail
    # It serves nothing, not even if its user resumes it: a request waits.
    served._get(served.host.call.remote(_user_continues))
    waiting = served.start_generate(proof.PROMPT, 3)
    import ray

    done, _ = ray.wait([waiting], timeout=2.0)
    assert not done
    group.attach(SETTINGS, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("whole"))
    assert_engine_holds(MODEL, group.weights(), served)
    tokens, version = served._get(waiting)
    assert (len(tokens), version) == (3, "whole")
    assert {s.state for s in served.engine.status()} == {"current"}
