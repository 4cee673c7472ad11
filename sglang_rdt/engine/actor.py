"""The SchedulerActor that RayEngine launches: SGLang's own, plus weight sync.

SGLang's actor is inside of ours rather than above it: whoever looks the actor up imports this
module, and a trainer must not import SGLang (25 s) for that, nor need it installed.

Source: sglang.srt.ray.scheduler_actor.SchedulerActor; upstream counterpart of ``pull_weights``:
sgl-project/sglang#27723.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sglang_rdt
from sglang_rdt import settings as settings_module
from sglang_rdt.activation import installed_version
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.engine import engine_info, runners
from sglang_rdt.engine.actor_class import plain_class
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.loop_inbox import LoopCall
from sglang_rdt.engine.pipeline import Pipeline
from sglang_rdt.engine.rank_session import RankSession
from sglang_rdt.engine.recorder import describe_tensors
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.engine.sync_request import (
    RankStatus,
    ReadResult,
    SyncRequest,
    check,
    check_version,
)
from sglang_rdt.errors import EngineStateError, RdtError
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.specs import EngineRank, ParamSpec, RankId, Recording, TensorSpec
from sglang_rdt.plan.transfers import Transfer
from sglang_rdt.transport import nixl

logger = logging.getLogger("sglang_rdt")

T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.0005
# Syncs that were given up, by id.
_REMEMBERED = 64
# For how long a loop that was parked leaves the GIL to Ray's threads.
_YIELD_S = 0.001


class RdtSchedulerActor:
    """SGLang's scheduler actor with methods for weight sync.

    All of them are served while the event loop runs. Those that touch weights run on the
    event-loop thread, between :meth:`begin_sync` and :meth:`end_sync` or :meth:`abort_sync`.
    """

    def __init__(self, *args: Any, rdt_identity: dict[str, Any], **kwargs: Any) -> None:
        # SGLang loads plugins in its other processes, but not in this one.
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.ray.scheduler_actor import SchedulerActor
        from sglang.utils import TypeBasedDispatcher

        self._released = plain_class(SchedulerActor)(*args, **kwargs)
        self.scheduler = self._released.scheduler

        settings = settings_module.load()
        self._phase_timeout_s = settings.phase_timeout_s
        self._identity = self._make_identity(rdt_identity)
        who = str(self._identity)
        rank = self._identity.rank
        self._control = SchedulerControl(
            self.scheduler, who, label_replies=rdt_identity["label_replies"]
        )
        self._gate = LoopGate(who, entry=rank.pp == 0 and rank.tp == 0, vote=self._control.vote)
        self._session = RankSession(self._control, self._gate, who)
        self._stall_timeout_s = settings.stall_timeout_s
        self._given_up: deque[str] = deque(maxlen=_REMEMBERED)
        on_call: Callable[[LoopCall], None] = self._on_loop_call
        if self._control.pipelined:
            on_call = Pipeline(self.scheduler, self._on_loop_call).later
        self.scheduler._request_dispatcher += TypeBasedDispatcher([(LoopCall, on_call)])
        self._guard_control_requests()
        # The event loop spins, and gives the GIL up only when another thread has asked for so
        # long. Python's 5 ms would be paid at the beginning and at the end of every sync.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def _make_identity(self, given: dict[str, Any]) -> EngineRank:
        args = self.scheduler.server_args
        dp_size, dp_attention = _data_parallel(args)
        return EngineRank(
            engine=given["engine"],
            rank=RankId(**given["rank"]),
            actor_name=given["actor_name"],
            released_name=given["released_name"],
            namespace=given["namespace"],
            node_ip=_node_ip(),
            instance=given["instance"],
            dp_size=dp_size,
            pp_size=args.pp_size,
            tp_size=args.tp_size,
            dp_attention=dp_attention,
            ep_size=int(getattr(args, "ep_size", 1) or 1),
            sglang_version=installed_version("sglang") or "",
            package_version=sglang_rdt.__version__,
            runners=runners.describe(self.scheduler),
        )

    # Event-loop thread.

    def _guard_control_requests(self) -> None:
        """The user's own control requests go through us: a dirty engine must not be resumed, and
        memory that is given back must not stay registered.

        Source: sglang.utils.TypeBasedDispatcher, the same from 0.5.16 to 0.5.23.
        """
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
            ReleaseMemoryOccupationReqInput,
        )

        handlers = self.scheduler._request_dispatcher._mapping
        pause, resume = handlers[PauseGenerationReqInput], handlers[ContinueGenerationReqInput]
        release = handlers[ReleaseMemoryOccupationReqInput]

        def guarded_pause(request: Any) -> Any:
            self._session.user_paused(True)
            return pause(request)

        def guarded_continue(request: Any) -> Any:
            return resume(request) if self._session.user_paused(False) else None

        def guarded_release(request: Any) -> Any:
            if not request.tags or "weights" in request.tags:
                self._session.memory_released()
            return release(request)

        handlers[PauseGenerationReqInput] = guarded_pause
        handlers[ContinueGenerationReqInput] = guarded_continue
        handlers[ReleaseMemoryOccupationReqInput] = guarded_release

    def _on_loop_call(self, call: LoopCall) -> None:
        self._gate.handle(call)
        if not self._gate.parked:
            return
        if not self._gate.park(self._stall_timeout_s):
            try:
                self._session.abort(
                    f"nothing was heard of its driver for {self._stall_timeout_s:g} s"
                )
            except Exception:  # the event loop must not die of it
                logger.exception("%s: giving a stalled sync up failed", self._identity)
        # Whoever waited for the last command answers its caller before the loop spins again.
        time.sleep(_YIELD_S)

    # Ray's threads.

    def get_info(self) -> dict[str, Any]:
        """SGLang's own: initialisation info for the handshake."""
        return self._released.get_info()

    def run_event_loop(self) -> None:
        """SGLang's own: blocks until the engine shuts down."""
        self._released.run_event_loop()

    def rdt_identity(self) -> EngineRank:
        """Who this rank is, with its present version and state."""
        status = self._session.status()
        return replace(self._identity, weight_version=status.version, state=status.state)

    def rdt_parallelism(self) -> dict[str, int]:
        """This rank's parallel configuration, as engine_info serves it."""
        return engine_info.of_this_rank()

    def rdt_status(self) -> RankStatus:
        """State of this rank's weights."""
        status = self._session.status()
        status.registrations = nixl.registrations()
        status.extra["threads"] = threading.active_count()
        return status

    def describe(self) -> list[ParamSpec]:
        """Name, shape, dtype, strides and storage identity of all parameters and buffers of what is
        synced: the target, unless a connect session asked for another runner.

        Tied weights come under every name, with the same storage. After :meth:`record_load` also
        the scratch memory of what the loader computes.
        """
        return self._session.weights.describe()

    def begin_sync(self, request: SyncRequest) -> EngineRank:
        """Pauses the engine (all its ranks are called with the same request) and parks its loop.

        Raises:
            EngineStateError, EngineBusyError: refused; the engine runs on as it was.
            DeadlineError: the event loop did not get to it.
        """
        check(request)
        if self._gate.parked:
            # On this thread: a caller that is refused must not look like a sign of life to the
            # sync under way.
            self._session.refuse(request)

        def begin() -> None:
            self._session.begin(request, given_up=request.sync_id in self._given_up)
            self._stall_timeout_s = request.stall_timeout_s
            self._phase_timeout_s = request.phase_timeout_s

        self._enter(request.sync_id, begin, request.begin_timeout_s)
        return self.rdt_identity()

    def disconnect(self, token: str) -> None:
        """The trainer of ``token`` has closed: what was prepared for it is given up."""
        self._enter(
            f"disconnect-{token}", lambda: self._session.disconnect(token), self._phase_timeout_s
        )

    def accept_weights(self, version: str) -> EngineRank:
        """Has a dirty engine (all its ranks are called) go on with the torn weights that it has,
        under the label ``version``: its user's decision.

        Raises:
            EngineStateError: it is not dirty; nothing has changed.
        """
        check_version(version)
        self._enter(
            f"accept-{version}", lambda: self._session.accept(version), self._phase_timeout_s
        )
        return self.rdt_identity()

    def record_load(
        self,
        sync_id: str,
        hf_specs: Sequence[TensorSpec],
        kept: Sequence[str] = (),
        left: Sequence[str] = (),
    ) -> Recording:
        """What this rank wants of which HF tensor, from the model's own ``load_weights``.

        Args:
            kept: names of those that are not synced.
            left: patterns of parameters that none of them is for, and that stay as they are.

        Raises:
            RecordError: the loader does more than copy slices, or ``kept`` cuts through what it
                computes; nothing was changed.
        """

        def record() -> Recording:
            self._session.require(sync_id)
            return self._session.weights.record(hf_specs, kept, left)

        return self._command(record, sync_id)

    def register_weights(self, sync_id: str) -> int:
        """Registers the parameters' memory with NIXL, once; how many storages were new."""

        def register() -> int:
            self._session.require(sync_id)
            return self._session.weights.register()

        return self._command(register, sync_id)

    def pull_weights(
        self,
        refs: Sequence[Any],
        names_or_slices: Sequence[str | Target],
        sync_id: str | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Pulls tensors over NIXL straight into live parameters; bytes moved.

        Args:
            refs: one reference from ``ray.put(tensors, _tensor_transport="nixl")``, inside a list so
                that Ray does not resolve it at call time.
            names_or_slices: a parameter name or a slice for each tensor behind the reference.
            sync_id: the sync under way (default: whichever is).

        Raises:
            EngineStateError: no sync is under way.
            SlicesError: a name or slice does not exist here; nothing was moved.
            TransportError, DeadlineError: the pull failed; the engine is dirty.
        """
        (ref,) = refs
        timeout = timeout_s or self._phase_timeout_s
        current = self._sync_id(sync_id)
        return self._command(
            lambda: self._session.pull(current, ref, names_or_slices, timeout), current, timeout
        )

    def accept_memory(self, sync_id: str, source: int, refs: Sequence[Any]) -> None:
        """Takes the reference to the memory of trainer rank ``source``, to be read at every sync.

        Args:
            refs: one reference from ``nixl.put`` of the rank's blocks, inside a list so that Ray
                does not resolve it.
        """
        (ref,) = refs
        self._session.require(sync_id)
        self._session.weights.sources[source] = ref

    def prepare_direct(
        self, sync_id: str, transfers: Sequence[Transfer], scratch_bytes: int, verify: bool = False
    ) -> int:
        """Prepares reading ``transfers`` out of the accepted memory; bytes per sync.

        Raises:
            SlicesError: a transfer does not fit this rank's parameters, or a source's memory.
            TransportError: a source cannot be reached. Nothing was moved.
        """

        def prepare() -> int:
            self._session.require(sync_id)
            return self._session.weights.prepare_direct(
                sync_id, transfers, scratch_bytes, self._phase_timeout_s, verify=verify
            )

        return self._command(prepare, sync_id)

    def read_direct(
        self, sync_id: str, connection: str, finalise: bool, checksum: bool, *begun: EngineRank
    ) -> ReadResult:
        """Reads everything that was prepared into the live parameters.

        Args:
            connection: the connect session in which it was.
            finalise: whether nothing else follows: checksums if asked for, then
                :meth:`finalise`, in the same call.
            begun: what :meth:`begin_sync` returned, on this rank and on those that do not vote with
                it (other replicas). As references: Ray makes this call once all of them have
                begun, and not at all if one was refused.

        Raises:
            EngineStateError: no such sync is under way, or nothing was prepared.
            TransportError, DeadlineError: a read failed; the engine is dirty.
        """
        timer = PhaseTimer()

        def read() -> ReadResult:
            with _phase(timer, "pull"):
                moved = self._session.read_direct(
                    sync_id, connection, self._phase_timeout_s, sums=finalise and checksum
                )
            sums: dict[str, int] = {}
            if finalise:
                if checksum:
                    with _phase(timer, "verify"):
                        sums = self._session.weights.checksums()
                with _phase(timer, "finalise"):
                    self._session.finalise(sync_id)
            return ReadResult(moved, sums, timer.seconds)

        return self._command(read, sync_id)

    def sync_direct(self, request: SyncRequest, connection: str, checksum: bool) -> ReadResult:
        """:meth:`begin_sync` and a :meth:`read_direct` that finalises, in one call: each costs the
        trainer a round trip in which the engine is paused.

        Raises:
            See both. A refusal to begin leaves the engine as it was.
        """
        timer = PhaseTimer()
        with _phase(timer, "pause"):
            self.begin_sync(request)
        result = self.read_direct(request.sync_id, connection, True, checksum)
        return replace(result, seconds={**timer.seconds, **result.seconds})

    def compare_direct(self, sync_id: str, connection: str) -> list[str]:
        """Reads everything again and compares it with the live bytes; one line per difference."""

        def compare() -> list[str]:
            self._session.require(sync_id)
            return self._session.weights.prepared(connection).compare(self._phase_timeout_s)

        return self._command(compare, sync_id)

    def compare_weights(
        self,
        refs: Sequence[Any],
        names_or_slices: Sequence[str | Target],
        sync_id: str | None = None,
    ) -> list[str]:
        """Compares live bytes with tensors behind a reference; one line per difference."""
        (ref,) = refs

        current = self._sync_id(sync_id)

        def compare() -> list[str]:
            self._session.require(current)
            return self._session.weights.compare(ref, names_or_slices, self._phase_timeout_s)

        return self._command(compare, current)

    def finalise(self, sync_id: str, checksum: bool) -> dict[str, int]:
        """After the last pull: constants and post-load processing, then checksums if asked."""

        def run() -> dict[str, int]:
            sums = self._session.weights.checksums() if checksum else {}
            self._session.finalise(sync_id)
            return sums

        return self._command(run, sync_id)

    def checksum(self, sync_id: str | None = None) -> dict[str, int]:
        """Additive checksum of every recorded parameter (see :mod:`sglang_rdt.checksum`)."""

        current = self._sync_id(sync_id)

        def run() -> dict[str, int]:
            self._session.require(current)
            return self._session.weights.checksums()

        return self._command(run, current)

    def end_sync(self, sync_id: str, version: str | None) -> EngineRank:
        """Ends the sync: with a version, sets it and resumes; without one (connect), just resumes."""

        if version is not None:
            check_version(version)

        def end() -> None:
            self._session.require(sync_id)
            if version is None:
                self._session.leave_connect(sync_id)
            else:
                self._session.commit(sync_id, version)

        self._command(end, sync_id)
        return self.rdt_identity()

    def abort_sync(self, sync_id: str, why: str) -> str:
        """Gives the sync up; returns ``current`` (old weights, running) or ``dirty`` (paused)."""

        def abort() -> str:
            self._session.require(sync_id)
            return self._session.abort(why)

        # Whether it has begun or not: a process that was stopped gets its calls late, in any order.
        self._given_up.append(sync_id)
        return self._command(abort, sync_id)

    def read_weights(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Copies of live parameters on the CPU, for tests and debugging: name -> tensor."""
        _, tensors = describe_tensors(self._control.model)
        return {n: tensors[n].detach().cpu().clone() for n in (names or tensors)}

    def _enter(self, call_id: str, run: Callable[[], None], timeout_s: float) -> None:
        # Before any rank hears of it: these loops could not be parked together.
        self._control.refuse_unsupported_layout()
        self._gate.enter(call_id, run, timeout_s)

    def _sync_id(self, given: str | None) -> str:
        if given is not None:
            return given
        request = self._session.request
        if request is None:
            raise EngineStateError(f"{self._identity} is not in a weight sync; begin_sync first")
        return request.sync_id

    def _command(self, run: Callable[[], T], sync_id: str, timeout_s: float | None = None) -> T:
        if self._gate.parked:
            self._session.require(sync_id)  # refused before it reaches the loop, see begin_sync
        return self._gate.command(run, timeout_s or self._phase_timeout_s)


@contextlib.contextmanager
def _phase(timer: PhaseTimer, name: str) -> Iterator[None]:
    """Times a phase; an error in it says so to whoever drives the sync."""
    try:
        with timer.phase(name):
            yield
    except RdtError as error:
        error.sync_phase = error.sync_phase or name
        raise


def _data_parallel(args: Any) -> tuple[int, bool]:
    """How many ranks share the requests, and whether they are ranks of one TP group.

    From 0.5.22 there are several ways to ask for it, and the parallel state has the answer.
    """
    import sglang.srt.runtime_context as context

    if hasattr(context, "num_dp_ranks_of"):
        parallel = context.get_parallel()
        return int(parallel.num_dp_ranks), bool(parallel.attn_dp_enabled)
    return int(args.dp_size), bool(getattr(args, "enable_dp_attention", False))


def _node_ip() -> str:
    import ray.util

    return ray.util.get_node_ip_address()
