"""Drives the engines through one sync. One process of the trainer runs it.

The order is design: pause, flush, begin session, (trainer ranks move the bytes), end session,
verify, set version, continue; once per sync. Engines are independent: one that fails is given
up and reported, the others finish.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.engine.sync_request import SyncRequest
from sglang_rdt.errors import PlanError, VerifyError
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.specs import EngineRankLayout, TensorSpec, TrainerRank
from sglang_rdt.settings import Settings

logger = logging.getLogger("sglang_rdt")

# The engine's own deadline comes first: it says more, and a call that it cancelled cannot begin
# after the coordinator has given up.
GRACE_S = 5.0

# (engine rank as text, parameter) -> additive checksum of what the trainer sent there.
Expected = Mapping[tuple[str, str], int]


class Coordinator:
    """Drives ``engines``.

    Args:
        settings: deadlines, pause mode, verification.
    """

    def __init__(self, engines: Sequence[Engine], settings: Settings) -> None:
        self.engines = {e.name: e for e in engines}
        self._settings = settings
        self._owner = f"{socket.gethostname()}:{os.getpid()}"

    def new_sync_id(self, what: str) -> str:
        """Unique, and readable in messages."""
        return f"{what}-{uuid.uuid4().hex[:8]}"

    def _request(self, sync_id: str, purpose: Any) -> SyncRequest:
        s = self._settings
        return SyncRequest(
            sync_id,
            self._owner,
            purpose,
            pause_mode=s.pause_mode if purpose == "sync" else "in_place",
            flush=s.flush and purpose == "sync",
            stall_timeout_s=s.stall_timeout_s,
            begin_timeout_s=s.phase_timeout_s if purpose == "sync" else s.connect_timeout_s,
        )

    def connect(self, trainers: Sequence[TrainerRank]) -> Plan:
        """Describes the engines, records their loaders, registers their memory, and plans.

        Raises:
            PlanError, RecordError, CallFailures: naming every culprit; the engines run on.
        """
        s = self._settings
        specs = {spec.name: spec for t in trainers for spec in t.exports}
        if not specs:
            raise PlanError("the trainer exports no tensor", ["every trainer rank reports nothing"])
        layouts: list[EngineRankLayout] = []
        for engine in self.engines.values():
            sync_id = self.new_sync_id("connect")
            try:
                params, recordings = self._describe(engine, sync_id, list(specs.values()))
            except BaseException:
                self._give_up_connect(engine, sync_id)
                raise
            engine.call("end_sync", sync_id, None, timeout_s=s.phase_timeout_s, phase="end_sync")
            layouts += [
                EngineRankLayout(rank, tuple(p), r)
                for rank, p, r in zip(engine.ranks, params, recordings, strict=True)
            ]
        plan = make_plan(
            trainers,
            layouts,
            s.bucket_bytes,
            allow_cast=s.allow_cast,
            allow_padding=s.allow_padding,
        )
        for cast in plan.casts:
            logger.warning("dtype conversion: %s", cast)
        return plan

    def _describe(
        self, engine: Engine, sync_id: str, specs: list[TensorSpec]
    ) -> tuple[list[Any], list[Any]]:
        timeout = self._settings.connect_timeout_s

        def call(method: str, *args: Any) -> list[Any]:
            return engine.call(method, *args, timeout_s=timeout + GRACE_S, phase=method)

        call("begin_sync", self._request(sync_id, "connect"))
        params = call("describe")
        recordings = call("record_load", sync_id, specs)
        call("register_weights", sync_id)
        return params, recordings

    def _give_up_connect(self, engine: Engine, sync_id: str) -> None:
        # Ranks that did begin must not stay parked; those that did not will say so.
        refs = engine.start("abort_sync", sync_id, "connecting failed")
        calls.settle(refs, self._settings.phase_timeout_s, "abort")

    def begin(self, sync_id: str) -> dict[str, str]:
        """Pauses, flushes and opens a session on every engine at once; failures per engine."""
        request = self._request(sync_id, "sync")
        return self._each("begin", lambda engine: engine.start("begin_sync", request))

    def finalise(
        self, sync_id: str, engines: Sequence[str]
    ) -> tuple[dict[str, dict], dict[str, str]]:
        """Ends the session on ``engines``.

        Returns:
            engine rank (text) -> checksums by parameter, and failures per engine.
        """
        checksum = self._settings.verify == "checksum"
        sums: dict[str, dict] = {}
        failures = self._each(
            "finalise",
            lambda engine: engine.start("finalise", sync_id, checksum),
            engines,
            on_result=sums.update,
        )
        return sums, failures

    def commit(self, sync_id: str, version: str, engines: Sequence[str]) -> dict[str, str]:
        """Sets the version and resumes; failures per engine."""
        return self._each(
            "version", lambda engine: engine.start("end_sync", sync_id, version), engines
        )

    def abort(self, sync_id: str, failures: Mapping[str, str]) -> dict[str, str]:
        """Gives the sync up on the engines in ``failures``; what state each is left in.

        Ranks that gave it up by themselves (they vote) refuse the call; their state says so.
        """
        timeout = self._settings.phase_timeout_s
        states: dict[str, str] = {}
        for name, why in failures.items():
            engine = self.engines[name]
            calls.settle(engine.start("abort_sync", sync_id, why), timeout, "abort")
            status, errors = calls.settle(engine.start("rdt_status"), timeout, "status")
            found = {s.state for s in status.values()}
            if "dirty" in found:
                states[name] = "dirty: it stays paused until a full sync succeeds"
            elif errors:
                states[name] = "unknown: " + "; ".join(calls.short(e) for e in errors.values())
            else:
                states[name] = " and ".join(sorted(found))
        return states

    def _each(
        self,
        phase: str,
        start: Callable[[Engine], dict[str, Any]],
        engines: Sequence[str] | None = None,
        on_result: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, str]:
        # Start everywhere before waiting anywhere: engines work at the same time.
        chosen = self.engines if engines is None else engines
        started = {name: start(self.engines[name]) for name in chosen}
        failures: dict[str, str] = {}
        for name, refs in started.items():
            results, errors = calls.settle(refs, self._settings.phase_timeout_s + GRACE_S, phase)
            if errors:
                failures[name] = f"{phase}: " + "; ".join(
                    f"{who}: {calls.short(e)}" for who, e in errors.items()
                )
            elif on_result is not None:
                on_result(results)
        return failures


def compare_checksums(
    expected: Expected, found: Mapping[str, Mapping[str, int]], engines: Mapping[str, str]
) -> dict[str, str]:
    """Where what the engines hold differs from what the trainer sent.

    Args:
        found: engine rank (text) -> parameter -> checksum.
        engines: engine rank (text) -> engine name.

    Returns:
        engine -> every parameter and rank that differs; empty if all is equal. A parameter that
        only one side reports differs too.
    """
    differences: dict[str, list[str]] = {}
    keys = set(expected) | {(rank, param) for rank, sums in found.items() for param in sums}
    for rank, param in sorted(keys):
        if rank not in found:
            continue
        sent, held = expected.get((rank, param)), found[rank].get(param)
        if sent != held:
            what = "was not sent" if sent is None else "is not held" if held is None else "differs"
            differences.setdefault(engines[rank], []).append(f"{rank}: {param} {what}")
    return {
        e: str(VerifyError("checksums differ after the sync", d)) for e, d in differences.items()
    }
