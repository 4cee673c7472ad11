"""Finding engines: by address, by actor name, by handle, or whatever there is."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sglang_rdt.brief import brief, cut, one_line
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.engine import names
from sglang_rdt.errors import AmbiguousEngineError, EngineNotFoundError, NotRayBackendError
from sglang_rdt.plan.forms import check_identity
from sglang_rdt.plan.specs import EngineRank

_DESCRIBE_TIMEOUT_S = 30.0


def _namespace(given: str | None) -> str:
    import ray

    from sglang_rdt import settings

    return given or settings.load().namespace or ray.get_runtime_context().namespace


def _listed(namespace: str) -> tuple[list[tuple[str, names.ActorName]], list[str]]:
    """Our scheduler actors in ``namespace``, and all others' names with their namespaces."""
    import ray.util

    ours, elsewhere = [], []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        parsed = names.parse(entry["name"])
        if parsed is None:
            continue
        if entry["namespace"] == namespace:
            ours.append((entry["name"], parsed))
        else:
            elsewhere.append(f"{entry['name']} (namespace {entry['namespace']!r})")
    return ours, elsewhere


def resolve_host(host: str) -> set[str]:
    """Every address that ``host`` can mean: this Ray node's for loopback and wildcards."""
    import ray.util

    if names.is_wildcard_or_loopback(host):
        return {ray.util.get_node_ip_address(), host}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)} | {host}
    except (OSError, ValueError):  # ValueError: no name that DNS could have
        return {host}
    if any(names.is_wildcard_or_loopback(one) for one in found):
        found.add(ray.util.get_node_ip_address())  # this machine's own name, in its /etc/hosts
    return found


def find_engines(
    addresses: Sequence[str] | None = None,
    *,
    namespace: str | None = None,
    timeout_s: float = _DESCRIBE_TIMEOUT_S,
) -> list[Engine]:
    """Engines in ``namespace`` (default: SGLANG_RDT_NAMESPACE, else the job's own).

    Args:
        addresses: ``host:port`` of each engine wanted; default: all there are.

    Raises:
        EngineNotFoundError: none, or one of ``addresses`` is missing, or a part of an engine;
            says what there is instead.
    """
    import ray

    space = _namespace(namespace)
    ours, elsewhere = _listed(space)
    stable = [(name, parsed) for name, parsed in ours if parsed.port is not None]
    if addresses is not None:
        stable = _select(stable, addresses, space, elsewhere)
    if not stable:
        released = [name for name, parsed in ours if parsed.port is None]
        raise EngineNotFoundError(
            f"no engine found in Ray namespace {space!r}."
            + (f" Scheduler actors without this package: {_some(released)}." if released else "")
            + (f" In other namespaces: {_some(elsewhere)}." if elsewhere else "")
            + " Start SGLang with RayEngine or --use-ray, with sglang-rdt installed, in this cluster"
            " and namespace."
        )
    handles = {}
    for name, _ in stable:
        try:
            handles[name] = ray.get_actor(name, namespace=space)
        except ValueError:
            continue  # died since it was listed; a missing rank is reported below
    strangers = [name for name, handle in handles.items() if not hasattr(handle, "rdt_identity")]
    if strangers:
        raise EngineNotFoundError(
            f"actors that are named like engine ranks are none of this package: {_some(strangers)}"
        )
    identities, failures = calls.settle(
        {name: handle.rdt_identity.remote() for name, handle in handles.items()},
        timeout_s,
        "identity",
    )
    if failures:
        raise EngineNotFoundError(
            "engine ranks do not answer: "
            + "; ".join(f"{who}: {calls.short(error)}" for who, error in failures.items())
        )
    return _group([(identity, handles[name]) for name, identity in identities.items()])


def _select(
    stable: list[tuple[str, names.ActorName]],
    addresses: Sequence[str],
    namespace: str,
    elsewhere: list[str],
) -> list[tuple[str, names.ActorName]]:
    wanted = []
    for address in addresses:
        try:
            host, port = names.split_address(address)
        except ValueError as error:
            raise EngineNotFoundError(f"engine address: {error}") from None
        hosts = resolve_host(host)
        matching = [(n, p) for n, p in stable if p.node in hosts and p.port == port]
        if not matching:
            there = sorted({names.engine_id(p.node, p.port or 0) for _, p in stable})
            raise EngineNotFoundError(
                f"no engine at {one_line(address)} in Ray namespace {namespace!r}; "
                + (f"there are: {_some(there, 40)}" if there else "there is none at all")
                + (f"; in other namespaces: {_some(elsewhere)}" if elsewhere else "")
                + ". An engine without the Ray back end has no actors and cannot be synced."
            )
        wanted += matching
    return list(dict.fromkeys(wanted))


def _group(found: list[tuple[EngineRank, Any]]) -> list[Engine]:
    groups: dict[tuple[str, str], list[tuple[EngineRank, Any]]] = defaultdict(list)
    for identity, handle in found:
        why = check_identity(identity)
        if why:
            raise EngineNotFoundError(f"an engine rank describes itself wrongly: {why}")
        groups[identity.engine, identity.instance].append((identity, handle))
    engines: list[Engine] = []
    for (name, _), members in sorted(groups.items()):
        members.sort(key=lambda m: (m[0].rank.dp, m[0].rank.pp, m[0].rank.tp))
        _check_members(name, [m[0] for m in members])
        if engines and engines[-1].name == name:
            raise AmbiguousEngineError(
                f"two engines are called {name}: one was started before the other has ended"
            )
        engines.append(Engine(tuple(m[0] for m in members), tuple(m[1] for m in members)))
    return engines


def _check_members(name: str, ranks: Sequence[EngineRank]) -> None:
    """Raises EngineNotFoundError unless ``ranks`` (sorted) are one whole engine."""
    have = _some([str(r.rank) for r in ranks], 40)
    first = ranks[0]
    for one in ranks:
        for what in ("dp_size", "pp_size", "tp_size", "dp_attention", "package_version"):
            here, there = getattr(one, what), getattr(first, what)
            if here != there:
                raise EngineNotFoundError(
                    f"engine {name}: its ranks contradict: {first.rank} has {what} "
                    f"{brief(there)}, {one.rank} has {brief(here)}"
                )
    if len(ranks) < first.world_size:
        raise EngineNotFoundError(
            f"engine {name} has {first.world_size} ranks, but only {len(ranks)} answer: {have}"
        )
    if len(ranks) > first.world_size or len({r.rank for r in ranks}) < len(ranks):
        raise EngineNotFoundError(
            f"engine {name} has {first.world_size} ranks, but {len(ranks)} answer, or one answers "
            f"twice: {have}"
        )
    for one in ranks:
        place = one.rank
        # With DP attention the data-parallel ranks are among the tensor-parallel ones.
        fits = place.pp < one.pp_size and place.tp < one.tp_size and place.dp < one.dp_size
        if not fits:
            raise EngineNotFoundError(
                f"engine {name}: {place} is outside of dp {one.dp_size}, pp {one.pp_size}, "
                f"tp {one.tp_size}"
            )


def _some(names_: Sequence[str], count: int = 4) -> str:
    """The first few, each in one line of bounded length."""
    more = len(names_) - count
    listed = ", ".join(cut(one_line(n), 200) for n in names_[:count])
    return f"{listed} and {more} more" if more > 0 else listed


def engine_at(address: str | None = None, *, namespace: str | None = None) -> Engine:
    """The one engine at ``address``, or the only one there is.

    Raises:
        EngineNotFoundError: there is none.
        AmbiguousEngineError: no address was given and there are several.
    """
    engines = find_engines([address] if address else None, namespace=namespace)
    if len(engines) > 1:
        raise AmbiguousEngineError(
            f"{len(engines)} engines are running: {', '.join(e.name for e in engines)}; name one"
        )
    return engines[0]


def engine_of(ray_engine: Any, *, timeout_s: float = _DESCRIBE_TIMEOUT_S) -> Engine:
    """The engine behind a RayEngine object of this process, or behind a list of actor handles.

    Raises:
        NotRayBackendError: the object has no scheduler actors, or not this package's.
    """
    if isinstance(ray_engine, list | tuple):
        actors = list(ray_engine)
    else:
        result = getattr(ray_engine, "_scheduler_init_result", None)
        actors = list(getattr(result, "scheduler_actors", None) or [])
    if not actors:
        raise NotRayBackendError(
            f"{type(ray_engine).__name__} has no scheduler actors: start the engine with "
            "sglang.srt.ray.engine.RayEngine (or --use-ray)"
        )
    if not all(hasattr(actor, "rdt_identity") for actor in actors):
        raise NotRayBackendError(
            "the engine was started without this package's patches (is sglang_rdt imported before "
            "the engine starts, or SGLANG_RDT=0 set?)"
        )
    identities = calls.gather(
        {str(i): actor.rdt_identity.remote() for i, actor in enumerate(actors)},
        timeout_s,
        "identity",
    )
    (engine,) = _group([(identities[str(i)], actor) for i, actor in enumerate(actors)])
    return engine


def resolve_actor(name: str, *, namespace: str | None = None) -> Any:
    """The handle of a scheduler actor by its stable name, or by the name that released SGLang
    (0.5.16 to 0.5.23) would have given it.

    Raises:
        EngineNotFoundError: nobody has that name; says which names there are.
        AmbiguousEngineError: a released name fits several actors.
    """
    import ray

    space = _namespace(namespace)
    parsed = names.parse(name)
    if parsed is None or parsed.port is not None:
        try:
            return ray.get_actor(name, namespace=space)
        except ValueError:
            pass
    ours, _ = _listed(space)
    matches = []
    for other, found in ours:
        if other == name:
            return ray.get_actor(name, namespace=space)
        if parsed is not None and parsed.port is None and found.rank == parsed.rank and found.port:
            handle = ray.get_actor(other, namespace=space)
            identity = ray.get(handle.rdt_identity.remote(), timeout=_DESCRIBE_TIMEOUT_S)
            if identity.released_name == name:
                matches.append(handle)
    if len(matches) > 1:
        raise AmbiguousEngineError(f"{len(matches)} actors answer to {name}")
    if matches:
        return matches[0]
    raise EngineNotFoundError(
        f"no scheduler actor {name!r} in Ray namespace {space!r}; there are: "
        + (_some(sorted(n for n, _ in ours), 40) or "none")
    )


def wait_for_engines(
    count: int, *, namespace: str | None = None, timeout_s: float = 300.0
) -> list[Engine]:
    """Waits until ``count`` engines are complete.

    Raises:
        EngineNotFoundError: not so within ``timeout_s``; says what there was at the end.
    """
    deadline = time.monotonic() + timeout_s
    last = "nothing"
    while time.monotonic() < deadline:
        try:
            engines = find_engines(namespace=namespace)
        except EngineNotFoundError as error:
            last = str(error)
        else:
            if len(engines) >= count:
                return engines
            last = f"{len(engines)} engine(s): {', '.join(e.name for e in engines)}"
        time.sleep(1.0)
    raise EngineNotFoundError(
        f"{count} engine(s) did not appear within {timeout_s:g} s; there is: {last}"
    )
