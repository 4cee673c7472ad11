"""The optimizer-step hook: what the patch ``optimizer_step`` calls.

``step()`` of the *outermost* Megatron optimizer is what counts: a ChainedOptimizer does not call
its children's ``step()`` in some versions and might in others, so the wrapped methods count how
deep they are. A torch ``register_step_post_hook`` would be too early: the fp32 main parameters
have not been copied to the model then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from sglang_rdt import settings as settings_module

logger = logging.getLogger("megatron_rdt")

# Classes of megatron.core.optimizer.optimizer whose step() the patch wraps.
STEP_CLASSES = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")

# Called after each successful step with the optimizer whose step() it was (a guard: before it).
Listener = Callable[[Any], None]

_depth = threading.local()
_any_optimizer: list[Listener] = []
_guards: list[Listener] = []
_instrumented = False
# Listeners of one optimizer live on it: a table of ours would keep both alive for ever, since a
# listener usually knows its optimizer.
_ATTRIBUTE = "_megatron_rdt_listeners"


def add_listener(listener: Listener, optimizer: Any | None = None) -> Callable[[], None]:
    """Calls ``listener(optimizer)`` after every successful step of ``optimizer`` (or of any).

    Returns:
        A function that takes the listener off again.
    """
    bucket: list[Listener] = _any_optimizer
    if optimizer is not None:
        bucket = optimizer.__dict__.setdefault(_ATTRIBUTE, [])
    bucket.append(listener)

    def remove() -> None:
        if listener in bucket:
            bucket.remove(listener)

    return remove


def add_guard(guard: Listener) -> Callable[[], None]:
    """Calls ``guard(optimizer)`` before every step of any optimizer; if it raises, there is no step.

    Returns:
        A function that takes the guard off again.
    """
    _guards.append(guard)

    def remove() -> None:
        if guard in _guards:
            _guards.remove(guard)

    return remove


def guarding() -> bool:
    """Whether steps go through guards: the patch is on, and Megatron's optimizers were imported."""
    return _instrumented


def step_succeeded(result: Any) -> bool:
    """Whether ``step()`` changed the parameters.

    Megatron returns ``(update_successful, grad_norm, num_zeros)``; ``update_successful`` is False
    after inf or nan, and on all ranks alike.
    """
    return bool(result[0]) if isinstance(result, tuple) else bool(result)


def instrument_optimizers(namespace: MutableMapping[str, Any]) -> None:
    """Wraps ``step`` of the optimizer classes in ``namespace`` (the vars() of
    megatron.core.optimizer.optimizer, or its globals() where the patch set calls this)."""
    settings = settings_module.load()
    if not settings.enabled or not settings.patch_optimizer_step:
        return
    import wrapt

    global _instrumented
    _instrumented = True
    for name in STEP_CLASSES:
        cls = namespace[name]
        if "step" in vars(cls) and not isinstance(vars(cls)["step"], wrapt.FunctionWrapper):
            wrapt.wrap_function_wrapper(cls, "step", _step)
    auto_sync_from_environment(settings)


def _step(wrapped: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
    depth = getattr(_depth, "value", 0)
    if depth == 0:
        for guard in list(_guards):
            guard(optimizer)
    _depth.value = depth + 1
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _depth.value = depth
    if depth == 0 and step_succeeded(result):
        for listener in [*optimizer.__dict__.get(_ATTRIBUTE, ()), *_any_optimizer]:
            listener(optimizer)
    return result


def auto_sync_from_environment(settings: settings_module.Settings) -> None:
    """With MEGATRON_RDT_HF_CONFIG set, connects and syncs without a line in the training loop."""
    if settings.hf_config is None or settings.export_every == 0:
        return
    from megatron_rdt.auto import AutoSync

    add_listener(AutoSync(settings).on_step)
