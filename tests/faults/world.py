"""The processes of the matrix: a Ray cluster of two nodes, engine A, engine B, two trainer ranks.

Engine A and its node live for the whole run. Engine B is the victim on the engine side; it is
started anew when it died. Everything is ended by process id.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_rdt import cpu
from sglang_rdt.coordinator.discovery import engine_at
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import EngineHost, Trainers
from sglang_rdt.settings import Settings
from tests.faults import injection

NAMESPACE = "sglang-rdt-faults"
MODEL = TinyModel("dense")
PORT_A, PORT_B = 31101, 31102
# Short, so that what is left to deadlines ends soon; not so short that a busy machine meets them.
SETTINGS = Settings(phase_timeout_s=10.0, stall_timeout_s=12.0, connect_timeout_s=25.0)
_CALL_S = 60.0
_START_S = 240.0

Kind = Literal["tp1", "tp2", "http", "tcp", "node"]


class ServedByRay:
    """A RayEngine in an actor of its own, on a node of our choice."""

    def __init__(self, folder: Path, port: int, tp: int, node: str) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.group = placement_group(
            [{"CPU": 1, "GPU": 1, node: 0.001}] * tp, strategy="STRICT_PACK"
        )
        ray.get(self.group.ready(), timeout=_CALL_S)
        node_id = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and node in n["Resources"])
        host = ray.remote(num_cpus=0)(EngineHost)
        kwargs = cpu.engine_kwargs(str(folder), tp_size=tp, port=port, placement_group=self.group)
        self._host = host.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(kwargs)
        address = ray.get(self._host.address.remote(), timeout=_START_S)
        self.engine: Engine = engine_at(address)
        self.host_pid: int = ray.get(
            self._host.__ray_call__.remote(injection.process_id), timeout=_CALL_S
        )

    def generate(self, count: int) -> tuple[list[int], str]:
        """Greedy tokens after the proof's prompt, and the label on the reply."""
        import ray

        return ray.get(self.start_generate(count), timeout=_CALL_S)

    def start_generate(self, count: int) -> Any:
        """Like :meth:`generate`, without waiting: a reference."""
        return self._host.generate.remote(proof.PROMPT, count)

    def stop(self) -> None:
        """Ends what is left of it."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in [*self.engine.actors, self._host]:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        remove_placement_group(self.group)


class ServedByHttp:
    """``python -m sglang.launch_server --use-ray``."""

    def __init__(self, folder: Path, port: int, log: Path) -> None:
        import ray

        environ = {
            **os.environ,
            **cpu.environment(2),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "RAY_NAMESPACE": NAMESPACE,
            "SGLANG_RDT_NAMESPACE": NAMESPACE,
        }
        command = [sys.executable, "-m", "sglang.launch_server"]
        command += cpu.launch_args(str(folder), tp_size=1, port=port)
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, env=environ, stdout=out, stderr=out, start_new_session=True
            )
        self.host_pid = self._process.pid
        self._port = port
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.engine: Engine = engine_at(f"0.0.0.0:{port}")
                self.generate(1)
                return
            except Exception as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(
                        f"the HTTP server did not start ({error}):\n{log.read_text()[-3000:]}"
                    ) from None
                time.sleep(1.0)

    def generate(self, count: int) -> tuple[list[int], str]:
        """See :meth:`ServedByRay.generate`."""
        body = {
            "input_ids": list(proof.PROMPT),
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_CALL_S) as reply:
            answer = json.load(reply)
        return answer["output_ids"], answer["meta_info"]["weight_version"]

    def start_generate(self, count: int) -> Any:
        """Not needed of a server: it is a victim that dies."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends what is left of it: the server's children are in its session."""
        import ray

        for actor in self.engine.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


Served = ServedByRay | ServedByHttp


@dataclass(frozen=True)
class Outcome:
    """What one trainer rank's sync came to: ``error`` None: a report."""

    rank: int
    error: BaseException | None
    at: float


class World:
    """Everything that runs; :meth:`repair` brings back what died.

    Args:
        folder: for checkpoints, logs and markers.
    """

    def __init__(self, folder: Path, say: Any = print) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.folder, self._say = folder, say
        os.environ.update(cpu.environment(4))
        os.environ.pop("RAY_ADDRESS", None)
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        ray.cloudpickle.register_pickle_by_value(injection)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 8,
                "num_gpus": 4,
                "resources": {"first": 1},
                "include_dashboard": False,
            },
        )
        ray.init(
            address=self._cluster.address,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=bool(os.environ.get("E2E_LOGS")),
        )
        self._node: Any = None
        self._checkpoint = folder / "start"
        MODEL.save_random_checkpoint(self._checkpoint, seed=100)
        self.a = self._start_a()
        self.b: Served | None = None
        self._kind: Kind | None = None
        self.trainers: Trainers | None = None
        self._next: Trainers | None = None
        self.trainer_pids: list[int] = []
        self._seed = 500
        self._count = 0
        self._settings = SETTINGS

    def _start_a(self) -> ServedByRay:
        return ServedByRay(self._checkpoint, PORT_A, 1, "first")

    def reset(self) -> None:
        """After a cell that went wrong: everything but engine A is started anew, and A too if it
        is not as it should be."""
        self.drop_trainers()
        with contextlib.suppress(Exception):
            self.drop_engine()
        self.b = self._kind = None
        self.drop_node()
        try:
            healthy = {s.state for s in self.a.engine.status(timeout_s=10.0)} <= {
                "current",
                "dirty",
            }
        except Exception:
            healthy = False
        if not healthy:
            self.a.stop()
            self._wait_unnamed(self.a.engine)
            self.a = self._start_a()

    # What a cell needs.

    def need_engine(self, kind: Kind) -> Served:
        """Engine B as ``kind``; starts one if it is another, or died."""
        if self.b is None or kind != self._kind:
            self.drop_engine()
            began = time.monotonic()
            if kind == "node":
                self._need_node()
                self.b = ServedByRay(self._checkpoint, PORT_B, 1, "second")
            elif kind == "http":
                self.b = ServedByHttp(self._checkpoint, PORT_B, self.folder / "server.log")
            else:
                self.b = ServedByRay(self._checkpoint, PORT_B, 2 if kind == "tp2" else 1, "first")
            if kind == "tcp":
                for too_late in self.on_ranks(self.b.engine, injection.over_tcp):
                    assert too_late is None, too_late
            self._kind = kind
            self._say(f"  engine B ({kind}) started in {time.monotonic() - began:.0f} s")
        return self.b

    def _need_node(self) -> None:
        if self._node is None:
            self._node = self._cluster.add_node(
                num_cpus=2, num_gpus=2, resources={"second": 1}, include_dashboard=False
            )

    @property
    def kind(self) -> Kind | None:
        """What engine B is now; None: it is not there."""
        return self._kind

    @property
    def raylet_pid(self) -> int:
        """Of the second node."""
        return self._node.all_processes["raylet"][0].process.pid  # type: ignore[no-any-return]

    def need_trainers(self) -> Trainers:
        """Two Megatron ranks at TP 2, with other weights than the ones before."""
        if self.trainers is None:
            import ray

            began = time.monotonic()
            self.expect_trainers()
            self.trainers, self._next = self._next, None
            assert self.trainers is not None
            self.trainers.wait_ready()
            self.trainer_pids = ray.get(
                [r.__ray_call__.remote(injection.process_id) for r in self.trainers.ranks],
                timeout=_CALL_S,
            )
            self._say(f"  trainers started in {time.monotonic() - began:.0f} s")
        return self.trainers

    def expect_trainers(self) -> None:
        """The next trainers may start now, for when these are dead."""
        if self._next is None:
            self._seed += 1
            self._next = Trainers(MODEL, Layout(tp=2), seed=self._seed, wait=False)

    def drop_engine(self) -> None:
        """Ends what is left of engine B."""
        if self.b is not None:
            self.b.stop()
            self._wait_unnamed(self.b.engine)
        self.b = self._kind = None

    def drop_node(self) -> None:
        """Ends what is left of the second node."""
        if self._node is None:
            return
        import ray

        gone, self._node = self._node, None
        self._cluster.remove_node(gone, allow_graceful=False)
        # Ray goes on placing actors there until its health checks have failed.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(
            n["Alive"] and n["NodeID"] == gone.node_id for n in ray.nodes()
        ):
            time.sleep(0.2)

    def drop_trainers(self) -> None:
        """Ends what is left of the trainers."""
        for pid in self.trainer_pids:
            # A stopped process must not be left behind; a dead one is what is wanted.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.trainers is not None:
            self.trainers.stop()
            injection.wait_gone(tuple(self.trainer_pids))
        self.trainers, self.trainer_pids = None, []

    def hand_over_trainers(self) -> tuple[Trainers, int]:
        """The trainers and the process of rank 1, which are the caller's to end from now on."""
        assert self.trainers is not None
        old, pid = self.trainers, self.trainer_pids[1]
        self.trainers, self.trainer_pids = None, []
        return old, pid

    def end_trainers(self, old: Trainers, pid: int) -> None:
        """Ends what was handed over."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        old.stop()
        injection.wait_gone((pid,))

    def _wait_unnamed(self, engine: Engine) -> None:
        names = {rank.actor_name for rank in engine.ranks}
        deadline = time.monotonic() + 30
        while names & {n for n, _ in self.actors()} and time.monotonic() < deadline:
            time.sleep(0.2)

    # What happens in it.

    def on_ranks(self, engine: Engine, run: Any, *args: Any) -> list[Any]:
        """``run(actor, *args)`` in every rank's process."""
        import ray

        return ray.get(
            [actor.__ray_call__.remote(run, *args) for actor in engine.actors], timeout=_CALL_S
        )

    def on_trainers(self, run: Any, *args: Any) -> list[Any]:
        """``run(actor, *args)`` in every trainer rank's process."""
        import ray

        assert self.trainers is not None
        return ray.get(
            [rank.__ray_call__.remote(run, *args) for rank in self.trainers.ranks], timeout=_CALL_S
        )

    def attach(self, settings: Settings) -> None:
        """A fresh WeightSync to all engines there are."""
        self._settings = settings
        self.need_trainers().attach(settings, on_step=False)

    def train(self) -> Mapping[str, Any]:
        """One optimizer step; the weights after it."""
        group = self.need_trainers()
        assert all(numbers["updated"] for numbers in group.on_all(_step))
        return group.weights()

    def start_sync(self, version: str) -> list[Any]:
        """References, one per trainer rank."""
        assert self.trainers is not None
        return [rank.call.remote(_sync, version) for rank in self.trainers.ranks]

    def outcomes(self, refs: Sequence[Any], timeout_s: float) -> list[Outcome]:
        """What became of :meth:`start_sync` on every rank, and when; a rank that has not answered
        raises TimeoutError."""
        import ray

        from sglang_rdt.coordinator import calls

        found: list[Outcome] = []
        left = list(refs)
        deadline = time.monotonic() + timeout_s
        while left:
            done, left = ray.wait(left, timeout=max(deadline - time.monotonic(), 0.001))
            now = time.time()
            if not done:
                stuck = [refs.index(ref) for ref in left]
                found += [
                    Outcome(rank, TimeoutError(f"no answer within {timeout_s:g} s"), now)
                    for rank in stuck
                ]
                break
            for ref in done:
                try:
                    ray.get(ref)
                except Exception as error:
                    found.append(Outcome(refs.index(ref), calls.unwrap(error), now))
                else:
                    found.append(Outcome(refs.index(ref), None, now))
        return sorted(found, key=lambda outcome: outcome.rank)

    def label(self, what: str) -> str:
        """A version that was not used before."""
        self._count += 1
        return f"{what}-{self._count}"

    def live(self, served: Served) -> list[dict[str, Any]]:
        """Copies of the live parameters of every rank."""
        return served.engine.call("read_weights", timeout_s=_CALL_S, phase="read_weights")

    def actors(self) -> set[tuple[str, str]]:
        """Name and namespace of every named actor."""
        import ray.util

        return {
            (e["name"], e["namespace"]) for e in ray.util.list_named_actors(all_namespaces=True)
        }

    def placement_groups(self) -> int:
        """How many are there."""
        from ray.util import placement_group_table

        return sum(g["state"] != "REMOVED" for g in placement_group_table().values())

    def close(self) -> None:
        """Ends everything."""
        import ray

        self.drop_trainers()
        if self._next is not None:
            self._next.stop()
        with contextlib.suppress(Exception):
            self.drop_engine()
        self.drop_node()
        with contextlib.suppress(Exception):
            self.a.stop()
        ray.shutdown()
        self._cluster.shutdown()


def _step(rank: Any) -> dict[str, Any]:
    return rank.trainer.step()  # type: ignore[no-any-return]


def _sync(rank: Any, version: str) -> Any:
    return rank.sync.sync(version)
