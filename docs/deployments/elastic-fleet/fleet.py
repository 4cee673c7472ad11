"""Engines come and go while training goes on; a router asks which ones are current."""

import os
import tempfile
from typing import Any

import ray
from ray.util.placement_group import placement_group

from sglang_rdt import cpu
from sglang_rdt.coordinator import current_engines
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options

MODEL = TinyModel("dense")


@ray.remote(enable_tensor_transport=True)  # on GPUs: num_gpus=1
class Trainer:
    """Stand-in for your own training, on one rank; more of them as in ../one-job."""

    def __init__(self) -> None:
        import megatron_rdt  # before Megatron
        from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

        init_distributed(0, 1, "127.0.0.1", 29555)
        self.tiny = TinyTrainer(MODEL, Layout(), seed=1)
        self.sync = megatron_rdt.WeightSync(
            self.tiny.model_chunks, hf_config=MODEL.hf_config(), optimizer=self.tiny.optimizer
        )

    def step(self) -> Any:
        self.tiny.step()  # a lost engine does not stop it: SGLANG_RDT_ENGINE_FAILURES=log
        return self.sync.last_report

    def close(self) -> None:
        self.sync.close()


@ray.remote
class Engine:
    """RayEngine wants a process of its own. host_options says where."""

    def __init__(self, **kwargs: Any) -> None:
        from sglang.srt.ray.engine import RayEngine

        import sglang_rdt  # noqa: F401  (before the engine starts)

        self.engine = RayEngine(**kwargs)

    def wait(self) -> None:
        """Returns when the engine is up."""

    def crash(self) -> None:
        os._exit(1)  # its actors end with it

    def shutdown(self) -> None:
        self.engine.shutdown()


def main() -> None:
    ray.init(log_to_driver=False)  # namespace and what a lost engine does: job.yaml
    path = tempfile.mkdtemp()  # several nodes: a folder that all of them see
    MODEL.save_random_checkpoint(path, seed=0)

    def start(port: int) -> Any:
        group = placement_group([{"CPU": 1, "GPU": 1}], strategy="STRICT_PACK")
        # On GPUs: model_path=path, tp_size=..., port=port, use_ray=True, and a bundle per rank.
        kwargs = cpu.engine_kwargs(path, port=port)
        engine = Engine.options(**host_options(group, [0])).remote(**kwargs)
        ray.get(engine.wait.remote())
        return engine

    def step(event: str) -> None:
        report = ray.get(trainer.step.remote())
        ports = sorted(name.rsplit(":", 1)[1] for name in current_engines(report.version))
        print(f"{event}: version {report.version} is served at ports {', '.join(ports)}")

    trainer = Trainer.remote()
    first = start(30000)  # an engine lives as long as somebody has a handle of its actor
    step("one engine")
    second = start(30010)
    print("before its first sync, current with version 1:", len(current_engines("1")), "of 2")
    step("another one joined")
    ray.wait([second.crash.remote()])
    step("it died")
    second = start(30010)
    step("it is back under its name")
    ray.get(trainer.close.remote())
    ray.get([engine.shutdown.remote() for engine in (first, second)])


if __name__ == "__main__":
    main()
