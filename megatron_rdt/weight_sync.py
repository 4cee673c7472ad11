"""Weight sync of a Megatron model, as seen from a training program.

Every trainer rank makes one :class:`WeightSync` and calls the same methods at the same points.
Rank 0 also drives the engines; ranks that serve no engine only take part in the gathers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rdt import hooks
from megatron_rdt.background import InBackground
from megatron_rdt.final_params import make_final
from megatron_rdt.link import Connected, EngineLink
from megatron_rdt.movers import Moved
from megatron_rdt.parallel import TrainerGroup
from megatron_rdt.sources.base import WeightSource
from sglang_rdt import settings as settings_module
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.coordinator import Coordinator, compare_checksums
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.failures import Failure
from sglang_rdt.coordinator.membership import Membership
from sglang_rdt.coordinator.phases import PhaseTimer, SyncReport, slowest
from sglang_rdt.errors import (
    ExportError,
    RdtError,
    SyncError,
    VerifyError,
)
from sglang_rdt.settings import Runner, Settings

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
        include: patterns of HF names: only tensors that match one are synced, and what the others
            would fill stays as it is on the engines (LoRA, frozen parts). Default: the settings'.
        exclude: patterns of HF names that are not synced. Default: the settings'.
        keep: patterns of the engine's own parameters that the trainer has no tensor for, such as a
            vision tower beside a language model, and that stay as they are. Default: the settings'.
        runner: which model of engines with speculative decoding: ``target``, ``draft`` or ``both``.
            Default: the settings'.

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
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        runner: Runner | None = None,
    ) -> None:
        self.settings = settings or settings_module.load()
        for name, patterns in (
            ("include", include),
            ("exclude", exclude),
            ("keep", keep),
        ):
            if isinstance(patterns, str):
                raise RdtError(f"{name} takes a list of patterns, such as [{patterns!r}]")
            if patterns is not None:
                self.settings = self.settings.replace(**{name: tuple(patterns)})
        if not self.settings.enabled:
            raise RdtError("SGLANG_RDT=0: weight sync is switched off")
        if runner is not None:
            self.settings = self.settings.replace(runner=runner)
        membership = Membership(engines, namespace)
        self._chunks = list(model_chunks)
        self._optimizer = optimizer
        if optimizer is not None and self.settings.export_every:
            self._refuse_late_changes("a sync after each step sends what is not clipped yet")
        self._source = source or _default_source(self._chunks, hf_config, self.settings)
        self._device = next(
            (p.device for c in self._chunks for p in c.parameters()), torch.device("cpu")
        )
        self._group = TrainerGroup(2 * self.settings.phase_timeout_s + 60.0)
        self._link = EngineLink(
            self._source,
            self.settings,
            self._group,
            membership,
            namespace,
            self._device,
        )
        self._pending: InBackground[SyncReport] | None = None
        self._warned = False
        self._steps = 0
        self._closed = False
        self._open_sync: str | None = None  # on rank 0: begun, and neither committed nor given up
        self.last_report: SyncReport | None = None
        self._remove_listeners = [hooks.add_guard(self._before_step)]
        if optimizer is not None:
            self._remove_listeners.append(hooks.add_listener(self.on_step, optimizer))

    def _refuse_late_changes(self, so: str) -> None:
        """Raises RdtError where weights change after ``optimizer.step()``.

        Source: megatron/core/optimizer/qk_clip.py, which a training loop calls after the step.
        """
        for chunk in self._chunks:
            module = chunk
            while hasattr(module, "module"):
                module = module.module
            if getattr(getattr(module, "config", None), "qk_clip", False):
                raise RdtError(
                    f"the model has qk_clip: its attention weights change after optimizer.step(), so {so}; "
                    "call sync(version) yourself, after clip_qk (MEGATRON_RDT_EXPORT_EVERY=0)"
                )

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory of this rank, in bytes."""
        return self._link.staging_bytes

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
        if not self._link.connected:
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

    def connect(self) -> Connected:
        """Finds and describes the engines, plans, registers memory, prepares reads. Collective.

        Returns:
            What it has come to, the same on every rank.

        Raises:
            EngineNotFoundError, RecordError, PlanError, DeadlineError: on all ranks; engines go
                on serving what they served.
            ExportError: mode ``direct`` was asked for, and the source cannot say where HF tensors
                lie; names what it cannot.

        Once engines were connected, one of them that cannot be is no error of this any more, but a
        failure of the next sync.
        """
        self.wait()
        return self._link.connect()

    def is_fresh(self) -> bool:
        """Whether the next sync has nothing to connect, as far as this rank knows. Asks nobody: an
        engine that came or went is noticed by the sync itself.

        For programs that keep track of their engines themselves (see :meth:`mark_stale`).
        """
        return self._link.is_fresh

    def mark_stale(self, engines: Sequence[str] | None = None) -> None:
        """Has the next sync connect these engines (``ip:port``) anew, or everything. One rank's word
        is enough.

        Not needed for engines that died, were restarted, or had their memory released: the sync
        notices by itself.

        Raises:
            RdtError: a text instead of a list of texts.
        """
        if isinstance(engines, str):
            raise RdtError(f"mark_stale takes a list of engines, such as [{engines!r}]")
        self._link.mark_stale(engines)

    @property
    def mode(self) -> str | None:
        """``direct`` or ``bucketed``: how the sync moves; None before it has connected."""
        return self._link.mode

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
        if not wait:
            self._refuse_late_changes("what engines read would change under them")
        self.wait()
        if self._link.connected:
            self._link.refresh()
        else:
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
        refresh = getattr(self._source, "refresh", None)
        if refresh is not None:
            refresh()
        if self._device.type == "cuda":
            # What the optimizer wrote must be in memory before others read it from there.
            torch.cuda.current_stream(self._device).synchronize()

    def _finish(
        self, version: str, timer: PhaseTimer, started: float, *, retry: bool
    ) -> SyncReport:
        report = self._try(version, timer, started)
        again = [name for name, failure in report.failures.items() if failure.reconnect]
        if retry and again:
            # Memory was released and resumed, or an engine forgot us: it says so before anything
            # has changed there.
            if self._group.leads:
                logger.warning(
                    "connecting again: %s", "; ".join(report.failures[n].text for n in again)
                )
            self._link.forget(again)
            self._link.mark_stale(again)
            self._link.refresh()
            second = self._try(version, PhaseTimer(), started, only=again)
            report = report.joined_by(second)
        self.last_report = report
        # An engine that died may be back under its name: look again next time.
        self._link.forget(report.failures)
        if report.failures and (self.settings.engine_failures == "raise" or not report.engines):
            raise SyncError(version, report.failures)
        return report

    def _try(
        self,
        version: str,
        timer: PhaseTimer,
        started: float,
        only: Sequence[str] | None = None,
    ) -> SyncReport:
        try:
            with torch.no_grad():
                return self._sync(version, timer, started, only)
        except BaseException as error:
            # Nobody else would tell the engines before their stall timeout.
            lead = self._link.coordinator
            if lead is not None and self._open_sync is not None:
                lead.abort(self._open_sync, dict.fromkeys(lead.taking_part, calls.short(error)))
            self._open_sync = None
            self._link.connected = False
            raise

    def _verifies(self) -> str:
        """How this sync is verified; the same on every rank, which count syncs alike."""
        every, count = self.settings.verify_every, self._link.syncs
        due = count == 0 or (every > 0 and count % every == 0)
        return self.settings.verify if due else "off"

    def _sync(
        self, version: str, timer: PhaseTimer, started: float, only: Sequence[str] | None
    ) -> SyncReport:
        mover = self._link.mover
        verify = self._verifies()
        group = self._group
        group.doing = "pause"
        sync_id, failures, others = group.lead(
            lambda: self._lead_begin(version, timer, verify, only)
        )
        group.doing = "pause to finalise" if mover.begins else "gather, put and pull"
        given_up = {*failures, *others}
        moved = mover.move(sync_id, given_up, timer, verify)
        reports = group.gather((moved, timer.seconds))
        failures = _merge(failures, *(m.failures for m, _ in reports))
        group.doing = "finalise and verify"
        failures = group.lead(
            lambda: self._lead_finalise(sync_id, failures, [m for m, _ in reports], timer, verify)
        )
        if verify == "equal":
            failures = self._verify_equal(sync_id, failures, others, timer)
        group.doing = "version"
        report = group.lead(
            lambda: self._lead_commit(sync_id, version, failures, reports, timer, started, verify)
        )
        self._link.syncs += 1
        return report

    # Rank 0 only.

    @property
    def _lead(self) -> Coordinator:
        lead = self._link.coordinator
        assert lead is not None
        return lead

    def _lead_begin(
        self, version: str, timer: PhaseTimer, verify: str, only: Sequence[str] | None
    ) -> tuple[str, dict[str, Failure], tuple[str, ...]]:
        """The sync's id, who failed, and who takes no part."""
        lead = self._lead
        sync_id = self._open_sync = lead.new_sync_id(f"sync-{version}")
        lead.take_part(only)
        others = tuple(name for name in lead.engines if name not in lead.taking_part)
        failures = {n: f for n, f in self._link.failures.items() if only is None or n in only}
        if self._link.mover.begins:
            return sync_id, failures, others
        with timer.phase("pause"):
            refused = lead.begin(sync_id, overwrite=verify == "equal")
            if refused:
                # Ranks that did begin must not stay parked; no byte has landed anywhere.
                refused = _with_states(refused, lead.abort(sync_id, refused))
        return sync_id, failures | refused, others

    def _lead_finalise(
        self,
        sync_id: str,
        failures: dict[str, Failure],
        moved: Sequence[Moved],
        timer: PhaseTimer,
        verify: str,
    ) -> dict[str, Failure]:
        lead = self._lead
        good = [name for name in lead.taking_part if name not in failures]
        if not good:
            return failures
        found = moved[0].finalised
        if found is None:
            with timer.phase("finalise"):
                found, new = lead.finalise(sync_id, good, checksum=verify == "checksum")
            failures = _merge(failures, new)
        if verify == "checksum":
            with timer.phase("verify"):
                total = Moved()
                for part in moved:
                    for (target, param), value in part.sums.items():
                        total.add_sum(target, param, value)
                untouched = lead.untouched()
                names = {
                    str(rank): engine.name
                    for engine in lead.taking_part.values()
                    if engine.name not in failures
                    for rank in engine.ranks
                    if str(rank) not in untouched
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
        lead = self._lead
        good = [name for name in lead.taking_part if name not in failures]
        with timer.phase("version"):
            if good:
                failures = _merge(failures, lead.commit(sync_id, version, good))
            left = {
                n: why for n, why in failures.items() if not why.state and n in lead.taking_part
            }
            if left:
                failures = _with_states(failures, lead.abort(sync_id, left))
        self._open_sync = None
        report = SyncReport(
            version=version,
            engines=tuple(n for n in lead.taking_part if n not in failures),
            nbytes=sum(m.nbytes for m, _ in reports),
            seconds=time.perf_counter() - started,
            phases=slowest([timer.seconds, *(seconds for _, seconds in reports)]),
            failures=failures,
            verified=verify,
            selection=self._link.selection,
        )
        (logger.error if failures else logger.info)("%s", report.line())
        return report

    # All ranks.

    def _verify_equal(
        self,
        sync_id: str,
        failures: dict[str, Failure],
        others: Sequence[str],
        timer: PhaseTimer,
    ) -> dict[str, Failure]:
        given_up = {*failures, *others}
        compared = self._group.gather(self._link.mover.compare(sync_id, given_up, timer))
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
            self._link.close()
            self._group.close()


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
