"""Families in real engines on a GPU, where SGLang has a forward for all of them.

Megatron has one GPU, and the engine that is synced the other. Beside the trainer runs an engine that
SGLang itself started from a checkpoint of the same weights: everything that the two models hold is
equal, and so is every log-probability that they give, in every bit. Megatron's own forward judges
both.

pytest tests/families/test_served_on_gpu.py -m gpu
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_rdt.bench.trainer import NOSET
from tests.families.cluster import running
from tests.families.zoo import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.families,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Heads as kernels want them; everything else stays tiny. SGLang 0.5.16 takes a kernel for latent
# attention by how its weights look before they are quantised, if rows are multiples of 256: 640, 192.
_DENSE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 128}
_EXPERTS = {"moe_intermediate_size": 256}
_MLA = {
    "hidden_size": 640,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **_EXPERTS,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5": {k: v for k, v in _DENSE.items() if k != "head_dim"},
    "qwen3": _DENSE,
    "qwen3_moe": {**_DENSE, **_EXPERTS, "num_experts": 8},
    "llama3": _DENSE,
    "glm4": _DENSE,
    "glm4_moe": {**_DENSE, **_EXPERTS, "n_routed_experts": 8},
    "glm4_moe_lite": {**_MLA, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "deepseek_v3": {**_MLA, "n_routed_experts": 16, "num_experts_per_tok": 4},
    "qwen3_5_moe": {
        "hidden_size": 512,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 8,
        "shared_expert_intermediate_size": 256,
        **_EXPERTS,
    },
    "gpt_oss": {**_DENSE, "head_dim": 64, "num_local_experts": 8},
}
ENGINE: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "skip_tokenizer_init": True,
    "enable_multimodal": False,
    "mem_fraction_static": 0.4,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "context_length": 512,
    "random_seed": 0,
    "log_level": "error",
    "dtype": "bfloat16",
}
MORE: dict[str, dict[str, Any]] = {"qwen3_5_moe": {"max_mamba_cache_size": 16}}
# Qwen3.5's engine has a vision tower beside what Megatron trains.
KEEP = {"qwen3_5_moe": ("visual.*",)}
PROMPT, NEW_TOKENS = tuple(range(3, 3 + 7 * 40, 7)), 16
FIRST, SECOND = 11, 12  # seeds
TIMEOUT_S = 300.0


class Trainer:
    """Megatron on the GPU that the synced engine does not have, and its WeightSync."""

    def __init__(self, name: str) -> None:
        from megatron_rdt import WeightSync

        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        self.name = name
        self.sync: WeightSync | None = None

    def build(self, gpu: int | None) -> None:
        """The model, with what :func:`second` says; None: on a CPU."""
        from sglang_rdt.demo.trainer import Layout, init_distributed
        from sglang_rdt.demo.workers import free_port
        from tests.families.megatron_models import FamilyTrainer

        if gpu is not None:
            torch.cuda.set_device(gpu)
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        init_distributed(0, 1, "127.0.0.1", free_port(), backend=backend)
        self.megatron = FamilyTrainer(
            self.name,
            Layout(),
            dtype=torch.bfloat16,
            device="cpu" if gpu is None else "cuda",
            seed=SECOND,
            **SIZES[self.name],
        )

    def attach(self, address: str, mode: Any) -> str:
        from megatron_rdt import WeightSync
        from sglang_rdt.settings import Settings

        self.detach()
        self.sync = WeightSync(
            self.megatron.model_chunks,
            hf_config=self.megatron.hf_config,
            engines=[address],
            settings=Settings(verify="equal", mode=mode, phase_timeout_s=120.0),
            keep=KEEP.get(self.name),
        )
        return str(self.sync.connect().mode)

    def detach(self) -> None:
        if self.sync is not None:
            self.sync.close()
            self.sync = None

    def train(self) -> float:
        return float(self.megatron.step()["loss"])

    def push(self, version: str) -> str:
        assert self.sync is not None
        return str(self.sync.sync(version).line())

    def log_probabilities(self, ids: tuple[int, ...]) -> list[float]:
        """Of each token after the first, by Megatron's own forward."""
        logits = self.megatron.logits(torch.tensor([ids]))[0]
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        return [float(x) for x in found[:, 0]]


def save(name: str, state: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint that SGLang starts from."""
    from safetensors.torch import save_file

    from tests.families.megatron_models import hf_config

    config = hf_config(name, **SIZES[name])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    if name == "qwen3_5_moe":
        _beside_a_tower(folder)
    return folder


def _beside_a_tower(folder: Path) -> None:
    path = folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    vision = {
        "depth": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }
    text.update(architectures=None)
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps(whole), encoding="utf-8")


def log_probabilities(host: Any, ids: list[int], count: int) -> tuple[list[Any], list[Any], str]:
    """Of the prompt's tokens after the first and of ``count`` greedy ones, exactly; and the label."""
    reply = host.engine.generate(
        input_ids=[ids],
        sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )[0]
    meta = reply["meta_info"]
    prompt = [one[0] for one in meta["input_token_logprobs"]][1:]
    return prompt, [one[:2] for one in meta["output_token_logprobs"]], meta["weight_version"]


@pytest.fixture
def cluster() -> Iterator[None]:
    with running(__name__, NOSET):
        yield


def start(folder: Path, name: str, fp8: bool) -> Any:
    from sglang_rdt.demo.workers import ServedEngine, free_port

    kwargs = {**ENGINE, **MORE.get(name, {}), "model_path": str(folder), "port": free_port()}
    if fp8:
        kwargs["quantization"] = "fp8"
    return ServedEngine(kwargs, environ=NOSET, timeout_s=TIMEOUT_S)


def gpu_of(engine: Any) -> int:
    import ray

    asked = engine.engine.actors[0].__ray_call__.remote(lambda _: ray.get_gpu_ids())
    return int(ray.get(asked, timeout=TIMEOUT_S)[0])


def digests(actor: Any) -> dict[str, str]:
    """Of everything that the model's modules hold: parameters, buffers, and tensors in attributes,
    such as what is derived of weights. The tower is nobody's."""
    import hashlib

    found = {}
    for prefix, module in actor._session.weights._model.named_modules():
        if prefix.startswith("visual"):
            continue
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    held = value.detach().contiguous().flatten().view(torch.uint8).cpu()
                    found[f"{prefix}.{name}"] = hashlib.sha256(held.numpy().tobytes()).hexdigest()
    return found


def held_by(engine: Any) -> dict[str, str]:
    import ray

    asked = engine.engine.actors[0].__ray_call__.remote(digests)
    return dict(ray.get(asked, timeout=TIMEOUT_S))


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))


CASES = [(name, False) for name in FAMILIES] + [
    (name, True) for name in ("qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe_lite")
]


@pytest.mark.parametrize(
    ("name", "fp8"), CASES, ids=[f"{n}-fp8" if q else f"{n}-bf16" for n, q in CASES]
)
def test_the_engine_says_what_one_started_from_the_checkpoint_says(
    name: str, fp8: bool, cluster: None, tmp_path: Path, passed: Callable[..., None]
) -> None:
    import ray

    from megatron_rdt.sources.families import MODEL_TYPES
    from tests.families.megatron_models import hf_config, hf_state

    ids = list(PROMPT)
    folders = []
    for seed in (FIRST, SECOND):
        state = hf_state(name, torch.bfloat16, seed=seed, **SIZES[name])
        folders.append(save(name, state, tmp_path / str(seed)))
    trainer = ray.remote(num_cpus=1, enable_tensor_transport=True)(Trainer).remote(name)

    def of(method: str, *args: Any) -> Any:
        return ray.get(getattr(trainer, method).remote(*args), timeout=TIMEOUT_S)

    def said_by(engine: Any) -> Any:
        asked = engine.host.call.remote(log_probabilities, ids, NEW_TOKENS)
        return ray.get(asked, timeout=TIMEOUT_S)

    served, fresh = None, None
    try:
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(start, folder, name, fp8) for folder in folders]
            served, fresh = [one.result() for one in starting]
        of("build", 1 - gpu_of(served) if torch.cuda.is_available() else None)
        with ThreadPoolExecutor() as pool:  # kernels are compiled
            before, right = pool.map(said_by, (served, fresh))
        assert right[:2] != before[:2]
        live = held_by(fresh)
        assert differing(held_by(served), live)
        for mode in ("bucketed", "direct"):
            assert of("attach", served.address, mode) == mode
            # Twice: what is computed from weights must not be computed from its own result.
            for version in (f"{mode} 1", f"{mode} 2"):
                print(name, fp8, of("push", version), flush=True)
                now = said_by(served)
                assert now[2] == version
                assert differing(held_by(served), live) == []
                assert now[:2] == right[:2], mode
        # And real steps, so that something moves in direct mode, too.
        print(name, "loss", of("train"), of("push", "trained"), flush=True)
        after = said_by(served)
        assert after[:2] != right[:2]
        theirs = of("log_probabilities", PROMPT)
        off = sorted(abs(a - b) for a, b in zip(after[0], theirs, strict=True))
        print(name, fp8, "off Megatron's by", off[len(off) // 2], "at most", off[-1], flush=True)
        spread = sorted(abs(a - b) for a, b in zip(before[0], theirs, strict=True))
        # Rounding differs, and a router may choose another expert; another model is far away.
        assert 4 * off[len(off) // 2] < spread[len(spread) // 2], (off, spread)
    finally:
        for engine in (served, fresh):
            if engine is not None:
                engine.shutdown()
        ray.kill(trainer)
    passed(
        family=name,
        trainer="one rank, on a GPU",
        engine="TP 1, served on a GPU",
        bridge="ours for mbridge" if hf_config(name).model_type in MODEL_TYPES else "mbridge",
        mode="both",
        dtype="bfloat16",
        fp8="fp8" if fp8 else "",
    )
