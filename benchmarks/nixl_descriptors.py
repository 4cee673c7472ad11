"""What descriptors cost: raw NIXL READs between two GPUs, without Ray, SGLang or Megatron.

    python benchmarks/nixl_descriptors.py > descriptors.jsonl

Reads the pieces of Qwen3-8B (1,119 runs, 16.4 GB) and of the experts of Qwen3-30B-A3B (12,288 runs,
58 GB) from GPU 0 to GPU 1 with a prepared transfer, for several numbers of posting threads, orders of
the runs, and both kinds of progress thread. A line of JSON for each, milliseconds, medians of 7.
Without GPUs it runs at 1/64 of the widths, which measures nothing but that it works.
"""

from __future__ import annotations

import json
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

CUDA = torch.cuda.device_count() >= 2
SCALE = 1 if CUDA else 64
KIND = "cuda" if CUDA else "cpu"
ROUNDS = 7


def dense() -> list[list[int]]:
    """Bytes of the runs of each parameter of Qwen3-8B: QKV comes in 8 groups from Megatron."""
    hidden, inner, vocab, head = 4096 // SCALE, 12288 // SCALE, 151936 // SCALE, 128 // SCALE
    layer = [
        [4 * head * hidden * 2] * 8 + [head * hidden * 2] * 16,
        [hidden * 32 * head * 2],
        [2 * inner * hidden * 2],
        [inner * hidden * 2],
        [hidden * 2],
        [hidden * 2],
        [head * 2],
        [head * 2],
    ]
    return [[vocab * hidden * 2], [vocab * hidden * 2], [hidden * 2], *(layer * 36)]


def experts() -> list[list[int]]:
    """48 layers, 128 experts, gate and up in one run."""
    hidden, inner = 2048 // SCALE, 768 // SCALE
    return [[2 * inner * hidden * 2] * 128, [inner * hidden * 2] * 128] * 48


def make_agent(name: str, threads: int, split: int, quiet: bool) -> Any:
    """An agent with UCX; ``quiet``: its progress thread sleeps 100 us between two looks."""
    import nixl._api as api

    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = 100 if quiet else 0
    if quiet:
        config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
    agent.agent = api.nixlBind.nixlAgent(name, config)
    options = {"num_threads": str(threads), "split_batch_size": str(split)} if threads else {}
    agent.create_backend("UCX", options)
    return agent


def device(index: int) -> torch.device:
    """A GPU, or the CPU."""
    return torch.device("cuda", index) if CUDA else torch.device("cpu")


def source(pipe: Connection, total: int, setting: tuple[int, int, bool]) -> None:
    """Owns the memory that is read."""
    memory = torch.zeros(total, dtype=torch.uint8, device=device(0))
    agent = make_agent("source", *setting)
    agent.register_memory([(memory.data_ptr(), total, 0, "")], mem_type=KIND)
    pipe.send((agent.get_agent_metadata(), memory.data_ptr()))
    pipe.recv()


def reader(pipe: Connection, model: str, setting: tuple[int, int, bool]) -> None:
    """Reads, and prints."""
    metadata, base = pipe.recv()
    agent = make_agent("reader", *setting)
    agent.add_remote_agent(metadata)
    local, remote, nbytes, tensors, offset = [], [], [], [], 0
    for runs in MODELS[model]():
        tensor = torch.empty(sum(runs), dtype=torch.uint8, device=device(1))
        agent.register_memory([(tensor.data_ptr(), tensor.numel(), int(CUDA), "")], mem_type=KIND)
        tensors.append(tensor)
        starts = np.cumsum([0, *runs[:-1]])
        # The source has them in reverse, so that no two runs are neighbours on both sides.
        back = sum(runs) - np.cumsum(runs)
        local += (tensor.data_ptr() + starts).tolist()
        remote += (base + offset + back).tolist()
        nbytes += runs
        offset += sum(runs)
    rows = np.array([local, remote, nbytes], dtype=np.uint64)
    for order in ("smallest first", "largest first", "as they come"):
        key = {"smallest first": rows[2], "largest first": -rows[2].astype(np.int64)}.get(order)
        by = np.arange(rows.shape[1]) if key is None else np.argsort(key, kind="stable")
        one = _read(agent, rows[:, by])
        line = {"model": model, "runs": rows.shape[1], "bytes": offset, "order": order}
        line |= dict(zip(("threads", "split", "quiet"), setting, strict=True))
        print(
            json.dumps(line | one | {"gbps": round(offset / one["median_ms"] / 1e6, 1)}), flush=True
        )
    pipe.send("done")


def _read(agent: Any, rows: Any) -> dict[str, float]:
    def descriptors(at: Any, index: int) -> Any:
        table = np.stack([at, rows[2], np.full(rows.shape[1], index, np.uint64)], axis=1)
        return agent.get_xfer_descs(table, mem_type=KIND)

    handle = agent.initialize_xfer(
        "READ", descriptors(rows[0], int(CUDA)), descriptors(rows[1], 0), "source", b""
    )
    done, posted = [], []
    for _ in range(ROUNDS + 1):
        if CUDA:
            torch.cuda.synchronize(1)
        time.sleep(0.05)
        started = time.perf_counter()
        state = agent.transfer(handle)
        posted.append(time.perf_counter() - started)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        done.append(time.perf_counter() - started)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in state {state}")
    agent.release_xfer_handle(handle)
    return {
        "first_ms": round(done[0] * 1e3, 2),
        "median_ms": round(statistics.median(done[1:]) * 1e3, 2),
        "posted_ms": round(statistics.median(posted[1:]) * 1e3, 2),
    }


MODELS = {"dense": dense, "experts": experts}
SETTINGS = [(0, 0, False), (0, 0, True), (2, 256, True), (4, 128, True), (8, 128, True)]


def main() -> None:
    """Each setting in processes of its own."""
    context = mp.get_context("spawn")
    for model, shapes in MODELS.items():
        total = sum(sum(runs) for runs in shapes())
        for setting in SETTINGS:
            one, other = context.Pipe()
            ends = [
                context.Process(target=source, args=(one, total, setting)),
                context.Process(target=reader, args=(other, model, setting)),
            ]
            for end in ends:
                end.start()
            for end in reversed(ends):
                end.join(120)
                if end.is_alive():
                    end.kill()


if __name__ == "__main__":
    main()
