"""What a benchmark runs inside of an engine's scheduler actors, through Ray's ``__ray_call__``.

``actor`` is an :class:`~sglang_rdt.engine.actor.RdtSchedulerActor`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench.memory import Mark

if TYPE_CHECKING:
    from sglang_rdt.coordinator.engine import Engine
    from sglang_rdt.demo.models import TinyModel


def on_ranks(
    engine: Engine, run: Callable[..., Any], *args: Any, timeout_s: float, phase: str
) -> list[Any]:
    """``run(actor, *args)`` on every rank of ``engine`` at once; results in rank order.

    Raises:
        CallFailures: naming every rank that raised, died or did not answer in time.
    """
    from sglang_rdt.coordinator import calls

    refs = {
        str(rank): actor.__ray_call__.remote(run, *args)
        for rank, actor in zip(engine.ranks, engine.actors, strict=True)
    }
    results = calls.gather(refs, timeout_s, phase)
    return [results[str(rank)] for rank in engine.ranks]


def compare(engine: Engine, model: TinyModel, key: int, timeout_s: float) -> tuple[int, list[str]]:
    """Compares every parameter of every rank with what it must be under ``key``.

    Returns:
        How many parameters were compared, and a line per difference.
    """
    call_id = f"bench-{uuid.uuid4().hex[:8]}"
    found = on_ranks(
        engine, _compare, call_id, model, key, timeout_s, timeout_s=timeout_s, phase="compare"
    )
    lines = [
        f"{rank}: {line}"
        for rank, (_, own) in zip(engine.ranks, found, strict=True)
        for line in own
    ]
    return sum(count for count, _ in found), lines


def _compare(
    actor: Any, call_id: str, model: TinyModel, key: int, timeout_s: float
) -> tuple[int, list[str]]:
    import torch

    from sglang_rdt.bench import pattern

    who = actor.rdt_identity()
    live = dict(actor.scheduler.tp_worker.model_runner.model.named_parameters())

    def run() -> tuple[int, list[str]]:
        with torch.no_grad():
            drain(actor)
            found = pattern.differences(model, key, who.tp_size, who.rank.tp, live)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    # On the event-loop thread: on any other one, Python would fight its spinning for the GIL.
    return actor._gate.enter(call_id, run, timeout_s)


def drain(actor: Any) -> None:
    """Waits for the engine's device."""
    import torch

    device = device_of(actor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(actor: Any) -> Any:
    """Where the engine's parameters are."""
    return next(actor.scheduler.tp_worker.model_runner.model.parameters()).device


def mark(actor: Any) -> Mark:
    """See :func:`sglang_rdt.bench.memory.mark`."""
    from sglang_rdt.bench import memory

    return memory.mark(device_of(actor))


def peak(actor: Any) -> Mark:
    """See :func:`sglang_rdt.bench.memory.peak`."""
    from sglang_rdt.bench import memory

    return memory.peak(device_of(actor))


def parameter_bytes(actor: Any) -> int:
    """Bytes of all parameters of this rank, tied ones once."""
    model = actor.scheduler.tp_worker.model_runner.model
    return sum(p.numel() * p.element_size() for p in model.parameters())


def staging_bytes(engine: Engine, timeout_s: float) -> list[int]:
    """Registered staging memory of each rank, as far as the engine says."""
    return [int(s.extra.get("staging_bytes", 0)) for s in engine.status(timeout_s)]


def counts(actor: Any) -> tuple[int, int]:
    """NIXL registrations and resident bytes of this rank's process."""
    from sglang_rdt.bench import memory
    from sglang_rdt.transport import nixl

    return nixl.registrations(), memory.resident()
