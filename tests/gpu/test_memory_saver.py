"""Weights in memory that is given back and taken again at the same address (torch_memory_saver, as
SGLang's release_memory_occupation does it): what was registered before is void, and anew is right.

pytest tests/gpu -m gpu
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torch_memory_saver")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COUNT = 1 << 31  # bytes


class Source:
    """Owns memory on GPU 0."""

    def __init__(self) -> None:
        from sglang_rdt.transport import nixl

        torch.cuda.set_device(0)
        self.memory = torch.zeros(COUNT, dtype=torch.uint8, device="cuda:0")
        nixl.register([self.memory])
        self.ref = nixl.put([self.memory])

    def reference(self) -> list[Any]:
        return [self.ref]

    def fill(self, value: int) -> None:
        self.memory.fill_(value)
        torch.cuda.synchronize(0)


class Reader:
    """Reads into memory on GPU 1 that can be given back."""

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver

        from sglang_rdt.transport import nixl

        torch.cuda.set_device(1)
        self.saver = torch_memory_saver
        with self.saver.region(tag="weights"):
            self.memory = torch.zeros(COUNT, dtype=torch.uint8, device="cuda:1")
        nixl.register([self.memory])

    def prepare(self, refs: list[Any]) -> None:
        import numpy as np

        from sglang_rdt.transport import nixl
        from sglang_rdt.transport.reads import PreparedRead

        remote = nixl.memory_of(refs[0], 60.0)
        self.read = PreparedRead(
            remote,
            np.array([self.memory.data_ptr()], dtype=np.uint64),
            np.array([remote.addresses[0]], dtype=np.uint64),
            np.array([COUNT], dtype=np.uint64),
            device=1,
            kind="cuda",
            who="the source",
        )

    def read_and_count(self, value: int) -> tuple[int, float]:
        """How many bytes are wrong after a read, and its seconds."""
        from sglang_rdt.transport.reads import read_all

        self.memory.fill_(0xA5)
        torch.cuda.synchronize(1)
        started = time.perf_counter()
        read_all([self.read], 30.0)
        seconds = time.perf_counter() - started
        return int((self.memory != value).sum()), seconds

    def cycle(self, forget: bool) -> bool:
        """Gives the memory back and takes it again; whether it kept its address."""
        from sglang_rdt.transport import nixl

        if forget:
            self.read.release()
            nixl.forget()
            nixl.deregister([self.memory])
        before = self.memory.data_ptr()
        self.saver.pause("weights")
        self.saver.resume("weights")
        torch.cuda.synchronize(1)
        if forget:
            nixl.register([self.memory])
        return self.memory.data_ptr() == before


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    import ray
    from torch_memory_saver.utils import get_binary_path_from_package

    ray.cloudpickle.register_pickle_by_value(importlib.import_module(__name__))
    environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    preload = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": environ},
    )
    options = {"num_cpus": 0, "num_gpus": 1, "enable_tensor_transport": True}
    source = ray.remote(**options)(Source).remote()
    with_saver = {"env_vars": {**environ, "LD_PRELOAD": preload}}
    yield source, ray.remote(runtime_env=with_saver, **options)(Reader).remote()
    ray.shutdown()


@pytest.mark.parametrize("forget", [True, False], ids=["registered-anew", "left-registered"])
def test_released_and_resumed_memory(forget: bool, pair: tuple[Any, Any]) -> None:
    import ray

    source, reader = pair
    refs = ray.get(source.reference.remote(), timeout=120)
    ray.get(reader.prepare.remote(refs), timeout=120)
    ray.get(source.fill.remote(1), timeout=60)
    for _ in range(2):
        wrong, seconds = ray.get(reader.read_and_count.remote(1), timeout=60)
        assert wrong == 0
    print(f"\nbefore: {COUNT / seconds / 1e9:.0f} GB/s")
    assert ray.get(reader.cycle.remote(forget), timeout=60)
    if forget:
        ray.get(reader.prepare.remote(refs), timeout=120)
    ray.get(source.fill.remote(2), timeout=60)
    try:
        wrong, seconds = ray.get(reader.read_and_count.remote(2), timeout=60)
    except Exception as error:
        if forget:
            raise
        # Not a promise: what happens to whoever does not register again.
        print(f"left registered: {str(error).splitlines()[-1]}")
        return
    print(f"after: {wrong} wrong bytes, {COUNT / seconds / 1e9:.0f} GB/s, anew: {forget}")
    if forget:
        assert wrong == 0
