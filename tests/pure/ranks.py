"""Threads that stand for the ranks of an engine: collectives, event loops, a scheduler's controls."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from sglang_rdt.engine import loop_inbox
from sglang_rdt.engine.actor import RdtSchedulerActor
from sglang_rdt.engine.loop_gate import LoopGate
from sglang_rdt.engine.rank_session import RankSession
from sglang_rdt.engine.recorder import record_load
from sglang_rdt.engine.runners import Models
from sglang_rdt.engine.sync_request import RankStatus, SyncRequest
from sglang_rdt.errors import EngineStateError
from sglang_rdt.plan.specs import TensorSpec

from .builders import engine_rank


class Hang(Exception):
    """A rank waited in a collective for one that did not come, or came with another one."""


class Group:
    """Collectives of ``size`` threads.

    As with gloo, the n-th collective of a rank meets the n-th of the others: ranks that call
    different ones there, or one that calls none, would hang. Here they raise :class:`Hang`.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.hangs: list[str] = []
        self._arrived = threading.Condition()
        self._count = [0] * size
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}

    def meet(self, rank: int, kind: str, value: Any = None) -> list[Any]:
        """Every rank's value, in rank order."""
        with self._arrived:
            here = self._rounds.setdefault(self._count[rank], {})
            self._count[rank] += 1
            here[rank] = (kind, value)
            self._arrived.notify_all()
            complete = self._arrived.wait_for(lambda: len(here) == self.size, self.timeout_s)
        kinds = {r: k for r, (k, _) in sorted(here.items())}
        if not complete or len(set(kinds.values())) > 1:
            self.hangs.append(f"rank {rank}: {kinds}")
            raise Hang(self.hangs[-1])
        return [here[r][1] for r in range(self.size)]

    def vote(self, rank: int, opinion: bool) -> bool:
        """True if everybody says True."""
        return all(self.meet(rank, "vote", opinion))


class Loops:
    """One event-loop thread per rank; rank 0 takes calls from the inbox and broadcasts them."""

    def __init__(self, handlers: Sequence[Callable[[loop_inbox.LoopCall], None]]) -> None:
        self.crashes: list[BaseException] = []
        self._stop = threading.Event()
        self._sent: list[queue.Queue[loop_inbox.LoopCall]] = [queue.Queue() for _ in handlers]
        self.threads = [
            threading.Thread(
                target=self._run, args=(rank, handler), name=f"loop{rank}", daemon=True
            )
            for rank, handler in enumerate(handlers)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int, handler: Callable[[loop_inbox.LoopCall], None]) -> None:
        while not self._stop.is_set():
            calls: Iterable[loop_inbox.LoopCall]
            if rank == 0:
                calls = loop_inbox.add_loop_calls([]) or []
                for call in calls:
                    for sent in self._sent[1:]:
                        sent.put(call)
                if not calls:
                    self._stop.wait(0.001)
            else:
                try:
                    calls = [self._sent[rank].get(timeout=0.02)]
                except queue.Empty:
                    continue
            for call in calls:
                try:
                    handler(call)
                except BaseException as error:
                    self.crashes.append(error)
                    return

    def stop(self) -> None:
        """Ends the threads; a loop that hangs fails the test."""
        self._stop.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads)


def together(calls: Sequence[Callable[[], Any]], timeout_s: float = 120.0) -> list[Any]:
    """Runs ``calls`` at once, a thread each; what each returned or raised."""
    out: list[Any] = [Hang("did not return")] * len(calls)

    def run(i: int) -> None:
        try:
            out[i] = calls[i]()
        except Exception as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return out


class Control:
    """Has the interface of SchedulerControl; the scheduler is a few flags.

    ``fail``: operation -> the error that its next call raises, before it does anything.
    As in SchedulerControl, opening and closing a session have no barrier.
    """

    def __init__(self, rank: int, group: Group, model: torch.nn.Module, has_session: bool) -> None:
        self.rank, self.group, self.model, self.has_session = rank, group, model, has_session
        self.scheduler = SimpleNamespace(weight_updater=SimpleNamespace(offload_tags=set()))
        self.device = torch.device("cpu")
        self.paused = self.session_open = False
        self.starts_empty = self.backs_weights_up = False
        self.drafts: list[torch.nn.Module] = []
        self.selectors: list[str] = []
        self.version = "v0"
        self.log: list[str] = []
        self.fail: dict[str, Exception] = {}

    def vote(self, opinion: bool) -> bool:
        return self.group.vote(self.rank, opinion)

    def _do(self, what: str) -> None:
        if what in self.fail:
            raise self.fail.pop(what)
        self.log.append(what)

    def refuse_unsupported_model(self, runner: str = "target") -> None:
        if "unsupported" in self.fail:
            raise self.fail.pop("unsupported")

    def refuse_unsupported_layout(self) -> None:
        if "layout" in self.fail:
            raise self.fail.pop("layout")

    def pause(self, mode: str) -> None:
        self._do(f"pause {mode}")
        self.paused = True

    def resume(self) -> None:
        self._do("resume")
        self.paused = False

    def flush(self) -> None:
        self._do("flush")

    def drain(self) -> None:
        self._do("drain")

    def synchronize(self) -> None:
        self._do("synchronize")

    def models(self, runner: str) -> Any:
        if runner != "target" and not self.drafts:
            raise EngineStateError(f"rank {self.rank} has no draft")
        if runner == "target":
            return self.model
        parts = [("", self.model)] if runner == "both" else []
        return Models([*parts, *(("draft:", draft) for draft in self.drafts)], self.model)

    def begin_session(self, selector: str = "target") -> None:
        self.selectors.append(selector)
        if not self.has_session or self.session_open:
            return
        self._do("begin_session")
        self.session_open = True

    def end_session(self, *, changed: bool = True) -> None:
        if not self.has_session:
            if changed:
                self._do("post_load")
            return
        if not self.session_open:
            raise EngineStateError("no weight-update session is open")
        self._do("end_session")
        self.session_open = False

    def set_version(self, version: str) -> None:
        self._do(f"version {version}")
        self.version = version


class TinyModel(torch.nn.Module):
    """Two parameters, one with a padding row, loaded by plain copies."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.e = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        named = dict(weights)
        self.w.data.copy_(named["w"])
        self.e.data[:2].copy_(named["e"])
        self.e.data[2:].fill_(0)


@cache
def warm_up() -> None:
    """Torch imports hundreds of modules at the first recording; not while loops and deadlines run."""
    record_load(
        TinyModel(), [TensorSpec("w", (4, 3), "float32"), TensorSpec("e", (2, 2), "float32")]
    )


@dataclass
class Rank:
    """One actor with everything behind it."""

    actor: RdtSchedulerActor
    control: Control
    gate: LoopGate
    session: RankSession
    model: torch.nn.Module

    @property
    def status(self) -> RankStatus:
        return self.session.status()


@dataclass
class Engine:
    """An engine of ``size`` ranks with running event loops. The actors are the package's own."""

    size: int = 2
    has_session: bool = True
    hang_s: float = 60.0
    phase_timeout_s: float = 60.0
    settle_s: float = 30.0
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        warm_up()
        self.group = Group(self.size, self.hang_s)
        for tp in range(self.size):
            model = TinyModel()
            control = Control(tp, self.group, model, self.has_session)
            who = f"engine tp{tp}"
            gate = LoopGate(who, entry=tp == 0, vote=partial(self.group.vote, tp))
            session = RankSession(control, gate, who)  # type: ignore[arg-type]
            actor = RdtSchedulerActor.__new__(RdtSchedulerActor)
            actor._identity = engine_rank(tp, tp_size=self.size)
            actor._control, actor._gate, actor._session = control, gate, session  # type: ignore[assignment]
            actor._phase_timeout_s = actor._stall_timeout_s = self.phase_timeout_s
            actor._given_up = deque(maxlen=8)
            self.ranks.append(Rank(actor, control, gate, session, model))
        self.loops = Loops([r.actor._on_loop_call for r in self.ranks])

    def call(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls an actor method on every rank (or ``ranks``) at once, as the coordinator does."""
        chosen = [self.ranks[i] for i in (ranks if ranks is not None else range(self.size))]
        return together([partial(getattr(r.actor, method), *args) for r in chosen])

    def begin(self, sync_id: str = "s1", purpose: str = "sync", **options: Any) -> list[Any]:
        """``begin_sync`` on every rank."""
        owner = options.pop("owner", "trainer:1")
        request = SyncRequest(sync_id, owner, purpose, **options)  # type: ignore[arg-type]
        return self.call("begin_sync", request)

    @property
    def states(self) -> list[str]:
        return [r.status.state for r in self.ranks]

    @property
    def paused(self) -> list[bool]:
        return [r.control.paused for r in self.ranks]

    def log(self, rank: int = 0) -> list[str]:
        """What the scheduler was told since the last call."""
        control = self.ranks[rank].control
        done, control.log = control.log, []
        return done

    def settle(self) -> None:
        """Waits until no loop is parked (calls are answered from inside of the park)."""
        deadline = time.monotonic() + self.settle_s
        while any(r.gate.parked for r in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.002)

    def stop(self) -> None:
        """Ends the loops, parked ones too."""
        for r in self.ranks:
            if r.gate.parked:
                together([partial(r.gate.command, r.gate.release, 1.0)], 2.0)
        self.loops.stop()
