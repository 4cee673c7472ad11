"""Names of actors that Ray lists, addresses of engines, identities that ranks give themselves."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.coordinator import discovery
from sglang_rdt.engine import names
from sglang_rdt.errors import AmbiguousEngineError, EngineNotFoundError

from ..builders import engine_rank
from . import strategies as hostile

NUMBERS = st.one_of(
    st.integers(0, 70_000).map(str),
    st.sampled_from(["", "00", "01", "-1", "٣", "²", "1_0", hostile.LONG, "99999999999"]),
)
NODES = st.one_of(
    hostile.TEXTS, st.ip_addresses().map(str), st.sampled_from(["a_port1", "10.0.0.1", "_dp0"])
)
NAMES = st.one_of(
    hostile.TEXTS,
    st.builds("sglang_scheduler_node{}_port{}_dp{}_pp{}_tp{}".format, NODES, *[NUMBERS] * 4),
    st.builds(
        "sglang_scheduler_node{}_dp{}_pp{}_tp{}_pg0123abcd_bundle{}".format, NODES, *[NUMBERS] * 4
    ),
)
ADDRESSES = st.one_of(
    hostile.ANYTHING,
    st.builds("{}:{}".format, NODES, NUMBERS),
    st.builds("http://[{}]:{}/x".format, NODES, NUMBERS),
    st.sampled_from(
        ["a..b:1", "." * 300 + ":1", "x" * 70 + ".org:1", "\x00:1", "\ud800:1", "[::1]:30000",
         "10.0.0.1:65536", ":1", "[]:1"]
    ),
)  # fmt: skip


@hostile.examples(120)
@given(NAMES)
def test_any_name_is_read_as_it_was_written_or_not_at_all(name: str) -> None:
    parsed = names.parse(name)
    if parsed is not None and parsed.port is not None:
        rank = parsed.rank
        assert (
            names.actor_name(parsed.node, parsed.port, dp=rank.dp, pp=rank.pp, tp=rank.tp) == name
        )


@hostile.examples(120)
@given(ADDRESSES)
def test_any_address_is_split_or_refused(address: Any) -> None:
    try:
        host, port = names.split_address(address)
    except ValueError as error:
        hostile.check_sentence(error, 400)
    else:
        assert host
        assert 0 <= port <= names.MAX_PORT


@pytest.fixture
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are encoded and refused as ever, but nobody is asked for them."""
    import ray.util

    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port: real(host, port, flags=socket.AI_NUMERICHOST)
    )
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")


@pytest.mark.usefixtures("no_lookups")
def test_any_addresses_among_any_actors() -> None:
    @hostile.examples(120)
    @given(st.lists(NAMES, max_size=4), st.lists(ADDRESSES, min_size=1, max_size=2))
    def check(listed: list[str], addresses: list[Any]) -> None:
        good = "sglang_scheduler_node10.0.0.1_port30000_dp0_pp0_tp0"
        parsed = [(n, names.parse(n)) for n in [*listed, good]]
        known = [discovery.Listed(n, p, "rl") for n, p in parsed if p is not None]
        stable = [one for one in known if one.stable]
        try:
            found = discovery._select(stable, addresses, "rl", known)
        except EngineNotFoundError as error:
            hostile.check_sentence(error, 12_000)
        else:
            assert found
        assert discovery._select(stable, ["10.0.0.1:30000"], "rl", known)[-1].name == good

    check()


def ranks(count: int = 2) -> list[Any]:
    return [engine_rank(tp, tp_size=count) for tp in range(count)]


@hostile.examples(120)
@given(st.data())
def test_any_identities_are_whole_engines_or_refused(data: st.DataObject) -> None:
    found = data.draw(hostile.mutated(tuple(ranks())))
    if not isinstance(found, tuple):
        return
    try:
        engines = discovery._group([(identity, object()) for identity in found])
    except (EngineNotFoundError, AmbiguousEngineError) as error:
        hostile.check_sentence(error)
        return
    for engine in engines:
        first = engine.ranks[0]
        assert len({str(r) for r in engine.ranks}) == len(engine.ranks) == first.world_size
        assert {(r.tp_size, r.pp_size, r.dp_size) for r in engine.ranks} == {
            (first.tp_size, first.pp_size, first.dp_size)
        }
    assert len({e.name for e in engines}) == len(engines)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp_size": 4}, "its ranks contradict: .*tp_size"),
        ({"rank": engine_rank(0).rank}, "one answers twice"),
        ({"rank": engine_rank(7).rank}, "dp0_pp0_tp7 is outside of dp 1, pp 1, tp 2"),
        ({"package_version": "9.9"}, "package_version '', dp0_pp0_tp1 has '9.9'"),
        ({"instance": "two"}, "has 2 ranks, but only 1 answer"),
        ({"tp_size": 0}, "0 is no tp size"),
        ({"engine": "a\nb"}, "is no name"),
    ],
)
def test_identities_that_contradict(changes: dict[str, Any], why: str) -> None:
    one, two = ranks()
    with pytest.raises(EngineNotFoundError, match=why):
        discovery._group([(one, 1), (replace(two, **changes), 2)])


def test_two_engines_of_one_name() -> None:
    again = [replace(r, instance="two") for r in ranks()]
    with pytest.raises(AmbiguousEngineError, match=r"two engines are called 10\.0\.0\.1:30000"):
        discovery._group([(r, 1) for r in ranks() + again])


def test_an_actor_of_other_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import ray.util

    name = names.actor_name("10.0.0.1", 30000)
    listed = [{"name": name, "namespace": "rl"}]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: object())
    with pytest.raises(EngineNotFoundError, match=f"none of this package: {name}"):
        discovery.find_engines(namespace="rl")
