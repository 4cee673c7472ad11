"""NIXL between two GPUs: when a read returns, every byte is there and the source may change.

pytest tests/gpu -m gpu
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COUNT = 1 << 31  # elements of 2 bytes
ROUNDS = 8


class Source:
    """Owns memory on GPU 0, and changes it when told."""

    def __init__(self) -> None:
        from sglang_rdt.transport import nixl

        torch.cuda.set_device(0)
        self.memory = torch.zeros(COUNT, dtype=torch.int16, device="cuda:0")
        nixl.register([self.memory])
        self.ref = nixl.put([self.memory])

    def reference(self) -> list[Any]:
        return [self.ref]

    def fill(self, value: int) -> None:
        self.memory.fill_(value)
        torch.cuda.synchronize(0)

    def expandable(self) -> str:
        """What registering memory in expandable segments raises, switched on without a variable."""
        from sglang_rdt.transport import nixl

        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            nixl.register([torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")])
        except Exception as error:
            return str(error)
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        return ""


class Reader:
    """Reads into GPU 1 and looks at every byte."""

    def __init__(self) -> None:
        from sglang_rdt.transport import nixl

        torch.cuda.set_device(1)
        self.memory = torch.zeros(COUNT, dtype=torch.int16, device="cuda:1")
        nixl.register([self.memory])
        self.other = torch.cuda.Stream(1)

    def prepare(self, refs: list[Any], pieces: int) -> None:
        import numpy as np

        from sglang_rdt.transport import nixl
        from sglang_rdt.transport.reads import PreparedRead

        remote = nixl.memory_of(refs[0], 60.0)
        each = COUNT * 2 // pieces
        at = np.arange(pieces, dtype=np.uint64) * np.uint64(each)
        self.read = PreparedRead(
            remote,
            np.uint64(self.memory.data_ptr()) + at,
            np.uint64(remote.addresses[0]) + at,
            np.full(pieces, each, dtype=np.uint64),
            device=1,
            kind="cuda",
            who="the source",
        )

    def rounds(self, source: Any) -> list[str]:
        import ray

        from sglang_rdt.transport.reads import read_all

        problems = []
        for i in range(1, ROUNDS + 1):
            ray.get(source.fill.remote(i))
            self.memory.fill_(-1)
            torch.cuda.synchronize(1)
            read_all([self.read], 60.0)
            later = source.fill.remote(-i)  # in the very moment of the return
            with torch.cuda.stream(self.other):
                stale = int((self.memory != i).sum())
            ray.get(later)
            torch.cuda.synchronize(1)
            changed = int((self.memory != i).sum())
            if stale or changed:
                problems.append(f"round {i}: {stale} stale, {changed} changed later")
        return problems


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    import ray

    ray.cloudpickle.register_pickle_by_value(importlib.import_module(__name__))
    environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": environ},
    )
    options = {"num_cpus": 0, "num_gpus": 1, "enable_tensor_transport": True}
    yield ray.remote(**options)(Source).remote(), ray.remote(**options)(Reader).remote()
    ray.shutdown()


@pytest.mark.parametrize("pieces", [1, 16, 512])
def test_every_byte_is_there_and_stays(pair: tuple[Any, Any], pieces: int) -> None:
    import ray

    source, reader = pair
    refs = ray.get(source.reference.remote(), timeout=120)
    ray.get(reader.prepare.remote(refs, pieces), timeout=120)
    assert ray.get(reader.rounds.remote(source), timeout=120) == []


def test_expandable_segments_are_refused_however_they_came(pair: tuple[Any, Any]) -> None:
    import ray

    source, _ = pair
    message = ray.get(source.expandable.remote(), timeout=60)
    assert "expandable segments" in message
    assert "0.3 GB/s" in message
