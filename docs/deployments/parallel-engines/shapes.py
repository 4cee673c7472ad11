"""An engine in a shape of your choice: python shapes.py [pp | dp | dp-attention]"""

import sys
import tempfile
from typing import Any

import ray
from ray.util.placement_group import placement_group

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options

MOE = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2}
# Model, server arguments, GPUs.
SHAPES = {
    "pp": ("dense", {"pp_size": 2}, 2),
    "dp": ("dense", {"dp_size": 2}, 2),
    "dp-attention": ("moe", MOE, 2),  # data-parallel ranks are among the tensor-parallel ones
}


@ray.remote(enable_tensor_transport=True)  # on GPUs: num_gpus=1
class Trainer:
    """Stand-in for your own training, on one rank; more of them as in ../one-job."""

    def __init__(self, model: TinyModel) -> None:
        import megatron_rdt  # before Megatron
        from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

        init_distributed(0, 1, "127.0.0.1", 29555)
        self.tiny = TinyTrainer(model, Layout(), seed=1)
        self.sync = megatron_rdt.WeightSync(
            self.tiny.model_chunks, hf_config=model.hf_config(), optimizer=self.tiny.optimizer
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

    def ranks(self) -> list[str]:
        from sglang_rdt.coordinator import engine_of

        engine = engine_of(self.engine)
        states = [(s.state, s.version) for s in engine.status()]
        return [f"{r.rank} {s} {v}" for r, (s, v) in zip(engine.ranks, states, strict=True)]

    def shutdown(self) -> None:
        self.engine.shutdown()


def main(shape: str) -> None:
    ray.init(namespace="rl", log_to_driver=False)
    kind, arguments, gpus = SHAPES[shape]
    model = TinyModel(kind)
    path = tempfile.mkdtemp()  # several nodes: a folder that all of them see
    model.save_random_checkpoint(path, seed=0)
    group = placement_group([{"CPU": 1, "GPU": 1}] * gpus, strategy="STRICT_PACK")
    # On GPUs: model_path=path, port=..., use_ray=True and the same arguments.
    kwargs = cpu.engine_kwargs(path, port=30000, **arguments)
    engine = Engine.options(**host_options(group, range(gpus))).remote(**kwargs)
    trainer = Trainer.remote(model)
    print(shape, ray.get(engine.ranks.remote()))  # returns when the engine is up
    print(ray.get(trainer.step.remote()))
    print(shape, ray.get(engine.ranks.remote()))
    ray.get(trainer.close.remote())
    ray.get(engine.shutdown.remote())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pp")
