"""This package's own sync: direct and bucketed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_rdt import settings as settings_module
from sglang_rdt.bench.options import BenchError, default_bucket_sizes
from sglang_rdt.bench.paths.base import Context, Timing

if TYPE_CHECKING:
    from sglang_rdt.bench.trainer import BenchRank


class RdtPath:
    """``WeightSync`` with ``SGLANG_RDT_MODE`` set to ``mode``.

    Args:
        name: in the results; default: the mode.
        verify: SGLANG_RDT_VERIFY; default: what the command line says.
    """

    writes_engines = True

    def __init__(self, mode: str, name: str | None = None, *, verify: str | None = None) -> None:
        self._mode, self._verify = mode, verify
        self.name = name or mode
        self.about = "WeightSync.sync: from the call until generation goes on, version set"

    def sizes(self, context: Context) -> tuple[int, ...]:
        """Direct mode has no bucket worth choosing."""
        if self._mode == "direct":
            return ()
        options = context.options
        each = context.nbytes // context.engine_world
        return options.bucket_bytes or default_bucket_sizes(each, options.device, whole=True)

    def start(self, context: Context, size: int | None) -> dict[str, Any]:
        """Connects."""
        options = context.options
        settings = settings_module.load().replace(
            mode=self._mode,
            verify=self._verify or options.verify,
            phase_timeout_s=options.timeout_s,
            connect_timeout_s=options.timeout_s,
            stall_timeout_s=2 * options.timeout_s,
        )
        if size is not None:
            settings = settings.replace(bucket_bytes=size)
        seconds = max(context.trainers.all("attach", settings, context.addresses))
        modes = context.trainers.call(_mode)
        if self._mode == "direct" and set(modes) != {"direct"}:
            raise BenchError(f"direct mode was asked for, and the WeightSync does {modes[0]}")
        return {"connect_ms": seconds * 1e3}

    def sync(self, context: Context, version: str) -> Timing:
        """One sync on all ranks; rank 0 measures it."""
        return context.trainers.call(_sync, version)[0]

    def staging_bytes(self, context: Context) -> int:
        """Registered buckets."""
        return max(context.trainers.call(_staging))

    def stop(self, context: Context) -> None:
        """Closes the WeightSync."""
        context.trainers.all("detach")


def _sync(rank: BenchRank, version: str) -> Timing:
    started = time.perf_counter()
    report = rank.sync.sync(version)
    returned = time.perf_counter() - started
    return Timing(
        report.seconds, dict(report.phases), report.nbytes, {"returned_ms": returned * 1e3}
    )


def _mode(rank: BenchRank) -> str:
    return str(getattr(rank.sync, "mode", "bucketed"))


def _staging(rank: BenchRank) -> int:
    return int(rank.sync.staging_bytes)
