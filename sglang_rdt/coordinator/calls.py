"""Ray calls with deadlines, and errors that name who failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sglang_rdt.errors import DeadlineError, RdtError


class CallFailures(RdtError):
    """Some of the called actors failed. ``failures``: who -> the exception."""

    def __init__(self, phase: str, failures: Mapping[str, BaseException]) -> None:
        text = "; ".join(f"{who}: {short(error)}" for who, error in failures.items())
        super().__init__(f"{phase} failed: {text}")
        self.phase, self.failures = phase, dict(failures)


def short(error: BaseException) -> str:
    """One clear line for ``error``: the cause behind Ray's wrapper, without its traceback."""
    import ray.exceptions as rx

    if isinstance(error, RdtError):
        # RdtErrors raised in an actor arrive as instances of both RayTaskError and their class.
        cause = getattr(error, "cause", None)
        return str(cause) if cause is not None else str(error)
    if isinstance(error, rx.RayTaskError):
        cause = getattr(error, "cause", None)
        return (
            f"{type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[-1]
        )
    if isinstance(error, rx.RayActorError):
        return "the actor is dead"
    return f"{type(error).__name__}: {error}"


def unwrap(error: BaseException) -> BaseException:
    """The exception that the actor raised, out of Ray's wrapper."""
    import ray.exceptions as rx

    if isinstance(error, rx.RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            return cause
    return error


def gather(refs: Mapping[str, Any], timeout_s: float, phase: str) -> dict[str, Any]:
    """Results of ``refs`` (who -> reference), all of them or an error that names every culprit.

    Raises:
        CallFailures: at least one call raised, its actor died, or it did not answer within
            ``timeout_s`` (DeadlineError). The others have been waited for.
    """
    results, failures = settle(refs, timeout_s, phase)
    if failures:
        raise CallFailures(phase, failures)
    return results


def settle(
    refs: Mapping[str, Any], timeout_s: float, phase: str
) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """Like :func:`gather`, but returns ``(results, failures)``."""
    import ray

    deadline = time.monotonic() + timeout_s
    waiting: list[Any] = list(refs.values())
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
    results: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}
    for who, ref in refs.items():
        try:
            results[who] = ray.get(ref, timeout=max(deadline - time.monotonic(), 0.001))
        except ray.exceptions.GetTimeoutError:
            failures[who] = DeadlineError(who, phase, timeout_s)
        except Exception as error:
            failures[who] = unwrap(error)
    return results, failures
