"""Weight sync of a Megatron model, as seen from a training program.

Every trainer rank makes one :class:`WeightSync` and calls the same methods at the same points.
Rank 0 also drives the engines; ranks that serve no engine only take part in the gathers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_rdt import cluster, hooks
from megatron_rdt.background import InBackground
from megatron_rdt.final_params import make_final
from megatron_rdt.movers import BucketedMover, DirectMover, Moved, Mover
from megatron_rdt.parallel import TrainerGroup, coordinates
from megatron_rdt.sender import RouteSender
from megatron_rdt.sources.base import WeightSource
from megatron_rdt.sources.holds import Holdings
from sglang_rdt import settings as settings_module
from sglang_rdt.coordinator import calls, discovery
from sglang_rdt.coordinator import trainers as identities
from sglang_rdt.coordinator.coordinator import Coordinator, compare_checksums
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.phases import PhaseTimer, SyncReport, human_bytes, slowest
from sglang_rdt.engine.sync_request import Trainer
from sglang_rdt.errors import (
    EngineNotFoundError,
    ExportError,
    PlanError,
    RdtError,
    SyncError,
    VerifyError,
)
from sglang_rdt.plan.direct import DirectPlan
from sglang_rdt.plan.planner import Plan, Route
from sglang_rdt.plan.specs import TensorSpec, TrainerRank
from sglang_rdt.settings import Settings
from sglang_rdt.transport import nixl

logger = logging.getLogger("megatron_rdt")

T = TypeVar("T")


class WeightSync:
    """Carries the weights of ``model_chunks`` to SGLang engines.

    Args:
        model_chunks: what was given to ``get_megatron_optimizer`` (DDP-wrapped or not).
        hf_config: transformers config of the model, or a path to its ``config.json`` or folder.
            Not needed with ``source``.
        optimizer: the outermost Megatron optimizer. If given, a sync follows every
            ``settings.export_every``-th successful step by itself (0: only on demand).
        source: where HF tensors come from; default: mbridge.
        engines: ``host:port`` of each engine, or engines already found; default: all engines in
            the namespace at the time of :meth:`connect`.
        namespace: Ray namespace of the engines.
        settings: default: from the environment.

    Collective: every trainer rank makes one, after ``torch.distributed`` and Megatron's parallel
    state are initialised.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        *,
        hf_config: Any | None = None,
        optimizer: Any | None = None,
        source: WeightSource | None = None,
        engines: Sequence[str | Engine] | None = None,
        namespace: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or settings_module.load()
        if not self.settings.enabled:
            raise RdtError("SGLANG_RDT=0: weight sync is switched off")
        self._chunks = list(model_chunks)
        self._optimizer = optimizer
        self._namespace = namespace
        self._wanted_engines = list(engines) if engines is not None else None
        self._source = source or _default_source(self._chunks, hf_config, self.settings)
        self._device = next(
            (p.device for c in self._chunks for p in c.parameters()), torch.device("cpu")
        )
        self._group = TrainerGroup(2 * self.settings.phase_timeout_s + 60.0)
        self._coordinator: Coordinator | None = None
        self._trainer: Trainer | None = None
        self._since_connect = 0  # syncs
        self._specs: Sequence[TensorSpec] = ()
        self._holdings: Holdings | None = None
        self._memory_ref: Any = None  # what engines read lives as long as this reference
        self._mover: Mover | None = None
        self._pending: InBackground[SyncReport] | None = None
        self._connected = False
        self._warned = False
        self._steps = 0
        self._closed = False
        self._open_sync: str | None = None  # on rank 0: begun, and neither committed nor given up
        self._engine_names: tuple[str, ...] = ()
        self.last_report: SyncReport | None = None
        self._remove_listeners = [hooks.add_guard(self._before_step)]
        if optimizer is not None:
            self._remove_listeners.append(hooks.add_listener(self.on_step, optimizer))

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory of this rank, in bytes."""
        return self._mover.staging_bytes if self._mover is not None else 0

    @property
    def steps(self) -> int:
        """Successful optimizer steps seen; the version of the sync after a step."""
        return self._steps

    def on_step(self, optimizer: Any) -> None:
        """After a successful optimizer step; syncs when the cadence says so."""
        self._steps += 1
        every = self.settings.export_every
        if every and self._steps % every == 0:
            self._optimizer = self._optimizer or optimizer
            self.sync(str(self._steps), wait=not self._overlaps())

    def _overlaps(self) -> bool:
        """Whether the sync after a step goes on by itself: where that was asked for and can be."""
        if not self.settings.overlap:
            return False
        if not self._connected:
            self.connect()
        if self.mode == "bucketed" and not self._warned and self._group.leads:
            self._warned = True
            logger.warning(
                "MEGATRON_RDT_OVERLAP: the sync is bucketed, so each step waits for it (a bucketed "
                "sync uses Megatron's process groups, and so does the next forward pass)"
            )
        return self.mode == "direct"

    def _before_step(self, optimizer: Any) -> None:
        # Whichever optimizer it is: a sync under way must not see a parameter change.
        self.wait()

    def connect(self) -> Plan | DirectPlan:
        """Finds and describes the engines, plans, registers memory, prepares reads. Collective.

        Returns:
            The plan of all ranks.

        Raises:
            EngineNotFoundError, RecordError, PlanError, DeadlineError: on all ranks; engines go
                on serving what they served.
            ExportError: mode ``direct`` was asked for, and the source cannot say where HF tensors
                lie; names what it cannot.
        """
        self.wait()
        return self._connect()

    def _connect(self) -> Plan | DirectPlan:
        started = time.perf_counter()
        self._group.doing = "connect"
        self._disconnect()
        self._agree_on_settings()
        self._group.together(lambda: cluster.join(self.settings, self._namespace))
        if self._trainer is None:
            self._trainer = identities.introduce()
            self._group.members = self._group.gather(self._trainer)
        self._specs = list(self._group.together(self._source.specs))
        self._holdings = self._find_holdings()
        me = TrainerRank(
            self._group.rank,
            cluster.node_ip(),
            tuple(self._specs),
            coordinates(),
            tuple(self._holdings.blocks) if self._holdings else (),
            tuple(self._holdings.holds) if self._holdings else (),
        )
        trainers = self._group.collect(me)
        plan = self._connect_direct(trainers) or self._connect_bucketed(trainers)
        self._connected = True
        self._since_connect = 0
        if self._group.leads:
            logger.info(
                "connected to %s (%s): %d HF tensors, %s per sync, in %.1f s",
                ", ".join(self._engine_names),
                self.mode,
                len(plan.specs),
                human_bytes(plan.nbytes),
                time.perf_counter() - started,
            )
        return plan

    @property
    def mode(self) -> str | None:
        """``direct`` or ``bucketed``: how the sync moves; None before it has connected."""
        if self._mover is None:
            return None
        return "direct" if self._holdings is not None else "bucketed"

    def _agree_on_settings(self) -> None:
        # What decides which collectives the ranks take part in.
        s = self.settings
        mine = (s.mode, s.verify, s.verify_every, s.bucket_bytes)
        for rank, theirs in enumerate(self._group.gather(mine)):
            if theirs != mine:
                raise RdtError(
                    f"trainer ranks {self._group.rank} and {rank} have different settings of mode, "
                    f"verify, verify_every and bucket_bytes: {mine} and {theirs}"
                )

    def _find_holdings(self) -> Holdings | None:
        """Where HF tensors lie in this rank's memory, if direct mode is wanted and possible."""
        wanted = self.settings.mode
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

    def _connect_bucketed(self, trainers: Sequence[TrainerRank]) -> Plan:
        plan = self._group.lead(lambda: _plain(lambda: self._coordinate().connect(trainers)))
        self._engine_names = tuple(sorted({r.target.engine for r in plan.routes}))
        senders = self._group.together(lambda: self._make_senders(plan.routes_of(self._group.rank)))
        self._mover = BucketedMover(
            self._group.rank,
            self._source,
            self._specs,
            senders,
            self._engine_names,
            draws=self._group.leads,
        )
        return plan

    def _connect_direct(self, trainers: Sequence[TrainerRank]) -> DirectPlan | None:
        """None if the sync has to be bucketed."""
        holdings = self._holdings
        if holdings is None:
            return None
        # Before the engines pause: registering a model takes a second the first time.
        ref = self._group.together(lambda: _offer(holdings))
        try:
            plan = self._group.lead(
                lambda: _plain(lambda: self._coordinate().connect_direct(trainers))
            )
        except PlanError as error:
            if self.settings.mode == "direct":
                raise
            # If the model itself does not fit, the bucketed plan says so again.
            self._disconnect()
            if self._group.leads:
                logger.warning(
                    "weights go in buckets, since direct mode is not possible: %s", error
                )
            return None
        self._engine_names = tuple(sorted({t.engine for t in plan.targets}))
        lead = self._coordinator
        senders: list[RouteSender] = []
        try:
            sessions = self._group.broadcast(dict(lead.connecting) if lead else {})
            self._group.together(lambda: self._send_memory(plan, sessions, ref))
            senders = self._group.together(
                lambda: self._make_senders(
                    plan.packed_routes(self._group.rank, self.settings.bucket_bytes)
                )
            )
            self._group.lead(lambda: _plain(lambda: lead.prepare_direct(plan)))  # type: ignore[union-attr]
        except BaseException as error:
            for sender in senders:
                sender.close()
            if lead is not None:
                lead.give_up_connect(calls.short(error))
            raise
        self._memory_ref = ref
        self._mover = DirectMover(
            self._group.rank,
            plan,
            holdings.tensors,
            senders,
            lead,
            verify=self.settings.verify == "checksum",
        )
        return plan

    def _send_memory(self, plan: DirectPlan, sessions: Mapping[str, str], ref: Any) -> None:
        """This rank's memory to every engine rank that reads from it; references only travel
        whole inside of Ray calls."""
        import ray

        refs = {}
        for i, target in enumerate(plan.targets):
            if self._group.rank in plan.sources_of(i):
                actor = ray.get_actor(target.actor_name, namespace=target.namespace)
                refs[str(target)] = actor.accept_memory.remote(
                    sessions[target.engine], self._group.rank, [ref]
                )
        calls.gather(refs, self.settings.connect_timeout_s, "accept_memory")

    def _coordinate(self) -> Coordinator:
        assert self._trainer is not None
        self._coordinator = Coordinator(self._find_engines(), self.settings, self._trainer)
        return self._coordinator

    def _find_engines(self) -> list[Engine]:
        if self._wanted_engines is not None and not self._wanted_engines:
            raise EngineNotFoundError("engines=[] names no engine; leave it out for all there are")
        if self._wanted_engines is None:
            return discovery.find_engines(namespace=self._namespace)
        given = [e for e in self._wanted_engines if isinstance(e, Engine)]
        addresses = [e for e in self._wanted_engines if isinstance(e, str)]
        found = discovery.find_engines(addresses, namespace=self._namespace) if addresses else []
        return given + found

    def _make_senders(self, routes: Sequence[Route]) -> list[RouteSender]:
        import ray

        senders = []
        for route in routes:
            target = route.target
            actor = ray.get_actor(target.actor_name, namespace=target.namespace)
            senders.append(RouteSender(route, actor, self._device, self.settings.phase_timeout_s))
        return senders

    def sync(self, version: str | int, *, wait: bool = True) -> SyncReport | None:
        """Brings all engines to the present parameters, labelled ``version``. Collective.

        Connects first if need be.

        Args:
            wait: if False, returns as soon as the parameters are final; the sync goes on under
                the next forward and backward pass. Nothing but ``optimizer.step`` may change
                parameters: the step hook waits for the sync before the step, or :meth:`wait` does.

        Returns:
            What was done, the same on every rank; None with ``wait=False`` (see :meth:`wait`).

        Raises:
            SyncError: on all ranks, after every engine was either finished or given up. Engines
                that are not in ``failures`` serve the new version. With ``wait=False`` it is
                raised by :meth:`wait`, and by the next step before it changes anything.
        """
        version = str(version)
        if self._closed:
            raise RdtError("this WeightSync is closed; make a new one")
        if not wait and not hooks.guarding():
            raise RdtError(
                "sync(wait=False) needs the patch `optimizer_step`, which keeps the next step from "
                "changing parameters under it; it is switched off, or Megatron's optimizers were "
                "not imported through it"
            )
        self.wait()
        if self._connected:
            self._reconnect_if_moved()
        if not self._connected:
            self.connect()
        if not wait and self.mode == "bucketed":
            raise RdtError(
                "sync(wait=False) is for direct mode: a bucketed sync gathers over Megatron's own "
                "process groups, which the next forward and backward pass uses at the same time"
            )
        started = time.perf_counter()
        timer = PhaseTimer()
        self._group.doing = "final_params"
        with timer.phase("final_params"):
            self._group.together(self._make_final)
        if wait:
            return self._finish(version, timer, started, retry=True)
        # Connecting again runs the bridge, which must not meet the forward pass.
        self._pending = InBackground(
            lambda: self._finish(version, timer, started, retry=False), self._device
        )
        return None

    def wait(self) -> SyncReport | None:
        """Waits for a sync that was started with ``wait=False``; its report, or None if there is
        none under way. Collective, as the sync was.

        Raises:
            SyncError: see :meth:`sync`.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            return pending.result()
        finally:
            # Not if the wait itself was interrupted: the next step must still wait.
            if pending.done and self._pending is pending:
                self._pending = None

    def _make_final(self) -> None:
        make_final(self._chunks, self._optimizer)
        if self._device.type == "cuda":
            # What the optimizer wrote must be in memory before others read it from there.
            torch.cuda.current_stream(self._device).synchronize()

    def _reconnect_if_moved(self) -> None:
        """Memory that was offloaded, resized or replaced is registered again."""
        held = self._holdings
        moved = self._group.together(
            lambda: held is not None and self._source.addresses() != held.addresses  # type: ignore[attr-defined]
        )
        if any(self._group.gather(moved)):
            if self._group.leads:
                logger.warning("parameters moved in memory since the last sync; connecting again")
            self._connected = False

    def _finish(
        self, version: str, timer: PhaseTimer, started: float, *, retry: bool
    ) -> SyncReport:
        report = self._try(version, timer, started)
        if retry and _nothing_but_reconnect(report.failures):
            # Memory was released and resumed, or an engine forgot us: it says so before anything
            # has changed there.
            if self._group.leads:
                why = "; ".join(f.text for f in report.failures.values())
                logger.warning("connecting again: %s", why)
            self._connect()
            report = self._try(version, PhaseTimer(), started)
        self.last_report = report
        if report.failures:
            # An engine that died may be back under its name: look again next time.
            self._connected = False
            raise SyncError(version, report.failures)
        return report

    def _try(self, version: str, timer: PhaseTimer, started: float) -> SyncReport:
        try:
            with torch.no_grad():
                return self._sync(version, timer, started)
        except BaseException as error:
            # Nobody else would tell the engines before their stall timeout.
            if self._coordinator is not None and self._open_sync is not None:
                engines = dict.fromkeys(self._coordinator.engines, calls.short(error))
                self._coordinator.abort(self._open_sync, engines)
            self._open_sync = None
            self._connected = False
            raise

    def _verifies(self) -> str:
        """How this sync is verified; the same on every rank, which count syncs alike."""
        every, count = self.settings.verify_every, self._since_connect
        due = count == 0 or (every > 0 and count % every == 0)
        return self.settings.verify if due else "off"

    def _sync(self, version: str, timer: PhaseTimer, started: float) -> SyncReport:
        assert self._mover is not None
        verify = self._verifies()
        group = self._group
        group.doing = "pause"
        sync_id, failures = group.lead(lambda: self._lead_begin(version, timer, verify))
        group.doing = "pause to finalise" if self._mover.begins else "gather, put and pull"
        moved = self._mover.move(sync_id, failures, timer, verify)
        reports = group.gather((moved, timer.seconds))
        failures = _merge(failures, *(m.failures for m, _ in reports))
        group.doing = "finalise and verify"
        failures = group.lead(
            lambda: self._lead_finalise(sync_id, failures, [m for m, _ in reports], timer, verify)
        )
        if verify == "equal":
            failures = self._verify_equal(sync_id, failures, timer)
        group.doing = "version"
        report = group.lead(
            lambda: self._lead_commit(sync_id, version, failures, reports, timer, started, verify)
        )
        self._since_connect += 1
        return report

    # Rank 0 only.

    def _lead_begin(
        self, version: str, timer: PhaseTimer, verify: str
    ) -> tuple[str, dict[str, Failure]]:
        assert self._coordinator is not None
        sync_id = self._open_sync = self._coordinator.new_sync_id(f"sync-{version}")
        assert self._mover is not None
        if self._mover.begins:
            return sync_id, {}
        with timer.phase("pause"):
            failures = self._coordinator.begin(sync_id, overwrite=verify == "equal")
            if failures:
                # Ranks that did begin must not stay parked; no byte has landed anywhere.
                failures = _with_states(failures, self._coordinator.abort(sync_id, failures))
        return sync_id, failures

    def _lead_finalise(
        self,
        sync_id: str,
        failures: dict[str, Failure],
        moved: Sequence[Moved],
        timer: PhaseTimer,
        verify: str,
    ) -> dict[str, Failure]:
        assert self._coordinator is not None
        good = [name for name in self._coordinator.engines if name not in failures]
        if not good:
            return failures
        found = moved[0].finalised
        if found is None:
            with timer.phase("finalise"):
                found, new = self._coordinator.finalise(
                    sync_id, good, checksum=verify == "checksum"
                )
            failures = _merge(failures, new)
        if verify == "checksum":
            with timer.phase("verify"):
                total = Moved()
                for part in moved:
                    for (target, param), value in part.sums.items():
                        total.add_sum(target, param, value)
                names = {
                    str(rank): engine.name
                    for engine in self._coordinator.engines.values()
                    if engine.name not in failures
                    for rank in engine.ranks
                }
                failures = _merge(failures, compare_checksums(total.sums, found, names))
        return failures

    def _lead_commit(
        self,
        sync_id: str,
        version: str,
        failures: dict[str, Failure],
        reports: Sequence[tuple[Moved, dict[str, float]]],
        timer: PhaseTimer,
        started: float,
        verify: str,
    ) -> SyncReport:
        assert self._coordinator is not None
        good = [name for name in self._coordinator.engines if name not in failures]
        with timer.phase("version"):
            if good:
                failures = _merge(failures, self._coordinator.commit(sync_id, version, good))
            left = {n: why for n, why in failures.items() if not why.state}
            if left:
                failures = _with_states(failures, self._coordinator.abort(sync_id, left))
        self._open_sync = None
        report = SyncReport(
            version=version,
            engines=tuple(n for n in self._coordinator.engines if n not in failures),
            nbytes=sum(m.nbytes for m, _ in reports),
            seconds=time.perf_counter() - started,
            phases=slowest([timer.seconds, *(seconds for _, seconds in reports)]),
            failures=failures,
            verified=verify,
        )
        (logger.error if failures else logger.info)("%s", report.line())
        return report

    # All ranks.

    def _verify_equal(
        self, sync_id: str, failures: dict[str, Failure], timer: PhaseTimer
    ) -> dict[str, Failure]:
        assert self._mover is not None
        compared = self._group.gather(self._mover.compare(sync_id, failures, timer))
        merged: dict[str, list[str]] = {}
        for part in compared:
            for engine, lines in part.differences.items():
                merged.setdefault(engine, []).extend(lines)
        unequal = {
            e: Failure("verify", str(VerifyError("bytes differ after the sync", lines)))
            for e, lines in merged.items()
        }
        return _merge(failures, *(c.failures for c in compared), unequal)

    def close(self) -> None:
        """Waits for a sync under way, gives memory, references and listeners back. Collective.

        Raises:
            SyncError: the sync under way failed; everything was given back all the same.
        """
        try:
            self.wait()
        finally:
            self._closed = True
            for remove in self._remove_listeners:
                remove()
            if self._coordinator is not None:
                self._coordinator.disconnect()
            if self._trainer is not None:
                identities.leave(self._trainer)
            self._disconnect()
            self._group.close()

    def _disconnect(self) -> None:
        if self._mover is not None:
            self._mover.close()
        elif self._holdings is not None:
            nixl.deregister(self._holdings.tensors)
        self._mover = self._holdings = self._memory_ref = None
        self._connected = False
        self._coordinator = None


def _plain(run: Callable[[], T]) -> T:
    """Calls that failed on several ranks for one cause (the same loader refuses the same tensor)
    raise it as it is."""
    try:
        return run()
    except calls.CallFailures as error:
        errors = list(error.failures.values())
        if errors and all(isinstance(e, RdtError) for e in errors):
            raise errors[0] from None
        raise


def _offer(holdings: Holdings) -> Any:
    """A reference to this rank's blocks, registered as whole storages; None if it has none."""
    if not holdings.tensors:
        return None
    nixl.register(holdings.tensors)
    return nixl.put(holdings.tensors)


def _nothing_but_reconnect(failures: Mapping[str, Failure]) -> bool:
    return bool(failures) and all(f.reconnect for f in failures.values())


def _with_states(failures: dict[str, Failure], states: Mapping[str, str]) -> dict[str, Failure]:
    """What the engines were left in. Their own reason is left out where it is the failure again."""
    stated = {}
    for name, failure in failures.items():
        state = states.get(name, failure.state)
        if failure.text in state:
            state = state.partition("; ")[0]
        stated[name] = replace(failure, state=state)
    return stated


def _merge(*parts: Mapping[str, Failure]) -> dict[str, Failure]:
    """The first failure of each engine."""
    merged: dict[str, Failure] = {}
    for part in parts:
        for engine, why in part.items():
            merged.setdefault(engine, why)
    return merged


def _default_source(
    chunks: Sequence[Any], hf_config: Any | None, settings: Settings
) -> WeightSource:
    from megatron_rdt.sources.mbridge import MBridgeSource

    config = hf_config if hf_config is not None else settings.hf_config
    if config is None:
        raise ExportError(
            "give hf_config= (a config or its path), source=, or MEGATRON_RDT_HF_CONFIG"
        )
    if isinstance(config, str | Path):
        config = load_hf_config(config)
    return MBridgeSource(chunks, config, gather_bytes=settings.bucket_bytes)


def load_hf_config(path: str | Path) -> Any:
    """The transformers config in a ``config.json`` or in the folder that holds one.

    Raises:
        ExportError: there is none.
    """
    from transformers import AutoConfig

    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    if not (folder / "config.json").is_file():
        raise ExportError(f"no config.json in {folder}")
    return AutoConfig.from_pretrained(folder)
