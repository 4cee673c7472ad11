"""A trainer for an HTTP server elsewhere in the cluster: python train.py HOST:PORT"""

import json
import sys
import urllib.request
from typing import Any

import ray

from sglang_rdt.demo.models import TinyModel

MODEL = TinyModel("dense")


@ray.remote(enable_tensor_transport=True)  # on GPUs: num_gpus=1
class Trainer:
    """Stand-in for your own training, on one rank; more of them as in ../one-job."""

    def __init__(self, server: str) -> None:
        import megatron_rdt  # before Megatron
        from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

        init_distributed(0, 1, "127.0.0.1", 29555)
        self.tiny = TinyTrainer(MODEL, Layout(), seed=1)
        self.sync = megatron_rdt.WeightSync(
            self.tiny.model_chunks,
            hf_config=MODEL.hf_config(),
            optimizer=self.tiny.optimizer,
            engines=[server],  # without it: all in the namespace
        )

    def step(self) -> str:
        self.tiny.step()  # ends with optimizer.step(), and that with the sync
        return self.sync.last_report.line()

    def close(self) -> None:
        self.sync.close()


def generate(server: str) -> Any:
    """The sync never goes this way; requests do."""
    sampling = {"temperature": 0, "max_new_tokens": 4}
    request = urllib.request.Request(
        f"http://{server}/generate",
        json.dumps({"input_ids": [7, 8, 9], "sampling_params": sampling}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def main(server: str) -> None:
    ray.init(log_to_driver=False)
    trainer = Trainer.remote(server)
    for _ in range(2):
        print(ray.get(trainer.step.remote()))
        reply = generate(server)
        print(reply["output_ids"], "version", reply["meta_info"]["weight_version"])
    ray.get(trainer.close.remote())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:30000")
