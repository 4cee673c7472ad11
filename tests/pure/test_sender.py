from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayTaskError

from megatron_rdt import sender as module
from megatron_rdt.sender import RouteSender
from sglang_rdt import checksum
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.errors import DeadlineError, EngineStateError, ExportError
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.planner import Route, make_plan
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import ParamSpec, TensorSpec, Want

from .builders import copy, engine_rank, layout, param, rect, spec, trainer
from .wire import Wire, connect

Weights = dict[str, torch.Tensor]


@dataclass
class Engine:
    """The other end. A pull runs as late as possible: when its result is asked for."""

    params: list[ParamSpec]
    memory: Weights = field(default_factory=dict)
    calls: list[tuple[str, list[Target], str]] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        for p in self.params:
            self.memory[p.name] = torch.full((p.extent,), -1, dtype=getattr(torch, p.dtype))

    def live(self, target: Target) -> torch.Tensor:
        return torch.as_strided(
            self.memory[target.param], target.dst.shape, target.dst.stride, target.dst.offset
        )

    def __getattr__(self, name: str) -> Any:
        if name not in ("pull_weights", "compare_weights"):
            raise AttributeError(name)
        engine = self

        class Method:
            @staticmethod
            def remote(refs: list[list[torch.Tensor]], what: list[Target], sync_id: str) -> Any:
                engine.calls.append((name, what, sync_id))
                return lambda: engine.run(name, refs[0], what)

        return Method

    def run(self, name: str, views: list[torch.Tensor], what: list[Target]) -> Any:
        if self.error is not None:
            raise self.error
        assert len(views) == len(what)
        if name == "compare_weights":
            pairs = zip(views, what, strict=True)
            return [t.param for v, t in pairs if not torch.equal(v, self.live(t))]
        for value, target in zip(views, what, strict=True):
            assert value.shape == target.dst.shape
            self.live(target).copy_(value)
        return sum(v.numel() * v.element_size() for v in views)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = connect(monkeypatch)

    def get(pending: Callable[[], Any], timeout: float) -> Any:
        try:
            return pending()
        except FutureTimeout:
            raise ray.exceptions.GetTimeoutError from None

    monkeypatch.setattr(ray, "get", get)
    return made


P, Q = param("p", (6, 4)), param("q", (4, 6), "float64")
SPECS = [spec("a", (3, 4)), spec("b", (3, 4)), spec("c", (6, 4)), spec("d", (1,))]
WANTS = [
    Want("p", rect((6, 4), (0, 3)), "a", rect((3, 4))),
    Want("p", rect((6, 4), (3, 6)), "b", rect((3, 4))),
    Want("q", Slice(0, (6, 4), (1, 6)), "c", rect((6, 4))),  # transposed, and widened
]
EXTRA = param("r", (5,))
WANTS_D = [*WANTS, Want("r", rect((5,)), "d", Slice(0, (5,), (0,)))]


def weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator) for s in SPECS}


def route(bucket_bytes: int, specs: list[TensorSpec] | None = None) -> Route:
    one = layout([P, Q, EXTRA], WANTS_D, rank=engine_rank(3, engine="e:1"))
    (made,) = make_plan([trainer(0, specs or SPECS)], [one], bucket_bytes).routes
    return made


def make(bucket_bytes: int = 100) -> tuple[RouteSender, Engine]:
    engine = Engine([P, Q, EXTRA])
    sender = RouteSender(route(bucket_bytes), engine, torch.device("cpu"), 5.0)
    return sender, engine


def begin(sender: RouteSender, mode: Any = "pull", sync_id: str = "s1") -> None:
    sender.start(sync_id, mode, checksum=True, timer=PhaseTimer())


def send(sender: RouteSender, hf: Weights, order: str = "abcd") -> None:
    for name in order:
        sender.offer(name, hf[name])
    sender.finish()


def check(engine: Engine, hf: Weights) -> None:
    assert torch.equal(engine.memory["p"].view(6, 4), torch.cat([hf["a"], hf["b"]]))
    assert torch.equal(engine.memory["q"].view(4, 6), hf["c"].double().t())
    assert torch.equal(engine.memory["r"], hf["d"].expand(5))


@pytest.mark.parametrize("bucket_bytes", [8, 16, 20, 40, 100, 192, 1 << 20])
def test_everything_arrives_whatever_the_bucket(wire: Wire, bucket_bytes: int) -> None:
    sender, engine = make(bucket_bytes)
    assert sender.staging_bytes <= bucket_bytes
    assert sender.engine == "e:1"
    hf = weights()
    begin(sender)
    send(sender, hf)
    check(engine, hf)
    assert sender.nbytes == sender.route.nbytes == 24 * 4 + 24 * 8 + 5 * 4
    assert {name for name, _, _ in engine.calls} == {"pull_weights"}
    assert {sync_id for _, _, sync_id in engine.calls} == {"s1"}
    assert len(engine.calls) == len(sender.route.rounds)
    for name, p in (("p", P), ("q", Q), ("r", EXTRA)):
        whole = torch.as_strided(engine.memory[name], p.shape, p.stride)
        assert sender.sums[name] == checksum.slice_sum(whole, 0)


def test_registered_and_put_once_for_all_syncs(wire: Wire) -> None:
    sender, engine = make(40)
    puts = wire.puts
    assert puts == len(sender.route.rounds)
    (bucket,) = wire.registered
    assert bucket.numel() == sender.staging_bytes
    for seed in range(3):
        begin(sender, sync_id=f"s{seed}")
        send(sender, weights(seed))
        check(engine, weights(seed))
        assert sender.nbytes == sender.route.nbytes
    assert wire.puts == puts
    assert wire.registered == [bucket]
    sender.close()
    assert wire.registered == []


def test_rounds_are_completed_by_identity_not_by_count(wire: Wire) -> None:
    sender, engine = make(1 << 20)  # everything in one round
    hf = weights()
    begin(sender)
    for _ in range(10):
        sender.offer("a", hf["a"])
    assert engine.calls == []
    sender.offer("unknown", hf["a"])
    send(sender, hf, "bcd")
    check(engine, hf)


def test_a_repeated_tensor_keeps_its_first_value(wire: Wire) -> None:
    sender, engine = make(1 << 20)
    hf = weights()
    begin(sender)
    sender.offer("a", hf["a"])
    sender.offer("a", hf["a"] + 1)
    send(sender, hf, "bcd")
    check(engine, hf)


def test_a_tensor_larger_than_the_bucket_goes_out_in_one_offer(wire: Wire) -> None:
    sender, engine = make(16)
    hf = weights()
    begin(sender)
    before = 0
    for name in "abcd":
        sender.offer(name, hf[name])
        assert len(engine.calls) > before + 1 or name == "d"
        before = len(engine.calls)
    sender.finish()
    check(engine, hf)


def test_the_bucket_is_not_refilled_before_its_pull_is_done(wire: Wire) -> None:
    # The fake engine reads the bucket only when the result is waited for; see Engine.
    sender, engine = make(48)
    hf = weights()
    begin(sender)
    sender.offer("a", hf["a"])
    assert len(engine.calls) == 1
    assert (engine.memory["p"] == -1).all()
    sender.offer("b", hf["b"])
    assert torch.equal(engine.memory["p"][:12].view(3, 4), hf["a"])


@pytest.mark.parametrize(
    ("offered", "missing"),
    [("", "a"), ("a", "b"), ("ab", "c"), ("abc", "d"), ("bcd", "a"), ("acd", "b")],
)
@pytest.mark.parametrize("bucket_bytes", [48, 1 << 20])
def test_missing_tensors_are_named_at_the_end(
    wire: Wire, offered: str, missing: str, bucket_bytes: int
) -> None:
    sender, _ = make(bucket_bytes)
    begin(sender)
    with pytest.raises(ExportError) as caught:
        send(sender, weights(), offered)
    assert "the export ended without" in str(caught.value)
    assert missing in str(caught.value).split("without ")[1].split(", which")[0].split(", ")
    assert "e:1 dp0_pp0_tp3 waits for" in str(caught.value)


def test_several_missing_tensors_are_all_named(wire: Wire) -> None:
    sender, _ = make(1 << 20)
    begin(sender)
    with pytest.raises(ExportError, match="without a, c, d, which"):
        send(sender, weights(), "b")


def test_another_order_than_announced_is_not_silent(wire: Wire) -> None:
    sender, _ = make(48)
    begin(sender)
    with pytest.raises(ExportError, match="without"):
        send(sender, weights(), "dcba")


def test_a_failed_pull_surfaces_at_the_next_tensor_or_the_end(wire: Wire) -> None:
    for error in (
        EngineStateError("not in a sync"),
        RayTaskError(
            "pull_weights", "trace", EngineStateError("not in a sync")
        ).as_instanceof_cause(),
    ):
        sender, engine = make(48)
        engine.error = error
        hf = weights()
        begin(sender)
        sender.offer("a", hf["a"])
        with pytest.raises(EngineStateError) as caught:
            sender.offer("b", hf["b"])
        assert type(caught.value) is EngineStateError
        sender, engine = make(1 << 20)
        engine.error = error
        begin(sender)
        with pytest.raises(EngineStateError, match="not in a sync"):
            send(sender, hf)


def test_a_late_pull_names_the_engine_rank(wire: Wire) -> None:
    sender, engine = make(1 << 20)
    engine.error = FutureTimeout()
    begin(sender)
    with pytest.raises(DeadlineError, match="e:1 dp0_pp0_tp3 did not finish 'pull' within 5 s"):
        send(sender, weights())


def test_after_a_failure_the_next_sync_starts_from_the_beginning(wire: Wire) -> None:
    sender, engine = make(48)
    begin(sender)
    sender.offer("a", weights()["a"])
    engine.calls.clear()
    begin(sender, sync_id="s2")
    send(sender, weights(5))
    check(engine, weights(5))
    assert sender.nbytes == sender.route.nbytes
    assert {sync_id for _, _, sync_id in engine.calls} == {"s2"}


def test_comparing_collects_differences_and_keeps_the_sums(wire: Wire) -> None:
    sender, engine = make(48)
    hf = weights()
    begin(sender)
    send(sender, hf)
    nbytes, sums = sender.nbytes, dict(sender.sums)
    begin(sender, "compare")
    send(sender, hf)
    assert sender.differences == []
    engine.memory["q"][3] = 0
    begin(sender, "compare")
    send(sender, hf)
    assert set(sender.differences) == {"q"}
    assert (sender.nbytes, sender.sums) == (nbytes, sums)
    assert torch.equal(engine.memory["p"].view(6, 4), torch.cat([hf["a"], hf["b"]]))
    begin(sender)
    assert sender.differences == []


def test_tensors_may_be_strided_views_and_need_gradients(wire: Wire) -> None:
    sender, engine = make(40)
    hf = weights()
    odd = {
        "a": torch.randn(4, 3).t().requires_grad_(),
        "b": torch.randn(9, 8)[3:6, ::2],
        "c": torch.randn(2, 6, 4)[1],
        "d": hf["d"],
    }
    begin(sender)
    with torch.no_grad():
        send(sender, odd)
    check(engine, {n: t.detach() for n, t in odd.items()})


def test_checksums_are_left_out_where_nobody_asks(wire: Wire) -> None:
    sender, _ = make()
    sender.start("s1", "pull", checksum=False, timer=PhaseTimer())
    send(sender, weights())
    assert sender.sums == {}


def test_phases_are_timed(wire: Wire) -> None:
    sender, _ = make(48)
    timer = PhaseTimer()
    sender.start("s1", "pull", checksum=True, timer=timer)
    send(sender, weights())
    assert set(timer.seconds) == {"stage", "put", "pull", "verify"}


@given(st.data())
def test_any_tiling_and_bucket(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        connect(patch)
        patch.setattr(ray, "get", lambda pending, timeout: pending())
        rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
        cuts = sorted(data.draw(st.sets(st.integers(0, rows))) | {0, rows})
        p = param("p", (rows, columns), "float16")
        wants, hf = [], {}
        for i, (low, high) in enumerate(itertools.pairwise(cuts)):
            name = f"t{i}"
            hf[name] = torch.randn(high - low, columns).half()
            wants.append(
                Want("p", rect((rows, columns), (low, high)), name, rect((high - low, columns)))
            )
        order = data.draw(st.permutations(list(hf)))
        specs = [spec(n, hf[n].shape, "float16") for n in order]
        bucket = data.draw(st.integers(2, 80))
        (one,) = make_plan([trainer(0, specs)], [layout([p], wants)], bucket).routes
        engine = Engine([p])
        sender = RouteSender(one, engine, torch.device("cpu"), 5.0)
        begin(sender)
        for name in order:
            sender.offer(name, hf[name])
        sender.finish()
        expected = torch.cat([hf[f"t{i}"] for i in range(len(hf))])
        assert torch.equal(engine.memory["p"].view(rows, columns), expected)
        assert sender.sums["p"] == checksum.slice_sum(expected, 0)


def test_dtype_names() -> None:
    assert module.torch_dtype("bfloat16") is torch.bfloat16


def test_one_route_per_engine_rank() -> None:
    p, s = param("p", (4,)), spec("a", (4,))
    layouts = [layout([p], [copy(p, s)], rank=engine_rank(t)) for t in range(3)]
    plan = make_plan([trainer(7, [s])], layouts, 64)
    assert [(r.source, r.target.rank.tp, r.nbytes) for r in plan.routes_of(7)] == [
        (7, 0, 16),
        (7, 1, 16),
        (7, 2, 16),
    ]
