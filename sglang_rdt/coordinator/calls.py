"""Ray calls with deadlines, and errors that name who failed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from sglang_rdt.brief import cut, one_line
from sglang_rdt.errors import DeadlineError, RdtError

# Who was called: an engine rank as text, or (engine, rank).
Who = TypeVar("Who", str, tuple[str, str])


class CallFailures(RdtError):
    """Some of the called actors failed. ``failures``: who -> the exception."""

    def __init__(self, phase: str, failures: Mapping[str, BaseException]) -> None:
        text = "; ".join(f"{who}: {short(error)}" for who, error in failures.items())
        super().__init__(f"{phase} failed: {text}")
        self.phase, self.failures = phase, dict(failures)

    def __reduce__(self) -> tuple[Any, ...]:
        # On its way to other ranks: what others raised may not be made for travelling.
        build, (cls, args, state) = super().__reduce__()
        failures = {who: _portable(error) for who, error in self.failures.items()}
        return build, (cls, args, {**state, "failures": failures})


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RdtError(short(error))
    return error


# Our own errors name many culprits; what others say is worth less.
_MAX_OWN, _MAX_OTHER = 16_000, 2_000


def short(error: BaseException) -> str:
    """One clear line for ``error``: the cause behind Ray's wrapper, without its traceback."""
    try:
        text = _text(error)
    except Exception:  # what others define as an error may fail to say what it is
        text = f"{type(error).__name__} (it has no readable message)"
    limit = _MAX_OWN if isinstance(error, RdtError) else _MAX_OTHER
    return cut(one_line(text[: 2 * limit]), limit) or type(error).__name__


def _text(error: BaseException) -> str:
    import ray.exceptions as rx

    if isinstance(error, RdtError):
        # RdtErrors raised in an actor arrive as instances of both RayTaskError and their class.
        cause = getattr(error, "cause", None)
        return str(cause) if cause is not None else str(error)
    if isinstance(error, rx.RayTaskError):
        cause = getattr(error, "cause", None)
        if cause is not None:
            return _named(cause)
        lines = str(error).strip().splitlines()
        return lines[-1] if lines else type(error).__name__
    if isinstance(error, rx.RayActorError):
        return "the actor is dead"
    return _named(error)


def _named(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


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
    refs: Mapping[Who, Any], timeout_s: float, phase: str
) -> tuple[dict[Who, Any], dict[Who, BaseException]]:
    """Like :func:`gather`, but returns ``(results, failures)``."""
    import ray

    deadline = time.monotonic() + timeout_s
    waiting: list[Any] = list(refs.values())
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
    results: dict[Who, Any] = {}
    failures: dict[Who, BaseException] = {}
    for who, ref in refs.items():
        try:
            results[who] = ray.get(ref, timeout=max(deadline - time.monotonic(), 0.001))
        except Exception as error:
            # One that the actor raised itself is both: an answer, and no deadline of ours.
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            if late and not isinstance(error, ray.exceptions.RayTaskError):
                name = who if isinstance(who, str) else str(who[-1])
                failures[who] = DeadlineError(name, phase, timeout_s)
            else:
                failures[who] = unwrap(error)
    return results, failures


def settle_each(
    started: Mapping[str, Mapping[str, Any]], timeout_s: float, phase: str
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, BaseException]]]:
    """:func:`settle` of several groups of calls (engine -> who -> reference), all under one
    deadline: however many do not answer, it passes once.

    Returns:
        Results of the groups in which every call succeeded, and failures of the others.
    """
    flat = {(group, who): ref for group, refs in started.items() for who, ref in refs.items()}
    answers, errors = settle(flat, timeout_s, phase)
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, dict[str, BaseException]] = {}
    for group, refs in started.items():
        failed = {who: errors[group, who] for who in refs if (group, who) in errors}
        if failed:
            failures[group] = failed
        else:
            results[group] = {who: answers[group, who] for who in refs}
    return results, failures
