"""Transfers that were given up before they ended.

A one-sided read cannot be called back: whoever was stopped while it was under way may still deliver
it minutes later, into weights that have been synced since. And NIXL (1.5) dies of the answer if the
transfer's handle has been released by then. So its handle, and the memory beside the weights that it may write
into, are kept until it has ended, and nothing new is written in this process before that.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang_rdt.transport.transfer import Transfer


class Memory(Protocol):
    """What transfers write into."""

    def close(self) -> None:
        """Frees it."""


_lock = threading.Lock()

_transfers: list[tuple[str, Transfer]] = []
_memory: list[Memory] = []


def release(who: str, transfer: Transfer) -> None:
    """Gives a transfer back: at once, or once it has ended; ``who``: the other end, for messages."""
    if not transfer.under_way():
        transfer.release()
        return
    with _lock:
        _transfers.append((who, transfer))


def close(memory: Memory) -> None:
    """Gives memory back: at once, or once no transfer can write into it any more."""
    late = unfinished()
    with _lock:
        if late:
            _memory.append(memory)
            return
    memory.close()


def unfinished() -> list[str]:
    """The other ends of transfers that still may write here; those that have ended are released."""
    with _lock:
        left = []
        for who, transfer in _transfers:
            if transfer.under_way():
                left.append((who, transfer))
            else:
                transfer.release()
        _transfers[:] = left
        closing = [] if left else _memory[:]
        del _memory[: len(closing)]
    for memory in closing:
        memory.close()
    return [who for who, _ in left]


def remotes() -> set[str]:
    """NIXL agents that must not be forgotten yet."""
    unfinished()
    with _lock:
        return {transfer.remote for _, transfer in _transfers}
