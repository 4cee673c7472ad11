"""Between Ray's ActorClass objects and the plain classes behind them."""

from __future__ import annotations

from typing import Any

from sglang_rdt.errors import PatchMismatchError

# What RdtSchedulerActor passes on. Ray calls nothing that the class does not define itself.
FORWARDED = frozenset({"get_info", "run_event_loop"})


def plain_class(actor_class: Any) -> type:
    """The user's class behind ``@ray.remote`` (an ActorClass is an instance, not a type).

    Raises:
        PatchMismatchError: it is no ActorClass, Ray keeps the class elsewhere, or it has other
            public methods than the known ones.
    """
    try:
        cls = actor_class.__ray_metadata__.modified_class.__ray_actor_class__
    except AttributeError:
        cls = None
    if not isinstance(cls, type):
        raise PatchMismatchError(
            "scheduler_actor",
            "sglang.srt.ray.scheduler_actor.SchedulerActor",
            "is not a Ray actor class of the known form",
            "SGLANG_RDT_PATCH_SCHEDULER_ACTOR",
        )
    public = {n for n, v in vars(cls).items() if callable(v) and not n.startswith("_")}
    if public != FORWARDED:
        raise PatchMismatchError(
            "scheduler_actor",
            "sglang.srt.ray.scheduler_actor.SchedulerActor",
            f"has the public methods {sorted(public)}, expected {sorted(FORWARDED)}",
            "SGLANG_RDT_PATCH_SCHEDULER_ACTOR",
        )
    return cls
