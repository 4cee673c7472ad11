"""Weight sync of a Megatron model, as seen from a training program.

Every trainer rank makes one :class:`WeightSync` and calls the same methods at the same points.
Rank 0 also drives the engines; ranks that serve no engine only take part in the gathers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rdt import cluster, hooks
from megatron_rdt.final_params import make_final
from megatron_rdt.parallel import TrainerGroup, coordinates
from megatron_rdt.progress import Progress
from megatron_rdt.sender import RouteSender
from megatron_rdt.sources.base import WeightSource
from sglang_rdt import settings as settings_module
from sglang_rdt.coordinator import calls, discovery
from sglang_rdt.coordinator.coordinator import Coordinator, compare_checksums
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.phases import PhaseTimer, SyncReport, human_bytes, slowest
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import (
    EngineNotFoundError,
    ExportError,
    RdtError,
    SyncError,
    VerifyError,
)
from sglang_rdt.plan.planner import Plan
from sglang_rdt.plan.specs import TensorSpec, TrainerRank
from sglang_rdt.settings import Settings

logger = logging.getLogger("megatron_rdt")


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
        self._specs: Sequence[TensorSpec] = ()
        self._senders: list[RouteSender] = []
        self._connected = False
        self._steps = 0
        self._closed = False
        self._open_sync: str | None = None  # on rank 0: begun, and neither committed nor given up
        self._engine_names: tuple[str, ...] = ()
        self.last_report: SyncReport | None = None
        self._remove_listener = (
            hooks.add_listener(self.on_step, optimizer) if optimizer is not None else lambda: None
        )

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory of this rank, in bytes."""
        return sum(s.staging_bytes for s in self._senders)

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
            self.sync(str(self._steps))

    def connect(self) -> Plan:
        """Finds and describes the engines, plans, allocates and registers staging. Collective.

        Returns:
            The plan of all ranks.

        Raises:
            EngineNotFoundError, RecordError, PlanError, DeadlineError: on all ranks; engines go
                on serving what they served.
        """
        started = time.perf_counter()
        self._disconnect()
        self._group.together(lambda: cluster.join(self.settings, self._namespace))
        self._specs = list(self._group.together(self._source.specs))
        me = TrainerRank(self._group.rank, cluster.node_ip(), tuple(self._specs), coordinates())
        trainers = self._group.gather(me)
        plan = self._group.lead(lambda: self._lead_connect(trainers))
        self._senders = self._group.together(lambda: self._make_senders(plan))
        self._connected = True
        self._engine_names = tuple(sorted({r.target.engine for r in plan.routes}))
        if self._group.leads:
            engines = self._engine_names
            logger.info(
                "connected to %s: %d HF tensors, %s per sync over %d routes, in %.1f s",
                ", ".join(engines),
                len(plan.specs),
                human_bytes(plan.nbytes),
                len(plan.routes),
                time.perf_counter() - started,
            )
        return plan

    def _lead_connect(self, trainers: Sequence[TrainerRank]) -> Plan:
        self._coordinator = Coordinator(self._find_engines(), self.settings)
        try:
            return self._coordinator.connect(trainers)
        except calls.CallFailures as error:
            errors = list(error.failures.values())
            # One cause on all ranks (the same loader refuses the same tensor): raise it as it is.
            if errors and all(isinstance(e, RdtError) for e in errors):
                raise errors[0] from None
            raise

    def _find_engines(self) -> list[Engine]:
        if self._wanted_engines is not None and not self._wanted_engines:
            raise EngineNotFoundError("engines=[] names no engine; leave it out for all there are")
        if self._wanted_engines is None:
            return discovery.find_engines(namespace=self._namespace)
        given = [e for e in self._wanted_engines if isinstance(e, Engine)]
        addresses = [e for e in self._wanted_engines if isinstance(e, str)]
        found = discovery.find_engines(addresses, namespace=self._namespace) if addresses else []
        return given + found

    def _make_senders(self, plan: Plan) -> list[RouteSender]:
        import ray

        senders = []
        for route in plan.routes_of(self._group.rank):
            target = route.target
            actor = ray.get_actor(target.actor_name, namespace=target.namespace)
            senders.append(RouteSender(route, actor, self._device, self.settings.phase_timeout_s))
        return senders

    def sync(self, version: str | int) -> SyncReport:
        """Brings all engines to the present parameters, labelled ``version``. Collective.

        Connects first if need be. Parameters must not change until it returns.

        Returns:
            What was done; the same on every rank.

        Raises:
            SyncError: on all ranks, after every engine was either finished or given up. Engines
                that are not in ``failures`` serve the new version.
        """
        version = str(version)
        if self._closed:
            raise RdtError("this WeightSync is closed; make a new one")
        if not self._connected:
            self.connect()
        try:
            report = self._sync(version)
        except BaseException as error:
            # Nobody else would tell the engines before their stall timeout.
            if self._coordinator is not None and self._open_sync is not None:
                engines = dict.fromkeys(self._coordinator.engines, calls.short(error))
                self._coordinator.abort(self._open_sync, engines)
            self._open_sync = None
            self._connected = False
            raise
        self.last_report = report
        if report.failures:
            # An engine that died may be back under its name: look again next time.
            self._connected = False
            raise SyncError(version, report.failures)
        return report

    def _sync(self, version: str) -> SyncReport:
        started = time.perf_counter()
        timer = PhaseTimer()
        with timer.phase("final_params"):
            self._group.together(lambda: make_final(self._chunks, self._optimizer))
        sync_id, failures = self._group.lead(lambda: self._lead_begin(version, timer))
        with torch.no_grad():
            self._move(sync_id, "pull", failures, timer)
        reports = self._group.gather(self._rank_report(timer))
        failures = _merge(failures, *(r["failures"] for r in reports))
        failures = self._group.lead(lambda: self._lead_finalise(sync_id, failures, reports, timer))
        if self.settings.verify == "equal":
            failures = self._verify_equal(sync_id, failures, timer)
        return self._group.lead(
            lambda: self._lead_commit(sync_id, version, failures, reports, timer, started)
        )

    # Rank 0 only.

    def _lead_begin(self, version: str, timer: PhaseTimer) -> tuple[str, dict[str, str]]:
        assert self._coordinator is not None
        sync_id = self._open_sync = self._coordinator.new_sync_id(f"sync-{version}")
        with timer.phase("pause"):
            failures = self._coordinator.begin(sync_id)
            if failures:
                # Ranks that did begin must not stay parked; no byte has landed anywhere.
                self._coordinator.abort(sync_id, failures)
        return sync_id, failures

    def _lead_finalise(
        self,
        sync_id: str,
        failures: dict[str, str],
        reports: Sequence[dict[str, Any]],
        timer: PhaseTimer,
    ) -> dict[str, str]:
        assert self._coordinator is not None
        good = [name for name in self._coordinator.engines if name not in failures]
        if not good:
            return failures
        with timer.phase("finalise"):
            found, new = self._coordinator.finalise(sync_id, good)
        failures = _merge(failures, new)
        if self.settings.verify == "checksum":
            with timer.phase("verify"):
                expected: dict[tuple[str, str], int] = {}
                for report in reports:
                    for key, value in report["sums"].items():
                        expected[key] = (expected.get(key, 0) + value) & ((1 << 64) - 1)
                names = {
                    str(rank): engine.name
                    for engine in self._coordinator.engines.values()
                    for rank in engine.ranks
                }
                failures = _merge(failures, compare_checksums(expected, found, names))
        return failures

    def _lead_commit(
        self,
        sync_id: str,
        version: str,
        failures: dict[str, str],
        reports: Sequence[dict[str, Any]],
        timer: PhaseTimer,
        started: float,
    ) -> SyncReport:
        assert self._coordinator is not None
        good = [name for name in self._coordinator.engines if name not in failures]
        with timer.phase("version"):
            if good:
                failures = _merge(failures, self._coordinator.commit(sync_id, version, good))
            begun = {n: w for n, w in failures.items() if not w.startswith("begin:")}
            states = self._coordinator.abort(sync_id, begun) if begun else {}
        self._open_sync = None
        failures = {
            name: f"{why} (the engine is {states[name]})" if name in states else why
            for name, why in failures.items()
        }
        report = SyncReport(
            version=version,
            engines=tuple(n for n in self._coordinator.engines if n not in failures),
            nbytes=sum(r["nbytes"] for r in reports),
            seconds=time.perf_counter() - started,
            phases=slowest([timer.seconds, *(r["seconds"] for r in reports)]),
            failures=failures,
            verified=self.settings.verify,
        )
        (logger.error if failures else logger.info)("%s", report.line())
        return report

    # All ranks.

    def _move(self, sync_id: str, mode: Any, failures: dict[str, str], timer: PhaseTimer) -> None:
        """One pass over the model. Never raises: the export is collective, so a rank that fails
        goes on yielding tensors, and reports at the end."""
        self._failures: dict[str, str] = {}
        checksum = self.settings.verify == "checksum"
        active = [s for s in self._senders if s.engine not in failures]
        for sender in active:
            sender.start(sync_id, mode, checksum=checksum, timer=timer)
        total = sum(spec.nbytes for spec in self._specs)
        announced = iter(self._specs)
        with Progress(total, f"weight sync {sync_id}", enabled=self._group.leads) as progress:
            try:
                for name, tensor in self._source.export(timer):
                    spec = next(announced, None)
                    wrong = _unlike(spec, name, tensor)
                    if wrong:
                        for sender in active:
                            self._failures.setdefault(sender.engine, wrong)
                    for sender in active:
                        if sender.engine not in self._failures:
                            self._guard(sender, lambda s=sender, n=name, t=tensor: s.offer(n, t))
                    progress.advance(tensor.numel() * tensor.element_size())
            except Exception as error:
                logger.exception("the export failed on trainer rank %d", self._group.rank)
                why = f"the export failed on trainer rank {self._group.rank}: {calls.short(error)}"
                self._failures = dict.fromkeys(self._engine_names, why)
        for sender in active:
            if sender.engine not in self._failures:
                self._guard(sender, sender.finish)

    def _guard(self, sender: RouteSender, run: Any) -> None:
        try:
            run()
        except Exception as error:
            self._failures[sender.engine] = (
                f"trainer rank {self._group.rank} to {sender.route.target}: {calls.short(error)}"
            )

    def _rank_report(self, timer: PhaseTimer) -> dict[str, Any]:
        sums = {}
        for sender in self._senders:
            for param, value in sender.sums.items():
                sums[str(sender.route.target), param] = value
        return {
            "failures": self._failures,
            "nbytes": sum(s.nbytes for s in self._senders),
            "sums": sums,
            "seconds": timer.seconds,
        }

    def _verify_equal(
        self, sync_id: str, failures: dict[str, str], timer: PhaseTimer
    ) -> dict[str, str]:
        with torch.no_grad():
            self._move(sync_id, "compare", failures, timer)
        differences: dict[str, list[str]] = {}
        for sender in self._senders:
            if sender.differences:
                differences.setdefault(sender.engine, []).extend(sender.differences)
        all_failures, all_differences = zip(
            *self._group.gather((self._failures, differences)), strict=True
        )
        merged: dict[str, list[str]] = {}
        for part in all_differences:
            for engine, lines in part.items():
                merged.setdefault(engine, []).extend(lines)
        unequal = {
            e: str(VerifyError("bytes differ after the sync", lines)) for e, lines in merged.items()
        }
        return _merge(failures, *all_failures, unequal)

    def close(self) -> None:
        """Gives staging memory, references and the listener back. Collective."""
        self._closed = True
        self._remove_listener()
        self._disconnect()
        self._group.close()

    def _disconnect(self) -> None:
        for sender in self._senders:
            sender.close()
        self._senders = []
        self._connected = False
        self._coordinator = None


def _merge(*parts: dict[str, str]) -> dict[str, str]:
    """The first failure of each engine."""
    merged: dict[str, str] = {}
    for part in parts:
        for engine, why in part.items():
            merged.setdefault(engine, why)
    return merged


def _unlike(spec: TensorSpec | None, name: str, tensor: torch.Tensor) -> str | None:
    """Why an exported tensor is not what was announced, or None."""
    if spec is None:
        return f"the export yields {name}, more than it announced"
    dtype = dtype_name(tensor.dtype)
    if (spec.name, spec.shape, spec.dtype) != (name, tuple(tensor.shape), dtype):
        return (
            f"the export yields {name} {dtype}{list(tensor.shape)} where it announced "
            f"{spec.name} {spec.dtype}{list(spec.shape)}"
        )
    return None


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
