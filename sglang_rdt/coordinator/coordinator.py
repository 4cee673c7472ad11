"""Drives the engines through one sync. One process of the trainer runs it.

The order is design: pause, flush, begin session, (trainer ranks move the bytes), end session,
verify, set version, continue; once per sync. Engines are independent: one that fails is given
up and reported, the others finish.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_rdt.brief import brief
from sglang_rdt.coordinator import calls, failures, trainers
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.engine.states import State
from sglang_rdt.engine.sync_request import Connection, SyncRequest, Trainer
from sglang_rdt.errors import EngineStateError, PlanError, VerifyError
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.specs import EngineRankLayout, TensorSpec, TrainerRank
from sglang_rdt.settings import Settings

logger = logging.getLogger("sglang_rdt")

# The engine's own deadline comes first: it says more, and a call that it cancelled cannot begin
# after the coordinator has given up.
GRACE_S = 5.0
# Closing must not wait for an engine that hangs; it notices the next connect anyway.
_DISCONNECT_S = 10.0

# (engine rank as text, parameter) -> additive checksum of what the trainer sent there.
Expected = Mapping[tuple[str, str], int]


class Coordinator:
    """Drives ``engines``.

    Args:
        settings: deadlines, pause mode, verification.
        trainer: whom the engines will follow.
    """

    def __init__(self, engines: Sequence[Engine], settings: Settings, trainer: Trainer) -> None:
        self.engines = {e.name: e for e in engines}
        self._settings = settings
        self._trainer = trainer
        self._connection = Connection(uuid.uuid4().hex, trainer)
        self._connecting: dict[str, str] = {}
        # Engine -> the connect session in which it prepared its reads.
        self._connections: dict[str, str] = {}

    def new_sync_id(self, what: str) -> str:
        """Unique, and readable in messages."""
        return f"{what}-{uuid.uuid4().hex[:8]}"

    def _request(
        self,
        sync_id: str,
        purpose: Any,
        *,
        overwrite: bool = False,
        replaces: str | None = None,
    ) -> SyncRequest:
        s = self._settings
        return SyncRequest(
            sync_id,
            self._trainer.where,
            purpose,
            pause_mode=s.pause_mode if purpose == "sync" else "in_place",
            flush=s.flush and purpose == "sync",
            stall_timeout_s=s.stall_timeout_s,
            begin_timeout_s=s.phase_timeout_s if purpose == "sync" else s.connect_timeout_s,
            phase_timeout_s=s.phase_timeout_s,
            connection=self._connection,
            replaces=replaces,
            overwrite=overwrite,
        )

    def _may_replace(self, engine: Engine) -> str | None:
        """The token of the trainer that was connected to ``engine`` and may be replaced.

        Raises:
            EngineStateError: it still runs.
            CallFailures: naming every rank that does not answer.
        """
        statuses = engine.call(
            "rdt_status", timeout_s=self._settings.connect_timeout_s, phase="connect"
        )
        other = next((c.trainer for s in statuses if (c := s.connection) is not None), None)
        if other is None or other.token == self._trainer.token:
            return None
        if self._settings.takeover:
            logger.warning("taking %s over from trainer %s", engine, other.where)
        elif trainers.is_there(other):
            raise EngineStateError(
                f"{engine} is connected to trainer {other.where}, which still runs; two trainers "
                "would overwrite each other's weights. Close that one (WeightSync.close), name other "
                "engines (engines=), or take it over with SGLANG_RDT_TAKEOVER=1"
            )
        else:
            logger.info("%s was connected to trainer %s, which is gone", engine, other.where)
        return other.token

    def disconnect(self) -> None:
        """Tells the engines that this trainer is done with them. Never raises: an engine that does
        not hear of it gives way to the next trainer once this process is gone."""
        refs: dict[str, Any] = {}
        try:
            for engine in self.engines.values():
                refs.update(engine.start("disconnect", self._trainer.token))
            _, errors = calls.settle(refs, _DISCONNECT_S, "disconnect")
        except Exception as error:  # Ray itself is gone
            errors = {"engines": error}
        for who, problem in errors.items():
            logger.debug("%s: not told that its trainer has closed: %s", who, calls.short(problem))

    def connect(self, trainers: Sequence[TrainerRank]) -> Plan:
        """Describes the engines, records their loaders, registers their memory, and plans a
        bucketed sync.

        Raises:
            PlanError, RecordError, CallFailures: naming every culprit; the engines run on.
        """
        s = self._settings
        layouts = self.describe(trainers)
        self.leave_connect()
        plan = make_plan(
            trainers,
            layouts,
            s.bucket_bytes,
            allow_cast=s.allow_cast,
            allow_padding=s.allow_padding,
        )
        log_casts(plan.casts)
        return plan

    def connect_direct(self, trainers: Sequence[TrainerRank]) -> DirectPlan:
        """Like :meth:`connect`, for a direct sync. The engines stay in their connect session, for
        the trainer ranks to send references and :meth:`prepare_direct` to end it.

        Raises:
            PlanError, RecordError, CallFailures: naming every culprit; the engines run on.
        """
        s = self._settings
        costs = LinkCosts.load(s.link_costs) if s.link_costs else LinkCosts()
        layouts = self.describe(trainers)
        try:
            plan = make_direct_plan(
                trainers,
                layouts,
                costs=costs,
                allow_cast=s.allow_cast,
                allow_padding=s.allow_padding,
            )
        except BaseException as error:
            self.give_up_connect(calls.short(error))
            raise
        log_casts(plan.casts)
        return plan

    def prepare_direct(self, plan: DirectPlan) -> None:
        """Every engine rank prepares its reads; then the engines go on.

        Raises:
            CallFailures: naming every rank that could not; the engines run on.
        """
        s = self._settings
        index = {str(rank): i for i, rank in enumerate(plan.targets)}
        refs = {}
        for name, sync_id in self._connecting.items():
            engine = self.engines[name]
            per_rank = [
                {
                    "transfers": plan.transfers(index[str(rank)]),
                    "scratch_bytes": s.bucket_bytes,
                    "verify": s.verify == "checksum",
                }
                for rank in engine.ranks
            ]
            refs.update(engine.start("prepare_direct", sync_id, per_rank=per_rank))
        calls.gather(refs, s.connect_timeout_s + GRACE_S, "prepare")
        self._connections = dict(self._connecting)
        self.leave_connect()

    def describe(self, trainers: Sequence[TrainerRank]) -> list[EngineRankLayout]:
        """Begins a connect session on every engine; what its ranks hold and want.

        Raises:
            PlanError, RecordError, CallFailures: naming every culprit; the engines run on.
        """
        specs = {spec.name: spec for t in trainers for spec in t.exports}
        if not specs:
            raise PlanError("the trainer exports no tensor", ["every trainer rank reports nothing"])
        layouts: list[EngineRankLayout] = []
        for engine in self.engines.values():
            sync_id = self._connecting[engine.name] = self.new_sync_id("connect")
            try:
                params, recordings = self._describe(engine, sync_id, list(specs.values()))
            except BaseException as error:
                self.give_up_connect(calls.short(error))
                raise
            layouts += [
                EngineRankLayout(rank, tuple(p), r)
                for rank, p, r in zip(engine.ranks, params, recordings, strict=True)
            ]
        return layouts

    def leave_connect(self) -> None:
        """Ends the connect sessions: the engines go on as they were.

        Raises:
            CallFailures: naming every rank that cannot.
        """
        connecting, self._connecting = self._connecting, {}
        refs: dict[str, Any] = {}
        for name, sync_id in connecting.items():
            refs.update(self.engines[name].start("end_sync", sync_id, None))
        calls.gather(refs, self._settings.phase_timeout_s, "end_sync")

    def give_up_connect(self, why: str) -> None:
        """Lets every engine go on that is in a connect session."""
        connecting, self._connecting = self._connecting, {}
        # Ranks that did begin must not stay parked; those that did not will say so.
        refs: dict[str, Any] = {}
        for name, sync_id in connecting.items():
            refs.update(
                self.engines[name].start("abort_sync", sync_id, f"connecting failed: {why}")
            )
        calls.settle(refs, self._settings.phase_timeout_s, "abort")

    @property
    def connecting(self) -> Mapping[str, str]:
        """Engine -> its connect session, while it is in one."""
        return self._connecting

    def _describe(
        self, engine: Engine, sync_id: str, specs: list[TensorSpec]
    ) -> tuple[list[Any], list[Any]]:
        timeout = self._settings.connect_timeout_s

        def call(method: str, *args: Any) -> list[Any]:
            return engine.call(method, *args, timeout_s=timeout + GRACE_S, phase=method)

        replaces = self._may_replace(engine)
        call("begin_sync", self._request(sync_id, "connect", replaces=replaces))
        params = call("describe")
        recordings = call("record_load", sync_id, specs)
        call("register_weights", sync_id)
        return params, recordings

    def begin(self, sync_id: str, *, overwrite: bool = False) -> dict[str, Failure]:
        """Pauses, flushes and opens a session on every engine at once; failures per engine.

        Args:
            overwrite: see :class:`~sglang_rdt.engine.sync_request.SyncRequest`.
        """
        request = self._request(sync_id, "sync", overwrite=overwrite)
        return self._each("pause", lambda engine: engine.start("begin_sync", request))

    def start_syncs(
        self, sync_id: str, *, checksum: bool, overwrite: bool
    ) -> dict[str, dict[str, Any]]:
        """All ranks of all engines begin, read what they prepared, and end their session; engine
        -> references. Nothing else must follow but :meth:`commit` or :meth:`abort`."""
        request = self._request(sync_id, "sync", overwrite=overwrite)
        return {
            name: engine.start("sync_direct", request, self._connections[name], checksum)
            for name, engine in self.engines.items()
        }

    def start_reads(self, sync_id: str, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
        """All ranks of ``engines``, which have begun, read what they prepared; engine ->
        references. Their session stays open for what others send them."""
        return {
            name: self.engines[name].start(
                "read_direct", sync_id, self._connections[name], False, False
            )
            for name in engines
        }

    def start_compares(self, sync_id: str, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
        """All ranks of ``engines`` read again and compare; engine -> references."""
        return {
            name: self.engines[name].start("compare_direct", sync_id, self._connections[name])
            for name in engines
        }

    def finish_reads(
        self, started: Mapping[str, Mapping[str, Any]], phase: str
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Failure]]:
        """Waits for what was started: engine -> engine rank (text) -> answer, and failures.

        Args:
            phase: what was started, for messages.
        """
        results: dict[str, dict[str, Any]] = {}
        failed: dict[str, Failure] = {}
        for name, refs in started.items():
            # Begin (which settles what it began), pull and finalise in one call, each with a
            # deadline of its own on the engine.
            timeout = 4 * self._settings.phase_timeout_s + 3 * GRACE_S
            answers, errors = calls.settle(refs, timeout, phase)
            if errors:
                failed[name] = failures.of_ranks(phase, errors)
            else:
                results[name] = answers
        return results, failed

    def finalise(
        self, sync_id: str, engines: Sequence[str], *, checksum: bool
    ) -> tuple[dict[str, dict], dict[str, Failure]]:
        """Ends the session on ``engines``.

        Returns:
            engine rank (text) -> checksums by parameter, and failures per engine.
        """
        sums: dict[str, dict] = {}
        failed = self._each(
            "finalise",
            lambda engine: engine.start("finalise", sync_id, checksum),
            engines,
            on_result=sums.update,
        )
        return sums, failed

    def commit(self, sync_id: str, version: str, engines: Sequence[str]) -> dict[str, Failure]:
        """Sets the version and resumes; failures per engine."""
        return self._each(
            "version", lambda engine: engine.start("end_sync", sync_id, version), engines
        )

    def abort(self, sync_id: str, failed: Mapping[str, Any]) -> dict[str, str]:
        """Gives the sync up on the engines in ``failed`` (engine -> why), all at once; what state
        each is left in.

        Ranks that gave it up by themselves (they vote) refuse the call; their state says so.
        """
        timeout = self._settings.phase_timeout_s
        started = {
            name: self.engines[name].start("abort_sync", sync_id, str(why))
            for name, why in failed.items()
        }
        for refs in started.values():
            calls.settle(refs, timeout, "abort")
        return {name: told(*self.engines[name].state(timeout)) for name in failed}

    def _each(
        self,
        phase: str,
        start: Callable[[Engine], dict[str, Any]],
        engines: Sequence[str] | None = None,
        on_result: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Failure]:
        # Start everywhere before waiting anywhere: engines work at the same time.
        chosen = self.engines if engines is None else engines
        started = {name: start(self.engines[name]) for name in chosen}
        failed: dict[str, Failure] = {}
        for name, refs in started.items():
            results, errors = calls.settle(refs, self._settings.phase_timeout_s + GRACE_S, phase)
            if errors:
                failed[name] = failures.of_ranks(phase, errors)
            elif on_result is not None:
                on_result(results)
        return failed


def told(state: State, why: str) -> str:
    """``state`` in words."""
    if state == "dirty":
        return f"dirty: it stays paused until a full sync succeeds; {why}"
    return state if state == "current" else f"{state}: {why}"


def log_casts(casts: Sequence[str]) -> None:
    """Every conversion that happens is named once."""
    for cast in casts:
        logger.warning("dtype conversion: %s", cast)


def compare_checksums(
    expected: Expected, found: Mapping[str, Mapping[str, int]], engines: Mapping[str, str]
) -> dict[str, Failure]:
    """Where what the engines hold differs from what the trainer sent.

    Args:
        found: engine rank (text) -> parameter -> checksum.
        engines: engine rank (text) -> engine name, of every rank that should have answered.

    Returns:
        engine -> every parameter and rank that differs; empty if all is equal. A parameter that
        only one side reports differs too, and so does a rank that reports nothing.
    """
    differences: dict[str, list[str]] = {}
    sent_to: dict[str, dict[str, int]] = {}
    for (rank, param), value in expected.items():
        sent_to.setdefault(rank, {})[param] = value
    for rank, engine in engines.items():
        sums, sent = found.get(rank), sent_to.get(rank, {})
        if sums is not None and not _are_sums(sums):
            differences.setdefault(engine, []).append(
                f"{rank}: what it reports are no checksums: {brief(sums)}"
            )
            continue
        if sums is None or not sent:
            side = "engine" if sums is None else "trainer"
            differences.setdefault(engine, []).append(f"{rank}: the {side} reports no checksum")
            continue
        for param in sorted({*sent, *sums}):
            if sent.get(param) != sums.get(param):
                what = (
                    "was not sent" if param not in sent
                    else "is not held" if param not in sums
                    else "differs"
                )  # fmt: skip
                differences.setdefault(engine, []).append(f"{rank}: {param} {what}")
    return {
        e: Failure("verify", str(VerifyError("checksums differ after the sync", d)))
        for e, d in differences.items()
    }


def _are_sums(sums: object) -> bool:
    return type(sums) is dict and all(
        type(param) is str and type(value) is int for param, value in sums.items()
    )
