"""One rank of an engine without its server: SGLang's own model, loader and post-load steps.

Run as ``python -m tests.families.engine_world <job.json>``, once per rank: SGLang keeps what it
knows about itself in globals, so each of them is a process. The job names families; for each of
them the rank builds the model, loads it by SGLang's own loader, has it synced to another
checkpoint by this package, and compares everything with a second model that SGLang's own loader
loaded with that checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed

from megatron_rdt.sources.block_fp8 import BlockFp8Source
from megatron_rdt.sources.generator import GeneratorSource
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.engine import live_weights
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.plan.coverage import union_of_specs
from sglang_rdt.plan.direct import make_direct_plan
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.runs import direct_runs
from sglang_rdt.plan.slices import whole
from sglang_rdt.plan.specs import (
    LOSSLESS,
    Block,
    EngineRankLayout,
    Hold,
    TensorSpec,
    TrainerRank,
)
from sglang_rdt.plan.transfers import Transfer, check_target_transfers, wanted_elements
from tests.families.zoo import FAMILIES
from tests.pure.builders import engine_rank

# Names that SGLang looks up when it imports a model, and that Intel's kernels would define.
_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "flash_attn_varlen_func",
)


# What the server wants to hear before it believes that it could run such a model.
_SERVER: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"disable_radix_cache": True},
    "gpt_oss": {"attention_backend": "triton"},
}


@dataclass
class Case:
    """One model of one job."""

    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    trainer_dtype: str = "bfloat16"
    engine_dtype: str = "bfloat16"
    server: dict[str, Any] = field(default_factory=dict)
    # Side of the blocks of a checkpoint in block FP8; 0: it is none.
    blocks: int = 0
    # Findings of tests/families/trainer_worker.py, and the job in them that says ``memory``: what
    # is synced comes out of the memory of Megatron's ranks.
    findings: str = ""
    job: str = ""

    def config(self) -> Any:
        """The HF config."""
        more: dict[str, Any] = {}
        if self.blocks:
            more["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.blocks, self.blocks],
            }
        return FAMILIES[self.family].make_config(**self.overrides, **more)

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        """A checkpoint, as the trainer yields it."""
        config = self.config()
        family, dtype = FAMILIES[self.family], torch_dtype(self.trainer_dtype)
        if not self.blocks:
            return family.hf_state(seed, dtype, config)
        plain = family.hf_state(seed, dtype, FAMILIES[self.family].make_config(**self.overrides))
        source = BlockFp8Source(
            GeneratorSource(lambda: iter(plain.items())), config.quantization_config
        )
        return dict(source.export(PhaseTimer()))

    @property
    def name(self) -> str:
        words = [self.family, *(f"{k}={v}" for k, v in self.overrides.items())]
        if (self.trainer_dtype, self.engine_dtype) != ("bfloat16", "bfloat16"):
            words.append(f"{self.trainer_dtype}->{self.engine_dtype}")
        words += [f"{k}={v}" for k, v in self.server.items()]
        words += [f"blocks={self.blocks}"] if self.blocks else []
        words += [f"from {self.job}"] if self.job else []
        return " ".join(words)


class World:
    """This process as rank ``rank`` of an engine of ``tp`` ranks."""

    def __init__(self, rank: int, tp: int, ep: int, port: int, folder: Path) -> None:
        self.rank, self.tp, self.ep, self.port, self.folder = rank, tp, ep, port, folder
        self._ready = False
        for name in _KERNELS:
            if not hasattr(torch.ops.sgl_kernel, name):
                setattr(torch.ops.sgl_kernel, name, _no_kernel)
        from sglang.srt.layers.quantization import fp8

        # On a CPU the FP8 methods want AMX, for kernels that nothing here runs.
        fp8._is_cpu = False
        fp8.scaled_fp8_quant = fp8.input_to_float8

    def build(self, case: Case) -> tuple[torch.nn.Module, Any]:
        """SGLang's model of ``case``, without weights."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
        from sglang.srt.distributed import bootstrap
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.model_executor.model_runner_components.load_model_utils import (
            build_load_config,
        )
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        from sglang_rdt.cpu import engine_kwargs

        family = FAMILIES[case.family]
        where = self.folder / f"{abs(hash(case.name))}-{self.rank}"
        config = case.config()
        config.dtype = case.engine_dtype
        config.save_pretrained(where)
        kwargs = engine_kwargs(
            str(where),
            tp_size=self.tp,
            ep_size=self.ep if family.moe else 1,
            dtype=case.engine_dtype,
            load_format="dummy",
            use_ray=False,
            **{**_SERVER.get(case.family, {}), **case.server},
        )
        args = ServerArgs(**kwargs)
        ranks = SpawnRanks(world_rank=self.rank, dp_rank=0, gpu_id=self.rank)
        publish(args, role="scheduler", ranks=ranks)
        model_config = ModelConfig.from_server_args(args)
        if not self._ready:
            bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=self.port)
            self._ready = True
        bootstrap.init_layer_runtime(model_config=model_config)
        initialize_moe_config()
        initialize_fp8_gemm_config()
        initialize_fp4_gemm_config()
        load_config = build_load_config(
            server_args=args,
            load_format="dummy",
            tp_rank=self.rank,
            remote_instance_weight_transporter_engine=None,
            remote_instance_weight_transporter_session_id="",
            draft_model_idx=None,
            weight_cache_mode="off",
            weight_cache_socket="",
        )
        # Where key-value heads do not divide by TP, a CPU engine pads all heads with zeros, and a GPU
        # engine repeats key-value heads, which is what people run. Qwen3.5 wants to have been asked.
        if case.family == "qwen3_5_moe":
            model_config = adjust_config_with_unaligned_cpu_tp(model_config, load_config, self.tp)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            quant = _get_quantization_config(model_config, load_config)
            model = _initialize_model(model_config, load_config, quant)
        for module in model.modules():
            # The same for experts.
            if hasattr(module, "use_padded_loading"):
                module.use_padded_loading = False
        return model.eval(), model_config

    def gather(self, layout: EngineRankLayout) -> list[EngineRankLayout]:
        """Those of all ranks: a plan is about an engine."""
        layouts: list[Any] = [layout] * self.tp
        if self.tp > 1:
            torch.distributed.all_gather_object(layouts, layout)
        return layouts


def _no_kernel(*_: object, **__: object) -> None:
    raise NotImplementedError("a kernel of Intel's; this machine has none")


def load(model: torch.nn.Module, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """SGLang's own loading, as an engine that starts with this checkpoint does it."""
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    with set_default_torch_dtype(dtype):
        DefaultModelLoader.load_weights_and_postprocess(
            model, iter([(n, t.clone()) for n, t in state.items()]), torch.device("cpu")
        )


def everything(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, and all tensors that modules keep in attributes."""
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}", value.detach()


def _served(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of Qwen3.5 SGLang has a class of its own for the language model, which takes its tensors
    without the prefix that they have beside a vision tower."""
    return {n.replace("model.language_model.", "model."): t for n, t in state.items()}


def specs_of(state: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in state.items()]


class _Session:
    """The part of a scheduler that a weight-update session needs: the product's own code drives it."""

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=lambda *_: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        runner = SimpleNamespace(weight_updater=updater)
        self.weight_updater = SimpleNamespace(
            begin_weight_update=None,
            _session=None,
            _select_runners=lambda selector: [("target", runner)],
        )


class Engine:
    """A model under the product's own :class:`LiveWeights` and :class:`SchedulerControl`."""

    def __init__(self, model: torch.nn.Module, rank: int, world: World) -> None:
        self.model = model
        self.control = SchedulerControl(_Session(model), f"rank {rank}", label_replies=False)
        self.weights = LiveWeights(model, f"rank {rank}")
        self.rank = engine_rank(rank, tp_size=world.tp)

    def connect(self, specs: Sequence[TensorSpec]) -> EngineRankLayout:
        """Records in an open session, in which packed weights have their loadable form."""
        self.control.refuse_unsupported_model()
        self.control.begin_session()
        recording = self.weights.record(specs)
        params = tuple(self.weights.describe())
        self.control.end_session(changed=False)
        return EngineRankLayout(self.rank, params, recording)

    def sync(self, move: Callable[[LiveWeights], None]) -> None:
        """One sync: what the rank session does between begin and commit."""
        self.control.begin_session()
        self.weights.check_addresses()
        self.weights.overwrite()
        move(self.weights)
        with self.weights.quantising():
            self.weights.apply_constants()
            self.weights.compute()
            self.control.end_session()


def bucketed(plan: Plan, state: Mapping[str, torch.Tensor]) -> Callable[[LiveWeights], None]:
    """Moves what a plan says: stages each round as the trainer's sender does, and pulls it."""

    def move(weights: LiveWeights) -> None:
        for route in plan.routes:
            for one in route.rounds:
                bucket = torch.zeros(one.nbytes, dtype=torch.uint8)
                for piece in one.pieces:
                    s, kind = piece.src, torch_dtype(piece.dtype)
                    part = torch.as_strided(state[piece.source], s.shape, s.stride, s.offset)
                    room = bucket[piece.at : piece.at + piece.nbytes].view(kind)
                    room.view(s.shape).copy_(part)
                views = [
                    bucket[t.at : t.at + t.nbytes].view(torch_dtype(t.dtype)).view(t.dst.shape)
                    for t in one.targets
                ]
                weights.pull(views, one.targets, 10.0)

    return move


def direct(
    transfers: Sequence[Transfer], blocks: Mapping[tuple[int, int], torch.Tensor]
) -> Callable[[LiveWeights], None]:
    """Moves what a direct plan says, out of the trainer's memory."""

    def move(weights: LiveWeights) -> None:
        assert weights.recording is not None
        wanted = wanted_elements(weights.recording.wants)
        check_target_transfers(weights.describe(), transfers, wanted)
        for one in transfers:
            kind, s = torch_dtype(one.src_dtype), one.src
            block = blocks[one.source, one.block].view(torch.uint8)
            block = block[: block.numel() // kind.itemsize * kind.itemsize].view(kind)
            part = torch.as_strided(block, s.shape, s.stride, s.offset)
            weights.view(one.param, one.dst).copy_(part)

    return move


@contextlib.contextmanager
def no_link() -> Iterator[None]:
    """Between processes NIXL moves the bytes; here both ends are in one."""

    def pull(
        views: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        for view, target in zip(views, targets, strict=True):
            target.copy_(view.view(target.shape))

    with (
        mock.patch.object(live_weights.nixl, "pull", pull),
        mock.patch.object(live_weights.nixl, "deregister", return_value=None),
        mock.patch.object(live_weights.nixl, "forget", return_value=None),
    ):
        yield


def differences(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Parameters, buffers and attributes of which not every byte is equal."""
    mine, theirs = dict(everything(one)), dict(everything(other))
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    return [n for n, t in mine.items() if not same_bytes(t, theirs[n])]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def run(world: World, case: Case, breakage: str = "") -> dict[str, Any]:
    """Everything about one model; what was measured.

    ``breakage``: what to do wrong, to see that it is noticed: "stale" (a tensor is not moved),
    "no compute", "no post-load".
    """
    began = time.perf_counter()
    kinds = torch_dtype(case.trainer_dtype), torch_dtype(case.engine_dtype)
    old, new = (_served(case.state(seed)) for seed in (0, 1))
    served, expected = world.build(case)[0], world.build(case)[0]
    load(served, old, kinds[1])
    load(expected, new, kinds[1])
    assert differences(served, expected), "the two checkpoints are one"
    specs = specs_of(new)
    engine = Engine(served, world.rank, world)
    layout = engine.connect(specs)
    # Connecting changes nothing.
    again = world.build(case)[0]
    load(again, old, kinds[1])
    changed = differences(served, again)
    assert not changed, f"connecting changed {changed}"
    layouts = world.gather(layout)
    pair = case.trainer_dtype, case.engine_dtype
    lossy = pair[0] != pair[1] and pair not in LOSSLESS
    # Its checkpoints keep the gated norm in float32, and SGLang does not.
    allow = {"allow_cast": lossy or case.family == "qwen3_5_moe"}
    exports = TrainerRank(0, "here", tuple(specs))
    plan = make_plan([exports], layouts, 1 << 16, **allow)
    routes = tuple(r for r in plan.routes if r.target == engine.rank)
    calls = count_post_loads(served)
    state = dict(new)
    if breakage == "stale":
        name = next(iter(state))
        state[name] = old[name]
    if breakage == "no compute":
        engine.weights.compute = lambda: None  # type: ignore[method-assign]
    if breakage == "no post-load":
        engine.control.end_session = lambda: None  # type: ignore[method-assign]
    engine.sync(bucketed(replace(plan, routes=routes), state))
    found = {"bucketed": differences(served, expected)}
    if calls is not None and not breakage:
        assert calls[0] == 1, f"{calls[0]} post-load steps in one sync"
    # And back, directly.
    blocks = {(0, i): t.contiguous().view(-1) for i, t in enumerate(old.values())}
    holds = tuple(
        Hold(s.name, whole(s.shape), i, whole(s.shape), s.dtype) for i, s in enumerate(specs)
    )
    memory = tuple(Block(s.name, s.nbytes) for s in specs)
    holder = TrainerRank(0, "here", tuple(specs), {}, memory, holds)
    plan_direct = make_direct_plan([holder], layouts, **allow)
    transfers = plan_direct.transfers(plan_direct.targets.index(engine.rank))
    in_place = [t for t in transfers if t.how == "direct"]
    if not breakage:
        engine.sync(direct(transfers, blocks))
        found["direct"] = differences(served, again)
    recording = layout.recording
    return {
        "case": case.name,
        "family": case.family,
        "different": {how: names for how, names in found.items() if names},
        "wants": len(recording.wants),
        "constants": len(recording.constants),
        "computed": [
            {"params": one.params, "sources": one.sources, "why": one.why}
            for one in recording.computed
        ],
        "transfers": len(transfers),
        "runs": len(direct_runs(in_place)) if in_place else 0,
        "how": {how: sum(t.how == how for t in transfers) for how in ("direct", "unpack", "pack")},
        "post_loads": None if calls is None else calls[0],
        "seconds": round(time.perf_counter() - began, 2),
    }


def run_from_megatron(world: World, case: Case) -> dict[str, Any]:
    """An engine that follows Megatron's ranks: out of their memory, as these describe it."""
    finding = torch.load(case.findings, weights_only=False)[case.job]
    kind = torch_dtype(case.engine_dtype)
    served, expected = world.build(case)[0], world.build(case)[0]
    load(served, _served(case.state(7)), kind)
    trained = {n: t.contiguous() for n, t in _served(finding.trained).items()}
    load(expected, trained, kind)
    ranks = [_served_rank(rank) for rank, _ in finding.ranks]
    blocks = {
        (rank.rank, i): block for rank, memory in finding.ranks for i, block in enumerate(memory)
    }
    union, problems = union_of_specs(rank.exports for rank in ranks)
    assert problems == []
    assert union.keys() == trained.keys()
    engine = Engine(served, world.rank, world)
    layouts = world.gather(engine.connect(list(union.values())))
    allow = {"allow_cast": case.family == "qwen3_5_moe"}
    plan = make_plan(ranks, layouts, 1 << 16, **allow)
    routes = tuple(r for r in plan.routes if r.target == engine.rank)
    engine.sync(bucketed(replace(plan, routes=routes), trained))
    found = {"bucketed": differences(served, expected)}
    plan_direct = make_direct_plan(ranks, layouts, **allow)
    transfers = plan_direct.transfers(plan_direct.targets.index(engine.rank))
    engine.sync(direct(transfers, blocks))
    found["direct"] = differences(served, expected)
    return {
        "case": case.name,
        "family": case.family,
        "different": {how: names for how, names in found.items() if names},
        "sources": sorted({t.source for t in transfers}),
        "transfers": len(transfers),
    }


def _served_rank(rank: TrainerRank) -> TrainerRank:
    """See :func:`_served`."""

    def name(of: str) -> str:
        return next(iter(_served({of: torch.empty(0)})))

    return replace(
        rank,
        exports=tuple(replace(spec, name=name(spec.name)) for spec in rank.exports),
        holds=tuple(replace(hold, source=name(hold.source)) for hold in rank.holds),
    )


def count_post_loads(model: torch.nn.Module) -> list[int] | None:
    """Counts the derivations of this model's weights; None: it derives none."""
    derive = getattr(model, "post_load_weights", None)
    if derive is None:
        return None
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return derive(*args, **kwargs)

    model.post_load_weights = counted  # type: ignore[assignment]
    return calls


def main(job_path: str, rank: int) -> None:
    job = json.loads(Path(job_path).read_text())
    folder = Path(job_path).parent
    world = World(rank, job["tp"], job["ep"], job["port"], folder)
    with (folder / f"result-{rank}.jsonl").open("w") as out, no_link():
        for item in job["cases"]:
            breakage = item.pop("breakage", "")
            case = Case(**item)
            try:
                result = run_from_megatron(world, case) if case.job else run(world, case, breakage)
            except Exception:
                result = {"case": case.name, "family": case.family, "error": traceback.format_exc()}
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
