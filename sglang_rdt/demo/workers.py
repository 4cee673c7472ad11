"""Engines and Megatron trainer ranks as Ray actors, for the demo and the tests."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.settings import Settings


class TrainerRank:
    """One rank: a :class:`~sglang_rdt.demo.trainer.TinyTrainer` and its WeightSync.

    Args:
        options: keyword arguments of TinyTrainer.
        environ: environment variables to set before Megatron is imported.
    """

    def __init__(
        self,
        model: TinyModel,
        layout: Layout,
        rank: int,
        master_port: int,
        options: dict[str, Any],
        environ: dict[str, str] | None = None,
    ) -> None:
        os.environ.update(environ or {})
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        import torch

        import megatron_rdt  # noqa: F401  (its hook must be in place before Megatron is imported)
        from sglang_rdt.demo.trainer import TinyTrainer, init_distributed

        torch.set_num_threads(1)
        init_distributed(rank, layout.world, "127.0.0.1", master_port)
        self.trainer = TinyTrainer(model, layout, **options)
        self.sync: Any = None

    def rebuild(self, model: TinyModel, layout: Layout, options: dict[str, Any]) -> None:
        """Another trainer in the same process (importing Megatron takes longest)."""
        from sglang_rdt.demo.trainer import TinyTrainer

        self.detach()
        self.trainer.close()
        self.trainer = TinyTrainer(model, layout, **options)

    def detach(self) -> None:
        """Closes the WeightSync, if there is one."""
        if self.sync is not None:
            self.sync.close()
            self.sync = None

    def attach(self, settings: Settings, on_step: bool = True, **options: Any) -> None:
        """Makes the WeightSync; with ``on_step`` a sync follows every optimizer step.

        ``generator``: a function that gets this object and returns an iterable of
        ``(HF name, tensor)``, to export with instead of mbridge.
        """
        from megatron_rdt import WeightSync

        self.detach()
        generator = options.pop("generator", None)
        if generator is not None:
            from megatron_rdt.sources import GeneratorSource

            options["source"] = GeneratorSource(lambda: generator(self))
        self.sync = WeightSync(
            self.trainer.model_chunks,
            hf_config=self.trainer.model.hf_config(),
            optimizer=self.trainer.optimizer if on_step else None,
            settings=settings,
            **options,
        )

    def step(self) -> tuple[dict[str, Any], Any]:
        """One optimizer step: its numbers, and the report of the sync that followed."""
        numbers = self.trainer.step()
        return numbers, self.sync.last_report if self.sync else None

    def weights(self) -> dict[str, Any]:
        """The current weights as HF tensors, put together without any bridge."""
        return self.trainer.reference_hf_state()

    def call(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(self, *args)``: for tests."""
        return run(self, *args)


class EngineHost:
    """A RayEngine in an actor of its own, as RL frameworks run it.

    Not in the driver: ``Engine.shutdown`` kills all children of its process, and a Ray cluster
    that the driver started is among them.
    """

    def __init__(self, kwargs: dict[str, Any], environ: dict[str, str] | None = None) -> None:
        os.environ.update(environ or {})
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        from sglang.srt.ray.engine import RayEngine

        import sglang_rdt  # noqa: F401  (its patches must be in place before the engine starts)

        self.engine = RayEngine(**kwargs)

    def address(self) -> str:
        """``ip:port`` under which the engine's actors are named."""
        from sglang_rdt.coordinator import engine_of

        return engine_of(self.engine).name

    def generate(
        self, prompt: Sequence[int], count: int, replica: int | None = None
    ) -> tuple[list[int], str]:
        """``count`` greedy tokens after ``prompt``, and the weight version on the reply.

        ``replica``: the data-parallel rank to ask; None: whichever.
        """
        where = {} if replica is None else {"routed_dp_rank": replica}
        reply = self.engine.generate(
            **where,
            input_ids=[list(prompt)],
            sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        )[0]
        return reply["output_ids"], reply["meta_info"]["weight_version"]

    def call(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(self, *args)``: for tests."""
        return run(self, *args)

    def shutdown(self) -> None:
        """Stops the engine."""
        self.engine.shutdown()


class ServedEngine:
    """The driver's end of an :class:`EngineHost`.

    Args:
        kwargs: arguments of RayEngine.
        environ: environment variables to set before SGLang is imported there.
        python_path: PYTHONPATH of the engine's processes.
    """

    def __init__(
        self,
        kwargs: dict[str, Any],
        *,
        environ: dict[str, str] | None = None,
        python_path: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group

        from sglang_rdt.coordinator.discovery import engine_at

        self._timeout_s = timeout_s
        # RayEngine never removes a group that it made itself; it would outlive the engine.
        world = kwargs.get("tp_size", 1) * kwargs.get("pp_size", 1)
        if not kwargs.get("enable_dp_attention"):  # its data-parallel ranks are TP ranks
            world *= kwargs.get("dp_size", 1)
        self._group = placement_group([{"CPU": 1, "GPU": 1}] * world, strategy="STRICT_PACK")
        self._get(self._group.ready())
        kwargs = {**kwargs, "placement_group": self._group}
        host = ray.remote(num_cpus=0, runtime_env=_runtime_env(python_path, environ))(EngineHost)
        self.host = host.remote(kwargs, environ)
        self.address: str = self._get(self.host.address.remote())
        self.engine = engine_at(self.address)

    def _get(self, ref: Any) -> Any:
        import ray

        return ray.get(ref, timeout=self._timeout_s)

    def generate(
        self, prompt: Sequence[int], count: int, replica: int | None = None
    ) -> tuple[list[int], str]:
        """See :meth:`EngineHost.generate`."""
        return self._get(self.host.generate.remote(prompt, count, replica))

    def start_generate(self, prompt: Sequence[int], count: int) -> Any:
        """Like :meth:`generate`, without waiting: a reference."""
        return self.host.generate.remote(prompt, count)

    def weights(self) -> list[dict[str, Any]]:
        """Copies of the live parameters of every rank."""
        return self.engine.call("read_weights", timeout_s=self._timeout_s, phase="read_weights")

    def shutdown(self) -> None:
        """Stops the engine and its host."""
        import ray
        from ray.util.placement_group import remove_placement_group

        try:
            self._get(self.host.shutdown.remote())
        finally:
            ray.kill(self.host)
            remove_placement_group(self._group)


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _runtime_env(python_path: str | None, environ: dict[str, str] | None) -> dict[str, Any]:
    # Only where asked for: with an environment of its own, an actor starts in a fresh process.
    if python_path is None:
        return {}
    return {"env_vars": {**(environ or {}), "PYTHONPATH": python_path}}


class Trainers:
    """All ranks of one trainer; methods run on every rank together.

    Args:
        wait: whether to return only when they are ready.
        options: see TinyTrainer.
    """

    def __init__(
        self,
        model: TinyModel,
        layout: Layout,
        *,
        environ: dict[str, str] | None = None,
        python_path: str | None = None,
        timeout_s: float = 180.0,
        wait: bool = True,
        **options: Any,
    ) -> None:
        import ray

        self._timeout_s = timeout_s
        port = free_port()
        actor = ray.remote(
            num_cpus=0,
            enable_tensor_transport=True,
            runtime_env=_runtime_env(python_path, environ),
        )(TrainerRank)
        self.ranks = [
            actor.remote(model, layout, rank, port, options, environ)
            for rank in range(layout.world)
        ]
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Returns when all ranks have built their model."""
        self.all("__ray_ready__")

    def rebuild(self, model: TinyModel, layout: Layout, **options: Any) -> None:
        """Another model or layout on the same ranks; ``layout.world`` must not change."""
        self.all("rebuild", model, layout, options)

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``method`` on every rank; results in rank order."""
        import ray

        refs = [getattr(rank, method).remote(*args, **kwargs) for rank in self.ranks]
        return ray.get(refs, timeout=self._timeout_s)

    def attach(self, settings: Settings | None = None, **options: Any) -> None:
        """See :meth:`TrainerRank.attach`."""
        self.all("attach", settings or Settings(), **options)

    def step(self) -> tuple[dict[str, Any], Any]:
        """One optimizer step; rank 0's numbers and sync report."""
        return self.all("step")[0]

    def weights(self) -> dict[str, Any]:
        """The current weights as HF tensors, from rank 0."""
        return self.all("weights")[0]

    def on_all(self, run: Callable[..., Any], *args: Any) -> Sequence[Any]:
        """``run(rank_object, *args)`` on every rank."""
        return self.all("call", run, *args)

    def stop(self) -> None:
        """Ends the ranks."""
        import ray

        for rank in self.ranks:
            ray.kill(rank)
