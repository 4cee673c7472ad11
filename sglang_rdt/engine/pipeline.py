"""Calls on the event loops of a pipeline-parallel engine.

SGLang's pipeline stages run the same turns one after the other: a stage takes requests in, hands
them to the next stage, and only then runs its microbatch. Two things follow:

- A call cannot run where it arrives. The first stage would wait for the others in the vote, and
  they for the requests that it has not handed on.
- Other microbatches are under way then. What they computed travels round the stages for some more
  turns, and belongs to the old weights.

So the call waits. From its turn on no stage begins a microbatch; as many turns later as there are
microbatches, all results are in, and the stages meet in the call. They count the same turns, since
each has seen the call in the same one.

Source: sglang/srt/managers/scheduler_pp_mixin.py (event_loop_pp), the same in this from 0.5.16 to
0.5.23. It does not look at SGLang's own pause, so that is done here, too: a paused engine begins
no microbatch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_rdt.engine.loop_inbox import LoopCall
from sglang_rdt.errors import PatchMismatchError


class Pipeline:
    """The turns of one stage's event loop.

    Args:
        scheduler: the live scheduler (sglang.srt.managers.scheduler).
        run: what to do with a call when all stages have drained.

    Raises:
        PatchMismatchError: the scheduler chooses its microbatches in another way than known.
    """

    def __init__(self, scheduler: Any, run: Callable[[LoopCall], None]) -> None:
        self._scheduler = scheduler
        self._run = run
        self._calls: deque[LoopCall] = deque()
        self._turns_left = 0
        self._next_batch = scheduler.get_next_batch_to_run
        known = {"running_batch", "last_batch"}
        if set(inspect.signature(self._next_batch).parameters) != known:
            raise PatchMismatchError(
                "scheduler_actor",
                "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
                f"does not take {' and '.join(sorted(known))}",
                "SGLANG_RDT_PATCH_SCHEDULER_ACTOR",
            )
        scheduler.get_next_batch_to_run = self.next_batch

    def later(self, call: LoopCall) -> None:
        """Takes the call that arrived in this turn."""
        if not self._calls:
            self._turns_left = self._scheduler.pp_loop_size
        self._calls.append(call)

    def next_batch(self, running_batch: Any, last_batch: Any) -> Any:
        """Stands where the loop asks for the microbatch of its turn."""
        if self._calls:
            if self._turns_left:
                self._turns_left -= 1
            else:
                while self._calls:
                    self._run(self._calls.popleft())
            # Also after the calls: the loop has taken what they may have retracted in hand already.
            return _none(running_batch)
        if self._scheduler._engine_paused:
            return _none(running_batch)
        return self._next_batch(running_batch=running_batch, last_batch=last_batch)


def _none(running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def retract_all(scheduler: Any, pause: Callable[[], None]) -> None:
    """Retracts the requests of every microbatch; nothing may be under way.

    SGLang's pause looks at one microbatch, the one whose turn it is.

    Args:
        pause: SGLang's pause with ``retract``.
    """
    chunked, scheduler.chunked_req = scheduler.chunked_req, None
    held = {id(r) for batch in scheduler.running_mbs for r in batch.reqs}
    held |= {id(r) for r in scheduler.waiting_queue}
    held |= {id(chunked)}
    for i, running in enumerate(scheduler.running_mbs):
        last = scheduler.last_mbs[i]
        if last is running:
            last = None
        if last is not None:
            # A prefill that nothing followed stays there after it was merged, and a chunk after the
            # next chunk has begun.
            last.reqs = [r for r in last.reqs if id(r) not in held and r is not last.chunked_req]
            held |= {id(r) for r in last.reqs}
        scheduler.running_batch, scheduler.last_batch = running, last
        pause()
        scheduler.last_mbs[i] = None
    if chunked is not None:
        scheduler.chunked_req = chunked
        pause()


def under_way(scheduler: Any) -> int:
    """How many microbatches have results that are not taken in."""
    return sum(batch is not None for batch in scheduler.mbs)
