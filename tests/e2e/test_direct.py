"""Direct mode: what is read out of live memory, how, and what may happen meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from sglang_rdt.demo import proof
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.errors import ExportError, PlanError, RdtError, SyncError
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.transport import nixl
from tests.e2e.conftest import DENSE_TP2, MOE_TP2, EngineKey, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, sync_and_check

pytestmark = pytest.mark.e2e

MODEL = DENSE_TP2.model
DIRECT = SETTINGS.replace(mode="direct")


def _down(rank: Any, layer: int) -> Any:
    from megatron_rdt.sources.mbridge import unwrap

    return unwrap(rank.trainer.model_chunks[0]).decoder.layers[layer].mlp.linear_fc2.weight


def _facts(rank: Any) -> dict[str, Any]:
    plan = rank.sync.connect()
    return {
        "mode": rank.sync.mode,
        "staged": plan.staged_bytes,
        "staging": rank.sync.staging_bytes,
        "nbytes": plan.nbytes,
    }


def test_nothing_is_staged_where_layouts_meet(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=31)
    group.attach(DIRECT, engines=[served.address])
    for facts in group.on_all(_facts):
        assert facts["mode"] == "direct"
        assert facts["staging"] == 0
        assert facts["staged"]["pack"] == facts["staged"]["unpack"] == 0
        assert facts["staged"]["direct"] == facts["nbytes"] > 270_000
    sync_and_check(MODEL, group, served, tmp_path)


def test_one_flipped_byte_is_found(engines: EnginePool, trainers: TrainerPool) -> None:
    """``equal`` reads again and looks: here the source changed in between."""
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=33)
    group.attach(DIRECT.replace(verify="equal"), on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("whole"))

    def tear(rank: Any) -> str:
        mover = rank.sync._link._mover
        compare = mover.compare

        def late(*args: Any) -> Any:
            weight = _down(rank, 1)
            with torch.no_grad():
                weight.view(-1)[7] += 1
            return compare(*args)

        mover.compare = late
        try:
            rank.sync.sync("torn")
        except SyncError as error:
            return str(error)
        finally:
            mover.compare = compare
        return ""

    for message in group.on_all(tear):
        assert "model.layers.1.mlp.down_proj.weight" in message
        assert "dirty" in message
    assert {s.version for s in served.engine.status()} == {"whole"}
    group.on_all(lambda rank: rank.sync.sync("whole again"))
    assert {s.state for s in served.engine.status()} == {"current"}


def test_the_next_step_waits_for_the_sync_under_way(
    engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=34)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("before"))
    before = group.weights()

    def overlap(rank: Any) -> dict[str, float]:
        coordinator = rank.sync._link.coordinator
        if coordinator is not None:
            start = coordinator.start_syncs

            def slow(*args: Any, **kwargs: Any) -> Any:
                time.sleep(1.5)  # the step below would come first
                return start(*args, **kwargs)

            coordinator.start_syncs = slow
        began = time.perf_counter()
        assert rank.sync.sync("during", wait=False) is None
        returned = time.perf_counter() - began
        assert rank.trainer.step()["updated"]
        stepped = time.perf_counter() - began
        if coordinator is not None:
            del coordinator.start_syncs
        assert rank.sync.wait() is None  # the step has waited
        return {"returned": returned, "stepped": stepped, "report": rank.sync.last_report.version}

    for times in group.on_all(overlap):
        assert times["returned"] < 1.0 < 1.5 <= times["stepped"]
        assert times["report"] == "during"
    # The engine has what was there when the sync began, not what the step made of it.
    assert_engine_holds(MODEL, before, served)
    assert served.generate(proof.PROMPT, 2)[1] == "during"
    after = group.weights()
    assert any(not torch.equal(before[n], after[n]) for n in before)
    group.on_all(lambda rank: rank.sync.sync("after"))
    assert_engine_holds(MODEL, after, served)


def test_every_step_overlaps_where_it_was_asked_for(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(dp=2), seed=35, distributed_optimizer=True)
    group.attach(DIRECT.replace(overlap=True), engines=[served.address])
    for step in ("1", "2", "3"):
        numbers, _ = group.step()
        assert numbers["updated"]
        state = group.weights()
        reports = group.on_all(lambda rank: rank.sync.wait())
        assert {r.version for r in reports} == {step}
        assert_engine_holds(MODEL, state, served)


def test_a_failed_sync_under_way_stops_the_next_step(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=36)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("fine"))

    def fail(rank: Any) -> tuple[str, bool]:
        before = [p.detach().clone() for p in rank.trainer.model_chunks[0].parameters()]
        mover = rank.sync._link._mover
        rank.sync._link._mover = type(
            "Broken",
            (),
            {"begins": False, "move": lambda *a: 1 / 0, "close": lambda self: mover.close()},
        )()
        rank.sync.sync("lost", wait=False)
        message = ""
        try:
            rank.trainer.step()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        after = rank.trainer.model_chunks[0].parameters()
        return message, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    for message, unchanged in group.on_all(fail):
        assert "ZeroDivisionError" in message
        assert unchanged
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", "fine")}
    group.on_all(lambda rank: rank.sync.sync("next"))
    assert_engine_holds(MODEL, group.weights(), served)


def test_parameters_that_moved_are_registered_again(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=37)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("first"))

    def move(rank: Any) -> int:
        if rank.sync._group.leads:  # one rank is enough for all to notice
            weight = _down(rank, 0)
            weight.data = weight.data.clone() + 1
        rank.sync.sync("moved")
        return nixl.registrations()

    before = group.on_all(lambda rank: nixl.registrations())
    # The old place is given back, the new one registered.
    assert group.on_all(move) == before
    assert_engine_holds(MODEL, group.weights(), served)


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
def test_a_parameter_that_was_replaced_is_followed(
    mode: Any, engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=41)
    group.attach(SETTINGS.replace(mode=mode), on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("first"))

    def put_another(rank: Any) -> None:
        from megatron_rdt.sources.mbridge import unwrap

        linear = unwrap(rank.trainer.model_chunks[0]).decoder.layers[0].mlp.linear_fc2
        new = torch.nn.Parameter(linear.weight.data.clone() + 1)
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(new, name, getattr(linear.weight, name))
        linear.weight = new
        rank.sync.sync("another")

    group.on_all(put_another)
    assert_engine_holds(MODEL, group.weights(), served)


def test_one_rank_that_cannot_read_keeps_the_others_from_writing(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=42)
    group.attach(DIRECT, on_step=False, engines=[served.address])
    group.on_all(lambda rank: rank.sync.sync("fine"))
    before = served.weights()

    def forget(actor: Any) -> None:
        actor._session.weights._connection = "somebody else's"

    ray.get(served.engine.actors[1].__ray_call__.remote(forget), timeout=30)
    started = time.monotonic()

    def refused(rank: Any) -> str:
        try:
            rank.sync.sync("refused")
        except SyncError as error:
            return str(error)
        return ""

    for message in group.on_all(refused):
        assert "no direct reads are prepared" in message
    assert time.monotonic() - started < 30
    assert {(s.state, s.version) for s in served.engine.status()} == {("current", "fine")}
    after = served.weights()
    assert all(torch.equal(b[n], a[n]) for b, a in zip(before, after, strict=True) for n in b)
    group.on_all(lambda rank: rank.sync.sync("again"))
    assert_engine_holds(MODEL, group.weights(), served)


def test_direct_by_order_needs_a_source_that_knows_its_memory(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(), seed=38)
    settings = {"direct": DIRECT, "auto": SETTINGS}
    for mode in settings:
        group.attach(
            settings[mode],
            on_step=False,
            engines=[served.address],
            generator=lambda rank: rank.trainer.reference_hf_state().items(),
        )
        if mode == "direct":
            with pytest.raises(ExportError, match="GeneratorSource does not say where"):
                group.on_all(lambda rank: rank.sync.connect())
        else:
            group.on_all(lambda rank: rank.sync.sync("in buckets"))
            assert group.on_all(lambda rank: rank.sync.mode) == ["bucketed"]
            # It would gather over the groups that training uses.
            with pytest.raises(RdtError, match="is for direct mode"):
                group.on_all(lambda rank: rank.sync.sync("never", wait=False))


@pytest.mark.parametrize("mode", ["direct", "auto"])
def test_what_cannot_be_planned_goes_in_buckets_unless_direct_was_ordered(
    mode: Any, engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=40)
    group.attach(SETTINGS.replace(mode=mode), on_step=False, engines=[served.address])

    def without_direct_plans(rank: Any) -> str:
        from sglang_rdt.coordinator import coordinator

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PlanError("trainer and engines do not fit together", ["w: an expanded source"])

        original, coordinator.make_direct_plan = coordinator.make_direct_plan, refuse
        try:
            rank.sync.sync("anyhow")
        except PlanError as error:
            return str(error)
        finally:
            coordinator.make_direct_plan = original
        return str(rank.sync.mode)

    said = group.on_all(without_direct_plans)
    if mode == "direct":
        assert all("an expanded source" in text for text in said)
        assert served.generate(proof.PROMPT, 2)[1] != "anyhow"
    else:
        assert said == ["bucketed", "bucketed"]
        assert_engine_holds(MODEL, group.weights(), served)


def test_without_the_step_hook_no_sync_goes_on_alone(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(), seed=39)
    group.attach(DIRECT, on_step=False, engines=[served.address])

    def unguarded(rank: Any) -> None:
        from megatron_rdt import hooks

        hooks._instrumented = False
        try:
            rank.sync.sync("never", wait=False)
        finally:
            hooks._instrumented = True

    with pytest.raises(RdtError, match="needs the patch `optimizer_step`"):
        group.on_all(unguarded)


# Descriptors so dear that whatever has rows is staged, in rounds of a small bucket.
STAGING = {
    "packed": (DENSE_TP2, Layout()),
    "unpacked": (EngineKey(MODEL, 1), Layout(tp=2)),
    "packed experts": (MOE_TP2, Layout(tp=2, ep=2, etp=1)),
}


@pytest.mark.parametrize("verify", ["checksum", "equal"])
@pytest.mark.parametrize("case", STAGING)
def test_strided_slices_are_staged(
    case: str, verify: Any, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    key, layout = STAGING[case]
    costs = tmp_path / "costs.json"
    LinkCosts(descriptor_s=1.0, copy_bytes_per_s=1e15).save(costs)
    served = engines.get(key)
    group = trainers.get(key.model, layout, seed=32)
    settings = DIRECT.replace(link_costs=str(costs), bucket_bytes=1 << 16, verify=verify)
    group.attach(settings, engines=[served.address])
    facts = group.on_all(_facts)[0]["staged"]
    assert (facts["unpack"] > 0, facts["pack"] > 0) == (case == "unpacked", case != "unpacked")
    sync_and_check(key.model, group, served, tmp_path, steps=2)
