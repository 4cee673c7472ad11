from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.engine import names
from sglang_rdt.engine.names import ActorName, actor_name, engine_id, parse, split_address
from sglang_rdt.plan.specs import RankId

ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.sampled_from(["host", "node-3.cluster.local", "fe80::1%eth0"]),
)
RANKS = st.integers(0, 4096)


@given(ADDRESSES, st.integers(1, 65535), RANKS, RANKS, RANKS)
def test_stable_names_round_trip(node: str, port: int, dp: int, pp: int, tp: int) -> None:
    name = actor_name(node, port, dp=dp, pp=pp, tp=tp)
    assert parse(name) == ActorName(node, RankId(dp, pp, tp), port=port)


@given(ADDRESSES, RANKS, RANKS, RANKS, st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_released_names_are_read(
    node: str, dp: int, pp: int, tp: int, group: int, bundle: int
) -> None:
    # sglang/srt/ray/engine.py, 0.5.16 to 0.5.23.
    pg = f"{group:08x}"
    name = f"sglang_scheduler_node{node}_dp{dp}_pp{pp}_tp{tp}_pg{pg}_bundle{bundle}"
    assert parse(name) == ActorName(node, RankId(dp, pp, tp), group=pg, bundle=bundle)
    older = f"sglang_scheduler_node{node}_pp{pp}_tp{tp}_pg{pg}_bundle{bundle}"
    parsed = parse(older)
    assert parsed is not None
    assert (parsed.rank, parsed.bundle) == (RankId(0, pp, tp), bundle)


@given(ADDRESSES, st.integers(1, 65535), st.integers(0, 7))
def test_names_of_different_ranks_differ(node: str, port: int, tp: int) -> None:
    made = {
        actor_name(node, port, tp=tp),
        actor_name(node, port, tp=tp + 1),
        actor_name(node, port, pp=1, tp=tp),
        actor_name(node, port, dp=1, tp=tp),
        actor_name(node, port + 1, tp=tp),
        actor_name(f"{node}0", port, tp=tp),
    }
    assert len(made) == 6


@pytest.mark.parametrize(
    "name",
    [
        "",
        "SchedulerActor",
        "sglang_scheduler_node10.0.0.1",
        "sglang_scheduler_node_port1_dp0_pp0_tp0",
        "sglang_scheduler_node10.0.0.1_port30000_dp0_pp0_tp",
        "sglang_scheduler_node10.0.0.1_port30000_dp0_pp0_tp0_extra",
        "my_sglang_scheduler_node10.0.0.1_port30000_dp0_pp0_tp0",
        "sglang_scheduler_node10.0.0.1_portx_dp0_pp0_tp0",
        "sglang_scheduler_node10.0.0.1_port30000_dpNone_pp0_tp0",
        "sglang_scheduler_node10.0.0.1_dp0_pp0_tp0_pg123_bundle0",
        "sglang_scheduler_node10.0.0.1_dp0_pp0_tp0_pgXYZXYZXY_bundle0",
        "sglang_scheduler_node10.0.0.1_port30000_dp0_pp0_tp0\n",
    ],
)
def test_foreign_names_are_nobody(name: str) -> None:
    assert parse(name) is None


@given(st.text(max_size=60))
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    assert parse(text) is None or text.startswith("sglang_scheduler_node")


@given(st.ip_addresses().map(str), st.integers(0, 65535))
def test_engine_ids_are_addresses(node: str, port: int) -> None:
    assert split_address(engine_id(node, port)) == (node, port)
    assert split_address(f"http://{engine_id(node, port)}/get_model_info") == (node, port)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:30000", ("10.0.0.1", 30000)),
        ("[::1]:30000", ("::1", 30000)),
        ("https://host.domain:8000", ("host.domain", 8000)),
        ("http://host:8000/a/b:9", ("host", 8000)),
        (" host:1 ", ("host", 1)),
    ],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", ":30000", "host:", "host:x", "http://host", "host:-1"]
)
def test_addresses_without_host_or_port(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port") as caught:
        split_address(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("0.0.0.0", True),
        ("::", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
        ("example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_wildcards_and_loopback(host: str, local: bool) -> None:
    assert names.is_wildcard_or_loopback(host) is local
