"""One engine: its ranks and their actor handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rdt.coordinator import calls
from sglang_rdt.engine.states import State, of_engine
from sglang_rdt.plan.specs import EngineRank


@dataclass(frozen=True)
class Engine:
    """All scheduler actors of one engine, ordered by (dp, pp, tp).

    ``instance`` tells two engines apart that carry the same name one after the other.
    """

    ranks: tuple[EngineRank, ...]
    actors: tuple[Any, ...]

    @property
    def name(self) -> str:
        """``ip:port``."""
        return self.ranks[0].engine

    @property
    def instance(self) -> str:
        """Unique per start of the engine."""
        return self.ranks[0].instance

    @property
    def replicated(self) -> bool:
        """Whether it is several replicas (plain data parallelism), which SGLang does not run in
        step."""
        return self.ranks[0].dp_size > 1 and not self.ranks[0].dp_attention

    def __str__(self) -> str:
        return f"engine {self.name}"

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        phase: str,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on every rank at once; results in rank order.

        Raises:
            CallFailures: naming every rank that raised, died or did not answer in time.
        """
        refs = self.start(method, *args, per_rank=per_rank)
        results = calls.gather(refs, timeout_s, phase)
        return [results[str(rank)] for rank in self.ranks]

    def start(
        self, method: str, *args: Any, per_rank: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Like :meth:`call`, without waiting: rank -> reference."""
        return {
            str(rank): getattr(actor, method).remote(*args, **(per_rank[i] if per_rank else {}))
            for i, (rank, actor) in enumerate(zip(self.ranks, self.actors, strict=True))
        }

    def accept(self, version: str, timeout_s: float = 60.0) -> None:
        """Has a dirty engine go on with the torn weights that it has, labelled ``version``.

        Raises:
            CallFailures: it is not dirty, or does not answer; nothing has changed.
        """
        chosen = list(zip(self.ranks, self.actors, strict=True))
        if self.replicated:
            # A replica may be whole while another one is dirty; they do not vote with one another.
            states = [status.state for status in self.status(timeout_s)]
            if "dirty" in states:
                chosen = [c for c, state in zip(chosen, states, strict=True) if state == "dirty"]
        refs = {str(rank): actor.accept_weights.remote(version) for rank, actor in chosen}
        calls.gather(refs, timeout_s, "accept")

    def state(self, timeout_s: float = 30.0) -> tuple[State, str]:
        """Its state, and why if it is not ``current``. Route requests only to ``current`` ones."""
        answers, errors = calls.settle(self.start("rdt_status"), timeout_s, "status")
        return of_ranks({**answers, **errors})

    def status(self, timeout_s: float = 30.0) -> list[Any]:
        """RankStatus of every rank."""
        return self.call("rdt_status", timeout_s=timeout_s, phase="status")


def of_ranks(answers: Mapping[str, Any]) -> tuple[State, str]:
    """State of an engine, and why if it is not ``current``: from the RankStatus of each rank (text),
    or the error instead of one."""
    said = {
        who: RuntimeError(calls.short(a)) if isinstance(a, BaseException) else a
        for who, a in answers.items()
    }
    return of_engine(said)
