"""One Ray job: two Megatron ranks and an SGLang engine, each in an actor of its own."""

import tempfile
from typing import Any

import ray
from ray.util.placement_group import placement_group

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options

MODEL = TinyModel("dense")


@ray.remote(enable_tensor_transport=True)  # on GPUs: num_gpus=1
class Trainer:
    """One rank. Stand-in for your own training: everything that is called "tiny"."""

    def address(self) -> str:
        import socket

        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(self, rank: int, world: int, master: str) -> None:
        import megatron_rdt  # before Megatron
        from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

        host, port = master.rsplit(":", 1)
        # On GPUs: backend="cpu:gloo,cuda:nccl" here, and device="cuda" there.
        init_distributed(rank, world, host, int(port))
        self.tiny = TinyTrainer(MODEL, Layout(tp=world), seed=1)
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

    def generate(self, **kwargs: Any) -> Any:
        return self.engine.generate(**kwargs)

    def shutdown(self) -> None:
        self.engine.shutdown()


def main() -> None:
    ray.init(namespace="rl", log_to_driver=False)
    path = tempfile.mkdtemp()  # several nodes: a folder that all of them see
    MODEL.save_random_checkpoint(path, seed=0)
    group = placement_group([{"CPU": 1, "GPU": 1}], strategy="STRICT_PACK")
    # On GPUs: model_path=path, tp_size=..., port=..., use_ray=True, and a bundle per rank.
    kwargs = cpu.engine_kwargs(path, port=30000)
    engine = Engine.options(**host_options(group, [0])).remote(**kwargs)
    trainers = [Trainer.remote() for _ in range(2)]
    ask = {"input_ids": [[7, 8, 9]], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    before = ray.get(engine.generate.remote(**ask))[0]  # returns when the engine is up
    print("before:", before["output_ids"], "version", before["meta_info"]["weight_version"])
    master = ray.get(trainers[0].address.remote())  # now: a free port may be taken later
    ray.get([t.start.remote(i, len(trainers), master) for i, t in enumerate(trainers)])
    for _ in range(2):
        print(ray.get([t.step.remote() for t in trainers])[0])
        reply = ray.get(engine.generate.remote(**ask))[0]
        print("now:", reply["output_ids"], "version", reply["meta_info"]["weight_version"])
    ray.get([t.close.remote() for t in trainers])
    ray.get(engine.shutdown.remote())


if __name__ == "__main__":
    main()
