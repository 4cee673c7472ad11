"""Which engines a trainer syncs, from one sync to the next: who joined, who is gone, who is back.

A look costs one question to Ray's table of names (0.5 ms on two CPU cores with a few actors) and a local
lookup per known actor, so there is one before every sync. Actors that are new are asked who they are once; what is still
starting answers when it is ready, and nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rdt.coordinator import calls, discovery
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.errors import DeadlineError, EngineNotFoundError, RdtError

logger = logging.getLogger("sglang_rdt")

# What is running answers in milliseconds; what is starting does not answer at all.
_ANSWER_S = 1.0
_FIRST_S = 30.0
# An engine that did not come to the end of a connect in time holds up the others while it is
# tried; it is tried less and less often.
_BACKOFF_S, _MAX_BACKOFF_S = 10.0, 600.0
_DEAD = 4  # ActorTableData.ActorState, ray/protobuf/gcs.proto


@dataclass(frozen=True)
class News:
    """What changed since the last look.

    ``lost``: engine -> why it is no member any more (its actors died, or are others now).
    ``joined``: whole engines that are not connected. ``missing``: engine that should be there and
    is not -> why. ``waiting``: the same of engines that nobody has named.
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Engine, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lost or self.joined)


def is_dead(handle: Any) -> bool:
    """Whether Ray has told this process that the actor is dead. Without asking anybody.

    Source: ray/actor.py ActorHandle._get_local_state (Ray 2.60): right once a method was called.
    """
    look = getattr(handle, "_get_local_state", None)
    return look is not None and look() == _DEAD


class Membership:
    """The engines that are wanted: those of certain addresses, or all there are.

    Args:
        wanted: ``host:port`` of each engine, or engines that were found already; None: all.
        namespace: Ray namespace to look in.

    Raises:
        EngineNotFoundError: ``wanted`` is empty.
    """

    def __init__(self, wanted: Sequence[str | Engine] | None, namespace: str | None) -> None:
        if wanted is not None and not wanted:
            raise EngineNotFoundError("engines=[] names no engine; leave it out for all there are")
        self._wanted = list(wanted) if wanted is not None else None
        self._namespace = namespace
        self._asked = discovery.Asked()
        # Names of the engines that were asked for, once they were found, and their namespaces.
        self._named: dict[str, str] = {}
        # Those that were connected at some time and are still listed.
        self._members: set[str] = set()
        self._told: dict[str, str] = {}
        self._backoff: dict[tuple[str, str], tuple[float, float]] = {}

    @property
    def takes_all(self) -> bool:
        """Whether it is all engines there are."""
        return self._wanted is None

    @property
    def found_before(self) -> bool:
        """Whether engines were connected before: from then on, one that is missed is a failure of
        its own, and no reason not to serve the others."""
        return bool(self._members)

    def find(self) -> News:
        """All engines that are wanted, to be connected from the beginning; all of them ``joined``.

        Raises:
            EngineNotFoundError: there is none; or one that was named is not there or not whole, and
                none was connected before.
        """
        if self.found_before:
            news = self.look({}, _FIRST_S)
            if not news.joined:
                lines = [f"{n}: {why}" for n, why in {**news.waiting, **news.missing}.items()]
                raise EngineNotFoundError("no engine to connect: " + ("; ".join(lines) or "none"))
            return news
        return News(joined=tuple(self._find_first()))

    def _find_first(self) -> list[Engine]:
        if self._wanted is None:
            return discovery.find_engines(namespace=self._namespace, timeout_s=_FIRST_S)
        given = [e for e in self._wanted if isinstance(e, Engine)]
        addresses = [e for e in self._wanted if isinstance(e, str)]
        space = self._namespace
        found = discovery.find_engines(addresses, namespace=space) if addresses else []
        engines = list({e.name: e for e in given + found}.values())
        self._named = {e.name: e.ranks[0].namespace for e in engines}
        return engines

    def connected(self, engines: Iterable[str]) -> None:
        """These are members from now on: if one is missed later, it is said."""
        self._members.update(engines)

    def failed(self, engine: Engine) -> None:
        """``engine`` did not answer while it was being connected: it is not tried at once again."""
        key = (engine.name, engine.instance)
        _, last = self._backoff.get(key, (0.0, _BACKOFF_S / 2))
        pause = min(2 * last, _MAX_BACKOFF_S)
        self._backoff[key] = (time.monotonic() + pause, pause)

    def look(self, known: Mapping[str, Engine], timeout_s: float | None = None) -> News:
        """What changed.

        Args:
            known: the engines that are connected.
            timeout_s: how long actors that were not asked yet may take to answer.
        """
        actors = [
            one for one in discovery.listed(self._space())[0] if one.stable and self._is_wanted(one)
        ]
        there = {(one.namespace, one.name) for one in actors}
        lost = {}
        for name, engine in known.items():
            dead = [
                str(rank.rank)
                for rank, actor in zip(engine.ranks, engine.actors, strict=True)
                if is_dead(actor) or (rank.namespace, rank.actor_name) not in there
            ]
            if dead:
                lost[name] = f"its actors are dead ({', '.join(dead[:8])})"
        alive = known.keys() - lost.keys()
        joined, broken = self._look_at(
            [one for one in actors if one.engine not in alive], timeout_s
        )
        return self._judge(lost, joined, broken, alive, {one.engine for one in actors})

    def _look_at(
        self, new: Sequence[discovery.Listed], timeout_s: float | None
    ) -> tuple[list[Engine], dict[str, str]]:
        """Engines that could be connected, and why others cannot."""
        if not new:
            return [], {}
        fresh = [self._asked.ask(one) for one in new]
        found = self._asked.answers(new, (timeout_s or _ANSWER_S) if any(fresh) else 0.0)
        joined: list[Engine] = []
        broken = {name: calls.short(why) for name, why in found.broken.items()}
        for engine in found.engines:
            until, _ = self._backoff.get((engine.name, engine.instance), (0.0, 0.0))
            if time.monotonic() < until:
                broken[engine.name] = (
                    "it did not answer while it was being connected, and is tried again in "
                    f"{until - time.monotonic():.0f} s"
                )
            else:
                joined.append(engine)
        return joined, broken

    def _judge(
        self,
        lost: Mapping[str, str],
        joined: Sequence[Engine],
        broken: Mapping[str, str],
        alive: Iterable[str],
        listed: set[str],
    ) -> News:
        back = {*alive, *(e.name for e in joined)}
        missing: dict[str, str] = {}
        if self.takes_all:
            # A member whose actors live, and which is no whole engine any more, serves what it has.
            for name in self._members & broken.keys():
                missing[name] = broken[name]
        else:
            for name in self._named.keys() - back:
                missing[name] = broken.get(name) or lost.get(name) or "it is not there"
        waiting = {n: why for n, why in broken.items() if n not in missing}
        if self.takes_all:
            self._members &= listed
        self._tell(lost, waiting)
        return News(lost, tuple(joined), missing, waiting)

    def _tell(self, lost: Mapping[str, str], waiting: Mapping[str, str]) -> None:
        for name, why in lost.items():
            logger.error("engine %s is gone: %s", name, why)
        for name, why in waiting.items():
            if self._told.get(name) != why:
                logger.warning("engine %s takes no part yet: %s", name, why)
        self._told = dict(waiting)

    def _space(self) -> str:
        spaces = set(self._named.values()) or {discovery.namespace_of(self._namespace)}
        return spaces.pop() if len(spaces) == 1 else discovery.EVERYWHERE

    def _is_wanted(self, one: discovery.Listed) -> bool:
        if self.takes_all:
            return True
        return self._named.get(one.engine) == one.namespace


def refusals(errors: Mapping[str, BaseException]) -> dict[str, BaseException]:
    """Of ``errors`` (engine -> why it could not be connected), those by which the engine itself said
    no. The others died, or did not answer."""

    def silent(error: BaseException) -> bool:
        if isinstance(error, calls.CallFailures):
            return any(silent(e) for e in error.failures.values())
        return isinstance(error, DeadlineError) or not isinstance(error, RdtError)

    return {name: error for name, error in errors.items() if not silent(error)}
