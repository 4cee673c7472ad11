"""One rank's side of a weight sync: the states, and what moves between them.

``current`` --begin--> ``syncing`` --commit--> ``current`` (new version)
                       ``syncing`` --abort, no byte landed--> ``current`` (old version, running)
                       ``syncing`` --abort, bytes landed--> ``dirty`` (old label, stays paused)
``dirty``   --begin--> ``syncing`` (only a full sync ends it)

Everything but :meth:`RankSession.status` runs on the event-loop thread. Each transition is voted
on by all ranks of the TP group, so that no rank serves what another does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_rdt.engine.direct_reader import DirectReader
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.engine.sync_request import RankStatus, State, SyncRequest
from sglang_rdt.errors import EngineStateError, RdtError
from sglang_rdt.plan.buckets import Target

logger = logging.getLogger("sglang_rdt")


class RankSession:
    """The state machine of one scheduler actor."""

    def __init__(self, control: SchedulerControl, gate: LoopGate, who: str) -> None:
        self._control = control
        self._gate = gate
        self._who = who
        self._status = RankStatus(version=control.version)
        self._request: SyncRequest | None = None
        self._was_paused = False
        self._finalised = False
        self.weights = LiveWeights(control.model, who)

    @property
    def request(self) -> SyncRequest | None:
        """The sync under way."""
        return self._request

    def status(self) -> RankStatus:
        """A copy of the rank's state; from any thread."""
        return RankStatus(**self._status.__dict__)

    def begin(self, request: SyncRequest) -> None:
        """Pause, flush, open SGLang's session: on all ranks or on none.

        Raises:
            EngineStateError, EngineBusyError: nothing changed, the engine runs on.
        """
        was_paused, had_session = self._control.paused, self._control.session_open

        def prepare() -> None:
            self.refuse(request)
            if not was_paused:
                self._control.pause(request.pause_mode)
            if request.flush:
                self._control.flush()
            self._control.drain()
            self._control.begin_session()
            # In their loadable form, in which they were recorded.
            if request.purpose == "sync" and self.weights.recording is not None:
                self.weights.check_addresses()

        problem = self._attempt("begin", prepare)
        if not self._control.vote(problem is None):
            self._undo_begin(was_paused, had_session)
            raise problem or EngineStateError(
                f"{self._who}: another rank of the engine refused the sync"
            )
        if self._status.state != "dirty":  # a dirty rank is paused by us, not by the user
            self._was_paused = was_paused
            self._status.state = "syncing"
        self._gate.will_park()
        self._request, self._finalised = request, False
        self._status.sync_id, self._status.owner = request.sync_id, request.owner
        self._status.bytes_landed = 0

    def user_paused(self, paused: bool) -> bool:
        """The user pauses or continues generation himself; whether a continue may go ahead.

        A dirty engine stays paused; it goes on after the sync that makes it whole, if the user
        wants it to run by then.
        """
        if self._status.state == "current":
            return True
        self._was_paused = paused
        if not paused:
            logger.error("%s is not resumed: %s", self._who, self._status.detail)
        return paused

    def _attempt(self, what: str, run: Callable[[], None]) -> RdtError | None:
        """Runs ``run``; its error, for the ranks to vote on."""
        try:
            run()
        except RdtError as error:
            return error
        except Exception as error:
            logger.exception("%s: %s failed", self._who, what)
            return EngineStateError(f"{self._who}: {what} failed: {type(error).__name__}: {error}")
        return None

    def _undo_begin(self, was_paused: bool, had_session: bool) -> None:
        problem = None
        if self._control.session_open and not had_session:
            problem = self._attempt("undoing begin", self._control.end_session)
        if not self._control.vote(problem is None):
            self._was_paused = was_paused
            why = problem or "on another rank"
            self._status.state = "dirty"
            self._status.detail = f"a refused sync could not be undone: {why}"
            logger.error("%s is dirty and stays paused: %s", self._who, self._status.detail)
        elif self._control.paused and not was_paused:
            self._control.resume()

    def refuse(self, request: SyncRequest) -> None:
        """Raises EngineStateError if ``request`` cannot begin now."""
        self._control.refuse_unsupported_model()
        if self._request is not None:
            raise EngineStateError(
                f"{self._who} is in sync {self._request.sync_id} of {self._request.owner}"
            )
        if self._status.state == "current" and self._control.session_open:
            raise EngineStateError(
                f"{self._who}: somebody else has a weight-update session open; end it first"
            )
        tags = getattr(self._control.scheduler.weight_updater, "offload_tags", None)
        if tags:
            raise EngineStateError(
                f"{self._who}: memory is released ({', '.join(sorted(tags))}); resume it first"
            )

    def require(self, sync_id: str, *, writing: bool = False) -> SyncRequest:
        """The sync under way; EngineStateError if it is not ``sync_id``, or may not write."""
        if self._request is None or self._request.sync_id != sync_id:
            now = f"in sync {self._request.sync_id}" if self._request else "in no sync"
            raise EngineStateError(f"{self._who} is {now}, not in {sync_id}")
        if writing and self._request.purpose != "sync":
            raise EngineStateError(
                f"{self._who}: sync {sync_id} was begun to connect, not to write"
            )
        return self._request

    def pull(self, sync_id: str, ref: Any, what: Sequence[str | Target], timeout_s: float) -> int:
        """Pulls one reference into live parameters; bytes moved."""
        self._refuse_writing(sync_id)
        # Resolve first: a bad slice is refused while the weights are still whole.
        self.weights.resolve(what)
        return self._land(lambda: self.weights.pull(ref, what, timeout_s))

    def read_direct(self, sync_id: str, connection: str, timeout_s: float) -> int:
        """Reads everything that was prepared in ``connection``; bytes moved."""
        self._refuse_writing(sync_id)
        readers: list[DirectReader] = []
        # All ranks or none: one that cannot read must not let the others write.
        self._agree(
            self._attempt("reading", lambda: readers.append(self.weights.prepared(connection))),
            broken=False,
        )
        moved: list[int] = []
        self._agree(
            self._attempt(
                "reading", lambda: moved.append(self._land(lambda: readers[0].read(timeout_s)))
            )
        )
        return moved[0]

    def _refuse_writing(self, sync_id: str) -> None:
        self.require(sync_id, writing=True)
        if self._finalised:
            raise EngineStateError(f"{self._who}: sync {sync_id} was finalised; no pull may follow")

    def _land(self, move: Callable[[], int]) -> int:
        # From here on a failure may leave half of a parameter.
        self._status.bytes_landed += 1
        moved = move()
        self._status.bytes_landed += moved - 1
        return moved

    def finalise(self, sync_id: str) -> None:
        """Constants, then SGLang's post-load processing, once; all ranks or none."""
        self.require(sync_id, writing=True)

        def run() -> None:
            self.weights.apply_constants()
            self._control.synchronize()
            self._control.end_session()
            self._control.synchronize()

        problem = self._attempt("finalise", run)
        self._agree(problem)
        self._finalised = True

    def commit(self, sync_id: str, version: str) -> None:
        """The new version is complete and checked: label it and go on generating."""
        self.require(sync_id, writing=True)
        old = self._control.version
        problem: RdtError | None = None
        if self._finalised:
            problem = self._attempt(
                "setting the version", lambda: self._control.set_version(version)
            )
        else:
            problem = EngineStateError(f"{self._who}: sync {sync_id} was not finalised")
        try:
            self._agree(problem, broken=self._finalised)
        except RdtError:
            # Nothing was generated under the new label: the engine is still paused.
            self._attempt("restoring the version", lambda: self._control.set_version(old))
            raise
        self._status.version = version
        self._status.syncs += 1
        self._finish("current", "")

    def leave_connect(self, sync_id: str) -> None:
        """Ends a ``connect`` session; weights and version are as before."""
        request = self.require(sync_id)
        if request.purpose != "connect":
            raise EngineStateError(f"{self._who}: sync {sync_id} writes; commit or abort it")
        if self._status.state == "dirty":
            self._agree(None)
            self._finish("dirty", self._status.detail)
            return
        self._agree(self._attempt("ending the session", self._end_open_session))
        self._finish("current", "")

    def _end_open_session(self) -> None:
        if self._control.session_open or not self._control.has_session:
            self._control.end_session()

    def _agree(self, problem: RdtError | None, broken: bool = True) -> None:
        """All ranks go on together; if one cannot, all give the sync up and raise.

        ``broken``: whether ``problem`` leaves weights that must not be served.
        """
        if self._control.vote(problem is None):
            return
        why = str(problem or "another rank of the engine gave the sync up")
        self._give_up(why, broken=broken and problem is not None)
        raise problem or EngineStateError(f"{self._who}: {why}")

    def abort(self, why: str) -> State:
        """Gives the sync up, with the other ranks; returns the state that the rank is left in."""
        self._control.vote(False)
        return self._give_up(why)

    def _give_up(self, why: str, broken: bool = False) -> State:
        sync_id = self._request.sync_id if self._request else "?"
        was_dirty = self._status.state == "dirty"
        # Bytes on any rank make the whole engine dirty: its ranks share one set of weights.
        clean = self._control.vote(self._status.bytes_landed == 0 and not was_dirty and not broken)
        cause = "after bytes had landed"
        if clean:
            problem = self._attempt("ending the session", self._end_open_session)
            clean = self._control.vote(problem is None)
            cause = f"and its session could not be ended ({problem or 'on another rank'})"
        elif not self._status.bytes_landed and not broken:
            cause = "after bytes had landed on another rank"
        if clean:
            self._finish("current", "")
            return self._status.state
        detail = self._status.detail if was_dirty else f"sync {sync_id} failed {cause}: {why}"
        logger.error("%s is dirty and stays paused: %s", self._who, detail)
        self._finish("dirty", detail)
        return self._status.state

    def _finish(self, state: State, detail: str) -> None:
        self._status.state, self._status.detail = state, detail
        self._request = None
        self._status.sync_id = self._status.owner = None
        self._gate.release()
        if state == "current" and not self._was_paused:
            self._control.resume()
