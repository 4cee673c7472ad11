"""Bucketed weight sync between two GPUs of one host: real SGLang, real Megatron-core, real NIXL.

    python benchmarks/bench_gpu_sync.py --case small --out small.json
    python benchmarks/bench_gpu_sync.py --case qwen3-8b --out qwen3-8b.json

``small`` trains with Megatron's optimizer and compares every engine parameter with a checkpoint
that is put together without any bridge. ``qwen3-8b`` builds the Qwen3-8B shape in Megatron-core
without an optimizer and times syncs for several bucket sizes, beside the raw peer copy of the same
number of bytes in the same run. Trainer on one GPU, TP 1 engine on the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_rdt.demo import proof
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, free_port
from sglang_rdt.settings import Settings

SMALL = TinyModel(
    "dense",
    num_layers=4,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    vocab=8192,
)
QWEN3_8B = TinyModel(
    "dense",
    num_layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    vocab=151936,
)
ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.5,
    "random_seed": 0,
    "log_level": "error",
    "port": 30400,
}
NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class GpuTrainer:
    """One Megatron rank on the GPU that Ray gave it."""

    def __init__(self, model: TinyModel, optimizer: bool) -> None:
        import logging

        logging.basicConfig(level=logging.WARNING)
        import ray
        import torch

        import megatron_rdt  # noqa: F401
        from sglang_rdt.demo.trainer import TinyTrainer, init_distributed

        torch.cuda.set_device(int(ray.get_gpu_ids()[0]))
        init_distributed(0, 1, "127.0.0.1", free_port(), backend="cpu:gloo,cuda:nccl")
        self.model = model
        if optimizer:
            self.trainer = TinyTrainer(model, Layout(), device="cuda", seed=3)
            self.chunks = self.trainer.model_chunks
        else:
            self.chunks = [bare_model(model)]
        self.sync: Any = None

    def attach(self, settings: Settings, engine: str) -> float:
        """Connects; seconds."""
        from megatron_rdt import WeightSync

        if self.sync is not None:
            self.sync.close()
        started = time.perf_counter()
        self.sync = WeightSync(
            self.chunks, hf_config=self.model.hf_config(), engines=[engine], settings=settings
        )
        self.sync.connect()
        return time.perf_counter() - started

    def step(self) -> dict[str, Any]:
        """One optimizer step."""
        return self.trainer.step()

    def weights(self) -> dict[str, Any]:
        """HF tensors on the CPU, put together without a bridge."""
        return {n: t.cpu() for n, t in self.trainer.reference_hf_state().items()}

    def run(self, version: str) -> Any:
        """One sync; its report."""
        return self.sync.sync(version)

    def change(self, seed: int) -> None:
        """Other values in every parameter, without an optimizer."""
        import torch

        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad():
            for chunk in self.chunks:
                for p in chunk.parameters():
                    p.normal_(generator=generator)
        torch.cuda.synchronize()

    def peer_copy(self, nbytes: int) -> list[float]:
        """Seconds of one copy of ``nbytes`` to the other GPU, five times."""
        import torch

        here = torch.cuda.current_device()
        a = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{here}")
        b = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{1 - here}")
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            started = time.perf_counter()
            b.copy_(a)
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            seconds.append(time.perf_counter() - started)
        del a, b
        torch.cuda.empty_cache()
        return seconds[1:]

    def memory(self) -> tuple[int, int]:
        """(allocated, staging) bytes."""
        import torch

        return torch.cuda.memory_allocated(), self.sync.staging_bytes


def bare_model(model: TinyModel) -> Any:
    """A Megatron GPTModel on the current GPU, no optimizer, no DDP."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from sglang_rdt.demo import trainer

    trainer._init_model_parallel(Layout(), 0)
    config = dataclasses.replace(
        trainer._transformer_config(model, Layout(), torch.bfloat16),
        use_cpu_initialization=False,
        perform_initialization=False,
    )
    return (
        GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                qk_layernorm=True, normalization="RMSNorm"
            ),
            vocab_size=model.vocab,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        .cuda()
        .to(torch.bfloat16)
    )  # norms are built in float32; Float16Module converts them


def summary(reports: list[Any]) -> dict[str, Any]:
    """Medians over syncs, in ms."""
    phases = sorted({p for r in reports for p in r.phases})
    return {
        "syncs": len(reports),
        "nbytes": reports[0].nbytes,
        "total_ms": round(statistics.median(r.seconds for r in reports) * 1e3, 2),
        "min_ms": round(min(r.seconds for r in reports) * 1e3, 2),
        "max_ms": round(max(r.seconds for r in reports) * 1e3, 2),
        "phases_ms": {
            p: round(statistics.median(r.phases.get(p, 0.0) for r in reports) * 1e3, 2)
            for p in phases
        },
    }


def small(get: Any, trainer: Any, folder: Path) -> dict[str, Any]:
    """Trains, syncs and compares every bit."""
    SMALL.save_random_checkpoint(folder, seed=1)
    served = ServedEngine({**ENGINE, "model_path": str(folder), "tp_size": 1}, environ=NOSET)
    try:
        connect = get(trainer.attach.remote(Settings(verify="equal"), served.address))
        rows = []
        for i in range(3):
            numbers = get(trainer.step.remote())
            report = get(trainer.run.remote(f"v{i}"))
            state = get(trainer.weights.remote())
            compared, differences = proof.unequal_parameters(SMALL, state, served.weights())
            print(report.line(), numbers, compared, differences, flush=True)
            rows.append({"compared": compared, "differences": differences, "line": report.line()})
        tokens, version = served.generate(proof.PROMPT, proof.NEW_TOKENS)
        SMALL.save_checkpoint(folder / "end", state)
        wrong = proof.same_tokens(SMALL, folder / "end", tokens, 2.0**-6)
        print("tokens", tokens, "label", version, "wrong", wrong, flush=True)
        return {"connect_s": connect, "steps": rows, "label": version, "tokens_wrong": wrong}
    finally:
        served.shutdown()


def large(get: Any, trainer: Any, folder: Path, buckets: list[int], syncs: int) -> dict[str, Any]:
    """Times syncs of the Qwen3-8B shape."""
    QWEN3_8B.hf_config().save_pretrained(folder)
    kwargs = {
        **ENGINE,
        "model_path": str(folder),
        "tp_size": 1,
        "load_format": "dummy",
        "dtype": "bfloat16",
    }
    served = ServedEngine(kwargs, environ=NOSET)
    result: dict[str, Any] = {"buckets": {}}
    try:
        for mib in buckets:
            settings = Settings(bucket_bytes=mib << 20, verify="off")
            connect = get(trainer.attach.remote(settings, served.address))
            reports = []
            for i in range(syncs + 2):
                get(trainer.change.remote(i))
                reports.append(get(trainer.run.remote(f"{mib}-{i}")))
            row = {
                "connect_s": round(connect, 2),
                "first_ms": reports[0].seconds * 1e3,
                **summary(reports[2:]),
            }
            row["memory"] = get(trainer.memory.remote())
            result["buckets"][f"{mib} MiB"] = row
            print(mib, "MiB", json.dumps(row), flush=True)
        for verify in ("checksum", "equal"):
            settings = Settings(bucket_bytes=buckets[-1] << 20, verify=verify)
            get(trainer.attach.remote(settings, served.address))
            reports = [get(trainer.run.remote(f"{verify}-{i}")) for i in range(3)]
            result[verify] = summary(reports[1:])
            print(verify, json.dumps(result[verify]), flush=True)
        nbytes = reports[0].nbytes
        result["peer_copy_ms"] = [round(s * 1e3, 2) for s in get(trainer.peer_copy.remote(nbytes))]
        print("peer copy ms", result["peer_copy_ms"], flush=True)
        return result
    finally:
        served.shutdown()


def main() -> None:
    """Runs one case and writes its JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["small", "qwen3-8b"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--buckets", default="512,2048,16640", help="MiB, comma-separated")
    parser.add_argument("--syncs", type=int, default=10)
    args = parser.parse_args()
    os.environ.update(NOSET)
    import logging

    import ray
    import torch

    ray.init(
        num_cpus=8,
        num_gpus=2,
        namespace="bench",
        include_dashboard=False,
        logging_level=logging.ERROR,
    )

    def get(ref: Any) -> Any:
        return ray.get(ref, timeout=400)

    kind = ray.remote(
        num_cpus=0, num_gpus=1, enable_tensor_transport=True, runtime_env={"env_vars": NOSET}
    )
    trainer = kind(GpuTrainer).remote(
        SMALL if args.case == "small" else QWEN3_8B, args.case == "small"
    )
    get(trainer.__ray_ready__.remote())
    print("trainer is there", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.case == "small":
            result = small(get, trainer, Path(folder))
        else:
            buckets = [int(b) for b in args.buckets.split(",")]
            result = large(get, trainer, Path(folder), buckets, args.syncs)
    result["command"] = " ".join(sys.argv)
    result["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    result["gpu"] = torch.cuda.get_device_name(0)
    result["torch"] = torch.__version__
    args.out.write_text(json.dumps(result, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
