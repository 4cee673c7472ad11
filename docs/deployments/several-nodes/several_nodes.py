"""Two nodes: on each a trainer rank, and one engine with a rank on each."""

import tempfile
from collections import defaultdict
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options

MODEL = TinyModel("dense")


@ray.remote(num_gpus=1, enable_tensor_transport=True)
class Trainer:
    """One rank of a stand-in for your own training."""

    def address(self) -> str:
        import socket

        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(self, rank: int, world: int, master: str) -> None:
        import megatron_rdt  # before Megatron
        from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

        host, port = master.rsplit(":", 1)
        init_distributed(rank, world, host, int(port))
        # Both ranks hold everything, so each engine rank can read from its own node.
        self.tiny = TinyTrainer(MODEL, Layout(dp=world), seed=1)
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

    def where(self) -> list[str]:
        from sglang_rdt.coordinator import engine_of

        return [f"{r.actor_name} on {r.node_ip}" for r in engine_of(self.engine).ranks]

    def shutdown(self) -> None:
        self.engine.shutdown()


def main() -> None:
    ray.init(namespace="rl", log_to_driver=False)
    path = tempfile.mkdtemp()  # on real nodes: a folder that all of them see
    MODEL.save_random_checkpoint(path, seed=0)
    group = placement_group([{"CPU": 1, "GPU": 1}] * 4, strategy="SPREAD")
    ray.get(group.ready())
    nodes = defaultdict(list)
    for bundle, node in placement_group_table(group)["bundles_to_node_id"].items():
        nodes[node].append(bundle)
    (a, b), (c, d) = nodes.values()  # one node and the other

    # On GPUs: model_path=path, tp_size=16, nnodes=2, port=..., use_ray=True, 16 bundles in rank order.
    kwargs = cpu.engine_kwargs(path, port=30000, tp_size=2, nnodes=2)
    engine = Engine.options(**host_options(group, [b, d])).remote(**kwargs)
    trainers = []
    for bundle in (a, c):
        there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        trainers.append(Trainer.options(scheduling_strategy=there).remote())
    print(*ray.get(engine.where.remote()), sep="\n")  # returns when the engine is up
    master = ray.get(trainers[0].address.remote())
    ray.get([t.start.remote(i, len(trainers), master) for i, t in enumerate(trainers)])
    for _ in range(2):
        print(ray.get([t.step.remote() for t in trainers])[0])
    ray.get([t.close.remote() for t in trainers])
    ray.get(engine.shutdown.remote())


if __name__ == "__main__":
    main()
