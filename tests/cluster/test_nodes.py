"""What depends on node addresses, on Ray nodes that have different ones.

Engine E has a rank on each node, its main process on node b, and bundles that were reserved before.
Engine H is an HTTP server on node a, on the same reserved group, with the same port. The trainer is on
node a. The last test kills node b.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rdt import cpu
from sglang_rdt.coordinator.discovery import engine_at, find_engines
from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import EngineHost, TrainerRank, free_port
from sglang_rdt.engine.placement import host_options
from sglang_rdt.errors import EngineNotFoundError, PlacementError, SyncError
from sglang_rdt.settings import Settings
from tests.cluster import netns

pytestmark = pytest.mark.cluster

NAMESPACE = "nodes"
MODEL = TinyModel("dense")
PORT, INFO_PORT = 31000, 31789
SETTINGS = Settings(phase_timeout_s=60.0, connect_timeout_s=60.0, stall_timeout_s=300.0)
START_S = 420.0
ROOT = Path(__file__).parents[2]
NODE_ENVIRON = {
    **cpu.environment(2),
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "SGLANG_RDT_NAMESPACE": NAMESPACE,
    # All nodes are one machine, where UCX would take shared memory.
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    # A dead node is noticed within seconds.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


class World:
    """The cluster, and what the tests have started in it so far."""

    def __init__(self, cluster: netns.Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.group: Any = None
        self.host: Any = None
        self.trainer: Any = None
        self.server: subprocess.Popen[bytes] | None = None

    def ip(self, name: str) -> str:
        return self.cluster.nodes[name].ip

    def on(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)`` on that node."""
        import ray

        task = ray.remote(num_cpus=0)(run).options(scheduling_strategy=self.affinity(name))
        return ray.get(task.remote(*args), timeout=120)

    def affinity(self, name: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        (node,) = (n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == self.ip(name))
        return NodeAffinitySchedulingStrategy(node, soft=False)

    def bundles(self, name: str) -> list[int]:
        """Bundles of the reserved group that are on that node."""
        import ray
        import ray.util

        (node,) = (n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == self.ip(name))
        table = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return sorted(i for i, where in table.items() if where == node)

    def train(self, run: Callable[..., Any], *args: Any) -> Any:
        import ray

        return ray.get(self.trainer.call.remote(run, *args), timeout=180)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    import ray

    why = netns.why_not()
    if why is not None:
        pytest.skip(f"no network namespaces: {why}")
    assert not ray.is_initialized(), "needs a process without another Ray cluster"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        cluster = netns.Cluster(["a", "b"], gpus=2, environ=NODE_ENVIRON).__enter__()
    except netns.NoNamespacesError as error:
        pytest.skip(f"no network namespaces: {error}")
    made = World(cluster, tmp_path_factory.mktemp("nodes"))
    try:
        cluster.connect(NAMESPACE)
        MODEL.save_random_checkpoint(made.folder / "hf", seed=100)
        yield made
    finally:
        ray.shutdown()
        cluster.close()  # the server's namespace with it, and so the server
        if made.server is not None:
            made.server.wait(30)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _found(address: str) -> str:
    try:
        return engine_at(address, namespace=NAMESPACE).name
    except EngineNotFoundError:
        return "not found"


def test_an_engine_over_two_nodes_takes_the_bundles_that_were_reserved(world: World) -> None:
    """Rank 0 on node b, rank 1 on node a: not the order of the bundles. No second group is made."""
    import ray
    import ray.util
    from ray.util.placement_group import placement_group

    # The trainer starts meanwhile.
    actor = ray.remote(num_cpus=0, enable_tensor_transport=True)(TrainerRank)
    world.trainer = actor.options(scheduling_strategy=world.affinity("a")).remote(
        MODEL, Layout(tp=1), 0, free_port(), {"seed": 5}
    )
    world.group = placement_group([{"CPU": 1, "GPU": 1}] * 4, strategy="SPREAD")
    assert world.group.wait(30)
    assert len(world.bundles("a")) == len(world.bundles("b")) == 2
    order = [world.bundles("b")[0], world.bundles("a")[0]]
    kwargs = cpu.engine_kwargs(
        str(world.folder / "hf"),
        tp_size=2,
        nnodes=2,
        port=PORT,
        sleep_on_idle=True,
        enable_engine_info_bootstrap=True,
        engine_info_bootstrap_port=INFO_PORT,
    )
    options = host_options(world.group, order, namespace=NAMESPACE, environ={"FROM_HOST": "1"})
    world.host = ray.remote(EngineHost).options(**options).remote(kwargs)
    assert ray.get(world.host.address.remote(), timeout=START_S) == f"{world.ip('b')}:{PORT}"

    engine = engine_at(namespace=NAMESPACE)
    assert [rank.node_ip for rank in engine.ranks] == [world.ip("b"), world.ip("a")]
    assert engine.ranks[0].actor_name.startswith(
        f"sglang_scheduler_node{world.ip('b')}_port{PORT}_"
    )
    assert len(ray.util.placement_group_table()) == 1
    seen = [ray.get(a.__ray_call__.remote(_environ_of), timeout=30) for a in engine.actors]
    assert seen == [("1", NAMESPACE)] * 2  # the host's runtime environment reaches all ranks


def _environ_of(_: Any) -> tuple[str | None, str]:
    import ray

    return os.environ.get("FROM_HOST"), ray.get_runtime_context().namespace


@pytest.mark.parametrize(
    ("node", "host"),
    [
        ("b", "localhost"),
        ("b", "127.0.0.1"),
        ("b", "0.0.0.0"),
        ("b", "[::]"),
        ("b", "[::1]"),
        ("b", "node-b"),  # 127.0.1.1 there
        ("b", socket.gethostname()),
        ("a", "node-b"),
        ("a", "{b}"),
        ("a", "http://{b}"),
    ],
)
def test_what_means_the_engine_on_node_b(world: World, node: str, host: str) -> None:
    address = f"{host.format(b=world.ip('b'))}:{PORT}"
    assert world.on(node, _found, address) == f"{world.ip('b')}:{PORT}"


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "node-a", socket.gethostname(), "{a}"])
def test_what_means_node_a_does_not_mean_the_engine_on_node_b(world: World, host: str) -> None:
    address = f"{host.format(a=world.ip('a'))}:{PORT}"
    assert world.on("a", _found, address) == "not found"


def test_other_namespaces_do_not_see_it_but_are_told(world: World) -> None:
    with pytest.raises(EngineNotFoundError, match=r"'somewhere else'.*namespace 'nodes'"):
        find_engines(namespace="somewhere else")


def test_each_rank_says_over_http_how_it_is_parallel(world: World) -> None:
    url = f"http://127.0.0.1:{INFO_PORT}/get_parallelism_config?rank="
    configs = [world.on("b", _get, f"{url}{rank}") for rank in (0, 1)]
    for rank, config in enumerate(configs):
        assert (config["tp_rank"], config["tp_size"]) == (rank, 2)
        assert (config["global_rank"], config["world_size"]) == (rank, 2)
        assert (config["pp_size"], config["ep_size"], config["attn_dp_size"]) == (1, 1, 1)
    # SGLang's default address, which other nodes do not see; and nobody can write there.
    status = world.on("b", _put_status, INFO_PORT)
    assert status == [404, 404]
    assert world.on("a", _refuses, world.ip("b"), INFO_PORT)


def _put_status(port: int) -> list[int]:
    out = []
    for method, path in (
        ("PUT", "register_transfer_engine_info"),
        ("GET", "get_parallelism_config?rank=2"),
    ):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", b"{}", method=method)
        request.add_header("Content-Type", "application/json")
        try:
            urllib.request.urlopen(request, timeout=10)
            out.append(200)
        except urllib.error.HTTPError as error:
            out.append(error.code)
    return out


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_sync_crosses_from_node_to_node(world: World) -> None:
    import ray

    ray.get(
        world.trainer.attach.remote(SETTINGS, on_step=False, engines=[f"{world.ip('b')}:{PORT}"]),
        timeout=120,
    )
    before = world.cluster.nodes["b"].received()
    report = world.train(_sync, "one")
    crossed = world.cluster.nodes["b"].received() - before
    assert crossed > report.nbytes / 2
    _holds(world, ["one"])


def _sync(rank: Any, version: str) -> Any:
    return rank.sync.sync(version)


def _weights(rank: Any) -> Any:
    return rank.weights()


def _holds(world: World, versions: list[str]) -> None:
    import ray

    state = world.train(_weights)
    for engine in find_engines(namespace=NAMESPACE):
        live = engine.call("read_weights", timeout_s=60, phase="read_weights")
        _, differences = proof.unequal_parameters(MODEL, state, live)
        assert not differences
        assert [s.version for s in engine.status()] == versions[-1:] * len(engine.ranks)
    tokens, label = ray.get(world.host.generate.remote(proof.PROMPT, proof.NEW_TOKENS), timeout=120)
    assert label == versions[-1]
    MODEL.save_checkpoint(world.folder / label, state)
    assert proof.same_tokens(MODEL, world.folder / label, tokens) is None


def _start_server(
    world: World, name: str, environ: dict[str, str], **arguments: Any
) -> subprocess.Popen[bytes]:
    words = cpu.launch_args(
        str(world.folder / "hf"), sleep_on_idle=True, skip_server_warmup=True, **arguments
    )
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    own = {"RAY_ADDRESS": world.cluster.address, "RAY_NAMESPACE": "the server's own"}
    with (world.folder / f"server-{name}.log").open("wb") as log:
        return subprocess.Popen(
            world.cluster.nodes[name].command(command),
            env={**os.environ, **NODE_ENVIRON, **own, **environ},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_another_node_of_a_server_starts_nothing_and_answers(world: World) -> None:
    """As frameworks start them, one per node. It does not even look for a Ray cluster."""
    import ray.util

    before = ray.util.list_named_actors(all_namespaces=True)
    server = _start_server(world, "b", {}, tp_size=2, nnodes=2, node_rank=1, port=PORT + 1)
    try:
        deadline = time.monotonic() + START_S
        while not world.on("b", _answers, f"http://127.0.0.1:{PORT + 1}/health"):
            assert time.monotonic() < deadline, (world.folder / "server-b.log").read_text()[-4000:]
            assert server.poll() is None
            time.sleep(0.5)
        assert ray.util.list_named_actors(all_namespaces=True) == before
        assert server.poll() is None
        os.kill(netns.inside(server.pid), signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_an_http_server_on_the_same_group_and_port_of_another_node(world: World) -> None:
    """``--use-ray`` has no argument for the group: it comes by the environment, from another job."""
    import ray
    import ray.util

    node = world.cluster.nodes["a"]
    world.server = _start_server(
        world,
        "a",
        {"SGLANG_RDT_PLACEMENT_GROUP": world.group.id.hex(), "SGLANG_RDT_ENGINE_INFO": "1"},
        tp_size=1,
        host="0.0.0.0",
        port=PORT,
        engine_info_bootstrap_port=INFO_PORT,
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            _get(f"http://{node.ip}:{PORT}/get_model_info")
            break
        except OSError:
            text = (world.folder / "server-a.log").read_text()[-4000:]
            assert time.monotonic() < deadline, text
            assert world.server.poll() is None, text
            time.sleep(0.5)
    engines = find_engines(namespace=NAMESPACE)
    assert {e.name for e in engines} == {f"{world.ip(n)}:{PORT}" for n in "ab"}
    assert len(ray.util.placement_group_table()) == 1
    assert world.on("a", _found, f"localhost:{PORT}") == f"{world.ip('a')}:{PORT}"
    assert world.on("b", _found, f"localhost:{PORT}") == f"{world.ip('b')}:{PORT}"
    # As the frameworks ask, on the server itself; and on the engine-info address.
    assert _get(f"http://{node.ip}:{PORT}/parallelism_config?rank=0")["tp_size"] == 1
    assert _get(f"http://{node.ip}:{INFO_PORT}/get_parallelism_config?rank=0")["tp_size"] == 1
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(f"http://{node.ip}:{PORT}/parallelism_config?rank=1")


def test_both_engines_follow_one_trainer(world: World) -> None:
    import ray

    ray.get(world.trainer.attach.remote(SETTINGS, on_step=False), timeout=120)
    world.train(_sync, "two")
    _holds(world, ["two"])
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    reply = _post(
        f"http://{world.ip('a')}:{PORT}/generate",
        {"input_ids": list(proof.PROMPT), "sampling_params": sampling},
    )
    assert reply["meta_info"]["weight_version"] == "two"


def test_bundles_that_are_taken_are_refused_by_name(world: World) -> None:
    """On the real group: two engines hold three of its four bundles."""
    from sglang_rdt.engine.placement import choose, look_at

    bundles = world.on("b", look_at, world.group)
    assert sorted(b.index for b in bundles if b.free == 0) == sorted(
        [world.bundles("b")[0], *world.bundles("a")]
    )
    assert choose(bundles, 1, None) == [world.bundles("b")[1]]
    with pytest.raises(PlacementError, match=r"2 rank.s. need a free bundle"):
        choose(bundles, 2, None)
    with pytest.raises(PlacementError, match="cannot take a rank"):
        choose(bundles, 1, [world.bundles("a")[0]])


def test_a_node_that_dies_takes_its_engine_along_and_no_other(world: World) -> None:
    world.cluster.lose("b")
    with pytest.raises(SyncError) as caught:
        world.train(_sync, "three")
    assert set(caught.value.failures) == {f"{world.ip('b')}:{PORT}"}
    deadline = time.monotonic() + 60
    while world.cluster.alive() != {"a"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (engine,) = find_engines(namespace=NAMESPACE)
    assert engine.name == f"{world.ip('a')}:{PORT}"
    assert engine.status()[0].version == "three"
    assert world.train(_sync, "four").engines == (engine.name,)
