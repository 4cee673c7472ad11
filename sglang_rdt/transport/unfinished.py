"""Transfers that were given up before they ended.

A one-sided read cannot be called back: whoever was stopped while it was under way may still deliver
it minutes later, into weights that have been synced since. And NIXL (1.5) dies of the answer if the
transfer's handle has been released by then. So its handle is kept until it has ended, and nothing
new is written in this process before that.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

_lock = threading.Lock()


@dataclass
class _Transfer:
    who: str
    remote: str
    agent: Any
    handle: Any

    def ended(self) -> bool:
        try:
            return self.agent.check_xfer_state(self.handle) != "PROC"
        except Exception:  # it has failed: that is an end
            return True


_transfers: list[_Transfer] = []


def keep(who: str, remote: str, agent: Any, handle: Any) -> None:
    """Keeps a transfer that nobody waits for any more.

    Args:
        who: the other end, for messages. ``remote``: its NIXL agent.
        agent: this process's NIXL agent. ``handle``: of the transfer.
    """
    with _lock:
        _transfers.append(_Transfer(who, remote, agent, handle))


def unfinished() -> list[str]:
    """The other ends of transfers that still may write here; those that have ended are released."""
    with _lock:
        left = []
        for one in _transfers:
            if one.ended():
                with contextlib.suppress(Exception):
                    one.handle.release()
            else:
                left.append(one)
        _transfers[:] = left
        return [one.who for one in left]


def remotes() -> set[str]:
    """NIXL agents that must not be forgotten yet."""
    unfinished()
    with _lock:
        return {one.remote for one in _transfers}
