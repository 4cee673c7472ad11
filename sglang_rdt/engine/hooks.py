"""What the patches call, monkey-patch and patch set alike. Each does nothing if switched off."""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_rdt import activation
from sglang_rdt import settings as settings_module
from sglang_rdt.engine import names
from sglang_rdt.engine.actor_class import plain_class
from sglang_rdt.errors import EngineStateError
from sglang_rdt.upstream import SOURCE_MARKER

logger = logging.getLogger("sglang_rdt")

# Event loop, control calls, and one waiting pull per source; threads of an actor cost little.
MAX_CONCURRENCY = 32
# Without it Ray hides all GPUs but one from the actor, and SGLang's device ordinal is wrong.
NOSET_CUDA = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def scheduler_actor_class(released: Any) -> Any:
    """What RayEngine should launch instead of ``released`` (SGLang's own SchedulerActor).

    Raises:
        UnsupportedVersionError: SGLang is outside of the supported range.
    """
    settings = settings_module.load()
    if not settings.enabled or not settings.patch_scheduler_actor:
        return released
    if isinstance(released, NamedActorClass):
        return released
    activation.check_version("sglang")
    plain_class(released)  # refuses now, by name, what could not be launched later
    return NamedActorClass(released)


def dp_server_args(server_args: Any, port_args: Any, rank0_node_ip: str) -> Any:
    """The server arguments that a data-parallel controller may declare an address on.

    A copy, with the address already in it, where ``server_args`` are those that the engine has
    published: SGLang refuses to declare anything on them, and makes ports from the field itself.
    Up to 0.5.19 SGLang makes such a copy itself.
    """
    settings = settings_module.load()
    if not settings.enabled or not settings.patch_dp_controller:
        return server_args
    import sglang.srt.ray.engine as module

    if not hasattr(module, "declare_resolution"):
        return server_args
    from ray import cloudpickle
    from sglang.srt.runtime_context import get_context

    try:
        published = get_context().server_args
    except ValueError:  # nothing is
        published = None
    if published is not server_args:
        return server_args
    # The way that they also take to the actors: it keeps what was resolved.
    copy = cloudpickle.loads(cloudpickle.dumps(server_args))
    sealed = getattr(copy, "_resolution_finished", False)
    copy._resolution_finished = False
    copy.dist_init_addr = f"{rank0_node_ip}:{port_args.nccl_port}"
    copy._resolution_finished = sealed
    return copy


def follow_weight_version(manager: Any) -> None:
    """Lets a TokenizerManager take the weight version that the schedulers send."""
    settings = settings_module.load()
    if not settings.enabled or not settings.patch_weight_version:
        return
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput
    from sglang.utils import TypeBasedDispatcher

    def follow(message: Any) -> None:
        manager._update_weight_version_if_provided(message.new_version)

    manager._result_dispatcher += TypeBasedDispatcher([(UpdateWeightVersionReqInput, follow)])


def _versions_followed(server_args: Any) -> bool:
    """Whether this process's tokenizer manager will follow versions; an unhooked one dies of them."""
    if not settings_module.load().patch_weight_version:
        return False
    import sglang.srt.managers.tokenizer_manager as module

    hooked = (
        getattr(module, SOURCE_MARKER, False) or activation.state()["weight_version"] == "applied"
    )
    # With several tokenizer workers, SGLang's router drops messages that belong to no request.
    return hooked and int(getattr(server_args, "tokenizer_worker_num", 1) or 1) == 1


@dataclass(frozen=True)
class _Engine:
    node_ip: str
    port: int
    instance: str
    nccl_port: int
    launched: list[str] = field(default_factory=list)


_lock = threading.Lock()
# One entry per engine start in this process, by the address of its tokenizer.
_engines: dict[str, _Engine] = {}


class NamedActorClass:
    """Stands where SGLang's SchedulerActor stood: same ``.options(...).remote(...)``, launches
    :class:`~sglang_rdt.engine.actor.RdtSchedulerActor` under its stable name."""

    def __init__(self, released: Any) -> None:
        self._released = released

    def options(self, **options: Any) -> _Launch:
        """Ray options as SGLang gives them; ``name`` is replaced by the stable one."""
        return _Launch(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._released, name)


class _Launch:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def remote(self, **kwargs: Any) -> Any:
        """Creates the actor; keyword arguments go to SchedulerActor unchanged."""
        import ray
        from ray.exceptions import ActorAlreadyExistsError

        settings = settings_module.load()
        namespace = settings.namespace or ray.get_runtime_context().namespace
        engine = _engine_of(kwargs["server_args"], kwargs["port_args"], namespace)
        try:
            return self._create(engine, settings, namespace, kwargs)
        except ActorAlreadyExistsError:
            # Another engine took the label since it was found free. All engines start their rank 0
            # first, so whoever has that name has the label; our other ranks use the new one too.
            engine = _relabel(kwargs["port_args"], engine)
            return self._create(engine, settings, namespace, kwargs)

    def _create(
        self, engine: _Engine, settings: Any, namespace: str, kwargs: dict[str, Any]
    ) -> Any:
        import ray

        from sglang_rdt.engine.actor import RdtSchedulerActor

        rank = {
            "dp": kwargs.get("dp_rank") or 0,
            "pp": kwargs["pp_rank"],
            "tp": kwargs["tp_rank"],
        }
        name = names.actor_name(engine.node_ip, engine.port, **rank)
        identity = {
            "engine": names.engine_id(engine.node_ip, engine.port),
            "rank": rank,
            "actor_name": name,
            "namespace": namespace,
            "instance": engine.instance,
            "label_replies": _versions_followed(kwargs["server_args"]),
            "released_name": self._options.get("name"),
        }
        options = {
            **self._options,
            "name": name,
            "namespace": namespace,
            "max_concurrency": MAX_CONCURRENCY,
            "runtime_env": _runtime_env(self._options.get("runtime_env")),
        }
        actor = ray.remote(RdtSchedulerActor).options(**options)
        made = actor.remote(rdt_identity=identity, **kwargs)
        engine.launched.append(name)
        return made


def _runtime_env(given: Any) -> dict[str, Any]:
    env = dict(given or {})
    env["env_vars"] = {
        **settings_module.load().env(),
        NOSET_CUDA: "1",
        **env.get("env_vars", {}),
    }
    return env


def _engine_of(server_args: Any, port_args: Any, namespace: str) -> _Engine:
    """The engine that is being launched: the same for all its ranks."""
    import ray.util

    key = port_args.tokenizer_ipc_name
    with _lock:
        engine = _engines.get(key)
        if engine is None:
            node_ip = ray.util.get_node_ip_address()
            nccl_port = int(port_args.nccl_port)
            port = _free_port_label(node_ip, int(server_args.port), nccl_port, namespace)
            engine = _engines[key] = _Engine(node_ip, port, uuid.uuid4().hex, nccl_port)
        return engine


def _relabel(port_args: Any, engine: _Engine) -> _Engine:
    """The same engine under its NCCL port, if none of its ranks has been started yet."""
    with _lock:
        if engine.launched or engine.port == engine.nccl_port:
            raise EngineStateError(
                f"the name of a rank of {names.engine_id(engine.node_ip, engine.port)} is taken by "
                "another actor"
            )
        _warn_of_label(engine.node_ip, engine.port, engine.nccl_port)
        renamed = replace(engine, port=engine.nccl_port)
        _engines[port_args.tokenizer_ipc_name] = renamed
        return renamed


def new_launch(port_args: Any) -> None:
    """An engine is about to be launched. One that ended may have had the same tokenizer address
    (a fixed one, with DP attention); this one is another instance all the same."""
    with _lock:
        _engines.pop(port_args.tokenizer_ipc_name, None)


def _free_port_label(node_ip: str, port: int, nccl_port: int, namespace: str) -> int:
    """``port``, or for a second engine object on one node (no HTTP server, so they share the
    default port number) the NCCL port, which no two engines share."""
    import ray.util

    taken = {
        (parsed.node, parsed.port)
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and (parsed := names.parse(entry["name"]))
    }
    if (node_ip, port) not in taken:
        return port
    _warn_of_label(node_ip, port, nccl_port)
    return nccl_port


def _warn_of_label(node_ip: str, port: int, nccl_port: int) -> None:
    logger.warning(
        "another engine is called %s already; this one is %s (give engines their own port=)",
        names.engine_id(node_ip, port),
        names.engine_id(node_ip, nccl_port),
    )
