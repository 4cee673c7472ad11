"""Which model a sync is about: the target, the draft, or both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt.engine import live_weights, runners
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.engine.sync_request import SyncRequest, check
from sglang_rdt.errors import EngineStateError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.specs import EngineRankLayout, TensorSpec

from .builders import engine_rank, rect
from .ranks import Engine

SPECS = [
    TensorSpec("embed", (4, 2), "float32"),
    TensorSpec("layers.0", (3, 2), "float32"),
    TensorSpec("layers.1", (3, 2), "float32"),  # the draft's
    TensorSpec("layers.1.embed", (4, 2), "float32"),  # a copy, as some checkpoints have it
]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class TargetModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = weight(4, 2), weight(3, 2)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data.copy_(tensor)
            elif name == "layers.0":
                self.layer.data.copy_(tensor)


class DraftModel(nn.Module):
    """Shares the embedding; its loader fills it all the same."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.embed, self.layer = target.embed, weight(3, 2)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name.endswith("embed"):
                self.embed.data.copy_(tensor)
            elif name == "layers.1":
                self.layer.data.copy_(tensor)


class Runner:
    def __init__(self, model: nn.Module, log: list[str]) -> None:
        self.model = model
        self.weight_updater = SimpleNamespace(
            begin_weight_update=lambda: log.append(f"begin {type(model).__name__}"),
            end_weight_update=lambda run_post_load: log.append(f"end {type(model).__name__}"),
        )


def scheduler(draft: bool = True, path: str | None = "model", log: list[str] | None = None) -> Any:
    log = [] if log is None else log
    target = TargetModel()
    model_runner = Runner(target, log)
    drafted = Runner(DraftModel(target), log)

    def select(selector: str = "all") -> list[tuple[str, Runner]]:
        both = [("target", model_runner)] + ([("draft", drafted)] if draft else [])
        return [one for one in both if selector in ("all", one[0])]

    worker = SimpleNamespace(weight_update_runners=lambda: [("draft", drafted)]) if draft else None
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=model_runner),
        weight_updater=SimpleNamespace(
            draft_worker=worker,
            _session=None,
            _select_runners=select,
            begin_weight_update=lambda: None,
        ),
        server_args=SimpleNamespace(model_path="model", speculative_draft_model_path=path),
    )


def weights_of(made: Any, runner: str) -> LiveWeights:
    return LiveWeights(runners.select(made, runner, "engine tp0"), "engine tp0")


@pytest.fixture(autouse=True)
def no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_weights.nixl, "register", lambda tensors: len(list(tensors)))
    monkeypatch.setattr(live_weights.nixl, "deregister", lambda tensors: None)


def found(made: Any, runner: str, *exclude: str) -> tuple[dict[str, str], list[str]]:
    """What is written (parameter -> HF tensor), and what is wrong with it."""
    weights = weights_of(made, runner)
    recording = weights.record(SPECS, exclude)
    layout = EngineRankLayout(engine_rank(), tuple(weights.describe()), recording)
    specs = {s.name: s for s in SPECS}
    problems = coverage.check_rank(layout, specs) + coverage.check_engine([layout], specs)
    return {w.param: w.source for w in recording.wants}, problems


def test_the_target_alone() -> None:
    written, problems = found(scheduler(), "target", "layers.1", "layers.1.embed")
    assert written == {"embed": "embed", "layer": "layers.0"}
    assert problems == []
    # What the trainer has for a draft goes nowhere, and is named.
    assert [p.split("tensor ")[1].split()[0] for p in found(scheduler(), "target")[1]] == [
        "layers.1",
        "layers.1.embed",
    ]


def test_both_and_what_they_share_is_the_targets() -> None:
    written, problems = found(scheduler(), "both")
    assert written == {"embed": "embed", "layer": "layers.0", "draft:layer": "layers.1"}
    assert problems == []


def test_the_draft_alone_leaves_what_it_shares() -> None:
    made = scheduler()
    written, problems = found(made, "draft", "layers.0")
    assert written == {"draft:layer": "layers.1"}
    assert problems == []
    assert found(made, "draft")[1] == [
        "10.0.0.1:30000: HF tensor layers.0 float32[3, 2] goes nowhere"
    ]
    weights = weights_of(made, "draft")
    weights.record(SPECS, ["layers.0"])
    assert weights.overwrite() == 24
    assert not made.tp_worker.model_runner.model.embed.any()
    assert set(weights.checksums()) == {"draft:layer"}


def test_what_an_engine_has_is_described() -> None:
    assert runners.describe(scheduler()) == "target, draft (own: 24 B; of the target: embed)"
    assert runners.describe(scheduler(draft=False)) == "target"
    old = scheduler()
    old.weight_updater.draft_worker = SimpleNamespace()
    assert runners.describe(old) == "target, draft"


@pytest.mark.parametrize(
    ("made", "runner", "why"),
    [
        (scheduler(draft=False), "draft", "no draft model that can be updated"),
        (scheduler(draft=False), "both", "no draft model that can be updated"),
        (scheduler(path="eagle"), "both", r"checkpoint of its own \(eagle\)"),
    ],
)
def test_what_cannot_be_synced(made: Any, runner: str, why: str) -> None:
    with pytest.raises(EngineStateError, match=why):
        runners.select(made, runner, "engine tp0")


def test_before_there_were_sessions() -> None:
    made = scheduler()
    made.weight_updater.draft_worker = SimpleNamespace()
    with pytest.raises(EngineStateError, match=r"needs SGLang 0\.5\.21"):
        runners.select(made, "both", "engine tp0")
    assert runners.select(made, "target", "engine tp0") is made.tp_worker.model_runner.model


def test_a_pipeline_stage_without_the_draft() -> None:
    made = scheduler(draft=False)
    made.server_args.pp_size, made.server_args.speculative_algorithm = 2, "NEXTN"
    assert runners.select(made, "both", "engine tp0") is made.tp_worker.model_runner.model
    made.server_args.speculative_algorithm = None
    with pytest.raises(EngineStateError, match="no draft model"):
        runners.select(made, "both", "engine tp0")


def test_a_draft_of_its_own_is_synced_when_asked_for() -> None:
    assert found(scheduler(path="eagle"), "draft", "layers.0")[1] == []


def test_a_request_for_no_runner_is_refused() -> None:
    with pytest.raises(EngineStateError, match="a sync request with runner 'all'"):
        check(SyncRequest("s", "o", "sync", runner="all"))  # type: ignore[arg-type]


@pytest.fixture
def real_session(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        _WeightUpdateSession=lambda selector: SimpleNamespace(
            selector=selector, loaded_weights=False
        )
    )
    name = "sglang.srt.managers.scheduler_components.weight_updater"
    for part in ("sglang", "sglang.srt", "sglang.srt.managers", name.rpartition(".")[0], name):
        monkeypatch.setitem(__import__("sys").modules, part, module)  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", ["target", "draft", "both"])
@pytest.mark.usefixtures("real_session")
def test_the_session_is_of_the_runners_that_are_synced(runner: str) -> None:
    log: list[str] = []
    control = SchedulerControl(scheduler(log=log), "engine tp0", label_replies=False)
    control.begin_session(runners.SELECTORS[runner])
    control.end_session()
    names = {"target": ["TargetModel"], "draft": ["DraftModel"]}.get(
        runner, ["TargetModel", "DraftModel"]
    )
    assert log == [f"{what} {name}" for what in ("begin", "end") for name in names]


@pytest.mark.usefixtures("real_session")
def test_a_session_of_another_runner_is_not_taken_over() -> None:
    control = SchedulerControl(scheduler(), "engine tp0", label_replies=False)
    control.begin_session("target")
    control.begin_session("target")
    with pytest.raises(EngineStateError, match="a session of 'target' is open"):
        control.begin_session("all")
    control.end_session()
    control.begin_session("all")
    control.begin_session("target")


# Whole sessions

TINY = [
    TensorSpec("w", (4, 3), "float32"),
    TensorSpec("e", (2, 2), "float32"),
    TensorSpec("d", (2,), "float32"),
]


class TinyDraft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = weight(2)

    def load_weights(self, weights: Any) -> None:
        self.d.data.copy_(dict(weights)["d"])


@pytest.fixture
def engine(empty_inbox: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    def pull(ref: list[Any], targets: list[torch.Tensor], timeout_s: float) -> None:
        for value, target in zip(ref, targets, strict=True):
            if isinstance(value, Exception):
                raise value
            target.copy_(value)

    monkeypatch.setattr(live_weights.nixl, "pull", pull)
    made = Engine(2)
    for rank in made.ranks:
        rank.control.drafts.append(TinyDraft())
    yield made
    made.stop()
    assert made.loops.crashes == []


def good(outcomes: list[Any]) -> bool:
    return not any(isinstance(o, Exception) for o in outcomes)


def connect(engine: Engine, runner: str, *kept: str) -> list[Any]:
    assert good(engine.begin(f"c {runner}", "connect", flush=False, runner=runner))
    described = engine.call("describe")
    assert good(engine.call("record_load", f"c {runner}", TINY, kept))
    assert good(engine.call("end_sync", f"c {runner}", None))
    engine.settle()
    return [[p.name for p in params] for params in described]


NUMBERS = itertools.count()


def sync(engine: Engine, runner: str, values: dict[str, Any]) -> bool:
    where = {
        "w": "w",
        "e": Target("e", rect((3, 2), (0, 2)), "float32", 0),
        "draft:d": "draft:d",
    }
    name = f"s{next(NUMBERS)}"
    assert good(engine.begin(name, runner=runner))
    targets = [where[name] for name in values]
    done = engine.call("pull_weights", [list(values.values())], targets, name)
    if not good(done):
        engine.call("abort_sync", name, "torn")
        return False
    assert good(engine.call("finalise", name, False))
    assert good(engine.call("end_sync", name, "v"))
    engine.settle()
    return True


TARGET = {"w": torch.full((4, 3), 7.0), "e": torch.full((2, 2), 8.0)}
DRAFT = {"draft:d": torch.full((2,), 9.0)}


def drafted(engine: Engine) -> list[float]:
    return [float(rank.control.drafts[0].d[0]) for rank in engine.ranks]  # type: ignore[index, arg-type]


def test_syncs_of_each_runner(engine: Engine) -> None:
    assert connect(engine, "target", "d") == [["w", "e"]] * 2
    assert sync(engine, "target", TARGET)
    assert drafted(engine) == [0.0, 0.0]
    assert connect(engine, "both") == [["w", "e", "draft:d"]] * 2
    assert sync(engine, "both", {**TARGET, **DRAFT})
    assert drafted(engine) == [9.0, 9.0]
    assert connect(engine, "draft", "w", "e") == [["draft:d"]] * 2
    assert sync(engine, "draft", {"draft:d": torch.full((2,), 3.0)})
    assert drafted(engine) == [3.0, 3.0]
    assert torch.equal(engine.ranks[0].model.w, TARGET["w"])
    assert set(engine.ranks[0].control.selectors) == {"target", "draft", "all"}
    # A sync of something else than what was connected is refused.
    for error in engine.begin("other", runner="both"):
        assert "was connected for runner 'draft'" in str(error)


def test_a_draft_does_not_mend_a_torn_target(engine: Engine) -> None:
    connect(engine, "target", "d")
    assert not sync(engine, "target", {"w": RuntimeError("link down"), "e": TARGET["e"]})
    assert engine.states == ["dirty", "dirty"]
    connect(engine, "draft", "w", "e")
    for error in engine.begin("other", runner="draft"):
        assert "a sync of the draft does not mend the target" in str(error)
    connect(engine, "target", "d")
    assert sync(engine, "target", TARGET)
    assert engine.states == ["current", "current"]


def test_without_a_draft_there_is_nothing_to_connect(engine: Engine) -> None:
    for rank in engine.ranks:
        rank.control.drafts.clear()
    for error in engine.begin("c", "connect", runner="both"):
        assert isinstance(error, EngineStateError)
        assert "has no draft" in str(error)
    assert engine.states == ["current", "current"]
