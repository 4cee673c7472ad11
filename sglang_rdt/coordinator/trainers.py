"""Who a trainer is to the engines, and whether one that connected before is still there."""

from __future__ import annotations

import logging
import os
import socket
import uuid

from sglang_rdt.engine.sync_request import Trainer

logger = logging.getLogger("sglang_rdt")

# Tokens of this process's weight syncs that are not closed.
_open: set[str] = set()


def introduce() -> Trainer:
    """This process, as one weight sync of it; until :func:`leave`."""
    import ray

    context = ray.get_runtime_context()
    token = uuid.uuid4().hex
    _open.add(token)
    return Trainer(
        token=token,
        where=f"{socket.gethostname()}:{os.getpid()}",
        job=context.get_job_id(),
        actor=context.get_actor_id() or "",
    )


def leave(trainer: Trainer) -> None:
    """It has closed."""
    _open.discard(trainer.token)


def is_there(trainer: Trainer) -> bool:
    """Whether ``trainer`` still runs, as far as Ray knows.

    Sources: ray._private.state.actors() and jobs() (Ray 2.60): the cluster's own table, without a
    dashboard. The public ray.util.state asks the dashboard, which many clusters do not run.
    """
    import ray

    if trainer.token in _open:
        return True
    context = ray.get_runtime_context()
    mine = (context.get_job_id(), context.get_actor_id() or "")
    if (trainer.job, trainer.actor) == mine:
        return False  # this process, and closed, or lost
    try:
        from ray._private import state

        if trainer.actor:
            return state.actors(trainer.actor).get("State") != "DEAD"
        return any(j["JobID"] == trainer.job and not j["IsDead"] for j in state.jobs())
    except Exception:
        logger.warning("Ray does not tell whether trainer %s still runs", trainer.where)
        return True
