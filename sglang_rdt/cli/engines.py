"""``sglang-rdt engines``."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.table import Table

from sglang_rdt import settings as settings_module
from sglang_rdt.errors import EngineNotFoundError


def _join(address: str | None, namespace: str | None) -> str | None:
    """Joins the cluster; the namespace to look in.

    Raises:
        EngineNotFoundError: there is no such cluster.
    """
    import ray

    settings = settings_module.load()
    space = namespace or settings.namespace
    where = address or settings.ray_address
    try:
        ray.init(address=where, namespace=space, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EngineNotFoundError(
            f"no Ray cluster to join at {where!r}: {str(error).splitlines()[0]}"
        ) from None
    return space


def show(address: str | None, namespace: str | None) -> None:
    """Prints one row per engine rank.

    Raises:
        EngineNotFoundError: there is none; says what there is.
    """
    from sglang_rdt.coordinator import find_engines

    space = _join(address, namespace)
    table = Table(
        "engine", "rank", "state", "weight version", "syncs", "trainer", "node", "SGLang", "note"
    )
    for engine in find_engines(namespace=space):
        for rank, status in zip(engine.ranks, engine.status(), strict=True):
            table.add_row(
                engine.name,
                str(rank.rank),
                status.state,
                status.version,
                str(status.syncs),
                status.connection.trainer.where if status.connection else "",
                rank.node_ip,
                rank.sglang_version,
                status.detail,
            )
    Console().print(table)


def accept(engine: str, version: str, address: str | None, namespace: str | None) -> None:
    """Has the dirty engine at ``engine`` go on with the torn weights that it has.

    Raises:
        EngineNotFoundError: there is none at that address.
        CallFailures: it is not dirty.
    """
    from sglang_rdt.coordinator import engine_at

    found = engine_at(engine, namespace=_join(address, namespace))
    found.accept(version)
    Console().print(f"{found} serves what it has, as version {version!r}")
