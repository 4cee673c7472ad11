"""Calls on their way to the event loop of this process.

The receiver of requests (patch ``event_loop``) picks them up on the entry rank; SGLang's own
broadcast then carries each to every rank of the tensor-parallel group, and its pipeline to the
later stages, so that all ranks hear of it in the same turn of the loop. Only the call's id travels: what to do waits at each rank.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoopCall:
    """Run the call with this id now. Pickled by SGLang's broadcast."""

    call_id: str


_lock = threading.Lock()
_waiting: list[LoopCall] = []


def post(call: LoopCall) -> None:
    """Leaves ``call`` for the next turn of the event loop; only on the entry rank."""
    with _lock:
        _waiting.append(call)


def add_loop_calls(requests: list[Any] | None) -> list[Any] | None:
    """What SGLang received in this turn, plus the waiting calls.

    ``None`` on ranks that receive by broadcast; their calls stay (there are none).
    """
    if requests is None or not _waiting:
        return requests
    with _lock:
        calls, _waiting[:] = list(_waiting), []
    return [*requests, *calls]
