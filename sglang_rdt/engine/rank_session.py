"""One rank's side of a weight sync: it drives the scheduler through the states of
:mod:`sglang_rdt.engine.states`.

Everything but :meth:`RankSession.status` runs on the event-loop thread. Each transition is voted
on by all ranks that run in step, so that no rank serves what another does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_rdt.engine.direct_reader import DirectReader
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.runners import SELECTORS
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.engine.states import Event, State, WeightState
from sglang_rdt.engine.sync_request import Connection, RankStatus, SyncRequest
from sglang_rdt.engine.unsound import Unsound
from sglang_rdt.errors import AnotherRankError, EngineStateError, RdtError, ReconnectError
from sglang_rdt.plan.buckets import Target

logger = logging.getLogger("sglang_rdt")


class RankSession:
    """The state machine of one scheduler actor."""

    def __init__(self, control: SchedulerControl, gate: LoopGate, who: str) -> None:
        self._control = control
        self._gate = gate
        self._who = who
        self._weights_are = WeightState(control.version)
        self._request: SyncRequest | None = None
        self._connection: Connection | None = None
        self._disconnected = ""  # why there is no connection any more
        self._bytes_landed = self._syncs = 0
        self._was_paused = False
        self._ended = False  # whether SGLang's session of this sync was ended, or should have been
        self._runner = "target"
        self.weights = LiveWeights(control.models(self._runner), who)
        self._unsound = Unsound(who)
        if control.starts_empty:
            self._unsound.add(None, "the engine was started with load_format dummy", own=True)

    @property
    def request(self) -> SyncRequest | None:
        """The sync under way."""
        return self._request

    def status(self) -> RankStatus:
        """A copy of the rank's state; from any thread."""
        request, are = self._request, self._weights_are
        return RankStatus(
            state=are.state,
            version=are.version,
            sync_id=request.sync_id if request else None,
            owner=request.owner if request else None,
            detail=are.detail,
            bytes_landed=self._bytes_landed,
            syncs=self._syncs,
            connection=self._connection,
        )

    def begin(self, request: SyncRequest, *, given_up: bool = False) -> None:
        """Pause, flush, open SGLang's session: on all ranks or on none.

        Args:
            given_up: whoever asked for it has given it up since; none of the ranks begins.

        Raises:
            EngineStateError, EngineBusyError: nothing changed, the engine runs on.
            ReconnectError: the same, and connecting anew is what helps.
        """
        was_paused, had_session = self._control.paused, self._control.session_open

        def prepare() -> None:
            if given_up:
                raise EngineStateError(f"{self._who}: sync {request.sync_id} was given up")
            self.refuse(request)
            if not was_paused:
                self._control.pause(request.pause_mode)
            if request.flush:
                self._control.flush()
            self._control.drain()
            self._control.begin_session(SELECTORS[request.runner])
            # In their loadable form, in which they were recorded.
            if request.purpose == "sync" and self.weights.recording is not None:
                self.weights.check_addresses()

        problem = self._attempt("begin", prepare)
        if not self._vote(problem is None):
            self._undo_begin(was_paused, had_session)
            raise problem or AnotherRankError(
                f"{self._who}: another rank of the engine refused the sync"
            )
        if self._weights_are.state != "dirty":  # a dirty rank is paused by us, not by the user
            self._was_paused = was_paused
        self._weights_are.on("begin")
        self._gate.will_park()
        self._request = request
        self._bytes_landed, self._ended = 0, False
        if request.purpose == "connect":
            # Recording gives up what was prepared for whoever was connected before.
            self._connection, self._disconnected = None, "another connect did not come to its end"
            self._choose(request.runner)
        if request.overwrite:
            self._overwrite()

    def _choose(self, runner: str) -> None:
        """What this sync, and those of the same trainer, are about."""
        if runner != self._runner:
            self.weights.forget()
            self.weights = LiveWeights(self._control.models(runner), self._who)
            self._runner = runner

    def _overwrite(self) -> None:
        def run() -> None:
            self._land(self.weights.overwrite)
            self._control.synchronize()

        self._agree(self._attempt("overwriting", run))

    def user_paused(self, paused: bool) -> bool:
        """The user pauses or continues generation himself; whether a continue may go ahead.

        A dirty engine stays paused; it goes on after the sync that makes it whole, if the user
        wants it to run by then.
        """
        if self._weights_are.state == "current":
            return True
        self._was_paused = paused
        if not paused:
            logger.error("%s is not resumed: %s", self._who, self._weights_are.detail)
        return paused

    def memory_released(self) -> None:
        """The weights' memory is about to be given back: what is registered there, and what was
        prepared to be read into it, must go first. Resumed memory keeps its address, but is other
        memory."""
        if self._connection is not None:
            self._connection = None
            self._disconnected = "its weights' memory was released since"
        if not self._control.backs_weights_up:
            self._unsound.add(None, "their memory was released, and came back empty", own=True)
        self.weights.forget()

    def disconnect(self, token: str) -> None:
        """The trainer of ``token`` is done with this engine; nothing if another one is connected."""
        if self._connection is not None and self._connection.trainer.token == token:
            self._connection, self._disconnected = None, "its trainer has closed the connection"
            self.weights.forget(closed=True)

    def accept(self, version: str) -> None:
        """The user has a dirty engine serve what it has, labelled ``version``. All ranks or none.

        Raises:
            EngineStateError: it is not dirty, or its session cannot be ended; it stays dirty.
        """

        def run() -> None:
            if self._weights_are.state != "dirty":
                raise EngineStateError(f"{self._who} is {self._weights_are.state}, not dirty")
            self._refuse_late_reads()
            if self._control.session_open or not self._control.has_session:
                self._control.end_session(changed=self.weights.derivable)
            self._control.set_version(version)

        problem = self._attempt("accepting", run)
        if not self._vote(problem is None):
            if self._weights_are.version != self._control.version:
                self._attempt("label", lambda: self._control.set_version(self._weights_are.version))
            raise problem or EngineStateError(
                f"{self._who}: another rank cannot accept its weights"
            )
        logger.warning(
            "%s serves torn weights as %r, by its user's word: %s",
            self._who,
            version,
            self._weights_are.detail,
        )
        self._weights_are.on("accept", version=version)
        self._control.resume()

    def _vote(self, opinion: bool) -> bool:
        """See :meth:`SchedulerControl.vote`; without the others this engine is none any more."""
        try:
            return self._control.vote(opinion)
        except Exception as error:
            self._weights_are.on("die")
            self._gate.release()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineStateError(
                f"{self._who}: another rank of the engine is gone ({reason[:200]})"
            ) from None

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
            problem = self._attempt("undoing begin", self._end_unchanged)
        if not self._vote(problem is None):
            self._was_paused = was_paused
            why = problem or "on another rank"
            self._unsound.add(None, f"a refused sync could not be undone: {why}", own=True)
            self._weights_are.on("tear", detail=f"a refused sync could not be undone: {why}")
            logger.error("%s is dirty and stays paused: %s", self._who, self._weights_are.detail)
        elif self._control.paused and not was_paused:
            self._control.resume()

    def refuse(self, request: SyncRequest) -> None:
        """Raises EngineStateError if ``request`` cannot begin now."""
        if request.purpose == "connect":  # what a model is made of does not change later
            self._control.refuse_unsupported_model(request.runner)
        if self._request is not None:
            raise EngineStateError(
                f"{self._who} is in sync {self._request.sync_id} of {self._request.owner}"
            )
        # A released KV cache does not matter: colocated trainers sync before they resume it.
        tags = getattr(self._control.scheduler.weight_updater, "offload_tags", None) or ()
        if "weights" in tags:
            raise EngineStateError(
                f"{self._who}: memory is released ({', '.join(sorted(tags))}); resume it first"
            )
        self._refuse_strangers(request)
        if request.purpose == "connect":
            self._control.models(request.runner)
        elif request.runner != self._runner:
            raise ReconnectError(
                f"{self._who} was connected for runner {self._runner!r}, and is asked for a sync of "
                f"{request.runner!r}; connect again"
            )
        if request.purpose == "sync" and self.weights.recording is not None:
            self._unsound.refuse(self.weights.recording.kept, request.runner)
        if self._weights_are.state == "current" and self._control.session_open:
            raise EngineStateError(
                f"{self._who}: somebody else has a weight-update session open; end it first"
            )
        self._refuse_late_reads()

    def _refuse_late_reads(self) -> None:
        """What was given up may still land, in weights that are newer, or that are served."""
        late = self.weights.unfinished()
        if late:
            raise EngineStateError(
                f"{self._who}: {len(late)} transfers from {', '.join(sorted(set(late)))} were given up "
                "and are still under way; they could land in newer weights. They end when that "
                "process goes on or dies; restart the engine if it does neither"
            )

    def _refuse_strangers(self, request: SyncRequest) -> None:
        """An engine follows one trainer: two would overwrite each other's weights."""
        mine, theirs = self._connection, request.connection
        if request.purpose == "connect":
            tokens = (theirs.trainer.token if theirs else None, request.replaces)
            if mine is not None and mine.trainer.token not in tokens:
                raise EngineStateError(
                    f"{self._who} is connected to trainer {mine.trainer.where}; close that one first"
                )
        elif mine is not None and (theirs is None or mine.id != theirs.id):
            raise EngineStateError(
                f"{self._who} is connected to trainer {mine.trainer.where} since, and takes nothing "
                f"from {theirs.trainer.where if theirs else request.owner}"
            )
        elif mine is None and theirs is not None:
            raise ReconnectError(
                f"{self._who} is not connected to {theirs.trainer.where}"
                + (f": {self._disconnected}" if self._disconnected else "")
                + "; connect again"
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

    def read_direct(
        self, sync_id: str, connection: str, timeout_s: float, *, sums: bool = False
    ) -> int:
        """Reads everything that was prepared in ``connection``; bytes moved.

        ``sums``: start summing up what has landed while the rest is on its way.
        """
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
                "reading",
                lambda: moved.append(
                    self._land(lambda: self.weights.read(readers[0], timeout_s, sums=sums))
                ),
            )
        )
        return moved[0]

    def _refuse_writing(self, sync_id: str) -> None:
        self.require(sync_id, writing=True)
        if self._weights_are.stage == "final":
            raise EngineStateError(f"{self._who}: sync {sync_id} was finalised; no pull may follow")

    def _land(self, move: Callable[[], int]) -> int:
        # From here on a failure may leave half of a parameter.
        self._weights_are.on("land")
        self._bytes_landed += 1
        moved = move()
        self._bytes_landed += moved - 1
        return moved

    def finalise(self, sync_id: str) -> None:
        """Constants and what the loader computes, then SGLang's post-load processing, once; all
        ranks or none."""
        self.require(sync_id, writing=True)

        def run() -> None:
            with self.weights.quantising():
                self.weights.apply_constants()
                self.weights.compute()
                self._control.synchronize()
                self._ended = True
                self._control.end_session()
            self._control.synchronize()

        problem = self._attempt("finalise", run)
        self._agree(problem)
        self._weights_are.on("finalise")

    def commit(self, sync_id: str, version: str) -> None:
        """The new version is complete and checked: label it and go on generating."""
        self.require(sync_id, writing=True)
        old = self._control.version
        problem: RdtError | None = None
        finalised = self._weights_are.stage == "final"
        if finalised:
            problem = self._attempt(
                "setting the version", lambda: self._control.set_version(version)
            )
        else:
            problem = EngineStateError(f"{self._who}: sync {sync_id} was not finalised")
        try:
            self._agree(problem, broken=finalised)
        except RdtError:
            # Nothing was generated under the new label: the engine is still paused.
            self._attempt("restoring the version", lambda: self._control.set_version(old))
            raise
        self._syncs += 1
        self._finish("commit", version=version)

    def leave_connect(self, sync_id: str) -> None:
        """Ends a ``connect`` session; weights and version are as before."""
        request = self.require(sync_id)
        if request.purpose != "connect":
            raise EngineStateError(f"{self._who}: sync {sync_id} writes; commit or abort it")
        if self._weights_are.torn:
            self._agree(None)
        else:
            self._agree(self._attempt("ending the session", self._end_unchanged))
        self._connection = request.connection
        self._finish("leave")

    def _end_unchanged(self) -> None:
        """The end of a session in which nothing was written."""
        if self._control.session_open:
            self._ended = True
            self._control.end_session(changed=False)

    def _agree(self, problem: RdtError | None, broken: bool = True) -> None:
        """All ranks go on together; if one cannot, all give the sync up and raise.

        ``broken``: whether ``problem`` leaves weights that must not be served.
        """
        if self._vote(problem is None):
            return
        why = str(problem or "another rank of the engine gave the sync up")
        self._give_up(why, broken=broken and problem is not None)
        raise problem or EngineStateError(f"{self._who}: {why}")

    def abort(self, why: str) -> State:
        """Gives the sync up, with the other ranks; returns the state that the rank is left in."""
        self._vote(False)
        return self._give_up(why)

    def _give_up(self, why: str, broken: bool = False) -> State:
        sync_id = self._request.sync_id if self._request else "?"
        # Bytes on any rank make the whole engine dirty: its ranks share one set of weights.
        clean = self._vote(not self._weights_are.torn and not broken)
        cause = "after bytes had landed" if self._bytes_landed else "after its session had ended"
        if clean:
            problem = self._attempt("ending the session", self._end_unchanged)
            clean = self._vote(problem is None)
            cause = f"and its session could not be ended ({problem or 'on another rank'})"
        elif not self._weights_are.torn and not broken:
            cause = "after bytes had landed on another rank"
        if clean:
            self._finish("abort")
        else:
            self._finish("tear", detail=f"sync {sync_id} failed {cause}: {why}")
            logger.error("%s is dirty and stays paused: %s", self._who, self._weights_are.detail)
        return self._weights_are.state

    def _finish(self, event: Event, **what: str) -> None:
        recording = self.weights.recording
        if event == "tear":
            self.weights.doubt()
            # What was being written; all of them where post-load processing went wrong.
            written = {w.source for w in recording.wants} if recording and not self._ended else None
            half_way = self._ended and self._weights_are.stage != "final"
            self._unsound.add(written, what["detail"], self._runner, own=half_way)
        elif event == "commit" and recording is not None:
            self._unsound.clear(self._runner)
        if event in ("abort", "tear") and self._request and self._request.purpose == "connect":
            # Nobody is connected, so nobody would give back what was prepared for him.
            self.weights.forget()
        self._request = None
        self._weights_are.on(event, **what)
        self._gate.release()
        if self._weights_are.state != "current" or self._was_paused:
            return
        try:
            self._control.resume()
        except Exception as error:
            logger.exception("%s: going on failed", self._who)
            raise EngineStateError(
                f"{self._who} holds version {self._weights_are.version!r}, but could not go on "
                f"({type(error).__name__}: {error}); it stays paused until continue_generation"
            ) from None
