"""The second job: plain torchrun ranks, which join the Ray cluster by themselves.

torchrun --nproc-per-node 2 train.py
"""

import megatron_rdt  # before Megatron
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout, TinyTrainer, init_distributed

MODEL = TinyModel("dense")


def main() -> None:
    # Stand-in for your own training. On GPUs: torch.cuda.set_device(LOCAL_RANK),
    # backend="cpu:gloo,cuda:nccl" and device="cuda".
    init_distributed()
    tiny = TinyTrainer(MODEL, Layout(tp=2), seed=1)
    # Joins the cluster of SGLANG_RDT_RAY_ADDRESS, and serves all engines in SGLANG_RDT_NAMESPACE.
    sync = megatron_rdt.WeightSync(
        tiny.model_chunks, hf_config=MODEL.hf_config(), optimizer=tiny.optimizer
    )
    for _ in range(3):
        tiny.step()  # ends with optimizer.step(), and that with the sync
    sync.close()  # the engines may follow another trainer from here on


if __name__ == "__main__":
    main()
