"""Which label an engine gets, and which addresses mean it. Ray's answers are made up."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rdt.coordinator import discovery
from sglang_rdt.engine import hooks, names
from sglang_rdt.errors import EngineStateError

pytest.importorskip("ray")

PORT, NCCL = 30000, 41000


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    import ray.util

    made = SimpleNamespace(ip="10.0.0.1", actors=[])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: made.ip)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: made.actors)
    monkeypatch.setattr(hooks, "_engines", {})
    return made


def start(cluster: SimpleNamespace, ipc: str, namespace: str = "rl") -> Any:
    args, ports = (
        SimpleNamespace(port=PORT),
        SimpleNamespace(nccl_port=NCCL, tokenizer_ipc_name=ipc),
    )
    engine = hooks._engine_of(args, ports, namespace)
    name = names.actor_name(engine.node_ip, engine.port)
    cluster.actors.append({"name": name, "namespace": namespace})
    return engine


def test_a_label_is_taken_in_its_own_namespace_and_on_its_own_node_only(
    cluster: SimpleNamespace,
) -> None:
    assert start(cluster, "one").port == PORT
    assert start(cluster, "two", namespace="other").port == PORT
    assert start(cluster, "three").port == NCCL
    cluster.ip = "10.0.0.2"
    assert start(cluster, "four").port == PORT


def test_all_ranks_of_an_engine_have_one_label_and_a_restart_is_another_instance(
    cluster: SimpleNamespace,
) -> None:
    first = start(cluster, "fixed")
    assert start(cluster, "fixed") is first
    hooks.new_launch(SimpleNamespace(tokenizer_ipc_name="fixed"))
    cluster.actors.clear()
    assert start(cluster, "fixed").instance != first.instance


def test_a_label_that_is_lost_in_a_race_is_given_up_once(cluster: SimpleNamespace) -> None:
    engine = start(cluster, "one")
    ports = SimpleNamespace(tokenizer_ipc_name="one")
    renamed = hooks._relabel(ports, engine)
    assert (renamed.port, renamed.instance) == (NCCL, engine.instance)
    assert start(cluster, "one") is renamed
    with pytest.raises(EngineStateError, match="taken by another actor"):
        hooks._relabel(ports, renamed)
    other = start(cluster, "two", namespace="other")
    other.launched.append("rank 0")
    with pytest.raises(EngineStateError, match=r"10\.0\.0\.1:30000 is taken"):
        hooks._relabel(SimpleNamespace(tokenizer_ipc_name="two"), other)


@pytest.mark.parametrize("ip", ["10.0.0.1", "fd00::7"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "0.0.0.0", "::", "::1"])
def test_what_means_this_node(cluster: SimpleNamespace, ip: str, host: str) -> None:
    cluster.ip = ip
    assert ip in discovery.resolve_host(host)


def _resolves(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    rows = [(socket.AF_INET6 if ":" in a else socket.AF_INET, 0, 0, "", (a, 0)) for a in addresses]
    monkeypatch.setattr(discovery.socket, "getaddrinfo", lambda host, port: rows)


def test_the_own_name_of_a_machine_may_mean_its_loopback_interface(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    _resolves(monkeypatch, "127.0.1.1")
    assert cluster.ip in discovery.resolve_host("me")
    _resolves(monkeypatch, "::1")
    assert cluster.ip in discovery.resolve_host("me")
    _resolves(monkeypatch, "10.0.0.9", "fd00::9")
    assert discovery.resolve_host("other") == {"10.0.0.9", "fd00::9", "other"}


@pytest.mark.parametrize("written", ["[fd00::7]:30000", "http://[fd00::7]:30000/v1"])
def test_ipv6_addresses_mean_what_the_actors_carry(cluster: SimpleNamespace, written: str) -> None:
    host, port = names.split_address(written)
    parsed = names.parse(names.actor_name("fd00::7", PORT, tp=1))
    assert parsed is not None
    assert parsed.node in discovery.resolve_host(host)
    assert (parsed.port, names.engine_id(parsed.node, port)) == (port, "[fd00::7]:30000")
