"""How long planning a direct sync of a Kimi-K2-shaped model takes, and how much memory.

``python -m tests.pure.scale``: 61 layers, 384 experts, 256 trainer ranks, 16 engines of 8 ranks.
Making the specs of both sides is not counted.
"""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.slices import Slice, whole
from sglang_rdt.plan.specs import (
    Block,
    EngineRankLayout,
    Hold,
    ParamSpec,
    Recording,
    TensorSpec,
    TrainerRank,
    Want,
)

from .builders import engine_rank, rect

BF16 = "bfloat16"


@dataclass(frozen=True)
class Size:
    """A model of MLA attention and experts, and how both sides are cut."""

    layers: int = 61
    experts: int = 384
    hidden: int = 7168
    expert: int = 2048
    heads: int = 64
    vocab: int = 163840
    trainers: int = 256
    pp: int = 8
    tp: int = 8
    ep: int = 16
    engines: int = 16
    engine_tp: int = 8

    def tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """HF tensors of one layer but for its experts."""
        h, n = self.hidden, f"model.layers.{layer}"
        return {
            f"{n}.input_layernorm": (h,),
            f"{n}.post_attention_layernorm": (h,),
            f"{n}.q_a_proj": (1536, h),
            f"{n}.q_a_layernorm": (1536,),
            f"{n}.q_b_proj": (self.heads * 192, 1536),
            f"{n}.kv_a_proj": (576, h),
            f"{n}.kv_a_layernorm": (512,),
            f"{n}.kv_b_proj": (self.heads * 256, 512),
            f"{n}.o_proj": (h, self.heads * 128),
            f"{n}.router": (self.experts, h),
            f"{n}.shared.gate": (self.expert, h),
            f"{n}.shared.up": (self.expert, h),
            f"{n}.shared.down": (h, self.expert),
        }

    def stage(self, layer: int) -> int:
        """Pipeline stage of a layer."""
        return layer * self.pp // self.layers


# The dimension by which tensor parallelism cuts.
CUTS = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "gate": 0, "up": 0, "down": 1, "embed": 0}


def shard(shape: tuple[int, ...], dim: int | None, rank: int, size: int) -> tuple[Slice, tuple]:
    """The HF slice of one tensor parallel rank, and its shape."""
    if dim is None:
        return whole(shape), shape
    step = shape[dim] // size
    bounds = [(0, n) for n in shape]
    bounds[dim] = (step * rank, step * (rank + 1))
    return rect(shape, *bounds), tuple(b - a for a, b in bounds)


class Buffer:
    """A rank's parameters, one behind the other."""

    def __init__(self) -> None:
        self.holds: list[Hold] = []
        self.numel = 0

    def add(self, name: str, hf: Slice, shape: tuple[int, ...]) -> None:
        """A parameter that is the slice ``hf`` of an HF tensor."""
        local = Slice(self.numel, shape, whole(shape).stride)
        self.holds.append(Hold(name, hf, 0, local, BF16))
        self.numel += local.numel


def trainers(size: Size) -> list[TrainerRank]:
    """Megatron's cut: TP for the attention, EP for the experts, replicas for the rest."""
    stages: list[dict[str, tuple[int, ...]]] = [{} for _ in range(size.pp)]
    experts: list[list[int]] = [[] for _ in range(size.pp)]
    for layer in range(size.layers):
        stages[size.stage(layer)].update(size.tensors(layer))
        experts[size.stage(layer)].append(layer)
    stages[0]["embed"] = (size.vocab, size.hidden)
    stages[-1]["lm_head.embed"] = (size.vocab, size.hidden)
    per_stage = size.trainers // size.pp
    up, down = (size.expert, size.hidden), (size.hidden, size.expert)
    out = []
    for rank in range(size.trainers):
        stage, inner = divmod(rank, per_stage)
        exports = [TensorSpec(n, s, BF16) for n, s in stages[stage].items()]
        buffer = Buffer()
        for name, shape in stages[stage].items():
            dim = CUTS.get(name.rsplit(".", 1)[-1])
            buffer.add(name, *shard(shape, dim, inner % size.tp, size.tp))
        for layer in experts[stage]:
            for e in range(size.experts):
                n = f"model.layers.{layer}.experts.{e}"
                here = e * size.ep // size.experts == inner % size.ep
                for kind, shape in (("gate", up), ("up", up), ("down", down)):
                    exports.append(TensorSpec(f"{n}.{kind}", shape, BF16))
                    if here:
                        buffer.add(f"{n}.{kind}", whole(shape), shape)
        block = Block("buffer", 2 * buffer.numel)
        holds = tuple(buffer.holds)
        out.append(TrainerRank(rank, f"t{rank // 8}", tuple(exports), {}, (block,), holds))
    return out


def engines(size: Size) -> list[EngineRankLayout]:
    """SGLang's cut: TP for the attention, whole experts on each rank, fused w13."""
    return [
        engine(size, number, rank)
        for number in range(size.engines)
        for rank in range(size.engine_tp)
    ]


def engine(size: Size, number: int, rank: int) -> EngineRankLayout:
    """One engine rank, all of its objects its own."""
    params, wants = [], []

    def param(name: str, shape: tuple[int, ...]) -> None:
        storage = (number * 1000 + rank) * 1_000_000 + len(params)
        params.append(ParamSpec(name, shape, whole(shape).stride, BF16, storage, 0))

    names = {"embed": (size.vocab, size.hidden), "lm_head.embed": (size.vocab, size.hidden)}
    for layer in range(size.layers):
        names |= size.tensors(layer)
    for name, shape in names.items():
        hf, mine = shard(shape, CUTS.get(name.rsplit(".", 1)[-1]), rank, size.engine_tp)
        param(name, mine)
        wants.append(Want(name, whole(mine), name, hf))
    each = size.experts // size.engine_tp
    up, down = (size.expert, size.hidden), (size.hidden, size.expert)
    for layer in range(size.layers):
        n = f"model.layers.{layer}.experts"
        param(f"{n}.w13", (each, 2 * size.expert, size.hidden))
        param(f"{n}.w2", (each, *down))
        for i in range(each):
            hf, first = f"{n}.{each * rank + i}", 2 * i * size.expert * size.hidden
            for k, kind in enumerate(("gate", "up")):
                dst = Slice(first + k * size.expert * size.hidden, up, whole(up).stride)
                wants.append(Want(f"{n}.w13", dst, f"{hf}.{kind}", whole(up)))
            dst = Slice(i * size.expert * size.hidden, down, whole(down).stride)
            wants.append(Want(f"{n}.w2", dst, f"{hf}.down", whole(down)))
    where = engine_rank(rank, engine=f"e{number}", node=f"e{number}", tp_size=size.engine_tp)
    return EngineRankLayout(where, tuple(params), Recording(tuple(wants)))


def report(plan: DirectPlan, ranks: Sequence[TrainerRank]) -> None:
    """Prints what one wants to know of a plan."""
    sources = [len(plan.sources_of(i)) for i in range(len(plan.targets))]
    print(f"{plan.nbytes / 1e12:.2f} TB, staged {plan.staged_bytes}")
    print(f"egress {plan.egress.min() / 1e9:.2f} to {plan.egress.max() / 1e9:.2f} GB")
    print(f"sources of a target: {min(sources)} to {max(sources)}")
    begin = time.perf_counter()
    data = pickle.dumps(plan)
    print(f"pickled: {len(data) / 1e6:.1f} MB in {time.perf_counter() - begin:.2f} s")
    begin = time.perf_counter()
    count = len(plan.transfers(0))
    print(f"transfers(0): {count} in {time.perf_counter() - begin:.3f} s")
    begin = time.perf_counter()
    count = len(plan.transfers_from(ranks[0].rank))
    print(f"transfers_from(0): {count} in {time.perf_counter() - begin:.3f} s")


def main() -> None:
    """Builds, plans, reports."""
    size = Size()
    begin = time.perf_counter()
    ranks, layouts = trainers(size), engines(size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"built in {time.perf_counter() - begin:.1f} s, {memory} MiB")
    print(f"{sum(len(t.exports) for t in ranks)} exports, {sum(len(t.holds) for t in ranks)} holds")
    print(f"{len(layouts[0].recording.wants)} wants a rank")
    begin = time.perf_counter()
    cpu = time.process_time()
    plan = make_direct_plan(ranks, layouts)
    cpu = time.process_time() - cpu
    seconds = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"planned in {seconds:.2f} s ({cpu:.2f} s of CPU), {memory} MiB with the specs")
    report(plan, ranks)


if __name__ == "__main__":
    main()
