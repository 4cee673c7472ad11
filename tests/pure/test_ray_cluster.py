"""A wrong address of a Ray cluster is told at once."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from sglang_rdt.coordinator import ray_cluster
from sglang_rdt.errors import EngineNotFoundError


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have left."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(
        EngineNotFoundError, match=f"no Ray cluster to join at '{address}'.*refused"
    ):
        ray_cluster.join(address, None)
    assert time.monotonic() - began < 10


def test_a_host_that_has_no_address() -> None:
    with pytest.raises(EngineNotFoundError, match="no Ray cluster to join"):
        ray_cluster.join("no-such-host.invalid:6379", None)


@pytest.mark.parametrize("address", ["auto", "local", "ray://somewhere:10001"])
def test_what_is_left_to_ray(address: str) -> None:
    ray_cluster._reach(address)
