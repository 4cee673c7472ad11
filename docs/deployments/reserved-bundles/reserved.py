"""One placement group for everything: a trainer on its first bundle, engines on two others."""

import tempfile
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options

MODEL = TinyModel("dense")


@ray.remote(num_gpus=1, enable_tensor_transport=True)
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

    def step(self) -> str:
        self.tiny.step()  # ends with optimizer.step(), and that with the sync
        return self.sync.last_report.line()

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

    def shutdown(self) -> None:
        self.engine.shutdown()


def main() -> None:
    ray.init(namespace="rl", log_to_driver=False)
    path = tempfile.mkdtemp()  # several nodes: a folder that all of them see
    MODEL.save_random_checkpoint(path, seed=0)
    # The framework's. One GPU per bundle.
    group = placement_group([{"CPU": 1, "GPU": 1}] * 4, strategy="PACK")
    ray.get(group.ready())

    def show(what: str) -> None:
        free = ray.available_resources()
        bundles = [i for i in range(4) if free.get(f"GPU_group_{i}_{group.id.hex()}")]
        table = ray.util.placement_group_table().values()
        alive = sum(entry["state"] == "CREATED" for entry in table)
        print(f"{what}: bundles {bundles} are free; placement groups: {alive}")

    show("reserved")
    first = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    trainer = Trainer.options(scheduling_strategy=first).remote()
    # On GPUs: model_path=path, tp_size=..., port=..., use_ray=True, and a bundle per rank.
    # The engine finds the group of its actor by itself; placement_group=group says the same.
    engines = [
        Engine.options(**host_options(group, [bundle])).remote(
            **cpu.engine_kwargs(path, port=30000 + bundle)
        )
        for bundle in (3, 1)
    ]
    ray.get([e.wait.remote() for e in engines])
    show("engines are up")
    print(ray.get(trainer.step.remote()))
    ray.get(trainer.close.remote())
    ray.get([e.shutdown.remote() for e in engines])


if __name__ == "__main__":
    main()
