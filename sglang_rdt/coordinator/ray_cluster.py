"""Joining the Ray cluster from a process that is no Ray worker (plain torchrun, the command line)."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from sglang_rdt.brief import cut, one_line
from sglang_rdt.engine import names
from sglang_rdt.errors import EngineNotFoundError

# Ray itself tries a wrong address for a minute and more.
_REACH_S = 5.0


def join(address: str, namespace: str | None) -> None:
    """Connects this process to the cluster unless it is connected already.

    Args:
        address: as of ``ray.init``; ``auto`` finds a cluster of this machine, or RAY_ADDRESS.

    Raises:
        EngineNotFoundError: there is no cluster to join.
    """
    import ray

    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if namespace is not None:
        options["namespace"] = namespace
    try:
        _reach(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(address=address, **options)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        why = cut(one_line(str(error).partition("\n")[0]), 400)
        raise EngineNotFoundError(
            f"no Ray cluster to join at {address!r} (SGLANG_RDT_RAY_ADDRESS): {why}"
        ) from None


def _reach(address: str) -> None:
    """Raises OSError if nobody listens at ``address``, where that is a host and a port."""
    if "://" in address:
        return  # Ray Client has deadlines of its own
    try:
        host, port = names.split_address(address)
    except ValueError:
        return  # "auto", "local": a word of Ray's
    socket.create_connection((host, port), timeout=_REACH_S).close()
