"""Which bundles of which placement group an engine's ranks are started on.

Stock RayEngine uses the group that it is given as a keyword, bundle by bundle. Without one it takes
the group of the calling actor for something else (one bundle per node, with all GPUs in it), or makes
a second group beside the framework's, which books the same GPUs twice; the HTTP server has no keyword.
What cannot be scheduled hangs there for ever. Here:

* the group is the keyword's, else SGLANG_RDT_PLACEMENT_GROUP's, else the calling actor's, else a new
  one on this node, which ends with the engine;
* bundles are SGLANG_RAY_BUNDLE_INDICES's, else free ones, this node's first;
* what cannot work is refused within a deadline, by name;
* the other nodes of a multi-node engine start nothing: node 0 starts all ranks.

Source: sglang.srt.ray.engine.RayEngine, 0.5.16 to 0.5.23.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_rdt import settings as settings_module
from sglang_rdt.engine import engine_info
from sglang_rdt.engine.hooks import new_launch
from sglang_rdt.errors import PlacementError

logger = logging.getLogger("sglang_rdt")

INDICES = "SGLANG_RAY_BUNDLE_INDICES"
# SGLang's own: an Engine on another node than the first returns instead of blocking.
_NO_BLOCK = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"
_PLACED = "_rdt_placed"
_POLL_S = 0.2


def host_options(
    group: Any,
    bundles: Sequence[int],
    *,
    node_rank: int = 0,
    namespace: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Options for the actor in which a framework makes its ``RayEngine`` (or starts the HTTP server).

    ``Host.options(**host_options(group, [4, 5])).remote(...)``: the engine's ranks go to these
    bundles, in this order; the actor itself sits in the first one and takes nothing of it.

    Args:
        group: the framework's placement group, one GPU per bundle.
        bundles: one per rank, rank 0 first. For another node than the first, one bundle there.
        node_rank: of a multi-node engine. An engine object on another node than the first starts
            nothing and is there for the framework to look after.
        namespace: where the engine's actors are named; default: the job's.
        environ: more variables; the scheduler actors inherit all of them. What the actor itself
            writes to ``os.environ`` they do not see.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if not bundles:
        raise PlacementError("an engine needs a bundle for each of its ranks")
    env = dict(environ or {})
    if namespace is not None:
        env["SGLANG_RDT_NAMESPACE"] = namespace
    if node_rank:
        env[_NO_BLOCK] = "0"
    else:
        env[INDICES] = ",".join(str(i) for i in bundles)
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundles[0]
        ),
        "runtime_env": {"env_vars": env},
    }


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One bundle: its GPUs, how much of them is free, and whether it is on this node."""

    index: int
    gpus: float
    free: float
    node: str
    here: bool


def choose(bundles: Sequence[Bundle], world: int, wanted: Sequence[int] | None) -> list[int]:
    """The bundle of each rank; pure.

    Args:
        wanted: the user's own order; default: free bundles with one GPU, this node's first, then the
            others' node by node.

    Raises:
        PlacementError: it cannot work; says why.
    """
    by_index = {b.index: b for b in bundles}
    if wanted is None:
        free = [b for b in bundles if b.gpus == 1 and b.free >= 1]
        free.sort(key=lambda b: (not b.here, b.node, b.index))
        if len(free) < world:
            raise PlacementError(
                f"{world} rank(s) need a free bundle with one GPU each; there are: {_show(bundles)}"
            )
        wanted = [b.index for b in free[:world]]
    if len(wanted) != world or len(set(wanted)) != world:
        raise PlacementError(f"{INDICES} must name {world} different bundles, not {list(wanted)}")
    for i in wanted:
        if i not in by_index or by_index[i].gpus != 1 or by_index[i].free < 1:
            raise PlacementError(
                f"bundle {i} cannot take a rank, which needs one whole GPU: {_show(bundles)} (an actor "
                "that hosts an engine must not ask for a part of a GPU)"
            )
    if not by_index[wanted[0]].here:
        raise PlacementError(
            f"rank 0 must be on the node of the engine's main process; bundle {wanted[0]} is not: "
            f"{_show(bundles)}"
        )
    return list(wanted)


def _show(bundles: Sequence[Bundle]) -> str:
    shown = [
        f"{b.index} ({b.free:g} of {b.gpus:g} GPU free, {'this' if b.here else 'another'} node)"
        for b in bundles[:40]
    ]
    return ", ".join(shown) or "none"


def wanted_indices() -> list[int] | None:
    """What SGLANG_RAY_BUNDLE_INDICES says."""
    text = os.environ.get(INDICES, "").strip()
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlacementError(f"{INDICES} must be numbers with commas, not {text[:100]!r}") from None


def find_group(wanted: str) -> Any:
    """The placement group with this id (hex) or name, of any job and namespace.

    Raises:
        PlacementError: there is none, or several.
    """
    import ray.util
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    table = ray.util.placement_group_table()
    alive = {key: entry for key, entry in table.items() if entry["state"] != "REMOVED"}
    found = [key for key, e in alive.items() if wanted == key or wanted == e["name"]]
    if len(found) == 1:
        return PlacementGroup(PlacementGroupID(bytes.fromhex(found[0])))
    listed = ", ".join(f"{key} {e['name']!r}" for key, e in list(alive.items())[:20]) or "none"
    raise PlacementError(
        f"SGLANG_RDT_PLACEMENT_GROUP={wanted[:100]!r} fits {len(found)} placement groups; there are: "
        f"{listed}"
    )


def look_at(group: Any) -> list[Bundle]:
    """The bundles of a group that is ready."""
    import ray.util

    table = ray.util.placement_group_table(group)
    nodes = table["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    available = ray.available_resources()
    return [
        Bundle(
            index=i,
            gpus=float(spec.get("GPU", 0)),
            free=float(available.get(f"GPU_group_{i}_{group.id.hex()}", 0)),
            node=nodes[i],
            here=nodes[i] == here,
        )
        for i, spec in enumerate(group.bundle_specs)
    ]


def _place(group: Any, world: int, timeout_s: float) -> list[int]:
    """:func:`choose`, again and again: GPUs of an engine that has just ended come back with delay."""
    deadline = time.monotonic() + timeout_s
    if not group.wait(timeout_s):
        raise PlacementError(f"the placement group is not ready after {timeout_s:g} s: {_booked()}")
    while True:
        try:
            return choose(look_at(group), world, wanted_indices())
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _booked() -> str:
    """What holds the cluster's GPUs."""
    import ray
    import ray.util

    free, there = (r.get("GPU", 0) for r in (ray.available_resources(), ray.cluster_resources()))
    groups = [
        f"{key} {entry['name']!r}"
        for key, entry in ray.util.placement_group_table().items()
        if entry["state"] == "CREATED" and any("GPU" in b for b in entry["bundles"].values())
    ]
    return (
        f"{free:g} of {there:g} GPUs of the cluster are free; placement groups that hold some: "
        + (", ".join(groups[:20]) or "none")
        + ". To start an engine on one of them, pass placement_group=, or set SGLANG_RDT_PLACEMENT_GROUP"
    )


def _new_group(world: int, timeout_s: float) -> Any:
    """A group on this node. Stock SGLang's may come to lie on another one, where it is refused."""
    import ray.util
    from ray.util.placement_group import placement_group, remove_placement_group

    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    bundles = [{"GPU": 1, **here} for _ in range(world)]
    bundles[0]["CPU"] = 1
    group = placement_group(bundles, strategy="STRICT_PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    raise PlacementError(
        f"this node has not had {world} free GPU(s) and a CPU for {timeout_s:g} s. {_booked()}"
    )


def _fits(group: Any, world: int) -> bool:
    """Whether the group has a bundle per rank. Else it is one of SGLang's kind, a bundle per node."""
    specs = group.bundle_specs
    return sum(spec.get("GPU", 0) == 1 for spec in specs) >= world and all(
        spec.get("GPU", 0) <= 1 for spec in specs
    )


def instrument(module: dict[str, Any]) -> None:
    """Puts placement into ``RayEngine``; ``module``: the namespace of sglang.srt.ray.engine."""
    settings = settings_module.load()
    engine = module["RayEngine"]
    # In patched sources the body of the class has put something else there.
    placed = getattr(engine, _PLACED, None) is True
    if settings.enabled and settings.patch_placement and not placed:
        setattr(engine, _PLACED, True)
        _wrap(module, engine)


def in_class_body(module: dict[str, Any]) -> _Placed:
    """The same for patched sources: what it returns is put into the body of ``RayEngine``."""
    return _Placed(module)


class _Placed:
    """Python tells it when the class is there."""

    def __init__(self, module: dict[str, Any]) -> None:
        self._module = module

    def __set_name__(self, owner: Any, name: str) -> None:
        self._module["RayEngine"] = owner
        instrument(self._module)


def _wrap(module: dict[str, Any], engine: Any) -> None:
    launch = vars(engine)["_launch_scheduler_processes"].__func__
    init, shutdown = engine.__init__, engine.shutdown

    def launch_placed(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        return _launch(module, launch, cls, server_args, *args, **kwargs)

    def init_placed(self: Any, **kwargs: Any) -> None:
        keyword = engine_info.take_keyword(kwargs)
        with engine_info.asked_for(keyword), _own_children(self, kwargs):
            init(self, **kwargs)

    def shutdown_placed(self: Any) -> None:
        _shutdown(self, shutdown)

    engine._launch_scheduler_processes = classmethod(launch_placed)
    engine.__init__ = init_placed
    engine.shutdown = shutdown_placed
    _note_stock_groups(module)


def _launch(
    module: dict[str, Any],
    released: Callable[..., Any],
    cls: Any,
    server_args: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if server_args.node_rank:
        logger.info("node %d of this engine starts nothing: node 0 does", server_args.node_rank)
        return _follower(module), None
    from ray.util.placement_group import remove_placement_group

    new_launch(kwargs["port_args"] if "port_args" in kwargs else args[0])
    engine_info.check_port(server_args)
    timeout_s = settings_module.load().connect_timeout_s
    world = _world_size(module, server_args)
    group = kwargs.pop("placement_group", None) or getattr(server_args, "placement_group", None)
    group, own = _group_for(group, world, int(server_args.nnodes), timeout_s)
    _noted.group = None
    try:
        indices = None if group is None else _place(group, world, timeout_s)
        if group is not None:
            if "placement_group" in inspect.signature(released).parameters:
                kwargs["placement_group"] = group
            else:  # 0.5.16 and 0.5.17
                server_args.override("ray.placement_group", placement_group=group)
        with _environ(indices):
            result, processes = released(cls, server_args, *args, **kwargs)
        own = own or _noted.group
        engine_info.start(result, server_args)
    except BaseException:
        if own or _noted.group:
            remove_placement_group(own or _noted.group)
        raise
    result.rdt_group = own
    return result, processes


def _group_for(given: Any, world: int, nnodes: int, timeout_s: float) -> tuple[Any, Any]:
    """(group to use bundle by bundle, or None to leave it to SGLang; group that is ours to remove)."""
    import ray.util

    wanted = settings_module.load().placement_group
    if given is None and wanted is not None:
        given = find_group(wanted)
    if given is not None:
        return given, None
    current = ray.util.get_current_placement_group()
    if current is not None:
        if _fits(current, world):
            return current, None
        if any(spec.get("GPU", 0) > 1 for spec in current.bundle_specs):
            return None, None
        raise PlacementError(
            f"the placement group of this actor has no {world} bundles with one GPU each: "
            f"{_show(look_at(current))}. Pass placement_group=, set SGLANG_RDT_PLACEMENT_GROUP, or start "
            "the engine outside of the group"
        )
    if nnodes > 1:
        return None, None
    own = _new_group(world, timeout_s)
    return own, own


def _world_size(module: dict[str, Any], server_args: Any) -> int:
    compute = module["_compute_world_size"]
    return int(compute(server_args) if inspect.signature(compute).parameters else compute())


@contextlib.contextmanager
def _environ(indices: Sequence[int] | None) -> Iterator[None]:
    """SGLang reads the order of the bundles from the environment, in two places."""
    if indices is None:
        yield
        return
    before = os.environ.get(INDICES)
    os.environ[INDICES] = ",".join(str(i) for i in indices)
    try:
        yield
    finally:
        if before is None:
            del os.environ[INDICES]
        else:
            os.environ[INDICES] = before


def _follower(module: dict[str, Any]) -> Any:
    """What stands for the schedulers on another node than the first: nothing, which runs until this
    process is told to end. SGLang answers health checks meanwhile."""
    ended = threading.Event()

    def block() -> None:
        if threading.current_thread() is threading.main_thread():
            # SGLang's own handler waits for schedulers.
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait()
        sys.exit(0)  # SGLang's Ray server would go on and serve

    made = module["RaySchedulerInitResult"]
    waits = {"block_until_scheduler_exits", "wait_for_completion"}  # the latter: 0.5.16
    names = waits & {f.name for f in dataclasses.fields(made)}
    result = made(scheduler_infos=[{}], **dict.fromkeys(names, block))
    result.rdt_group = None
    return result


# The group that stock SGLang made or found, in a launch on this thread.
_noted = threading.local()


def _note_stock_groups(module: dict[str, Any]) -> None:
    """SGLang makes a group for a multi-node engine and forgets it; this sees which."""
    released = module["_find_engine_bundle"]

    def find(placement_group: Any, *args: Any, **kwargs: Any) -> Any:
        import ray.util

        if ray.util.get_current_placement_group() is None:
            _noted.group = placement_group
        return released(placement_group, *args, **kwargs)

    module["_find_engine_bundle"] = find


# ------------------------------------------------------------------------------------ the end

# Which processes SGLang may kill on this thread; None: as it likes.
_mine = threading.local()


@contextlib.contextmanager
def _own_children(engine: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Children of this process that appear while the engine starts are the engine's."""
    import psutil

    if not kwargs.get("node_rank"):
        import ray.util

        ray.util.get_current_placement_group()  # starts a Ray cluster if there is none: not the engine's
    me = psutil.Process()
    before = me.children()
    engine._rdt_children = lambda: [c for c in me.children() if c not in before]
    yield
    own = engine._rdt_children()
    engine._rdt_children = lambda: own


def _shutdown(engine: Any, released: Callable[[Any], None]) -> None:
    """Ends what the engine has started, and that only."""
    result = getattr(engine, "_scheduler_init_result", None)
    if result is None:  # it never started, and SGLang's own shutdown would fail of that
        return
    _spare_others()
    _mine.children = engine._rdt_children()
    try:
        released(engine)
    finally:
        _mine.children = None
        engine_info.stop(result)
        group, result.rdt_group = getattr(result, "rdt_group", None), None
        if group is not None:
            import ray
            from ray.util.placement_group import remove_placement_group

            if ray.is_initialized():
                remove_placement_group(group)


def _spare_others() -> None:
    """``Engine.shutdown`` kills all children of its process: a Ray cluster, another engine."""
    import sglang.srt.entrypoints.engine as engine_module

    released = engine_module.kill_process_tree
    if getattr(released, _PLACED, False):
        return

    def kill_process_tree(parent_pid: int, include_parent: bool = True, **kwargs: Any) -> None:
        own = getattr(_mine, "children", None)
        if own is None or include_parent or parent_pid != os.getpid():
            return released(parent_pid, include_parent=include_parent, **kwargs)
        for child in own:
            if child.is_running():
                released(child.pid, include_parent=True, **kwargs)
        return None

    setattr(kill_process_tree, _PLACED, True)
    engine_module.kill_process_tree = kill_process_tree
