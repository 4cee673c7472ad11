"""Ray and NIXL as function calls in one process: handles, references, pulls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import ray
import torch

from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.engine import Engine as EngineHandle
from sglang_rdt.errors import DeadlineError
from sglang_rdt.transport import nixl

from .ranks import Engine


class Method:
    """``handle.method``: remote() runs it on a thread and returns a future."""

    def __init__(self, run: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._run, self._pool = run, pool

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._run, *args, **kwargs)


class Handle:
    """An actor handle on an object of this process. ``lost``: methods whose replies never come."""

    def __init__(self, actor: Any, pool: ThreadPoolExecutor) -> None:
        self._actor, self._pool = actor, pool
        self.lost: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        run = getattr(self._actor, name)
        if name not in self.lost:
            return Method(run, self._pool)

        def lose(*args: Any) -> None:
            run(*args)
            raise FutureTimeout

        return Method(lose, self._pool)


class Wire:
    """Registrations and references so far."""

    def __init__(self) -> None:
        self.registered: list[torch.Tensor] = []
        self.put_count = itertools.count()
        self.puts = 0
        self.fail_pulls: dict[int, Exception] = {}  # by how many pulls came before
        self.pulls = 0

    def register(self, tensors: Any) -> int:
        new = list(tensors)
        self.registered += new
        return len(new)

    def deregister(self, tensors: Any) -> None:
        gone = {t.data_ptr() for t in tensors}
        self.registered = [t for t in self.registered if t.data_ptr() not in gone]

    def put(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert all(v.is_contiguous() for v in views)
        self.puts += 1
        return list(views)

    def pull(self, ref: list[torch.Tensor], targets: list[torch.Tensor], timeout_s: float) -> None:
        self.pulls += 1
        if self.pulls - 1 in self.fail_pulls:
            raise self.fail_pulls.pop(self.pulls - 1)
        for value, target in zip(ref, targets, strict=True):
            assert target.is_contiguous()
            assert (target.shape, target.dtype) == (value.shape, value.dtype)
            target.copy_(value)


def get(ref: Future[Any], timeout: float) -> Any:
    """ray.get on a future."""
    try:
        return ref.result(timeout)
    except FutureTimeout:
        raise ray.exceptions.GetTimeoutError from None


def settle(
    refs: Mapping[str, Future[Any]], timeout_s: float, phase: str
) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """calls.settle on futures."""
    results: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}
    for who, ref in refs.items():
        try:
            results[who] = ref.result(timeout_s)
        except FutureTimeout:
            failures[who] = DeadlineError(
                who if isinstance(who, str) else who[-1], phase, timeout_s
            )
        except Exception as error:
            failures[who] = error
    return results, failures


def connect(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """Puts the wire in place of Ray and NIXL."""
    wire = Wire()
    for name in ("register", "deregister", "put", "pull"):
        monkeypatch.setattr(nixl, name, getattr(wire, name))
    monkeypatch.setattr(calls, "settle", settle)
    monkeypatch.setattr(ray, "get", get)
    return wire


def handles(engine: Engine, pool: ThreadPoolExecutor) -> EngineHandle:
    """What discovery would have found."""
    ranks = tuple(r.actor._identity for r in engine.ranks)
    return EngineHandle(ranks, tuple(Handle(r.actor, pool) for r in engine.ranks))
