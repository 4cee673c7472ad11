"""One cell: bring everything to a known state, hit it, judge, repair, and sync again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rdt.coordinator import calls
from sglang_rdt.demo import proof
from sglang_rdt.errors import RdtError
from tests.faults import injection
from tests.faults.cells import BEFORE_SYNC, OF_TRAINER, OF_TRANSFER, Cell
from tests.faults.injection import Fault
from tests.faults.world import MODEL, SETTINGS, Kind, Outcome, Served, World

# So long a request to a paused engine must stay unanswered to count as waiting.
_WAITS_S = 1.0
# Slack on deadlines, for a machine that is busy with something else.
_SLACK_S = 15.0


@dataclass
class Result:
    """What became of a cell. ``problems``: where that is not as promised; empty: it is."""

    cell: Cell
    errors: list[str] = field(default_factory=list)
    seconds: float | None = None
    states: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        """As promised."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "phase": self.cell.phase,
            "victim": self.cell.victim,
            "mode": self.cell.mode,
            "promise": self.cell.promise,
            "ok": self.ok,
            "errors": self.errors,
            "seconds": self.seconds,
            "states": self.states,
            "problems": self.problems,
            "took_s": round(self.took_s, 1),
        }


@dataclass(frozen=True)
class _Before:
    """What was known to be right before the fault."""

    label: str
    state: Mapping[str, Any]
    actors: set[tuple[str, str]]
    groups: int
    held: dict[str, dict[str, int]]
    native_threads: int


def kind_for(cell: Cell, now: Kind | None) -> Kind:
    """Which engine B the cell needs; ``now``: the one there is."""
    if cell.victim in ("never completes", "killed in flight", "resumes late"):
        return "tcp"
    fixed: dict[str, Kind] = {
        "engine rank": "tp2",
        "engine": "tp1",
        "http server": "http",
        "ray node": "node",
    }
    if cell.victim in fixed:
        return fixed[cell.victim]
    return now if now in ("tp1", "tp2") else "tp1"


def run_cell(world: World, cell: Cell, then: Cell | None = None) -> Result:
    """Runs ``cell``. Never raises: what goes wrong is a problem of the cell.

    Args:
        then: the cell after it: what died is replaced by what that one needs.
    """
    result = Result(cell)
    began = time.monotonic()
    clean = False
    try:
        clean = _Run(world, cell, result, then).run()
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {str(error)[:400]}")
        if os.environ.get("FAULTS_RAISE"):
            raise
    if not clean:
        world.reset()
    result.took_s = time.monotonic() - began
    return result


class _Run:
    def __init__(self, world: World, cell: Cell, result: Result, then: Cell | None) -> None:
        self.world, self.cell, self.result, self.then = world, cell, result, then
        verify = (
            "equal" if (cell.phase, cell.victim) == ("verify", "never completes") else "checksum"
        )
        self.settings = SETTINGS.replace(mode=cell.mode, verify=verify)
        if cell.victim in ("never completes", "resumes late"):
            # The stopped rank goes on after the read's deadline, before others give up.
            self.settings = self.settings.replace(phase_timeout_s=6.0, stall_timeout_s=25.0)
        self.marker = world.folder / f"{cell.name}.hit"
        self.waiting: list[tuple[str, Any]] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.result.problems.append(otherwise)

    def run(self) -> bool:
        """Whether everything was as it should be once it was repaired."""
        world, cell = self.world, self.cell
        self.b = world.need_engine(kind_for(cell, world.kind))
        world.need_trainers()
        before = self.baseline()
        new_state = world.train()
        if cell.phase in BEFORE_SYNC:
            world.attach(self.settings)
        new_label = world.label("hit")
        outcomes = self.hit(new_label)
        self.judge_errors(outcomes)
        for name, served in (("A", world.a), ("B", self.b)):
            self.judge_engine(name, served, before, new_label, new_state)
        self.collect_garbage()
        found = len(self.result.problems)
        self.repair_and_check(before)
        return len(self.result.problems) == found

    # Before.

    def baseline(self) -> _Before:
        world = self.world
        world.attach(self.settings)
        label = world.label("base")
        for outcome in world.outcomes(world.start_sync(label), self.deadline()):
            if outcome.error is not None:
                raise RuntimeError(f"the sync before the fault failed: {outcome.error}")
        assert world.trainers is not None
        return _Before(
            label,
            world.trainers.weights(),
            world.actors(),
            world.placement_groups(),
            self.held(),
            world.on_ranks(world.a.engine, injection.native_threads)[0],
        )

    def held(self) -> dict[str, dict[str, int]]:
        """Of engine A, and of B and the trainers where they live through the cell."""
        world, victim = self.world, self.cell.victim
        found = {"A": world.on_ranks(world.a.engine, injection.held)[0]}
        if victim in OF_TRAINER or victim in OF_TRANSFER:
            found["B"] = world.on_ranks(self.b.engine, injection.held)[0]
        if victim not in OF_TRAINER:
            for rank, counts in enumerate(world.on_trainers(injection.held)):
                found[f"trainer rank {rank}"] = counts
        return found

    # The fault.

    def deadline(self) -> float:
        """By when a sync must have ended, well or not, after the fault."""
        s, grace = self.settings, 5.0
        if self.cell.phase in BEFORE_SYNC:
            return s.connect_timeout_s + grace + s.phase_timeout_s + _SLACK_S
        # One call of a direct sync has four deadlines in it; giving up has two more.
        return 6 * s.phase_timeout_s + 3 * grace + _SLACK_S

    def hit(self, label: str) -> list[Outcome]:
        import ray

        world, cell = self.world, self.cell
        actor, where, fault = self.fault()
        self.marker.unlink(missing_ok=True)
        ray.get(actor.__ray_call__.remote(injection.arm, where, fault), timeout=30)
        refs = world.start_sync(label)
        if cell.victim in OF_TRAINER:
            world.expect_trainers()  # while everybody waits for the dead ones
        after = threading.Thread(target=self.afterwards)
        after.start()
        if cell.victim == "resumes late":
            refs = refs[:1]  # the other one says nothing until it goes on
        outcomes = world.outcomes(refs, self.deadline() + injection.GONE_S)
        after.join()
        if self.marker.exists():
            hit_at = float(self.marker.read_text())
            self.result.seconds = round(max(o.at for o in outcomes) - hit_at, 2)
            self.expect(
                self.result.seconds <= self.deadline(),
                f"the error came after {self.result.seconds} s, the deadline is {self.deadline():g}",
            )
        else:
            self.expect(False, f"the sync never came to {where.owner}.{where.name}")
            with contextlib.suppress(Exception):
                ray.get(actor.__ray_call__.remote(injection.disarm, where), timeout=30)
        if self.dead_trainer is not None:
            outcomes = [o for o in outcomes if o.rank != self.dead_trainer]
        return outcomes

    @property
    def dead_trainer(self) -> int | None:
        """The trainer rank that dies in this cell."""
        if self.cell.victim in ("driver", "resumes late"):
            return 0
        return 1 if self.cell.victim in OF_TRAINER else None

    def fault(self) -> tuple[Any, injection.Point, Fault]:
        """In which actor, where, and what."""
        world, cell = self.world, self.cell
        assert world.trainers is not None
        again = (cell.phase, cell.victim) == ("verify", "never completes")
        where = injection.point("verify again" if again else cell.phase, cell.mode)
        ranks = self.b.engine.actors
        pids = tuple(world.on_ranks(self.b.engine, injection.process_id))
        rank0, rank1 = world.trainer_pids
        kills: dict[str, Fault] = {
            "engine rank": Fault("", kill=pids[-1:], gone=pids[-1:]),
            "engine": Fault("", kill=(*pids, self.b.host_pid), gone=pids),
            "http server": Fault("", kill=(self.b.host_pid,), gone=pids),
            "source rank": Fault("", kill=(rank1,), gone=(rank1,)),
            "driver": Fault("", kill=(rank0,), gone=(rank0,)),
            "nixl error": Fault("", unmap=True),
            "never completes": Fault("", stop=(rank1,)),
            "killed in flight": Fault("", stop=(rank1,)),
            "resumes late": Fault("", stop=(rank1,)),
        }
        if cell.victim == "ray node":
            kills["ray node"] = Fault("", kill=(world.raylet_pid,), gone=pids)
        fault = kills[cell.victim]
        fault = Fault(str(self.marker), fault.kill, fault.stop, fault.gone, fault.unmap)
        if where.side == "trainer":
            own = cell.victim == "source rank" and cell.phase != "plan"
            return world.trainers.ranks[1 if own else 0], where, fault
        if cell.victim in ("source rank", "driver"):
            return world.a.engine.actors[0], where, fault
        return ranks[-1], where, fault

    def afterwards(self) -> None:
        """What happens to a process that was stopped."""
        if self.cell.victim not in ("never completes", "killed in flight", "resumes late"):
            return
        deadline = time.monotonic() + self.deadline()
        while not self.marker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        source = self.world.trainer_pids[1]
        if self.cell.victim == "killed in flight":
            time.sleep(1.0)
            os.kill(source, signal.SIGKILL)
        elif self.cell.victim == "resumes late":
            # It stays stopped; its driver dies, so that another trainer can take over.
            self.settled(self.b)
            os.kill(self.world.trainer_pids[0], signal.SIGKILL)
        else:
            # The engine's deadline has passed; others wait for the rank longer than that.
            time.sleep(self.settings.phase_timeout_s + 2.0)
            os.kill(source, signal.SIGCONT)

    # Judging.

    def judge_errors(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            error = outcome.error
            who = f"trainer rank {outcome.rank}"
            if error is None:
                self.result.errors.append(f"{who}: no error")
                self.expect(False, f"{who} was told of no error")
                continue
            text = " ".join(str(error).split())
            name = type(error).__name__
            self.result.errors.append(f"{who}: {name}: {text[:700]}")
            if not isinstance(error, RdtError):
                self.expect(
                    False, f"{who}: {name} is not one of the package's errors: {text[:200]}"
                )
                continue
            names = self.names_of_victim()
            self.expect(
                any(n in text for n in names),
                f"{who}: {name} does not name the victim ({' or '.join(names)}): {text[:200]}",
            )
            spoken = self.cell.spoken()
            self.expect(
                any(word in text for word in spoken),
                f"{who}: {name} does not name the phase ({self.cell.phase}): {text[:200]}",
            )

    def names_of_victim(self) -> tuple[str, ...]:
        victim = self.cell.victim
        if victim == "driver":
            return ("trainer rank 0", "rank 0 died", "rank 0 is gone")
        if victim in OF_TRAINER:
            return ("trainer rank 1", "rank 1 died", "rank 1 is gone")
        if victim == "engine rank":
            return (str(self.b.engine.ranks[-1]),)
        return (self.b.engine.name,)

    def judge_engine(
        self, name: str, served: Served, before: _Before, label: str, state: Mapping[str, Any]
    ) -> None:
        cell = self.cell
        lost = name == "B" and cell.victim not in OF_TRAINER and cell.victim not in OF_TRANSFER
        states, versions = self.now(served) if lost else self.settled(served)
        self.result.states[name] = "/".join(sorted(set(states))) + (
            f" {'/'.join(sorted(set(versions)))}" if versions else ""
        )
        if lost:
            self.expect(
                "current" not in states or label not in versions,
                f"what is left of B calls itself whole: {self.result.states[name]}",
            )
            return
        self.expect(len(set(states)) == 1, f"the ranks of {name} differ: {states}")
        self.expect(len(set(versions)) == 1, f"the labels of {name} differ: {versions}")
        state_now, version = states[0], versions[0] if versions else ""
        if cell.victim in OF_TRAINER:
            self.expect(
                state_now in ("current", "dirty"), f"{name} is {states} after a trainer's death"
            )
            if state_now == "dirty":
                self.judge_dirty(name, served, version, before)
            elif version == label:
                self.judge_serving(name, served, label, state)
            else:
                self.judge_serving(name, served, before.label, before.state)
        elif name == "B":
            self.expect(state_now == "dirty", f"B is {state_now}, not dirty, after a failed read")
            self.judge_dirty(name, served, version, before)
        elif state_now != "current":
            self.expect(False, f"{name} is {state_now}, and it was not {name} that failed")
        else:
            self.judge_serving(name, served, label, state)

    def settled(self, served: Served) -> tuple[list[str], list[str]]:
        """States and labels of the ranks, once none of them is in a sync."""
        deadline = time.monotonic() + self.settings.stall_timeout_s + _SLACK_S
        while True:
            states, versions = self.now(served)
            if "syncing" not in states or time.monotonic() > deadline:
                return states, versions
            time.sleep(0.2)

    def now(self, served: Served) -> tuple[list[str], list[str]]:
        """States of all ranks (``gone``: dead), and labels of those that live."""
        found, dead = calls.settle(served.engine.start("rdt_status"), 10.0, "status")
        states = [s.state for s in found.values()] + ["gone"] * len(dead)
        return states, [s.version for s in found.values()]

    def judge_serving(
        self, name: str, served: Served, label: str, state: Mapping[str, Any]
    ) -> None:
        compared, differences = proof.unequal_parameters(MODEL, state, self.world.live(served))
        self.expect(
            compared > 0 and not differences,
            f"{name}: {len(differences)} of {compared} parameters are not those of {label}",
        )
        try:
            tokens, said = served.generate(proof.NEW_TOKENS)
        except Exception as error:
            self.expect(False, f"{name} does not serve: {type(error).__name__}: {error}")
            return
        self.expect(said == label, f"{name}'s reply is labelled {said}, not {label}")
        folder = self.world.folder / "tokens"
        MODEL.save_checkpoint(folder, state)
        wrong = proof.same_tokens(MODEL, folder, tokens)
        self.expect(wrong is None, f"{name}'s tokens: {wrong}")

    def judge_dirty(self, name: str, served: Served, version: str, before: _Before) -> None:
        import ray

        self.expect(
            version == before.label, f"{name} is dirty and labelled {version}, not {before.label}"
        )
        waiting = served.start_generate(3)
        done, _ = ray.wait([waiting], timeout=_WAITS_S)
        self.expect(not done, f"{name} is dirty and answers requests")
        self.waiting.append((name, waiting))

    def collect_garbage(self) -> None:
        """What a failed read left behind is freed now, not at some later time."""
        engines: list[tuple[str, Served]] = [("A", self.world.a)]
        if self.result.states.get("B", "gone") != "gone":
            engines.append(("B", self.b))
        for name, served in engines:
            try:
                self.world.on_ranks(served.engine, injection.collect_garbage)
                served.engine.status(timeout_s=10.0)
            except Exception as error:
                left = name == "B" and self.cell.victim not in (OF_TRAINER | OF_TRANSFER)
                self.expect(left, f"{name} dies of collecting garbage: {str(error)[:200]}")

    # Afterwards.

    def repair_and_check(self, before: _Before) -> None:
        import ray

        world, cell = self.world, self.cell
        if cell.victim not in OF_TRAINER and cell.victim not in OF_TRANSFER:
            kind = world.kind
            world.drop_engine()
            if cell.victim == "ray node":
                world.drop_node()
            assert kind is not None
            self.b = world.need_engine(kind_for(self.then, kind) if self.then else kind)
        elif cell.victim == "resumes late":
            self.repair_before_it_resumes()
        elif cell.victim in OF_TRAINER:
            world.drop_trainers()
            world.need_trainers()
            world.attach(self.settings)
        state = world.train()
        label = world.label("repaired")
        for outcome in world.outcomes(world.start_sync(label), self.deadline()):
            self.expect(
                outcome.error is None,
                f"the sync after the repair fails on trainer rank {outcome.rank}: "
                f"{' '.join(str(outcome.error).split())[:300]}",
            )
        for name, served in (("A", world.a), ("B", self.b)):
            states, versions = self.settled(served)
            self.expect(
                set(states) == {"current"} and set(versions) == {label},
                f"after the repair {name} is {states} {versions}",
            )
            if set(states) == {"current"}:
                self.judge_serving(name, served, label, state)
        for name, waiting in self.waiting:
            try:
                said = ray.get(waiting, timeout=30)[1]
            except Exception as error:
                said = f"{type(error).__name__}"
            self.expect(said == label, f"the request that waited at {name} ends with {said}")
        self.judge_leaks(before)

    def repair_before_it_resumes(self) -> None:
        """Another trainer heals the engines; then the stopped one answers the read at last.

        A sync that is refused for as long as the read may still land is right as well.
        """
        world = self.world
        old, stopped = world.hand_over_trainers()
        try:
            world.need_trainers()
            world.attach(self.settings)
            label = world.label("healed")
            first = world.outcomes(world.start_sync(label), self.deadline())[0].error
            assert world.trainers is not None
            state = world.trainers.weights()
            os.kill(stopped, signal.SIGCONT)
            time.sleep(3.0)
            if first is not None:
                self.expect(
                    isinstance(first, RdtError) and "trainer rank 1" in str(first),
                    f"healing B fails otherwise than by naming trainer rank 1: {first}",
                )
                return
            for name, served in (("A", world.a), ("B", self.b)):
                states, versions = self.now(served)
                if states != ["current"] or versions != [label]:
                    self.expect(False, f"after healing {name} is {states} {versions}")
                    continue
                self.judge_serving(f"after the late answer {name}", served, label, state)
        finally:
            world.end_trainers(old, stopped)

    def judge_leaks(self, before: _Before) -> None:
        world = self.world
        tp = {len(self.b.engine.ranks)}
        actors = world.actors()
        expected = {n for n in before.actors if tp == {2} or not n[0].endswith("_tp1")}
        extra = actors - before.actors
        self.expect(tp == {2} or not extra, f"actors are left: {sorted(n for n, _ in extra)}")
        self.expect(expected <= actors, f"actors are missing: {sorted(expected - actors)}")
        groups = world.placement_groups()
        self.expect(groups <= before.groups, f"{groups} placement groups, {before.groups} before")
        for who, counts in self.held().items():
            was = before.held.get(who)
            if was is None:
                continue
            grown = {k: (was.get(k, 0), n) for k, n in counts.items() if n > was.get(k, 0)}
            self.expect(not grown, f"{who} holds more than before: {grown}")
        threads = world.on_ranks(world.a.engine, injection.native_threads)[0]
        # Ray starts threads of its own for calls that come at the same time.
        self.expect(
            threads <= before.native_threads + 8,
            f"A has {threads} threads, {before.native_threads} before",
        )
