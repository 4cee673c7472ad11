"""``sglang-rdt engines``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sglang_rdt import settings as settings_module
from sglang_rdt.coordinator import ray_cluster

_WIDE = 220


def _join(address: str | None, namespace: str | None) -> str | None:
    """Joins the cluster; the namespace to look in.

    Raises:
        EngineNotFoundError: there is no such cluster.
    """
    settings = settings_module.load()
    space = namespace or settings.namespace
    ray_cluster.join(address or settings.ray_address, space)
    return space


def show(address: str | None, namespace: str | None, everywhere: bool) -> None:
    """Prints one row per engine rank, and one per engine that is not whole.

    Raises:
        EngineNotFoundError: there is none; says what there is.
    """
    from sglang_rdt.coordinator import find_engines, roster
    from sglang_rdt.coordinator.discovery import EVERYWHERE

    space = _join(address, namespace)
    table = Table(
        "engine",
        "rank",
        "state",
        "weight version",
        "syncs",
        "trainer",
        "node",
        "SGLang",
        "models",
        "note",
    )
    standings = roster(EVERYWHERE if everywhere else space)
    if not standings:
        find_engines(namespace=space)  # says what there is instead
    for name, one in standings.items():
        for rank in one.engine.ranks if one.engine else ():
            status = (one.statuses or {}).get(str(rank))
            connection = getattr(status, "connection", None)
            table.add_row(
                name,
                str(rank.rank),
                getattr(status, "state", one.state),
                getattr(status, "version", ""),
                str(getattr(status, "syncs", "")),
                connection.trainer.where if connection else "",
                rank.node_ip,
                rank.sglang_version,
                rank.runners,
                getattr(status, "detail", "") or (one.why if status is None else ""),
            )
        if one.engine is None:
            table.add_row(name, "", one.state, "", "", "", "", "", "", one.why)
    console = Console()
    # Into a file or a pipe, nothing is cut.
    (console if console.is_terminal else Console(width=_WIDE)).print(table)


def show_current(
    address: str | None, namespace: str | None, everywhere: bool, label: str | None
) -> None:
    """Prints the addresses of engines that requests may go to, one per line."""
    from sglang_rdt.coordinator import current_engines
    from sglang_rdt.coordinator.discovery import EVERYWHERE

    space = _join(address, namespace)
    for name in current_engines(label, namespace=EVERYWHERE if everywhere else space):
        print(name)


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
