"""Real engines, over Ray and NIXL, synced from a user's own generator of HF tensors: they hold every
byte, and say the tokens that transformers says.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_rdt import cpu
from sglang_rdt.cpu import boot
from tests.families.cluster import running
from tests.families.zoo import FAMILIES, Family

pytest.importorskip("sglang")
pytestmark = [pytest.mark.families, pytest.mark.e2e, pytest.mark.long]

boot.activate()  # transformers imports torchvision, which may be a CUDA build

PROMPT, NEW_TOKENS = (1, 10, 20, 30, 40), 12


class Trainer:
    """One rank that has HF tensors, and no Megatron."""

    def __init__(self, address: str, states: list[dict[str, torch.Tensor]]) -> None:
        import torch.distributed as dist

        from megatron_rdt import WeightSync
        from megatron_rdt.sources import GeneratorSource
        from sglang_rdt.settings import Settings

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        self.states, self.now = states, 0
        self.sync = WeightSync(
            [],
            source=GeneratorSource(lambda: self.states[self.now].items()),
            engines=[address],
            settings=Settings(verify="equal", mode="bucketed"),
        )

    def push(self, which: int) -> int:
        self.now = which
        return self.sync.sync(f"v{which}").nbytes

    def close(self) -> None:
        self.sync.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running(__name__, cpu.environment(2)):
        yield


def save(family: Family, folder: Path, state: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    config = family.make_config()
    config.dtype = torch.float32
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def greedy(family: Family, state: dict[str, torch.Tensor]) -> list[int]:
    import transformers

    model = getattr(transformers, family.architecture).from_pretrained(
        None, config=family.make_config(), state_dict=dict(state), dtype=torch.float32
    )
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


# Not those with latent attention: SGLang's PyTorch attention on a CPU takes values as wide as keys.
@pytest.mark.parametrize("name", ["glm4_moe", "glm4", "llama3", "qwen2_5"])
def test_a_sync_reaches_the_engine(
    name: str, cluster: None, tmp_path: Path, passed: Callable[..., None]
) -> None:
    import ray

    from sglang_rdt.demo.workers import ServedEngine

    family = FAMILIES[name]
    states = [family.hf_state(seed, torch.float32) for seed in (0, 1, 2)]
    where = save(family, tmp_path / "start", states[0])
    port = 32000 + list(FAMILIES).index(name)
    served = ServedEngine(cpu.engine_kwargs(where, dtype="float32", port=port))
    trainer: Any = None
    try:
        assert served.generate(PROMPT, NEW_TOKENS)[0] == greedy(family, states[0])
        trainer = ray.remote(num_cpus=1)(Trainer).remote(served.address, states)
        for which in (1, 2):
            assert ray.get(trainer.push.remote(which), timeout=300)
            tokens, version = served.generate(PROMPT, NEW_TOKENS)
            assert version == f"v{which}"
            assert tokens == greedy(family, states[which])
    finally:
        if trainer is not None:
            ray.get(trainer.close.remote(), timeout=60)
            ray.kill(trainer)
        served.shutdown()
    passed(family=name, engine="TP 1, served", bridge="generator", mode="bucketed", dtype="float32")
