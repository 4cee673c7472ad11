"""The transport by itself: real Ray, real NIXL, two plain actors, no engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

COUNT = 1 << 18


class Source:
    """Owns two tensors and a reference to them."""

    def __init__(self) -> None:
        import torch

        from sglang_rdt.transport import nixl

        self.tensors = [torch.arange(COUNT, dtype=torch.float32), torch.zeros(1000)]
        nixl.register(self.tensors)
        self.ref = nixl.put(self.tensors)

    def reference(self) -> list[Any]:
        return [self.ref]

    def again(self) -> list[Any]:
        """The same memory, registered and put anew."""
        from sglang_rdt.transport import nixl

        self.ref = None
        nixl.deregister(self.tensors)
        nixl.register(self.tensors)
        self.ref = nixl.put(self.tensors)
        return [self.ref]

    def fill(self, value: float) -> None:
        for t in self.tensors:
            t.fill_(value)

    def registrations(self) -> tuple[int, int]:
        return _registrations()


class Reader:
    """Pulls and reads."""

    def __init__(self) -> None:
        import torch

        from sglang_rdt.transport import nixl

        self.targets = [torch.zeros(COUNT), torch.zeros(1000)]
        nixl.register(self.targets)

    def pull(self, refs: list[Any], timeout_s: float = 20.0) -> tuple[float, float]:
        from sglang_rdt.transport import nixl

        nixl.pull(refs[0], self.targets, timeout_s)
        return float(self.targets[0].sum()), float(self.targets[1].sum())

    def pull_elsewhere(self, refs: list[Any]) -> None:
        import torch

        from sglang_rdt.transport import nixl

        nixl.pull(refs[0], [torch.zeros(COUNT), torch.zeros(1000)], 20.0)

    def prepare(self, refs: list[Any], pieces: list[tuple[int, int, int]]) -> None:
        """Reads (from element, to element, count) of the first tensor."""
        import numpy as np

        from sglang_rdt.transport import nixl
        from sglang_rdt.transport.reads import PreparedRead

        memory = nixl.memory_of(refs[0], 20.0)
        a = np.array(pieces, dtype=np.uint64)
        four = np.uint64(4)
        self.read = PreparedRead(
            memory,
            np.uint64(self.targets[0].data_ptr()) + a[:, 1] * four,
            np.uint64(memory.addresses[0]) + a[:, 0] * four,
            a[:, 2] * four,
            device=0,
            kind="cpu",
            who="the source",
        )

    def read_and_overwrite(self, source: Any, rounds: int) -> list[str]:
        """Reads; the source changes in the very moment in which the read returns; what arrived
        must be the old bytes, then and later."""
        import ray

        from sglang_rdt.transport.reads import read_all

        problems = []
        for i in range(rounds):
            ray.get(source.fill.remote(float(i)))
            read_all([self.read], 20.0)
            later = source.fill.remote(-1.0)
            got = self.targets[0][:100].tolist()
            ray.get(later)
            if got != [float(i)] * 100 or self.targets[0][:100].tolist() != got:
                problems.append(f"round {i}: {got[:3]}")
        return problems

    def many(self, rounds: int) -> None:
        from sglang_rdt.transport.reads import read_all

        for _ in range(rounds):
            read_all([self.read], 20.0)

    def values(self, places: list[int]) -> list[float]:
        return [float(self.targets[0][i]) for i in places]

    def registrations(self) -> tuple[int, int]:
        return _registrations()

    def resize(self) -> list[tuple[int, int]]:
        """Empties a registered storage and fills it again, as offloading does; registrations."""
        import torch

        from sglang_rdt.transport import nixl

        counts = [_registrations()]
        held = []
        for _ in range(3):
            storage = self.targets[0].untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            held.append(torch.zeros(COUNT))  # takes the place, maybe
            storage.resize_(nbytes)
            nixl.register(self.targets)
            counts.append(_registrations())
        nixl.deregister(self.targets)
        counts.append(_registrations())
        return counts

    def pull_into_another_place_and_back(self, refs: list[Any]) -> tuple[float, float]:
        """Registers the targets anew between two pulls, as memory that took their place would be."""
        from sglang_rdt.transport import nixl
        from sglang_rdt.transport.agent import transport

        self.pull(refs)
        (stale,) = transport()._prepared.values()
        nixl.deregister(self.targets)
        nixl.register(self.targets)
        for t in self.targets:
            t.fill_(-1.0)
        got = self.pull(refs)
        (fresh,) = transport()._prepared.values()
        # NIXL may as well die of it.
        assert stale.lost, "a transfer outlived its memory's registration"
        assert fresh is not stale
        return got

    def read_after_deregistering(self) -> str:
        from sglang_rdt.errors import TransportError
        from sglang_rdt.transport import nixl
        from sglang_rdt.transport.reads import read_all

        read_all([self.read], 20.0)
        nixl.deregister(self.targets)
        nixl.register(self.targets)
        try:
            read_all([self.read], 20.0)
        except TransportError as error:
            return str(error)
        finally:
            self.read.release()
        return ""

    def reconnect(self, refs: list[Any], rounds: int) -> list[int]:
        """How many connections this process has after each time that it read and let go."""
        import psutil

        from sglang_rdt.transport import nixl

        counts = []
        for _ in range(rounds):
            self.prepare(refs, [(0, 0, 100)])
            self.many(1)
            self.pull(refs)
            self.read.release()
            nixl.forget()
            nixl.forget()  # as a connect does it that follows upon released memory
            here = psutil.Process().net_connections(kind="inet")
            counts.append(sum(c.status == psutil.CONN_ESTABLISHED for c in here))
        return counts

    def known(self) -> tuple[int, int]:
        from sglang_rdt.transport.agent import transport

        return len(transport()._memory), len(transport()._former)

    def prepared(self) -> int:
        from sglang_rdt.transport.agent import transport

        return len(transport()._prepared)

    def forget(self) -> None:
        from sglang_rdt.transport import nixl

        nixl.forget()


def _registrations() -> tuple[int, int]:
    from sglang_rdt.transport import nixl
    from sglang_rdt.transport.agent import transport

    return nixl.registrations(), len(transport()._tensor_desc_cache)


@pytest.fixture
def pair(cluster: None) -> Iterator[tuple[Any, Any, list[Any]]]:
    import ray

    options = {"num_cpus": 0, "enable_tensor_transport": True}
    source = ray.remote(**options)(Source).remote()
    reader = ray.remote(**options)(Reader).remote()
    yield source, reader, ray.get(source.reference.remote(), timeout=60)
    ray.kill(source)
    ray.kill(reader)


def test_put_once_pulled_after_every_change(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    for value in (1.0, 2.0, 3.0):
        ray.get(source.fill.remote(value), timeout=20)
        got = ray.get(reader.pull.remote(refs), timeout=30)
        assert got == (value * COUNT, value * 1000)
    # One reference and one set of targets: one prepared transfer.
    assert ray.get(reader.prepared.remote(), timeout=20) == 1
    ray.get(reader.forget.remote(), timeout=20)
    assert ray.get(reader.prepared.remote(), timeout=20) == 0
    assert ray.get(reader.pull.remote(refs), timeout=30) == (3.0 * COUNT, 3000.0)


def test_memory_that_is_not_registered_is_no_target(pair: Any) -> None:
    import ray

    _, reader, refs = pair
    with pytest.raises(Exception, match="not registered"):
        ray.get(reader.pull_elsewhere.remote(refs), timeout=30)


def test_any_part_of_live_memory_can_be_read(pair: Any) -> None:
    import ray

    _, reader, refs = pair
    ray.get(reader.prepare.remote(refs, [(10, 0, 100), (5000, 100, 7), (COUNT - 1, 107, 1)]))
    ray.get(reader.many.remote(1), timeout=30)
    got = ray.get(reader.values.remote([0, 99, 100, 106, 107, 108]))
    assert got == [10.0, 109.0, 5000.0, 5006.0, float(COUNT - 1), 0.0]


def test_bytes_are_there_when_the_read_returns_and_the_source_may_change(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    ray.get(reader.prepare.remote(refs, [(0, 0, COUNT)]))
    assert ray.get(reader.read_and_overwrite.remote(source, 50), timeout=60) == []


def test_a_thousand_reads_register_nothing(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    ray.get(reader.prepare.remote(refs, [(i * 64, i * 64, 64) for i in range(100)]))
    ray.get(reader.many.remote(1), timeout=30)
    before = ray.get([source.registrations.remote(), reader.registrations.remote()])
    ray.get(reader.many.remote(1000), timeout=60)
    assert ray.get([source.registrations.remote(), reader.registrations.remote()]) == before


def test_storage_that_moves_leaves_no_registration_behind(pair: Any) -> None:
    import ray

    _, reader, _ = pair
    counts = ray.get(reader.resize.remote(), timeout=60)
    assert counts == [(2, 2)] * 4 + [(0, 0)]


def test_no_transfer_outlives_the_registration_of_the_memory_that_it_reads_into(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    ray.get(source.fill.remote(4.0), timeout=20)
    got = ray.get(reader.pull_into_another_place_and_back.remote(refs), timeout=30)
    assert got == (4.0 * COUNT, 4000.0)
    ray.get(reader.prepare.remote(refs, [(0, 0, COUNT)]), timeout=30)
    assert "was deregistered since" in ray.get(reader.read_after_deregistering.remote(), timeout=30)


def test_who_connects_again_leaves_no_connection_behind(pair: Any) -> None:
    import ray

    _, reader, refs = pair
    counts = ray.get(reader.reconnect.remote(refs, 6), timeout=60)
    assert counts[1:] == counts[:-1]


def test_memory_that_was_registered_anew_is_not_taken_for_what_it_was(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    assert ray.get(reader.pull.remote(refs), timeout=30)[1] == 0.0
    again = ray.get(source.again.remote(), timeout=30)
    ray.get(reader.forget.remote(), timeout=20)
    ray.get(source.fill.remote(5.0), timeout=20)
    assert ray.get(reader.pull.remote(again), timeout=30) == (5.0 * COUNT, 5000.0)
    # Not even known any more: nothing of the agent's is but what came since.
    assert ray.get(reader.known.remote(), timeout=20) == (1, 0)


def test_after_a_failure_nothing_is_taken_over(pair: Any) -> None:
    import ray

    _, reader, refs = pair
    ray.get(reader.pull.remote(refs), timeout=30)
    ray.get(reader.forget.remote(), timeout=20)
    assert ray.get(reader.known.remote(), timeout=20) == (0, 1)
    ray.get(reader.prepare.remote(refs, [(0, 0, 100)]), timeout=30)
    ray.get(reader.many.remote(1), timeout=30)
    assert "was deregistered since" in ray.get(reader.read_after_deregistering.remote(), timeout=30)
    ray.get(reader.forget.remote(), timeout=20)
    assert ray.get(reader.known.remote(), timeout=20) == (0, 0)
    ray.get(reader.pull.remote(refs), timeout=30)


def test_a_dead_source_is_named_within_the_deadline(pair: Any) -> None:
    import ray

    source, reader, refs = pair
    ray.get(reader.prepare.remote(refs, [(0, 0, COUNT)]))
    ray.get(reader.many.remote(1), timeout=30)
    ray.kill(source)
    time.sleep(1.0)
    started = time.monotonic()
    with pytest.raises(Exception, match="the source"):
        ray.get(reader.many.remote(1), timeout=40)
    assert time.monotonic() - started < 35
    # The reader's process has survived it.
    assert ray.get(reader.registrations.remote(), timeout=20)[0] == 2
