"""One Ray cluster for all end-to-end tests; one engine alive at a time; trainer processes reused.

An idle engine rank spins on a core, and starting one takes half a minute: tests are grouped by
the engine that they need, and the next group stops the engine of the one before.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, Trainers

NAMESPACE = "sglang-rdt-tests"
GPUS = 4  # nothing is behind them


# Modules that share an engine follow one another; others keep their place after them.
ORDER = (
    "test_dense",
    "test_refusals",
    "test_verify",
    "test_launchers",
    "test_direct",
    "test_other_models",
    "test_membership",
    "test_load",
    "test_races",
    "test_engine_parallel",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the end-to-end tests by :data:`ORDER`."""
    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if item.path.parent == here]
    rank = {name: i for i, name in enumerate(ORDER)}
    ordered = sorted(
        (items[i] for i in places), key=lambda item: rank.get(item.path.stem, len(ORDER))
    )
    for i, item in zip(places, ordered, strict=True):
        items[i] = item


@dataclass(frozen=True)
class EngineKey:
    """What makes two tests share an engine."""

    model: TinyModel
    tp: int
    dtype: str = "bfloat16"
    more: tuple[tuple[str, Any], ...] = ()  # other server arguments


DENSE_TP2 = EngineKey(TinyModel("dense"), 2)
DENSE_TP1 = EngineKey(TinyModel("dense"), 1)
MOE_TP2 = EngineKey(TinyModel("moe"), 2)
# Tied embeddings, a vocabulary that both sides pad, and QKV biases, all in one model.
TIED_TP2 = EngineKey(
    TinyModel("dense", tied=True, qkv_bias=True, vocab=500, padded_vocab=512), 2, "float32"
)


class EnginePool:
    """The live engine, and how to get another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: EngineKey | None = None
        self._served: ServedEngine | None = None
        self._count = 0

    def get(self, key: EngineKey) -> ServedEngine:
        """The engine for ``key``; stops the one before."""
        if key != self._key or self._served is None:
            import torch

            self.stop()
            self._count += 1
            start = self._folder / f"start{self._count}"
            key.model.save_random_checkpoint(start, seed=100, dtype=getattr(torch, key.dtype))
            kwargs = cpu.engine_kwargs(
                str(start),
                tp_size=key.tp,
                dtype=key.dtype,
                port=31000 + self._count,
                **dict(key.more),
            )
            self._served, self._key = ServedEngine(kwargs), key
        return self._served

    def stop(self) -> None:
        """Stops the live engine."""
        if self._served is not None:
            self._served.shutdown()
        self._served = self._key = None


class TrainerPool:
    """Trainer processes by world size, rebuilt for each test."""

    def __init__(self) -> None:
        self._pools: dict[int, Trainers] = {}

    def get(self, model: TinyModel, layout: Layout, **options: Any) -> Trainers:
        """Fresh trainers for ``model`` in ``layout``; those of other sizes let their engines go."""
        for world, other in self._pools.items():
            if world != layout.world:
                other.all("detach")
        return self.beside(model, layout, **options)

    def beside(self, model: TinyModel, layout: Layout, **options: Any) -> Trainers:
        """Like :meth:`get`; those of other sizes stay connected."""
        pool = self._pools.get(layout.world)
        if pool is None:
            self._pools[layout.world] = Trainers(model, layout, **options)
        else:
            pool.rebuild(model, layout, **options)
        return self._pools[layout.world]

    def forget(self, world: int) -> None:
        """The trainers of this size are dead."""
        self._pools.pop(world, None)

    def stop(self) -> None:
        """Ends all processes."""
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster of our own."""
    import ray

    os.environ.update(cpu.environment(GPUS))
    # Functions of test modules travel to actors, which cannot import the tests.
    for name in (
        "test_dense",
        "test_refusals",
        "test_other_models",
        "test_launchers",
        "test_transport",
        "test_direct",
        "test_engine_parallel",
        "test_verify",
        "test_load",
        "test_races",
        "test_membership",
        "traffic",
        "steps",
    ):
        ray.cloudpickle.register_pickle_by_value(importlib.import_module(f"tests.e2e.{name}"))
    ray.init(
        address="local",  # never a cluster that somebody else runs on this machine
        num_cpus=16,
        num_gpus=GPUS,
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=bool(os.environ.get("E2E_LOGS")),
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def engines(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """The engine pool."""
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def trainers(cluster: None) -> Iterator[TrainerPool]:
    """The trainer pool."""
    pool = TrainerPool()
    yield pool
    pool.stop()
