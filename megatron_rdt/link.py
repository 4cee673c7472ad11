"""What ties the trainer ranks to engines: a plan, registered memory, prepared reads.

It is made once, and afterwards changed only where engines came or went. Every method that talks to
other ranks is collective; rank 0 also talks to the engines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megatron_rdt import cluster
from megatron_rdt.movers import BucketedMover, DirectMover, Mover
from megatron_rdt.parallel import TrainerGroup, coordinates
from megatron_rdt.sender import RouteSender
from megatron_rdt.sources.base import WeightSource
from megatron_rdt.sources.holds import Holdings
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator import trainers as identities
from sglang_rdt.coordinator.coordinator import Coordinator
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.membership import Membership, News, refusals
from sglang_rdt.coordinator.phases import human_bytes, kept_line
from sglang_rdt.engine.sync_request import Trainer
from sglang_rdt.errors import EngineNotFoundError, ExportError, PlanError, RdtError
from sglang_rdt.plan.direct import DirectPlan, DirectShare
from sglang_rdt.plan.planner import BucketedShare, Plan, Route
from sglang_rdt.plan.selection import Selection, select
from sglang_rdt.plan.specs import EngineRank, TensorSpec, TrainerRank
from sglang_rdt.settings import Settings
from sglang_rdt.transport import nixl

logger = logging.getLogger("megatron_rdt")

T = TypeVar("T")


@dataclass(frozen=True)
class _Notice:
    """What one rank has noticed since the last sync.

    ``moved``: its parameters lie elsewhere. ``stale``: engines that its program calls stale; None:
    all. ``changed``: on rank 0, whether engines came or went. ``error``: it could not tell.
    """

    moved: bool = False
    stale: frozenset[str] | None = frozenset()
    changed: bool = False
    error: RdtError | None = None


@dataclass(frozen=True)
class _Met:
    """Rank 0 to another rank: its share of the plan, and the engines that are in a connect session
    for it, with their sessions."""

    share: DirectShare | BucketedShare
    sessions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Connected:
    """What a connect has come to.

    ``mode``: ``direct`` or ``bucketed``. ``tensors``: HF tensors. ``nbytes``: bytes per sync over
    all links. ``staged_bytes``: of these, by how they move, in direct mode. ``selection``: what a
    name filter leaves as it is.
    """

    mode: str
    engines: tuple[str, ...]
    tensors: int
    nbytes: int
    staged_bytes: Mapping[str, int]
    selection: Selection = Selection()


class EngineLink:
    """This rank's end.

    Args:
        source: of HF tensors.
        settings: deadlines, mode, verification.
        group: all trainer ranks.
        membership: which engines are wanted. Rank 0 asks it.
        namespace: for joining the Ray cluster.
        device: of the parameters.
    """

    def __init__(
        self,
        source: WeightSource,
        settings: Settings,
        group: TrainerGroup,
        membership: Membership,
        namespace: str | None,
        device: torch.device,
    ) -> None:
        self._source = source
        self._settings = settings
        self._group = group
        self._membership = membership
        self._namespace = namespace
        self._device = device
        self._specs: Sequence[TensorSpec] = ()
        self._holdings: Holdings | None = None
        self._memory_ref: Any = None  # what engines read lives as long as this reference
        self._trainer: Trainer | None = None
        self._stale: frozenset[str] | None = frozenset()
        self._senders: dict[str, RouteSender] = {}
        self._mover: Mover | None = None
        # Rank 0 only.
        self._trainers: Sequence[TrainerRank] = ()
        self._plan: Plan | DirectPlan | None = None
        self.selection = Selection()
        self._news = News()
        self.coordinator: Coordinator | None = None
        self._followers: Mapping[str, Engine] = {}
        # Engines that should take part in a sync, and cannot; on rank 0.
        self.failures: dict[str, Failure] = {}
        # Syncs since engines were connected.
        self.syncs = 0
        self.connected = False

    @property
    def mover(self) -> Mover:
        """Who moves the bytes."""
        if self._mover is None:
            raise RdtError("not connected to any engine")
        return self._mover

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory of this rank, in bytes."""
        return self._mover.staging_bytes if self._mover is not None else 0

    @property
    def mode(self) -> str | None:
        """``direct`` or ``bucketed``; None before it has connected."""
        if self._mover is None:
            return None
        return "direct" if self._holdings is not None else "bucketed"

    @property
    def is_fresh(self) -> bool:
        """Whether this rank knows of nothing that has to be connected before the next sync."""
        return self.connected and self._stale == frozenset()

    def mark_stale(self, engines: Iterable[str] | None) -> None:
        """These are connected anew before the next sync; None: everything is."""
        if engines is None or self._stale is None:
            self._stale = None
        else:
            self._stale |= frozenset(engines)

    def connect(self) -> Connected:
        """Everything from the beginning.

        Raises:
            EngineNotFoundError, RecordError, PlanError, ExportError, DeadlineError: on all ranks;
                engines go on serving what they served.
        """
        started = time.perf_counter()
        self._group.doing = "connect"
        self.disconnect()
        self._stale = frozenset()
        self._agree_on_settings()
        self._group.together(lambda: cluster.join(self._settings, self._namespace))
        if self._trainer is None:
            self._trainer = identities.introduce()
            self._group.members = self._group.gather(self._trainer)
        self._specs = list(self._group.together(self._source.specs))
        self._holdings = holdings = self._find_holdings()
        me = TrainerRank(
            self._group.rank,
            cluster.node_ip(),
            tuple(self._specs),
            coordinates(),
            tuple(holdings.blocks) if holdings else (),
            tuple(holdings.holds) if holdings else (),
        )
        self._trainers = self._group.collect(me)
        if holdings is not None:
            # Before the engines pause: registering a model takes a second the first time.
            self._memory_ref = self._group.together(lambda: _offer(holdings))
        plan = self._group.lead(self._lead_first)
        self._attach(strict=self._strict)
        self.connected = True
        if self._group.leads:
            logger.info(
                "connected to %s (%s%s): %d HF tensors, %s per sync%s, in %.1f s",
                ", ".join(sorted(self.coordinator.engines)) if self.coordinator else "",
                self.mode,
                self._runners(),
                plan.tensors,
                human_bytes(plan.nbytes),
                f", {kept_line(plan.selection)}" if plan.selection.kept else "",
                time.perf_counter() - started,
            )
        return plan

    def _runners(self) -> str:
        """What engines with several models are synced, for the log."""
        engines = self.coordinator.engines.values() if self.coordinator else ()
        several = sorted({r.runners for e in engines for r in e.ranks} - {"target"})
        if not several and self._settings.runner == "target":
            return ""
        return f", runner {self._settings.runner} of {' / '.join(several)}"

    @property
    def _strict(self) -> bool:
        """Whether an engine that cannot be connected is an error of the connect."""
        return not (self._membership.takes_all or self._membership.found_before)

    def refresh(self) -> None:
        """Before a sync: connects what came, forgets what went, and registers what moved.

        Raises:
            EngineNotFoundError: no engine is left.
            As :meth:`connect`, where everything has to be connected.
        """
        self._group.doing = "connect"
        notices = self._group.gather(self._notice())
        for notice in notices:
            if notice.error is not None:
                raise notice.error
        stale: frozenset[str] = frozenset()
        for notice in notices:
            if notice.moved or notice.stale is None:
                if self._group.leads:
                    what = "parameters moved in memory" if notice.moved else "told so"
                    logger.warning("connecting again: %s", what)
                self.connect()
                return
            stale |= notice.stale
        self._stale = frozenset()
        if stale or notices[0].changed:
            self._update(stale)

    def forget(self, engines: Iterable[str]) -> None:
        """These failed: they are connected anew before the next sync. Not collective."""
        if self.coordinator is not None:
            self.coordinator.forget(engines)

    def _notice(self) -> _Notice:
        try:
            held = self._holdings
            moved = held is not None and self._source.addresses() != held.addresses  # type: ignore[attr-defined]
            changed = False
            if self.coordinator is not None:
                self._news = self._membership.look(self.coordinator.engines)
                changed = bool(self._news) or bool(
                    self._planned() - self.coordinator.engines.keys()
                )
                self.failures = _missing(self._news)
            return _Notice(moved, self._stale, changed)
        except Exception as error:  # all ranks must hear of it
            return _Notice(error=RdtError(f"trainer rank {self._group.rank}: {calls.short(error)}"))

    def _planned(self) -> set[str]:
        """Engines that the plan is about; one that failed may be among them."""
        return set(self._plan.engines) if self._plan is not None else set()

    def _update(self, stale: frozenset[str]) -> None:
        """Collective: the plan and the reads follow the engines."""
        started = time.perf_counter()
        try:
            self._group.lead(lambda: self._lead_update(stale))
        except EngineNotFoundError:
            self.disconnect()
            raise
        joined = self._attach(strict=False)
        if self._group.leads and joined:
            logger.info(
                "connected to %s in %.1f s", ", ".join(joined), time.perf_counter() - started
            )

    # Rank 0.

    def _lead_first(self) -> Connected:
        assert self._trainer is not None
        # Before any engine is asked for anything.
        self.selection = select(
            self._specs_of_all(), self._settings.include, self._settings.exclude
        )
        news = self._membership.find()
        self.failures = _missing(news)
        self.coordinator = lead = Coordinator(self._settings, self._trainer, self._followers)
        problems = lead.meet(news.joined, self._specs_of_all(), self.selection.kept)
        try:
            self._judge(problems, news.joined, strict=self._strict)
            self._plan = self._make_plan()
            lead.report(self._plan)
            return _summary(self._plan, self.selection)
        except BaseException as error:
            lead.give_up(dict.fromkeys(lead.connecting, error))
            raise

    def _lead_update(self, stale: frozenset[str]) -> None:
        """Raises EngineNotFoundError if no engine is left."""
        lead = self.coordinator
        assert lead is not None
        unknown = sorted(stale - lead.engines.keys())
        if unknown:
            logger.warning("called stale, and not connected: %s", ", ".join(unknown))
        lead.forget(stale)
        news = self._membership.look(lead.engines) if stale else self._news
        self.failures = _missing(news)
        lead.forget(news.lost)
        try:
            problems = lead.meet(news.joined, self._specs_of_all(), self.selection.kept)
            self._judge(problems, news.joined, strict=False)
            if lead.engines:
                self._plan = self._plan_fitting()
            if not lead.engines:
                why = "; ".join(
                    f"{name}: {failure.text}" for name, failure in self.failures.items()
                )
                raise EngineNotFoundError(
                    "no engine is left to sync" + (f" ({why})" if why else "")
                )
            self._check_kept(self._plan)
            if self._plan is not None:
                lead.report(self._plan)
        except BaseException as error:
            lead.give_up(dict.fromkeys(lead.connecting, error))
            raise

    def _specs_of_all(self) -> list[TensorSpec]:
        if self._plan is not None:
            return list(self._plan.specs.values())
        return list({spec.name: spec for t in self._trainers for spec in t.exports}.values())

    def _judge(
        self, problems: Mapping[str, BaseException], engines: Sequence[Engine], *, strict: bool
    ) -> None:
        """Notes why engines could not be connected.

        Args:
            strict: raise instead. Without it, too, an engine that refuses is an error where none
                was connected before, and so none has any weights of this trainer yet.
        """
        lead = self.coordinator
        assert lead is not None
        no = refusals(problems)
        if problems and (strict or not lead.engines or (no and not self._membership.found_before)):
            raise _one_of(problems if strict else no or problems)
        for engine in engines:
            error = problems.get(engine.name)
            if error is None:
                continue
            self.failures[engine.name] = Failure("connect", calls.short(error))
            logger.error("engine %s is not connected: %s", engine.name, calls.short(error))
            if engine.name not in no:
                self._membership.failed(engine)

    def _plan_fitting(self) -> Plan | DirectPlan | None:
        """A plan of all engines that fit, if any does; one that joined and does not must not keep
        the others from theirs."""
        lead = self.coordinator
        assert lead is not None
        joined = list(lead.connecting)
        try:
            return self._make_plan()
        except PlanError:
            if not joined:
                raise
        layouts = lead.set_aside(joined)
        for name in joined:
            lead.take_back({name: layouts[name]})
            try:
                self._make_plan()
            except PlanError as error:
                lead.give_up({name: error})
                self.failures[name] = Failure("plan", calls.short(error))
                logger.error("engine %s fits no plan: %s", name, calls.short(error))
        return self._make_plan() if lead.engines else None

    def _check_kept(self, plan: Plan | DirectPlan | None) -> None:
        """What engines have prepared must still be what they are to read."""
        lead = self.coordinator
        assert lead is not None
        if not isinstance(plan, DirectPlan):
            return
        for i, target in enumerate(plan.targets):
            if target.engine not in lead.connecting and i not in plan.kept:
                raise RdtError(f"{target} would read something else than it has prepared")

    def _make_plan(self) -> Plan | DirectPlan:
        lead = self.coordinator
        assert lead is not None
        old = self._plan
        if self._holdings is None or isinstance(old, Plan):
            return lead.plan(self._trainers, old if isinstance(old, Plan) else None)
        try:
            return lead.plan_direct(self._trainers, old)
        except PlanError as error:
            if self._settings.mode == "direct" or self.connected:
                raise
            # If the model itself does not fit, the bucketed plan says so again.
            plan = lead.plan(self._trainers)
            logger.warning("weights go in buckets, since direct mode is not possible: %s", error)
            return plan

    # All ranks.

    def _attach(self, *, strict: bool) -> list[str]:
        """Engines in a connect session get what they need of each rank, and go on; their names."""
        group, lead = self._group, self.coordinator
        try:
            met = group.scatter(group.alone(self._shares))
            routes = group.together(lambda: self._routes(met.share))
            problems = _first_of(
                group.gather(self._send_memory(met)), group.gather(self._renew_senders(routes))
            )
            joined = group.lead(lambda: self._lead_attach(problems, strict=strict))
        except BaseException as error:
            self._drop_senders(self._senders)
            if lead is not None:
                lead.give_up(dict.fromkeys(lead.connecting, error))
            self.connected = False
            raise
        if self._mover is None:
            self._mover = self._make_mover(isinstance(met.share, DirectShare))
        self._mover.follow(met.share, list(self._senders.values()))
        if joined:
            self.syncs = 0
        return joined

    def _shares(self) -> list[_Met]:
        """What each rank is sent."""
        lead, plan = self.coordinator, self._plan
        assert lead is not None
        assert plan is not None
        sessions = dict(lead.connecting)
        return [_Met(plan.share(rank), sessions) for rank in range(self._group.size)]

    def _lead_attach(self, problems: Mapping[str, BaseException], *, strict: bool) -> list[str]:
        lead = self.coordinator
        assert lead is not None
        engines = [lead.engines[name] for name in lead.connecting]
        problems = dict(problems)
        lead.give_up(problems)
        if isinstance(self._plan, DirectPlan):
            unprepared = lead.prepare_direct(self._plan)
            lead.give_up(unprepared)
            problems |= unprepared
        stuck = lead.leave()
        lead.forget(stuck)
        self._judge({**stuck, **problems}, engines, strict=strict)
        joined = [e.name for e in engines if e.name in lead.engines]
        self._membership.connected(joined)
        return joined

    def _make_mover(self, direct: bool) -> Mover:
        if direct:
            assert self._holdings is not None
            return DirectMover(
                self._group.rank,
                self._holdings.tensors,
                self.coordinator,
                verify=self._settings.verify == "checksum",
            )
        if self._holdings is not None:
            nixl.deregister(self._holdings.tensors)
        self._holdings = self._memory_ref = None
        return BucketedMover(self._group.rank, self._source, self._specs, draws=self._group.leads)

    def _routes(self, share: DirectShare | BucketedShare) -> Sequence[Route]:
        if isinstance(share, DirectShare):
            return share.packed_routes(self._group.rank, self._settings.bucket_bytes)
        return share.routes

    def _send_memory(self, met: _Met) -> dict[str, BaseException]:
        """This rank's memory to every engine rank that is in a session and reads from it; references
        only travel whole inside of Ray calls."""
        started: dict[str, dict[str, Any]] = {}
        problems: dict[str, BaseException] = {}
        for target in met.share.targets if isinstance(met.share, DirectShare) else ():
            session = met.sessions.get(target.engine)
            if session is None:
                continue
            try:
                ref = _actor_of(target).accept_memory.remote(
                    session, self._group.rank, [self._memory_ref]
                )
            except ValueError as error:  # died since
                problems[target.engine] = error
            else:
                started.setdefault(target.engine, {})[str(target)] = ref
        _, errors = calls.settle_each(started, self._settings.connect_timeout_s, "accept_memory")
        for name, failed in errors.items():
            problems[name] = calls.CallFailures("accept_memory", failed)
        return {name: _travelling(error) for name, error in problems.items()}

    def _renew_senders(self, routes: Sequence[Route]) -> dict[str, BaseException]:
        """One sender per route; those whose route is as before stay."""
        problems: dict[str, BaseException] = {}
        wanted = {_key(route): route for route in routes}
        self._drop_senders([k for k, s in self._senders.items() if wanted.get(k) != s.route])
        for key, route in wanted.items():
            if key in self._senders:
                continue
            try:
                self._senders[key] = RouteSender(
                    route, _actor_of(route.target), self._device, self._settings.phase_timeout_s
                )
            except Exception as error:
                problems[route.target.engine] = _travelling(error)
        return problems

    def _drop_senders(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._senders.pop(key).close()

    def _agree_on_settings(self) -> None:
        # What decides which collectives the ranks take part in.
        s = self._settings
        mine = {
            name: getattr(s, name)
            for name in (
                "mode",
                "verify",
                "verify_every",
                "bucket_bytes",
                "engine_failures",
                "include",
                "exclude",
                "keep",
                "runner",
            )
        }
        for rank, theirs in enumerate(self._group.gather(mine)):
            if theirs != mine:
                raise RdtError(
                    f"trainer ranks {self._group.rank} and {rank} have different settings of "
                    f"{', '.join(mine)}: {tuple(mine.values())} and {tuple(theirs.values())}"
                )

    def _find_holdings(self) -> Holdings | None:
        """Where HF tensors lie in this rank's memory, if direct mode is wanted and possible."""
        wanted = self._settings.mode
        if wanted == "bucketed":
            return None
        error: BaseException | None = None
        found: Holdings | None = None
        try:
            find = getattr(self._source, "holds", None)
            if find is None:
                raise ExportError(
                    f"{type(self._source).__name__} does not say where HF tensors lie in memory"
                )
            found = find()
        except Exception as caught:  # a bridge's own error on one rank must not lose the others
            if not isinstance(caught, ExportError):
                logger.exception("tracing the bridge failed on trainer rank %d", self._group.rank)
            error = caught
        problems = [p for p in self._group.gather(calls.short(error) if error else None) if p]
        if not problems:
            return found
        if wanted == "direct":
            raise ExportError(f"direct mode is not possible: {problems[0]}")
        if self._group.leads:
            logger.warning("weights go in buckets, since %s", problems[0])
        return None

    def disconnect(self) -> None:
        """Gives staging memory, references and registrations back. Not collective; tells nobody."""
        self._drop_senders(self._senders)
        if self._mover is not None:
            self._mover.close()
        elif self._holdings is not None:
            nixl.deregister(self._holdings.tensors)
        self._mover = self._holdings = self._memory_ref = None
        if self.coordinator is not None:
            self._followers = self.coordinator.followers
        self._plan, self._trainers, self.coordinator = None, (), None
        self.connected = False

    def close(self) -> None:
        """Tells the engines, too, that this trainer is done with them."""
        if self._trainer is not None:
            # There is no coordinator where no engine was left; those that had failed still follow.
            followers = self.coordinator.followers if self.coordinator else self._followers
            Coordinator(self._settings, self._trainer, followers).disconnect()
            identities.leave(self._trainer)
        self.disconnect()


def _summary(plan: Plan | DirectPlan, selection: Selection) -> Connected:
    mode = "direct" if isinstance(plan, DirectPlan) else "bucketed"
    staged = plan.staged_bytes.items() if isinstance(plan, DirectPlan) else ()
    sizes = {str(how): nbytes for how, nbytes in staged}
    return Connected(mode, plan.engines, len(plan.specs), plan.nbytes, sizes, selection)


def _key(route: Route) -> str:
    return f"{route.target} {route.target.instance}"


def _actor_of(target: EngineRank) -> Any:
    """Raises ValueError if there is none of that name any more."""
    import ray

    return ray.get_actor(target.actor_name, namespace=target.namespace)


def _missing(news: News) -> dict[str, Failure]:
    return {name: Failure("connect", why) for name, why in news.missing.items()}


def _first_of(*rounds: Iterable[Mapping[str, BaseException]]) -> dict[str, BaseException]:
    first: dict[str, BaseException] = {}
    for ranks in rounds:
        for problems in ranks:
            for name, error in problems.items():
                first.setdefault(name, error)
    return first


def _travelling(error: BaseException) -> BaseException:
    return error if isinstance(error, RdtError) else RdtError(calls.short(error))


def _one_of(problems: Mapping[str, BaseException]) -> BaseException:
    """Calls that failed on several ranks for one cause (the same loader refuses the same tensor)
    are that cause; several engines are listed."""
    error = next(iter(problems.values()))
    if len(problems) > 1:
        return calls.CallFailures("connect", problems)
    if isinstance(error, calls.CallFailures):
        errors = list(error.failures.values())
        if errors and all(isinstance(e, RdtError) for e in errors):
            return errors[0]
    return error


def _offer(holdings: Holdings) -> Any:
    """A reference to this rank's blocks, registered as whole storages; None if it has none."""
    if not holdings.tensors:
        return None
    nixl.register(holdings.tensors)
    return nixl.put(holdings.tensors)
