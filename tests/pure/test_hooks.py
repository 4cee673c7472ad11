from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rdt import hooks
from sglang_rdt.settings import Settings


def optimizer_module() -> SimpleNamespace:
    """Like megatron.core.optimizer.optimizer: fresh classes."""

    class Base:
        result: Any = (True, 1.0, None)
        error: Exception | None = None

        def step(self, *args: Any, **kwargs: Any) -> Any:
            if self.error:
                raise self.error
            return self.result

    class MixedPrecisionOptimizer(Base):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.called = (args, kwargs)
            return super().step()

    class Float16Optimizer(MixedPrecisionOptimizer):
        """Inherits step(): must not be wrapped twice."""

    class FP32Optimizer(Base):
        def step(self) -> Any:
            return super().step()

    class ChainedOptimizer(Base):
        children: tuple[Any, ...] = ()

        def step(self) -> Any:
            for child in self.children:
                child.step()
            return super().step()

    return SimpleNamespace(**{k: v for k, v in locals().items() if isinstance(v, type)})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setattr(hooks.settings_module, "load", Settings)
    monkeypatch.setattr(hooks, "_any_optimizer", [])
    monkeypatch.setattr(hooks, "_guards", [])
    monkeypatch.setattr(hooks, "_instrumented", False)
    made = optimizer_module()
    hooks.instrument_optimizers(vars(made))
    yield made
    assert getattr(hooks._depth, "value", 0) == 0


def test_a_successful_step_tells_its_listeners(module: SimpleNamespace) -> None:
    one, other = module.MixedPrecisionOptimizer(), module.FP32Optimizer()
    heard: list[Any] = []
    hooks.add_listener(heard.append, one)
    assert one.step(1, closure=2) == (True, 1.0, None)
    assert one.called == ((1,), {"closure": 2})
    other.step()
    assert heard == [one]


def test_a_listener_for_any_optimizer(module: SimpleNamespace) -> None:
    heard: list[Any] = []
    remove = hooks.add_listener(heard.append)
    both = [module.MixedPrecisionOptimizer(), module.FP32Optimizer()]
    for optimizer in both:
        optimizer.step()
    assert heard == both
    remove()
    both[0].step()
    assert heard == both


@pytest.mark.parametrize(
    ("result", "fires"),
    [
        ((True, 1.0, None), True),
        ((False, None, None), False),
        ((0, 1.0), False),
        (True, True),
        (None, False),
    ],
)
def test_only_successful_steps_count(module: SimpleNamespace, result: Any, fires: bool) -> None:
    optimizer = module.FP32Optimizer()
    optimizer.result = result
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    assert optimizer.step() == result
    assert bool(heard) is fires


def test_a_chain_fires_once_for_the_outermost(module: SimpleNamespace) -> None:
    chain = module.ChainedOptimizer()
    inner = module.ChainedOptimizer()
    inner.children = (module.MixedPrecisionOptimizer(), module.FP32Optimizer())
    chain.children = (inner, module.MixedPrecisionOptimizer())
    heard: list[Any] = []
    child: list[Any] = []
    hooks.add_listener(heard.append)
    hooks.add_listener(child.append, inner.children[0])
    chain.step()
    chain.step()
    assert heard == [chain, chain]
    assert child == []
    inner.children[0].step()
    assert child == [inner.children[0]]


def test_a_failed_chain_with_successful_children_does_not_fire(module: SimpleNamespace) -> None:
    chain = module.ChainedOptimizer()
    chain.children = (module.MixedPrecisionOptimizer(),)
    chain.result = (False, None, None)
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    chain.step()
    assert heard == []


def test_a_step_that_raises_does_not_fire_and_the_next_one_does(module: SimpleNamespace) -> None:
    chain, child = module.ChainedOptimizer(), module.FP32Optimizer()
    chain.children = (child,)
    child.error = RuntimeError("nan")
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    with pytest.raises(RuntimeError, match="nan"):
        chain.step()
    assert heard == []
    child.error = None
    chain.step()
    assert heard == [chain]


def test_an_error_of_a_listener_reaches_the_training_loop(module: SimpleNamespace) -> None:
    def fail(optimizer: Any) -> None:
        raise ConnectionError("no engine")

    remove = hooks.add_listener(fail)
    optimizer = module.FP32Optimizer()
    with pytest.raises(ConnectionError):
        optimizer.step()
    remove()
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    optimizer.step()
    assert heard == [optimizer]


def test_listeners_may_take_themselves_off_while_called(module: SimpleNamespace) -> None:
    heard: list[str] = []
    removers: list[Any] = []

    def once(optimizer: Any) -> None:
        heard.append("once")
        removers[0]()

    removers.append(hooks.add_listener(once))
    hooks.add_listener(lambda optimizer: heard.append("always"))
    optimizer = module.FP32Optimizer()
    optimizer.step()
    optimizer.step()
    assert heard == ["once", "always", "always"]
    removers[0]()  # again: nothing happens


def test_one_listener_twice_is_taken_off_one_by_one(module: SimpleNamespace) -> None:
    optimizer = module.FP32Optimizer()
    heard: list[Any] = []
    first = hooks.add_listener(heard.append, optimizer)
    hooks.add_listener(heard.append, optimizer)
    optimizer.step()
    assert len(heard) == 2
    first()
    optimizer.step()
    assert len(heard) == 3


def test_threads_count_their_own_depth(module: SimpleNamespace) -> None:
    inside, go = threading.Event(), threading.Event()
    slow, quick = module.ChainedOptimizer(), module.FP32Optimizer()

    class Waits:
        def step(self) -> None:
            inside.set()
            go.wait(60)

    slow.children = (Waits(),)
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    thread = threading.Thread(target=slow.step)
    thread.start()
    assert inside.wait(60)
    quick.step()  # not nested in the other thread's step
    assert heard == [quick]
    go.set()
    thread.join(60)
    assert heard == [quick, slow]


def test_optimizers_are_not_kept_alive(module: SimpleNamespace) -> None:
    optimizer = module.FP32Optimizer()
    heard: list[str] = []
    remove = hooks.add_listener(lambda o: heard.append("step"), optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect(1)
    assert gone() is None
    remove()


def test_instrumenting_twice_fires_once(module: SimpleNamespace) -> None:
    hooks.instrument_optimizers(vars(module))
    heard: list[Any] = []
    hooks.add_listener(heard.append)
    for cls in (module.MixedPrecisionOptimizer, module.Float16Optimizer, module.ChainedOptimizer):
        cls().step()
    assert len(heard) == 3


@pytest.mark.parametrize("off", [{"enabled": False}, {"patch_optimizer_step": False}])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, off: dict[str, bool]) -> None:
    monkeypatch.setattr(hooks.settings_module, "load", lambda: Settings(**off))
    made = optimizer_module()
    before = {n: vars(getattr(made, n))["step"] for n in hooks.STEP_CLASSES}
    hooks.instrument_optimizers(vars(made))
    assert {n: vars(getattr(made, n))["step"] for n in hooks.STEP_CLASSES} == before


def test_auto_sync_listens_only_where_a_config_is_given(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hooks._any_optimizer == []
    hooks.auto_sync_from_environment(Settings(hf_config="/models/x", export_every=0))
    assert hooks._any_optimizer == []
    hooks.auto_sync_from_environment(Settings(hf_config="/models/x"))
    assert len(hooks._any_optimizer) == 1


def test_a_listener_that_knows_its_optimizer_does_not_keep_it_alive(
    module: SimpleNamespace,
) -> None:
    class Sync:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            hooks.add_listener(self.on_step, optimizer)

        def on_step(self, optimizer: Any) -> None: ...

    optimizer = module.FP32Optimizer()
    gone = weakref.ref(optimizer)
    Sync(optimizer)
    del optimizer
    gc.collect(1)
    assert gone() is None


def test_guards_come_before_the_step_once_per_outermost(module: SimpleNamespace) -> None:
    order: list[str] = []

    class Child(module.FP32Optimizer):  # type: ignore[name-defined, misc]
        def step(self) -> Any:
            order.append("step")
            return super().step()

    chain = module.ChainedOptimizer()
    chain.children = (Child(), Child())
    remove = hooks.add_guard(lambda optimizer: order.append(f"guard {optimizer is chain}"))
    assert hooks.guarding()
    chain.step()
    assert order == ["guard True", "step", "step"]
    remove()
    remove()
    chain.step()
    assert order.count("guard True") == 1


def test_a_guard_that_raises_prevents_the_step(module: SimpleNamespace) -> None:
    optimizer = module.MixedPrecisionOptimizer()
    heard: list[Any] = []
    hooks.add_listener(heard.append, optimizer)

    def refuse(_: Any) -> None:
        raise RuntimeError("the sync under way failed")

    remove = hooks.add_guard(refuse)
    with pytest.raises(RuntimeError, match="under way failed"):
        optimizer.step()
    assert not hasattr(optimizer, "called")
    assert not heard
    remove()
    optimizer.step()
    assert heard == [optimizer]


def test_without_the_patch_nothing_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_instrumented", False)
    monkeypatch.setattr(hooks.settings_module, "load", lambda: Settings(patch_optimizer_step=False))
    hooks.instrument_optimizers(vars(optimizer_module()))
    assert not hooks.guarding()
