"""Which engines there are and which of them serve whole, labelled weights: for routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rdt.coordinator import calls, discovery
from sglang_rdt.coordinator.engine import Engine, of_ranks
from sglang_rdt.engine.states import State


@dataclass(frozen=True)
class Standing:
    """One engine.

    ``state``: only a ``current`` one may be routed to; one that is still starting, does not answer
    or is no whole engine is ``gone``. ``version``: of its replies; empty if unknown. ``why``: if it
    is not ``current``. ``engine`` and ``statuses`` (RankStatus by rank as text): if it is whole.
    """

    name: str
    state: State
    version: str = ""
    why: str = ""
    engine: Engine | None = None
    statuses: Mapping[str, Any] | None = None


def roster(namespace: str | None = None, *, timeout_s: float = 10.0) -> dict[str, Standing]:
    """Every engine in ``namespace`` (default: SGLANG_RDT_NAMESPACE, else the job's own; ``"*"``:
    all of them) by name. Asks all at once; one that does not answer costs ``timeout_s``, and
    nothing else."""
    actors = [one for one in discovery.listed(discovery.namespace_of(namespace))[0] if one.stable]
    found = discovery.survey(actors, timeout_s)
    standings = {n: Standing(n, "gone", why=calls.short(e)) for n, e in found.broken.items()}
    started = {engine.name: engine.start("rdt_status") for engine in found.engines}
    answers, errors = calls.settle_each(started, timeout_s, "status")
    for engine in found.engines:
        ranks = answers.get(engine.name, {})
        state, why = of_ranks({**ranks, **errors.get(engine.name, {})})
        versions = sorted({s.version for s in ranks.values()})
        version = versions[0] if len(versions) == 1 else ""
        standings[engine.name] = Standing(engine.name, state, version, why, engine, ranks)
    return dict(sorted(standings.items()))


def current_engines(
    version: str | None = None, *, namespace: str | None = None, timeout_s: float = 10.0
) -> list[str]:
    """Addresses (``ip:port``) of the engines that requests may go to.

    Args:
        version: only those that serve this weight version; default: any.
    """
    return [
        name
        for name, one in roster(namespace, timeout_s=timeout_s).items()
        if one.state == "current" and version in (None, one.version)
    ]
