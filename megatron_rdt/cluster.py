"""The Ray cluster, as a trainer process sees it."""

from __future__ import annotations

from sglang_rdt.coordinator import ray_cluster
from sglang_rdt.coordinator.discovery import EVERYWHERE
from sglang_rdt.settings import Settings


def join(settings: Settings, namespace: str | None = None) -> None:
    """Connects this process to the cluster unless it is connected already.

    Raises:
        EngineNotFoundError: there is no cluster to join.
    """
    space = settings.namespace if namespace in (None, EVERYWHERE) else namespace
    ray_cluster.join(settings.ray_address, space)


def node_ip() -> str:
    """This node's address, as Ray and the engines' actors report theirs."""
    import ray.util

    return ray.util.get_node_ip_address()
