"""Every error that this package raises on purpose: typed, picklable, one clear sentence each.

All of them carry plain values, so that they cross Ray and torch.distributed unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_LISTED = 40


def listed(items: Sequence[object], limit: int = MAX_LISTED) -> str:
    """``items`` one per line, all of them up to ``limit``, then how many more there are."""
    lines = [f"  - {item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"  ... and {len(items) - limit} more")
    return "\n".join(lines)


class RdtError(RuntimeError):
    """Base of all errors of this package. ``sync_phase``: of the sync that it ended, if known."""

    sync_phase: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword or multi-argument constructors do not unpickle by default.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[RdtError], args: tuple[Any, ...], state: dict[str, Any]) -> RdtError:
    error = cls.__new__(cls)
    RuntimeError.__init__(error, *args)
    error.__dict__.update(state)
    return error


class SettingError(RdtError):
    """An environment variable has a value that cannot be used."""

    def __init__(self, name: str, value: str, why: str) -> None:
        super().__init__(f"{name}={value!r}: {why}")
        self.name = name


class UnsupportedVersionError(RdtError):
    """SGLang, Megatron-core or Ray is installed in a version that this package does not know."""

    def __init__(self, package: str, version: str, supported: str) -> None:
        super().__init__(
            f"sglang-rdt supports {package} {supported}; {version} is installed. "
            f"Install a supported {package}, or set SGLANG_RDT=0 to run without weight sync."
        )
        self.package, self.version, self.supported = package, version, supported


class PatchMismatchError(RdtError):
    """An upstream symbol does not look as the patch expects; nothing was patched."""

    def __init__(self, patch: str, symbol: str, why: str, toggle: str) -> None:
        super().__init__(
            f"patch {patch!r} refused: {symbol} {why}. Nothing was changed; "
            f"set {toggle}=0 to run without this patch."
        )
        self.patch, self.symbol = patch, symbol


class EngineNotFoundError(RdtError):
    """No engine, or only a part of one, answers to what was asked for."""


class AmbiguousEngineError(RdtError):
    """More engines than one answer to a request that must name one."""


class NotRayBackendError(RdtError):
    """The engine runs SGLang's multiprocessing back end: it has no actors to pull with."""


class DeadlineError(RdtError):
    """Somebody did not answer in time; the message says who, in which phase."""

    def __init__(self, who: str, phase: str, seconds: float) -> None:
        super().__init__(f"{who} did not finish {phase!r} within {seconds:g} s")
        self.who, self.phase, self.seconds = who, phase, seconds


class EngineStateError(RdtError):
    """The engine is in a state that does not allow the call (not in a sync, in another's sync)."""


class ReconnectError(EngineStateError):
    """The engine has nothing to do with this trainer any more, or its memory is another one: it
    refused, nothing changed, and connecting again is what helps."""


class AnotherRankError(EngineStateError):
    """Another rank of the engine refused, so this one did not go on either; that one says why."""


class EngineBusyError(RdtError):
    """The engine cannot be paused and flushed: requests are still running."""


class RecordError(RdtError):
    """The engine's loader does something with a tensor that cannot be followed as slices."""


class PlanError(RdtError):
    """Wants and specs do not fit together; lists every culprit.

    ``problems`` holds one line for each.
    """

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        super().__init__(f"{title}:\n{listed(problems, 200)}")
        self.problems = tuple(problems)


class SlicesError(RdtError):
    """A slice reaches outside of its tensor, overlaps another, or is malformed."""


class PlacementError(RdtError):
    """An engine cannot be started on the bundles or ports that it was given; says what there is."""


class TransportError(RdtError):
    """NIXL or Ray Direct Transport failed; the message names both ends."""


class ExportError(RdtError):
    """The trainer's bridge yields something other than what it announced."""


class TrainerLostError(RdtError):
    """A trainer rank died, or did not come to a point where all ranks meet, in time."""


class VerifyError(RdtError):
    """After a sync, bytes differ between trainer and engine; lists every parameter and rank."""

    def __init__(self, title: str, differences: Sequence[str]) -> None:
        super().__init__(f"{title}:\n{listed(differences, 200)}")
        self.differences = tuple(differences)


class SyncError(RdtError):
    """A sync failed on at least one engine.

    ``failures``: engine -> what happened (``sglang_rdt.coordinator.failures.Failure``).
    """

    def __init__(self, version: str, failures: Mapping[str, Any]) -> None:
        lines = [f"{engine}: {what}" for engine, what in sorted(failures.items())]
        super().__init__(
            f"weight sync to version {version!r} failed on {len(lines)} engine(s):\n{listed(lines)}"
        )
        self.version, self.failures = version, dict(failures)
