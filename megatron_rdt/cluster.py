"""Joining the Ray cluster from a process that is no Ray worker (plain torchrun)."""

from __future__ import annotations

from typing import Any

from sglang_rdt.errors import EngineNotFoundError
from sglang_rdt.settings import Settings


def join(settings: Settings, namespace: str | None = None) -> None:
    """Connects this process to the cluster unless it is connected already.

    Raises:
        EngineNotFoundError: there is no cluster to join.
    """
    import ray

    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    space = namespace or settings.namespace
    if space is not None:
        options["namespace"] = space
    try:
        ray.init(address=settings.ray_address, **options)
    except ConnectionError as error:
        raise EngineNotFoundError(
            f"no Ray cluster to join at {settings.ray_address!r} (SGLANG_RDT_RAY_ADDRESS): {error}"
        ) from None


def node_ip() -> str:
    """This node's address, as Ray and the engines' actors report theirs."""
    import ray.util

    return ray.util.get_node_ip_address()
