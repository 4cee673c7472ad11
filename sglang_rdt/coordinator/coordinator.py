"""Drives the engines through one sync. One process of the trainer runs it.

The order is design: pause, flush, begin session, (trainer ranks move the bytes), end session,
verify, set version, continue; once per sync. Engines are independent: one that fails is given
up and reported, the others finish.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_rdt.brief import brief
from sglang_rdt.coordinator import calls, failures, trainers
from sglang_rdt.coordinator.engine import Engine, of_ranks
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import human_bytes
from sglang_rdt.engine.states import State
from sglang_rdt.engine.sync_request import Connection, SyncRequest, Trainer
from sglang_rdt.errors import EngineStateError, PlanError, RdtError, VerifyError
from sglang_rdt.plan import report
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.selection import unmatched
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
    """Drives the engines that were met.

    Args:
        settings: deadlines, pause mode, verification.
        trainer: whom the engines will follow.
        followers: engines that may follow it already.
    """

    def __init__(
        self, settings: Settings, trainer: Trainer, followers: Mapping[str, Engine] | None = None
    ) -> None:
        # Those that were described; a sync takes place on all of them, or on ``taking_part``.
        self.engines: dict[str, Engine] = {}
        self.taking_part: dict[str, Engine] = {}
        self._layouts: dict[str, list[EngineRankLayout]] = {}
        # Whoever may think that it follows this trainer, though it was forgotten here.
        self.followers: dict[str, Engine] = dict(followers or {})
        self._settings = settings
        self._trainer = trainer
        self._connection = Connection(uuid.uuid4().hex, trainer)
        self._connecting: dict[str, str] = {}
        self._casts: set[str] = set()
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
            runner=s.runner,
        )

    def _may_replace(self, engine: Engine, statuses: Iterable[Any]) -> str | None:
        """The token of the trainer that was connected to ``engine`` and may be replaced.

        Raises:
            EngineStateError: it still runs.
        """
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
            for engine in self.followers.values():
                refs.update(engine.start("disconnect", self._trainer.token))
            _, errors = calls.settle(refs, _DISCONNECT_S, "disconnect")
        except Exception as error:  # Ray itself is gone
            errors = {"engines": error}
        for who, problem in errors.items():
            logger.debug("%s: not told that its trainer has closed: %s", who, calls.short(problem))

    def meet(
        self,
        engines: Sequence[Engine],
        specs: Sequence[TensorSpec],
        kept: Iterable[str] = (),
    ) -> dict[str, BaseException]:
        """Begins a connect session on each of ``engines``, describes them, records their loaders and
        registers their memory: all at once.

        The engines stay in their connect session until :meth:`leave` or :meth:`give_up`.

        Args:
            kept: names of those of ``specs`` that are not synced.

        Returns:
            Why an engine could not be met; it runs on as it was, and is none of :attr:`engines`.

        Raises:
            PlanError: there are no ``specs``.
        """
        if not specs:
            raise PlanError("the trainer exports no tensor", ["every trainer rank reports nothing"])
        problems: dict[str, BaseException] = {}
        alive = {e.name: e for e in engines}
        timeout = self._settings.connect_timeout_s + GRACE_S

        def step(phase: str, start: Callable[[Engine], dict[str, Any]]) -> dict[str, list[Any]]:
            started = {name: start(engine) for name, engine in alive.items()}
            results, errors = calls.settle_each(started, timeout, phase)
            for name, failed in errors.items():
                problems[name] = calls.CallFailures(phase, failed)
                del alive[name]
            return {name: list(answers.values()) for name, answers in results.items()}

        statuses = step("connect", lambda e: e.start("rdt_status"))
        replaced: dict[str, str | None] = {}
        for name, engine in list(alive.items()):
            try:
                replaced[name] = self._may_replace(engine, statuses[name])
            except RdtError as error:
                problems[name] = error
                del alive[name]
        self._give_up_abandoned(alive, statuses)
        for name, engine in alive.items():
            self.engines[name] = self.followers[name] = engine
            self._connecting[name] = self.new_sync_id("connect")
        sessions = self._connecting
        requests = {
            name: self._request(sessions[name], "connect", replaces=replaced[name])
            for name in alive
        }
        step("begin_sync", lambda e: e.start("begin_sync", requests[e.name]))
        arguments = (list(specs), sorted(kept), self._settings.keep)
        recordings = step(
            "record_load", lambda e: e.start("record_load", sessions[e.name], *arguments)
        )
        # Afterwards: with the scratch memory of what the loader computes.
        params = step("describe", lambda e: e.start("describe"))
        step("register_weights", lambda e: e.start("register_weights", sessions[e.name]))
        for name, engine in alive.items():
            self._layouts[name] = [
                EngineRankLayout(rank, tuple(p), r)
                for rank, p, r in zip(engine.ranks, params[name], recordings[name], strict=True)
            ]
            for layout in self._layouts[name]:
                own = layout.recording.kept.params
                if own:
                    nbytes = sum(p.nbytes for p in layout.params if p.name in own)
                    logger.info(
                        "%s: %d parameters, %s, stay as they are (SGLANG_RDT_KEEP): %s%s",
                        layout.rank,
                        len(own),
                        human_bytes(nbytes),
                        ", ".join(sorted(own)[:5]),
                        ", ..." if len(own) > 5 else "",
                    )
            if not_there := unmatched(self._layouts[name], self._settings.keep):
                problems[name] = PlanError(f"{name}: the name filter", not_there)
        # Ranks that did begin must not stay parked; those that did not will say so.
        self.give_up(problems)
        self.taking_part = dict(self.engines)
        return problems

    def _give_up_abandoned(
        self, engines: Mapping[str, Engine], statuses: Mapping[str, Sequence[Any]]
    ) -> None:
        """An engine that was stopped for a while may be in a sync that this trainer gave up since:
        it would wait for the rest until its stall timeout."""
        started = {}
        for name, engine in engines.items():
            for status in statuses[name]:
                mine = status.connection is None or status.connection.trainer == self._trainer
                if status.sync_id is not None and mine and status.owner == self._trainer.where:
                    started[name] = engine.start("abort_sync", status.sync_id, "it came too late")
        calls.settle_each(started, self._settings.phase_timeout_s, "abort")

    def forget(self, engines: Iterable[str]) -> None:
        """These take part in nothing any more, until they are met again."""
        for name in list(engines):
            for kept in (self.engines, self.taking_part, self._layouts, self._connections):
                kept.pop(name, None)

    def set_aside(self, engines: Iterable[str]) -> dict[str, list[EngineRankLayout]]:
        """The layouts of these, which no plan is about until they are taken back."""
        return {name: self._layouts.pop(name) for name in engines}

    def take_back(self, layouts: Mapping[str, list[EngineRankLayout]]) -> None:
        """See :meth:`set_aside`."""
        self._layouts.update(layouts)

    def take_part(self, engines: Iterable[str] | None = None) -> None:
        """Which of the engines syncs are about from now on; default: all."""
        names = self.engines if engines is None else engines
        self.taking_part = {name: self.engines[name] for name in names if name in self.engines}

    def plan(self, trainers: Sequence[TrainerRank], previous: Plan | None = None) -> Plan:
        """Plans a bucketed sync of all engines.

        Raises:
            PlanError: naming every culprit.
        """
        s = self._settings
        plan = make_plan(
            trainers,
            self._all_layouts(),
            s.bucket_bytes,
            allow_cast=s.allow_cast,
            allow_padding=s.allow_padding,
            previous=previous,
        )
        self._log_casts(plan.casts)
        return plan

    def plan_direct(
        self, trainers: Sequence[TrainerRank], previous: DirectPlan | None = None
    ) -> DirectPlan:
        """Plans a direct sync of all engines.

        Args:
            previous: whose transfers stay as they are, for the engines that were in it.

        Raises:
            PlanError: naming every culprit.
        """
        s = self._settings
        plan = make_direct_plan(
            trainers,
            self._all_layouts(),
            costs=LinkCosts.load(s.link_costs) if s.link_costs else LinkCosts(),
            allow_cast=s.allow_cast,
            allow_padding=s.allow_padding,
            previous=previous,
        )
        self._log_casts(plan.casts)
        return plan

    def _log_casts(self, casts: Sequence[str]) -> None:
        """Every conversion that happens is named once."""
        for cast in casts:
            if cast not in self._casts:
                logger.warning("dtype conversion: %s", cast)
                self._casts.add(cast)

    def report(self, plan: Plan | DirectPlan) -> None:
        """Writes down what the plan does, if that was asked for. A disk that is full is no reason
        not to sync: it is logged."""
        path = self._settings.plan_report
        if path is None:
            return
        try:
            report.save(report.report(self._all_layouts(), plan), Path(path))
        except OSError as error:
            logger.error("SGLANG_RDT_PLAN_REPORT=%s: %s", path, error)

    def _all_layouts(self) -> list[EngineRankLayout]:
        return [layout for layouts in self._layouts.values() for layout in layouts]

    def untouched(self) -> set[str]:
        """Engine ranks that a name filter leaves as they are: nothing is sent to them."""
        return {str(one.rank) for one in self._all_layouts() if not one.recording.wants}

    def prepare_direct(self, plan: DirectPlan) -> dict[str, BaseException]:
        """Every rank of the engines in a connect session prepares its reads.

        Returns:
            Why an engine could not; it is still in its session.
        """
        s = self._settings
        index = {str(rank): i for i, rank in enumerate(plan.targets)}
        started = {}
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
            started[name] = engine.start("prepare_direct", sync_id, per_rank=per_rank)
        _, errors = calls.settle_each(started, s.connect_timeout_s + GRACE_S, "prepare")
        self._connections.update({n: self._connecting[n] for n in started if n not in errors})
        return {name: calls.CallFailures("prepare", failed) for name, failed in errors.items()}

    def leave(self) -> dict[str, BaseException]:
        """Ends all connect sessions: the engines go on as they were.

        Returns:
            Why an engine could not.
        """
        connecting, self._connecting = self._connecting, {}
        started = {
            name: self.engines[name].start("end_sync", sync_id, None)
            for name, sync_id in connecting.items()
        }
        _, errors = calls.settle_each(started, self._settings.phase_timeout_s, "end_sync")
        return {name: calls.CallFailures("end_sync", failed) for name, failed in errors.items()}

    def give_up(self, engines: Mapping[str, BaseException]) -> None:
        """Ends the connect sessions of these (engine -> why), and forgets them."""
        started = {
            name: self.engines[name].start(
                "abort_sync",
                self._connecting.pop(name),
                f"connecting failed: {calls.short(why)}",
            )
            for name, why in engines.items()
            if name in self._connecting
        }
        calls.settle_each(started, self._settings.phase_timeout_s, "abort")
        self.forget(engines)

    @property
    def connecting(self) -> Mapping[str, str]:
        """Engine -> its connect session, while it is in one."""
        return self._connecting

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

        def start(name: str, engine: Engine) -> dict[str, Any]:
            connection = self._connections[name]
            if not engine.replicated:
                return engine.start("sync_direct", request, connection, checksum)
            # Replicas do not vote with one another: none of them reads before all have begun.
            begun = engine.start("begin_sync", request).values()
            return engine.start("read_direct", sync_id, connection, True, checksum, *begun)

        return {name: start(name, engine) for name, engine in self.taking_part.items()}

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
        # Begin (which settles what it began), pull and finalise in one call, each with a deadline
        # of its own on the engine.
        timeout = 4 * self._settings.phase_timeout_s + 3 * GRACE_S
        results, errors = calls.settle_each(started, timeout, phase)
        return results, {name: failures.of_ranks(phase, e) for name, e in errors.items()}

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
        calls.settle_each(started, timeout, "abort")
        asked = {name: self.engines[name].start("rdt_status") for name in failed}
        answers, errors = calls.settle_each(asked, timeout, "status")
        return {
            name: told(*of_ranks({**answers.get(name, {}), **errors.get(name, {})}))
            for name in failed
        }

    def _each(
        self,
        phase: str,
        start: Callable[[Engine], dict[str, Any]],
        engines: Sequence[str] | None = None,
        on_result: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Failure]:
        # Start everywhere before waiting anywhere: engines work at the same time.
        chosen = self.taking_part if engines is None else engines
        started = {name: start(self.engines[name]) for name in chosen}
        results, errors = calls.settle_each(
            started, self._settings.phase_timeout_s + GRACE_S, phase
        )
        if on_result is not None:
            for answers in results.values():
                on_result(answers)
        return {name: failures.of_ranks(phase, e) for name, e in errors.items()}


def told(state: State, why: str) -> str:
    """``state`` in words."""
    if state == "dirty":
        return f"dirty: it stays paused until a full sync succeeds; {why}"
    return state if state == "current" else f"{state}: {why}"


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
