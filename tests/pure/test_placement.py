from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.engine import engine_info, placement
from sglang_rdt.engine.placement import Bundle, choose
from sglang_rdt.errors import PlacementError
from sglang_rdt.settings import Settings


def bundle(
    index: int, gpus: float = 1, free: float = 1, node: str = "n", here: bool = True
) -> Bundle:
    return Bundle(index, gpus, free, node, here)


def test_free_bundles_of_this_node_come_first() -> None:
    bundles = [
        bundle(0, node="b", here=False),
        bundle(1, gpus=0, free=0),
        bundle(2),
        bundle(3, free=0),
        bundle(4, free=0.8),
        bundle(5),
        bundle(6, node="a", here=False),
        bundle(7, node="b", here=False),
    ]
    assert choose(bundles, 1, None) == [2]
    assert choose(bundles, 4, None) == [2, 5, 6, 0]
    with pytest.raises(PlacementError, match=r"6 rank.*4 \(0\.8 of 1 GPU free, this node\)"):
        choose(bundles, 6, None)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([0], "must name 2 different bundles"),
        ([0, 0], "must name 2 different bundles"),
        ([0, 9], "bundle 9 cannot take a rank"),
        ([0, 3], "bundle 3 cannot take a rank.*a part of a GPU"),
        ([0, 4], "bundle 4 cannot take a rank"),
        ([2, 0], "rank 0 must be on the node"),
    ],
)
def test_an_order_that_cannot_work_is_refused(wanted: list[int], why: str) -> None:
    bundles = [
        bundle(0),
        bundle(1),
        bundle(2, node="b", here=False),
        bundle(3, free=0.5),
        bundle(4, gpus=2, free=2),
    ]
    with pytest.raises(PlacementError, match=why):
        choose(bundles, 2, wanted)
    assert choose(bundles, 2, [1, 2]) == [1, 2]
    assert choose(bundles, 2, [1, 0]) == [1, 0]


BUNDLES = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([0, 0.5, 1]), st.sampled_from("abc")),
    max_size=12,
).map(lambda rows: [bundle(i, g, min(f, g), n, n == "a") for i, (g, f, n) in enumerate(rows)])


@given(BUNDLES, st.integers(1, 6))
def test_what_is_chosen_can_be_scheduled(bundles: list[Bundle], world: int) -> None:
    try:
        got = choose(bundles, world, None)
    except PlacementError:
        free = [b for b in bundles if b.gpus == 1 and b.free == 1]
        assert len(free) < world or not any(b.here for b in free)
        return
    assert len(set(got)) == world
    assert all(bundles[i].gpus == 1 and bundles[i].free == 1 for i in got)
    assert bundles[got[0]].here
    nodes = [bundles[i].node for i in got]
    assert len({n for n, m in itertools.pairwise(nodes) if n != m}) < 3  # node by node
    assert choose(bundles, world, got) == got


@pytest.mark.parametrize("text", ["1,x", "1,,2", "0x1"])
def test_indices_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(placement.INDICES, text)
    with pytest.raises(PlacementError, match="must be numbers"):
        placement.wanted_indices()


def test_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(placement.INDICES, " 3, 1 ")
    assert placement.wanted_indices() == [3, 1]
    monkeypatch.delenv(placement.INDICES)
    assert placement.wanted_indices() is None
    with placement._environ([2, 0]):
        assert os.environ[placement.INDICES] == "2,0"
    assert placement.INDICES not in os.environ


class FakeGroup:
    def __init__(self, *gpus: float) -> None:
        self.bundle_specs = [{"GPU": g} if g else {"CPU": 1.0} for g in gpus]


@pytest.mark.parametrize(
    ("gpus", "world", "fits"),
    [
        ((1, 1), 2, True),
        ((0, 1, 1), 2, True),
        ((1,), 2, False),
        ((4, 4), 2, False),
        ((0,), 1, False),
    ],
)
def test_a_bundle_per_rank_or_a_bundle_per_node(
    gpus: tuple[float, ...], world: int, fits: bool
) -> None:
    assert placement._fits(FakeGroup(*gpus), world) is fits


@dataclasses.dataclass
class Result:
    scheduler_infos: list[Any]
    block_until_scheduler_exits: Callable[[], None] = lambda: None
    scheduler_actors: list[Any] = dataclasses.field(default_factory=list)


def module() -> dict[str, Any]:
    """Like sglang.srt.ray.engine."""

    class RayEngine:
        def __init__(self, **kwargs: Any) -> None:
            raise AssertionError

        def shutdown(self) -> None:
            raise AssertionError

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, placement_group: Any = None) -> Any:
            raise AssertionError("ranks are started on another node than the first")

    return {
        "RayEngine": RayEngine,
        "RaySchedulerInitResult": Result,
        "_find_engine_bundle": lambda group, nnodes: (0, ""),
    }


def test_another_node_starts_nothing_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.settings_module, "load", Settings)
    made = module()
    placement.instrument(made)
    placement.instrument(made)
    result, processes = made["RayEngine"]._launch_scheduler_processes(
        SimpleNamespace(node_rank=1), None, None
    )
    assert processes is None
    assert (result.scheduler_infos, result.scheduler_actors) == ([{}], [])
    thread = threading.Thread(target=result.block_until_scheduler_exits, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()


@pytest.mark.parametrize("off", [{"enabled": False}, {"patch_placement": False}])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, off: dict[str, bool]) -> None:
    monkeypatch.setattr(placement.settings_module, "load", lambda: Settings(**off))
    made = module()
    before = dict(vars(made["RayEngine"]))
    placement.instrument(made)
    assert dict(vars(made["RayEngine"])) == before


def test_host_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    options = placement.host_options("group", [4, 5], namespace="rl", environ={"A": "1"})
    assert (options["num_cpus"], options["num_gpus"]) == (0, 0)
    assert options["scheduling_strategy"].placement_group_bundle_index == 4
    env = {"A": "1", "SGLANG_RDT_NAMESPACE": "rl", "SGLANG_RAY_BUNDLE_INDICES": "4,5"}
    assert options["runtime_env"] == {"env_vars": env}
    follower = placement.host_options("group", [6], node_rank=1)
    assert follower["runtime_env"] == {"env_vars": {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}}
    with pytest.raises(PlacementError):
        placement.host_options("group", [])


@pytest.mark.parametrize(
    ("keyword", "argument", "setting", "wanted"),
    [
        (None, False, False, False),
        (None, False, True, True),
        (None, True, False, True),
        (True, False, False, True),
        (False, True, True, False),
    ],
)
def test_who_asks_for_engine_info(
    monkeypatch: pytest.MonkeyPatch,
    keyword: bool | None,
    argument: bool,
    setting: bool,
    wanted: bool,
) -> None:
    monkeypatch.setattr(engine_info.settings_module, "load", lambda: Settings(engine_info=setting))
    args = SimpleNamespace(**{engine_info.KEYWORD: argument})
    with engine_info.asked_for(keyword):
        assert engine_info.wanted(args) is wanted


@pytest.mark.parametrize("argument", [False, True], ids=["released", "patched sources"])
@pytest.mark.parametrize("keyword", [None, False, True])
def test_the_keyword_is_a_server_argument_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, argument: bool, keyword: bool | None
) -> None:
    module = ModuleType("sglang.srt.server_args")
    fields = {engine_info.KEYWORD: False} if argument else {}
    module.ServerArgs = type("ServerArgs", (), fields)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kwargs = {"tp_size": 1, engine_info.KEYWORD: keyword}
    assert engine_info.take_keyword(kwargs) is keyword
    stays = argument and keyword is not None
    assert kwargs == {"tp_size": 1, **({engine_info.KEYWORD: keyword} if stays else {})}
    assert engine_info.take_keyword(rest := {"tp_size": 1}) is None
    assert rest == {"tp_size": 1}


def test_an_engine_info_server_that_dies_is_refused_not_waited_for() -> None:
    """A mock: a port that is lost between the check and the start cannot be arranged."""
    closed: list[bool] = []
    thread = threading.Thread(target=lambda: None)
    server = SimpleNamespace(
        host="127.0.0.1",
        port=6789,
        _server=SimpleNamespace(started=False),
        _thread=thread,
        close=lambda: closed.append(True),
    )
    with pytest.raises(PlacementError, match=r"127\.0\.0\.1:6789; is the port taken"):
        engine_info._wait_until_it_listens(server)
    assert closed
    server._server.started = True
    engine_info._wait_until_it_listens(server)


def test_patched_sources_are_placed_once_like_released_ones() -> None:
    def find(placement_group: Any, nnodes: int) -> None: ...

    module: dict[str, Any] = {"_find_engine_bundle": find}

    class RayEngine:
        _rdt_placed = placement.in_class_body(module)  # as patch 0005 has it

        def __init__(self, **kwargs: Any) -> None: ...

        def shutdown(self) -> None: ...

        @classmethod
        def _launch_scheduler_processes(cls) -> None: ...

    assert module["RayEngine"] is RayEngine
    placed = RayEngine.__init__
    assert placed.__name__ == "init_placed"
    assert RayEngine.shutdown.__name__ == "shutdown_placed"
    assert RayEngine._launch_scheduler_processes.__name__ == "launch_placed"
    placement.instrument(module)
    assert RayEngine.__init__ is placed
