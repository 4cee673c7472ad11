"""One-sided reads of another process's memory, prepared once and posted at every sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_rdt.errors import DeadlineError, TransportError
from sglang_rdt.transport import unfinished
from sglang_rdt.transport.waiting import poll

Rows = npt.NDArray[np.uint64]


class PreparedRead:
    """A READ whose descriptors NIXL knows already.

    Args:
        memory: where to read (``RemoteMemory``).
        local: shape (n,): addresses in registered memory of this process.
        remote: shape (n,): addresses in ``memory``.
        nbytes: shape (n,): bytes of each run.
        device: index of the local device; ``kind``: ``cuda`` or ``cpu``.
        who: the other end, for messages.

    Raises:
        TransportError: NIXL does not accept the descriptors (memory that is not registered).
    """

    def __init__(
        self,
        memory: Any,
        local: Rows,
        remote: Rows,
        nbytes: Rows,
        *,
        device: int,
        kind: str,
        who: str,
    ) -> None:
        from sglang_rdt.transport.agent import transport

        self.who = who
        self.nbytes = int(nbytes.sum())
        self.count = len(nbytes)
        try:
            self._transfer = transport().prepare(
                memory.agent,
                _rows(local, nbytes, device),
                _rows(remote, nbytes, memory.device),
                (kind, memory.kind),
            )
        except Exception as error:
            raise TransportError(
                f"preparing {self.count} reads from {who} failed: {error}"
            ) from None

    def post(self) -> None:
        """Starts reading.

        Raises:
            TransportError: NIXL refuses, or the one before has not ended.
        """
        if self.under_way():
            raise TransportError(f"a read from {self.who} that was given up is still under way")
        try:
            self._transfer.post()
        except Exception as error:
            self._doubt()
            raise TransportError(f"reading from {self.who} failed: {error}") from None

    def _doubt(self) -> None:
        from sglang_rdt.transport.agent import transport

        transport().doubt()

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Returns when every byte is there; both sides may change their memory then.

        Args:
            deadline: on time.monotonic()'s clock; ``timeout_s``: for the message.

        Raises:
            DeadlineError: not complete in time.
            TransportError: the transfer failed, or its source is gone.
        """
        try:
            done = poll(self._transfer.state, max(deadline - time.monotonic(), 0.0))
        except Exception as error:
            self._doubt()
            raise TransportError(f"reading from {self.who} failed: {error}") from None
        if not done:
            self._doubt()
            raise DeadlineError(f"reads from {self.who}", "pull", timeout_s)

    def under_way(self) -> bool:
        """Whether it was posted, and has neither completed nor failed."""
        return self._transfer.under_way()

    def release(self) -> None:
        """Gives the handle back, once a transfer under way has ended."""
        unfinished.release(self.who, self._transfer)


def read_all(reads: Sequence[PreparedRead], timeout_s: float) -> int:
    """Posts all ``reads``, waits for all; bytes read.

    Raises:
        DeadlineError, TransportError: naming the other end.
    """
    deadline = time.monotonic() + timeout_s
    for read in reads:
        read.post()
    for read in reads:
        read.wait(deadline, timeout_s)
    return sum(read.nbytes for read in reads)


def _rows(address: Rows, nbytes: Rows, device: int) -> Rows:
    return np.stack(
        [address, nbytes, np.full(len(nbytes), device, dtype=np.uint64)], axis=1
    ).astype(np.uint64, copy=False)
