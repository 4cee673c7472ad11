"""Waiting for NIXL without sleeping a millisecond at a time.

A pull of a whole model takes 40 to 60 ms; Ray's own wait sleeps 1 ms between two looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# So long a transfer is worth a core; one that takes longer is not decided by microseconds.
_SPIN_S = 0.5
_SLEEP_S = 100e-6
# With so few cores the other end of the transfer needs the one that would spin.
_FEW_CORES = 4


def poll(state: Callable[[], str], timeout_s: float) -> bool:
    """Looks at ``state()`` (``PROC``, ``DONE`` or ``ERR``) until it is done.

    Returns:
        False if it is not after ``timeout_s``.

    Raises:
        RuntimeError: NIXL reports an error.
    """
    started = time.monotonic()
    spin_s = _SPIN_S if (os.cpu_count() or 1) > _FEW_CORES else 0.0
    while True:
        now = state()
        if now == "DONE":
            return True
        if now != "PROC":
            raise RuntimeError(f"the transfer ended in state {now}")
        waited = time.monotonic() - started
        if waited >= timeout_s:
            return False
        if waited >= spin_s:
            time.sleep(_SLEEP_S)
