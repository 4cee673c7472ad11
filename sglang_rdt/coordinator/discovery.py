"""Finding engines: by address, by actor name, by handle, or whatever there is."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rdt.brief import brief, cut, one_line
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.engine import names
from sglang_rdt.errors import (
    AmbiguousEngineError,
    DeadlineError,
    EngineNotFoundError,
    NotRayBackendError,
    RdtError,
)
from sglang_rdt.plan.forms import check_identity
from sglang_rdt.plan.specs import EngineRank

logger = logging.getLogger("sglang_rdt")

_DESCRIBE_TIMEOUT_S = 30.0


# In place of a namespace: all of them.
EVERYWHERE = "*"


def namespace_of(given: str | None) -> str:
    """``given``, SGLANG_RDT_NAMESPACE, or the one of this job: the first that there is."""
    import ray

    from sglang_rdt import settings

    return given or settings.load().namespace or ray.get_runtime_context().namespace


@dataclass(frozen=True)
class Listed:
    """A scheduler actor in Ray's table of names."""

    name: str
    parsed: names.ActorName
    namespace: str

    @property
    def engine(self) -> str:
        """Name of its engine."""
        return names.engine_id(self.parsed.node, self.parsed.port or 0)

    @property
    def stable(self) -> bool:
        """Whether it has the name that this package gives."""
        return self.parsed.port is not None

    def __str__(self) -> str:
        return f"{self.name} (namespace {self.namespace!r})"


def listed(namespace: str) -> tuple[list[Listed], list[Listed]]:
    """Scheduler actors in ``namespace``, and all others."""
    import ray.util

    here: list[Listed] = []
    elsewhere: list[Listed] = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        parsed = names.parse(entry["name"])
        if parsed is None:
            continue
        one = Listed(entry["name"], parsed, entry["namespace"])
        (here if namespace in (EVERYWHERE, one.namespace) else elsewhere).append(one)
    return here, elsewhere


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


@dataclass(frozen=True)
class Survey:
    """What there is: whole engines, ordered by name, and why others are not (name -> error)."""

    engines: tuple[Engine, ...]
    broken: Mapping[str, RdtError]


def find_engines(
    addresses: Sequence[str] | None = None,
    *,
    namespace: str | None = None,
    timeout_s: float = _DESCRIBE_TIMEOUT_S,
) -> list[Engine]:
    """Engines in ``namespace`` (default: SGLANG_RDT_NAMESPACE, else the job's own).

    Args:
        namespace: :data:`EVERYWHERE` looks in all of them.
        addresses: ``host:port`` of each engine wanted; default: all that are whole. Others (still
            starting, a rank dead or silent) are named in the log.

    Raises:
        EngineNotFoundError: none, or one of ``addresses`` is missing, or a part of an engine;
            says what there is instead.
    """
    space = namespace_of(namespace)
    ours, elsewhere = listed(space)
    wanted = [one for one in ours if one.stable]
    if addresses is not None:
        wanted = _select(wanted, addresses, space, elsewhere)
    found = survey(wanted, timeout_s)
    if found.broken and (addresses is not None or not found.engines):
        raise _all_of(found.broken)
    for name, why in found.broken.items():
        logger.warning("engine %s is left out: %s", name, why)
    if not found.engines:
        released = [one.name for one in ours if not one.stable]
        raise EngineNotFoundError(
            f"no engine found in {_where(space)}."
            + (f" Scheduler actors without this package: {_some(released)}." if released else "")
            + (f" In other namespaces: {_some(elsewhere)}." if elsewhere else "")
            + " Start SGLang with RayEngine or --use-ray, with sglang-rdt installed, in this cluster"
            " and namespace."
        )
    return list(found.engines)


def _where(namespace: str) -> str:
    return "any Ray namespace" if namespace == EVERYWHERE else f"Ray namespace {namespace!r}"


def _all_of(broken: Mapping[str, RdtError]) -> RdtError:
    if len(broken) == 1:
        return next(iter(broken.values()))
    return EngineNotFoundError("; ".join(f"{name}: {why}" for name, why in broken.items()))


def survey(actors: Sequence[Listed], timeout_s: float) -> Survey:
    """Asks ``actors`` who they are; one that does not answer costs its own engine only."""
    asked = Asked()
    for one in actors:
        asked.ask(one)
    return asked.answers(actors, timeout_s)


class Asked:
    """Questions to actors who they are, and what they answered.

    Kept from one look to the next: an actor that is still starting is asked once, and answers when
    it is ready.
    """

    def __init__(self) -> None:
        self._handles: dict[tuple[str, str], Any] = {}
        self._asked: dict[tuple[str, str], Any] = {}

    def ask(self, one: Listed) -> bool:
        """Asks the actor that has the name now, unless it was asked and has not answered yet;
        whether it did."""
        import ray

        key = (one.namespace, one.name)
        try:
            handle = ray.get_actor(one.name, namespace=one.namespace)
        except ValueError:  # died since it was listed; a missing rank is reported with its engine
            self._handles.pop(key, None)
            self._asked.pop(key, None)
            return False
        known = self._handles.get(key)
        if known is None or getattr(known, "_actor_id", None) != getattr(handle, "_actor_id", 0):
            self._handles[key] = handle
            self._asked.pop(key, None)
        if key in self._asked or not hasattr(handle, "rdt_identity"):
            return False
        self._asked[key] = handle.rdt_identity.remote()
        return True

    def answers(self, actors: Sequence[Listed], timeout_s: float) -> Survey:
        """Waits for the answers of ``actors``, and puts ranks together to engines. Never raises."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for one in actors:
            groups[one.engine].append((one.namespace, one.name))
        keys = [key for members in groups.values() for key in members]
        refs = {key: self._asked[key] for key in keys if key in self._asked}
        identities, errors = calls.settle(refs, timeout_s, "identity")
        engines: list[Engine] = []
        broken: dict[str, RdtError] = {}
        for engine, members in sorted(groups.items()):
            spaces = sorted({space for space, _ in members})
            handles = {key: h for key in members if (h := self._handles.get(key))}
            strangers = [n for (_, n), h in handles.items() if not hasattr(h, "rdt_identity")]
            silent = [f"{k[1]}: {calls.short(errors[k])}" for k in handles if k in errors]
            try:
                if len(spaces) > 1:
                    raise AmbiguousEngineError(
                        f"engines called {engine} are in namespaces {_some(spaces)}; name one"
                    )
                if strangers:
                    raise EngineNotFoundError(
                        "actors that are named like engine ranks are none of this package: "
                        + _some(strangers)
                    )
                if silent:
                    raise EngineNotFoundError("engine ranks do not answer: " + "; ".join(silent))
                if not handles:
                    raise EngineNotFoundError(f"engine {engine} has died")
                engines += _group([(identities[k], handle) for k, handle in handles.items()])
            except RdtError as error:
                broken[engine] = error
                # Those that answer are not asked again while others of their engine do not.
                answered = [key for key in members if not _is_late(errors.get(key))]
                if len(answered) < len(members):
                    continue
            for key in members:
                self._asked.pop(key, None)  # an answer is of its moment: state, version
        return Survey(tuple(engines), broken)


def _is_late(error: BaseException | None) -> bool:
    return isinstance(error, DeadlineError)


def _select(
    stable: Sequence[Listed],
    addresses: Sequence[str],
    namespace: str,
    elsewhere: Sequence[Listed],
) -> list[Listed]:
    wanted: list[Listed] = []
    for address in addresses:
        try:
            host, port = names.split_address(address)
        except ValueError as error:
            raise EngineNotFoundError(f"engine address: {error}") from None
        hosts = resolve_host(host)
        matching = [o for o in stable if o.parsed.node in hosts and o.parsed.port == port]
        if not matching:
            there = sorted({one.engine for one in stable})
            raise EngineNotFoundError(
                f"no engine at {one_line(address)} in {_where(namespace)}; "
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


def _some(things: Sequence[object], count: int = 4) -> str:
    """The first few, each in one line of bounded length."""
    more = len(things) - count
    shown = ", ".join(cut(one_line(str(n)), 200) for n in things[:count])
    return f"{shown} and {more} more" if more > 0 else shown


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

    space = namespace_of(namespace)
    parsed = names.parse(name)
    if parsed is None or parsed.port is not None:
        try:
            return ray.get_actor(name, namespace=space)
        except ValueError:
            pass
    ours, _ = listed(space)
    matches = []
    for one in ours:
        if one.name == name:
            return ray.get_actor(name, namespace=one.namespace)
        released = parsed is not None and parsed.port is None
        if released and one.parsed.rank == parsed.rank and one.stable:  # type: ignore[union-attr]
            handle = ray.get_actor(one.name, namespace=one.namespace)
            identity = ray.get(handle.rdt_identity.remote(), timeout=_DESCRIBE_TIMEOUT_S)
            if identity.released_name == name:
                matches.append(handle)
    if len(matches) > 1:
        raise AmbiguousEngineError(f"{len(matches)} actors answer to {name}")
    if matches:
        return matches[0]
    raise EngineNotFoundError(
        f"no scheduler actor {name!r} in {_where(space)}; there are: "
        + (_some(sorted(one.name for one in ours), 40) or "none")
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
