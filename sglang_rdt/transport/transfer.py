"""One prepared READ, and one of a single byte behind it.

NIXL (1.5.1, over UCX) says DONE of a read whose copy failed at once; only the next use of the
connection tells that it is broken. Measured on a CPU with a target that could not be written: no
error, no bytes, and old ones would have passed for new. So a transfer is done when another one that
was posted after it is done, too: the last byte, once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# (address, bytes, device) each; also an array of shape (n, 3), uint64.
Rows = Any
_LOST = "the memory that it reads into was deregistered since"


class Transfer:
    """A READ whose descriptors NIXL knows already; posted again and again, one at a time.

    Args:
        agent: this process's NIXL agent.
        remote: name of the other agent.
        kinds: ``cuda`` or ``cpu``, of the local and of the remote memory.

    Raises:
        Exception: whatever NIXL raises of descriptors that it does not accept.
    """

    def __init__(
        self, agent: Any, remote: str, local: Rows, source: Rows, kinds: tuple[str, str]
    ) -> None:
        self._agent = agent
        self.remote = remote
        self._local = np.array(local, dtype=np.uint64)[:, 0].copy()
        self._lost = False  # its local memory was deregistered
        self._handles: list[Any] = []
        self._at: int | None = None  # which of the two is under way
        try:
            for here, there in ((local, source), (_last_byte(local), _last_byte(source))):
                self._handles.append(
                    agent.initialize_xfer(
                        "READ",
                        agent.get_xfer_descs(here, mem_type=kinds[0]),
                        agent.get_xfer_descs(there, mem_type=kinds[1]),
                        remote,
                        b"",
                    )
                )
        except BaseException:
            self.release()
            raise

    def post(self) -> None:
        """Starts reading.

        Raises:
            RuntimeError: NIXL refuses, or the memory to read into was deregistered since.
        """
        if self._lost:
            raise RuntimeError(_LOST)
        self._start(0)

    def _start(self, at: int) -> None:
        self._at = None
        if self._agent.transfer(self._handles[at]) == "ERR":
            raise RuntimeError("NIXL refused the transfer")
        self._at = at

    def state(self) -> str:
        """``PROC`` while it is under way, then ``DONE`` or ``ERR``. May raise what NIXL raises: it
        has failed then."""
        if self._lost:
            # Where it was under way, nobody can tell whether it came to its end.
            self._at = None
            raise RuntimeError(_LOST)
        while self._at is not None:
            try:
                state = self._agent.check_xfer_state(self._handles[self._at])
            except Exception:
                self._at = None
                raise
            if state == "PROC":
                return "PROC"
            if state != "DONE":
                self._at = None
                return str(state)
            if self._at == 0:
                self._start(1)
            else:
                self._at = None
        return "DONE"

    def under_way(self) -> bool:
        """Whether it was posted, and has neither completed nor failed; for whoever does not wait for
        it any more: nothing further is posted."""
        if self._at is not None:
            with contextlib.suppress(Exception):  # it has failed: that is an end
                if self._agent.check_xfer_state(self._handles[self._at]) == "PROC":
                    return True
            self._at = None
        return False

    def reads_into(self, address: int, nbytes: int) -> bool:
        """Whether any of it lands in these bytes of this process."""
        at = self._local
        return bool(((at >= np.uint64(address)) & (at < np.uint64(address + nbytes))).any())

    def lose_memory(self) -> None:
        """The memory that it reads into is about to be deregistered. NIXL's handle points to that
        registration, and NIXL (1.5.1) dies of posting it, even where the same memory is registered
        again: it must not be posted any more."""
        self._lost = True
        if not self.under_way():
            self.release()

    @property
    def lost(self) -> bool:
        """Whether it can never be posted again."""
        return self._lost

    def release(self) -> None:
        """Gives the handles back; it must not be under way."""
        handles, self._handles = self._handles, []
        for handle in handles:
            # One that NIXL keeps is in its list of leaked ones, released with the agent.
            with contextlib.suppress(Exception):
                handle.release()


def _last_byte(rows: Rows) -> Sequence[tuple[int, int, int]] | np.ndarray[Any, Any]:
    address, nbytes, device = (int(v) for v in rows[len(rows) - 1])
    row = (address + nbytes - 1, 1, device)
    return np.array([row], dtype=np.uint64) if isinstance(rows, np.ndarray) else [row]
