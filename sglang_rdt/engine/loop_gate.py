"""Running our code on the scheduler's event-loop thread, on all ranks at once.

The Ray method leaves what to do at its rank (:meth:`LoopGate.enter`) and waits; the entry rank
also posts a :class:`~sglang_rdt.engine.loop_inbox.LoopCall`, which SGLang broadcasts. Each rank's
event loop then runs what was left there (with pipeline stages some turns later, see
:mod:`sglang_rdt.engine.pipeline`). A call may *park* the loop: it stays on the loop thread
and runs commands (:meth:`LoopGate.command`) until one of them releases it. While a loop is parked
nobody spins, so Ray's threads have the GIL, and no forward pass can run.

Ranks never diverge: before anything happens, and again at every decision, they vote
(:data:`Vote`) over SGLang's own CPU group, that of all ranks which run in step; one "no", or one rank whose call never arrived, means
no for all.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sglang_rdt.brief import brief, cut, one_line
from sglang_rdt.engine import loop_inbox
from sglang_rdt.errors import DeadlineError, EngineStateError

logger = logging.getLogger("sglang_rdt")

T = TypeVar("T")

# All ranks that run in step call it with their opinion; True only if everyone said True.
Vote = Callable[[bool], bool]

# How long a rank's loop waits for its own call after the broadcast told it of one.
ARRIVAL_TIMEOUT_S = 10.0


# For a sync that comes with no usable stall timeout.
DEFAULT_STALL_S = 600.0
# What settings allow, too.
_MAX_WAIT_S = 1e9


def _is_time(seconds: Any) -> bool:
    return type(seconds) in (int, float) and 0 < seconds <= _MAX_WAIT_S


@dataclass
class _Call:
    run: Callable[[], Any]
    cancelled: bool = False
    claimed: bool = False  # by the event loop: too late to cancel
    future: Future = field(default_factory=Future)

    def execute(self) -> None:
        try:
            self.future.set_result(self.run())
        except BaseException as error:
            # Without its frames: they would keep what failed (NIXL handles) alive in a cycle, to
            # be freed by the garbage collector on some other thread.
            logger.debug("a call on the event loop failed", exc_info=True)
            error.__context__ = error.__cause__ = None
            self.future.set_exception(error.with_traceback(None))


class LoopGate:
    """The way onto the event loop of one scheduler actor. Thread-safe.

    Args:
        who: this rank, for messages.
        entry: whether this is the rank whose received requests SGLang broadcasts.
        vote: see :data:`Vote`.
    """

    def __init__(self, who: str, *, entry: bool, vote: Vote) -> None:
        self._who = who
        self._entry = entry
        self._vote = vote
        self._lock = threading.Condition()
        self._calls: dict[str, _Call] = {}
        self._commands: queue.Queue[_Call] = queue.Queue()
        self._parked = False
        self._release = False

    @property
    def parked(self) -> bool:
        """Whether the event loop is inside :meth:`park`."""
        return self._parked

    # On Ray's threads.

    def enter(self, call_id: str, run: Callable[[], T], timeout_s: float) -> T:
        """Runs ``run`` on the event loop, with the other ranks' calls of the same id.

        Raises:
            EngineStateError: no id, or no time, that can be; nothing was begun.
            DeadlineError: the event loop did not get to it in time; it never will.
            EngineStateError: another rank's call did not arrive, so none ran.
        """
        if not isinstance(call_id, str) or not call_id:
            raise EngineStateError(f"{self._who}: {brief(call_id)} is no name of a sync")
        self._check_time(timeout_s)
        call = _Call(run)
        with self._lock:
            if call_id in self._calls:
                raise EngineStateError(
                    f"{self._who}: call {cut(one_line(call_id), 200)} is under way already"
                )
            self._calls[call_id] = call
            self._lock.notify_all()
        if self._entry:
            loop_inbox.post(loop_inbox.LoopCall(call_id))
        return self._wait(call, "reach the event loop", timeout_s, settle=True)

    def command(self, run: Callable[[], T], timeout_s: float) -> T:
        """Runs ``run`` on the parked event loop.

        Raises:
            EngineStateError: the loop is not parked: there is no sync under way; or no time that
                can be.
            DeadlineError: not done in time (an earlier command may still be running).
        """
        self._check_time(timeout_s)
        call = _Call(run)
        with self._lock:
            if not self._parked:
                raise EngineStateError(f"{self._who} is not in a weight sync; begin_sync first")
            self._commands.put(call)
        return self._wait(call, "command", timeout_s)

    def _check_time(self, timeout_s: Any) -> None:
        # Before anybody hears of the call: a wait that raises would leave it behind.
        if not _is_time(timeout_s):
            raise EngineStateError(f"{self._who}: {brief(timeout_s)} is no number of seconds")

    def _wait(self, call: _Call, phase: str, timeout_s: float, settle: bool = False) -> Any:
        try:
            return call.future.result(timeout_s)
        except FutureTimeout:
            with self._lock:
                call.cancelled = not call.claimed
        if settle and not call.cancelled:
            # The ranks are voting on it: whether it runs must be known, and is known soon.
            wait([call.future], timeout=timeout_s + ARRIVAL_TIMEOUT_S)
        if call.future.done():
            return call.future.result()
        raise DeadlineError(self._who, phase, timeout_s)

    # On the event-loop thread.

    def handle(self, loop_call: loop_inbox.LoopCall) -> None:
        """Runs what was left under the call's id; SGLang's request dispatcher calls it."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        call_id = loop_call.call_id
        with self._lock:
            # What is no text is nobody's id, and might not even be one to look up.
            while isinstance(call_id, str) and call_id not in self._calls:
                left = deadline - time.monotonic()
                if left <= 0 or not self._lock.wait(left):
                    break
            call = self._calls.pop(call_id, None) if isinstance(call_id, str) else None
            ready = call is not None and not call.cancelled
            if call is not None:
                call.claimed = ready
        if not self._vote(ready):
            if call is not None:
                call.future.set_exception(
                    EngineStateError(
                        f"{self._who}: the call did not reach every rank of the engine within "
                        f"{ARRIVAL_TIMEOUT_S:g} s, so none ran it"
                    )
                )
            return
        assert call is not None
        call.execute()

    def park(self, stall_timeout_s: float) -> bool:
        """Stays on the event loop and runs commands until :meth:`release`.

        Returns:
            False if no command came for ``stall_timeout_s``: whoever drives the sync is gone.
        """
        released = True
        if not _is_time(stall_timeout_s):  # the event loop must not die of it
            logger.error("%s: %s is no stall timeout", self._who, brief(stall_timeout_s))
            stall_timeout_s = DEFAULT_STALL_S
        while not self._release:
            try:
                call = self._commands.get(timeout=stall_timeout_s)
            except queue.Empty:
                released = False
                break
            with self._lock:
                call.claimed = not call.cancelled
            if call.claimed:
                call.execute()
        with self._lock:
            self._parked = self._release = False
            left = []
            while not self._commands.empty():
                left.append(self._commands.get_nowait())
        for call in left:
            call.future.set_exception(EngineStateError(f"{self._who}: the weight sync has ended"))
        return released

    def will_park(self) -> None:
        """From inside a call: commands are welcome from now on; :meth:`park` follows."""
        with self._lock:
            self._parked, self._release = True, False

    def release(self) -> None:
        """From inside a command: the loop leaves :meth:`park` after it."""
        self._release = True
