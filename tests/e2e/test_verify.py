"""Verification finds what it is there for, and cannot pass where nothing was copied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from sglang_rdt.demo import proof
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.errors import EngineStateError, PlanError, SyncError
from sglang_rdt.plan import report as report_module
from tests.e2e.conftest import DENSE_TP2, EnginePool, TrainerPool
from tests.e2e.steps import SETTINGS, assert_engine_holds, assert_engine_serves

pytestmark = pytest.mark.e2e

MODEL = DENSE_TP2.model
FIRST = "model.layers.0.mlp.down_proj.weight"
LAST = "model.layers.1.mlp.down_proj.weight"
# What is done to one engine rank's weights after the bytes landed -> parameters that must be named.
FAULTS = {"flipped bit": [LAST], "swapped": [FIRST, LAST], "dropped": [LAST], "nothing": [LAST]}


def sabotage(actor: Any, fault: str) -> None:
    """Installs ``fault`` for one sync; ``""`` takes it away."""
    import torch

    weights = actor._session.weights
    for name in ("checksums", "apply_constants", "read", "pull"):
        weights.__dict__.pop(name, None)
    if not fault:
        return
    first, last = weights._tensors[FIRST], weights._tensors[LAST]
    before = last.clone()
    checksums, constants = weights.checksums, weights.apply_constants
    done: list[bool] = []

    def tamper() -> None:
        if done:
            return
        done.append(True)
        with torch.no_grad():
            if fault == "flipped bit":
                last.view(torch.int16).view(-1)[77] ^= 1
            elif fault == "swapped":
                other = first.clone()
                first.copy_(last)
                last.copy_(other)
            elif fault == "dropped":
                last.copy_(before)

    if fault == "nothing":
        weights.read = lambda *args, **kwargs: 1
        weights.pull = lambda *args, **kwargs: 1
        return
    # Checksums are taken before the session ends, bytes are compared after it.
    weights.checksums = lambda: (tamper(), checksums())[1]
    weights.apply_constants = lambda: (tamper(), constants())[1]


def attempt(rank: Any, version: str) -> str:
    try:
        rank.sync.sync(version)
    except SyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
@pytest.mark.parametrize("verify", ["checksum", "equal"])
def test_every_fault_is_found_and_named(
    verify: Any, mode: Any, engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=51)
    group.attach(
        SETTINGS.replace(mode=mode, verify=verify), on_step=False, engines=[served.address]
    )
    group.on_all(attempt, "whole")
    for fault, named in FAULTS.items():
        numbers, _ = group.step()  # or what was dropped would be right
        assert numbers["updated"]
        ray.get(served.engine.actors[1].__ray_call__.remote(sabotage, fault), timeout=30)
        for message in group.on_all(attempt, "torn"):
            assert re.search(
                "checksums differ" if verify == "checksum" else "bytes differ", message
            )
            assert "verify: " in message, fault
            assert f"{served.engine.ranks[1]}: {named[0]}" in message, fault
            for name in named:
                assert name in message, fault
            assert f"{served.engine.ranks[0]}: model" not in message
        assert served.engine.state()[0] == "dirty"
        assert {s.version for s in served.engine.status()} == {"whole"}
        ray.get(served.engine.actors[1].__ray_call__.remote(sabotage, ""), timeout=30)
        assert set(group.on_all(attempt, "whole")) == {""}
        assert served.engine.state() == ("current", "")
    assert_engine_holds(MODEL, group.weights(), served)


@pytest.mark.parametrize(
    ("every", "expected"), [(1, "cccccc"), (2, "c.c.c."), (3, "c..c.."), (0, "c.....")]
)
@pytest.mark.parametrize("mode", ["direct", "bucketed"])
def test_the_schedule(
    mode: Any, every: int, expected: str, engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=52)
    group.attach(
        SETTINGS.replace(mode=mode, verify_every=every), on_step=False, engines=[served.address]
    )

    def syncs(rank: Any) -> str:
        done = [rank.sync.sync(i).verified for i in range(6)]
        return "".join({"checksum": "c", "off": "."}[d] for d in done)

    assert set(group.on_all(syncs)) == {expected}
    group.on_all(lambda rank: rank.sync.connect())
    assert {r.verified for r in group.on_all(lambda rank: rank.sync.sync("again"))} == {"checksum"}
    assert_engine_holds(MODEL, group.weights(), served)


def test_its_user_may_have_a_dirty_engine_go_on(engines: EnginePool, trainers: TrainerPool) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=53)
    group.attach(SETTINGS, on_step=False, engines=[served.address])
    group.on_all(attempt, "whole")
    with pytest.raises(Exception, match="current, not dirty"):
        served.engine.accept("never")
    ray.get(served.engine.actors[0].__ray_call__.remote(sabotage, "flipped bit"), timeout=30)
    assert all(group.on_all(attempt, "torn"))
    ray.get(served.engine.actors[0].__ray_call__.remote(sabotage, ""), timeout=30)
    waiting = served.start_generate(proof.PROMPT, 3)
    assert not ray.wait([waiting], timeout=1.0)[0]
    served.engine.accept("torn, I know")
    assert served._get(waiting)[1] == "torn, I know"
    assert served.engine.state() == ("current", "")
    assert set(group.on_all(attempt, "healed")) == {""}
    assert_engine_holds(MODEL, group.weights(), served)
    assert served.generate(proof.PROMPT, 2)[1] == "healed"


def test_a_second_trainer_waits_for_the_end_of_the_first(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    first = trainers.get(MODEL, Layout(tp=2), seed=54)
    first.attach(SETTINGS, on_step=False, engines=[served.address])
    assert set(first.on_all(attempt, "mine")) == {""}
    second = trainers.beside(MODEL, Layout(), seed=55)
    second.attach(SETTINGS, on_step=False, engines=[served.address])
    with pytest.raises(EngineStateError, match=r"connected to trainer .*, which still runs"):
        second.on_all(lambda rank: rank.sync.sync("theirs"))
    assert set(first.on_all(attempt, "mine again")) == {""}
    assert_engine_holds(MODEL, first.weights(), served)

    # By order: the first is told.
    second.attach(SETTINGS.replace(takeover=True), on_step=False, engines=[served.address])
    assert second.on_all(attempt, "taken") == [""]
    for message in first.on_all(attempt, "mine?"):
        assert re.search(r"is connected to trainer .* since, and takes nothing from", message)
        assert "(the engine is current)" in message
    assert_engine_holds(MODEL, second.weights(), served)
    assert served.generate(proof.PROMPT, 1)[1] == "taken"

    # Killed, not closed: Ray knows.
    second.stop()
    trainers.forget(Layout().world)
    assert set(first.on_all(attempt, "mine once more")) == {""}
    assert_engine_holds(MODEL, first.weights(), served)


# Whole parameters, a slice of a fused one (of q, k and v), and one with a padded vocabulary.
FROZEN = ("*.mlp.*", "*.k_proj.weight", "model.embed_tokens.weight")


def assert_report(
    found: report_module.Report, mode: str, live: Sequence[dict[str, Any]], nbytes: int
) -> None:
    """Every byte of every parameter goes one way, and what moves is what was moved."""
    assert found.mode == mode
    assert found.moved == nbytes
    for rank, weights in enumerate(live):
        here = [line for line in found.lines if line.rank.endswith(f"tp{rank}")]
        sizes: dict[str, int] = {}
        for line in here:
            sizes[line.param] = sizes.get(line.param, 0) + line.nbytes
            assert line.way in ("direct", "staged", "kept") or mode == "bucketed"
        for name, tensor in weights.items():
            if "rotary" not in name:
                assert sizes[name] == tensor.numel() * tensor.element_size(), name
        fused = {line.way: line.sources for line in here if "1.self_attn.qkv_proj" in line.param}
        assert fused.pop("kept") == ("model.layers.1.self_attn.k_proj.weight",)
        (moved,) = fused.values()
        assert sorted(name.split(".")[-2] for name in moved) == ["q_proj", "v_proj"]
    assert found.totals()["kept"][1] > 0


@pytest.mark.parametrize(("mode", "verify"), [("direct", "equal"), ("bucketed", "checksum")])
def test_what_is_frozen_stays_as_it_is(
    mode: Any, verify: Any, engines: EnginePool, trainers: TrainerPool, tmp_path: Path
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=61)
    settings = SETTINGS.replace(mode=mode, verify=verify)
    group.attach(settings, on_step=False, engines=[served.address])
    assert set(group.on_all(attempt, "whole")) == {""}
    old, before = group.weights(), served.weights()
    for _ in range(2):
        numbers, _ = group.step()
        assert numbers["updated"]
    new = group.weights()
    frozen = {n for n in new if any(fnmatchcase(n, pattern) for pattern in FROZEN)}
    assert len(frozen) == 2 * 4 + 1
    assert all(not torch.equal(old[n], new[n]) for n in frozen), "or nothing would be proved"

    group.attach(
        settings.replace(plan_report=str(tmp_path / "plan.json")),
        on_step=False,
        engines=[served.address],
        exclude=list(FROZEN),
    )
    chosen = {str(sorted(c.selection.kept)) for c in group.on_all(lambda r: r.sync.connect())}
    assert chosen == {str(sorted(frozen))}
    reports = group.on_all(lambda rank: rank.sync.sync("part"))
    for report in reports:
        assert report.verified == verify
        assert f"kept {len(frozen)} of {len(new)} HF tensors, " in report.line()
        assert report.selection.kept_bytes == sum(2 * new[n].numel() for n in frozen)
    state = {n: old[n] if n in frozen else new[n] for n in new}
    assert_engine_holds(MODEL, state, served)
    assert_engine_serves(MODEL, state, served, "part", tmp_path / "part")
    for was, now in zip(before, served.weights(), strict=True):
        for name in was:
            alone = ".mlp." in name or "embed_tokens" in name or "rotary" in name
            assert torch.equal(was[name], now[name]) == alone, name
    assert_report(report_module.load(tmp_path / "plan.json"), mode, before, reports[0].nbytes)

    # Without the filter, all of it comes.
    group.attach(settings, on_step=False, engines=[served.address])
    assert set(group.on_all(attempt, "whole again")) == {""}
    assert_engine_holds(MODEL, new, served)


def test_a_filter_of_nothing_is_refused_before_the_engine_hears_of_it(
    engines: EnginePool, trainers: TrainerPool
) -> None:
    served = engines.get(DENSE_TP2)
    group = trainers.get(MODEL, Layout(tp=2), seed=62)
    for how in ({"include": ["*.lora_A.*"]}, {"exclude": ["*"]}, {"exclude": ["lm_haed.*"]}):
        group.attach(SETTINGS, on_step=False, engines=[served.address], **how)
        with pytest.raises(PlanError, match="name filter") as caught:
            group.on_all(lambda rank: rank.sync.sync("nothing"))
        assert next(iter(how.values()))[0] in str(caught.value)
    assert served.engine.state() == ("current", "")
    group.attach(SETTINGS, on_step=False, engines=[served.address], runner="draft")
    with pytest.raises(EngineStateError, match="no draft model that can be updated"):
        group.on_all(lambda rank: rank.sync.sync("nothing"))
    assert served.engine.state() == ("current", "")
    assert {rank.runners for rank in served.engine.ranks} == {"target"}
