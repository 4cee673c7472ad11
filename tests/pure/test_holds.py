"""Holds of all ranks put together against what mbridge makes of the same parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_rdt.sources.holds import Holdings, check_plain
from megatron_rdt.sources.mbridge import MBridgeSource
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.errors import ExportError
from sglang_rdt.plan import slices
from sglang_rdt.plan.slices import Slice, whole
from sglang_rdt.plan.specs import Block, Hold

pytest.importorskip("mbridge")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, EXPERT_WIDTH, EXPERTS = 32, 8, 4, 8, 48, 16, 4
Shape = tuple[int, ...]


# Whole Megatron parameters: TE name with global layer and expert numbers -> shape, and the
# dimension that is split over TP (ETP), or None.

Weights = dict[str, tuple[Shape, int | None]]


def attention(layer: int, *, bias: bool = False, norms: bool = True) -> Weights:
    at = f"decoder.layers.{layer}.self_attention."
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    weights: Weights = {
        f"{at}linear_qkv.layer_norm_weight": ((HIDDEN,), None),
        f"{at}linear_qkv.weight": ((rows, HIDDEN), 0),
        f"{at}linear_proj.weight": ((HIDDEN, HEADS * HEAD_DIM), 1),
    }
    if bias:
        weights[f"{at}linear_qkv.bias"] = ((rows,), 0)
    if norms:
        weights[f"{at}q_layernorm.weight"] = ((HEAD_DIM,), None)
        weights[f"{at}k_layernorm.weight"] = ((HEAD_DIM,), None)
    return weights


def latent_attention(layer: int) -> Weights:
    at = f"decoder.layers.{layer}.self_attention."
    return {
        f"decoder.layers.{layer}.input_layernorm.weight": ((HIDDEN,), None),
        f"{at}linear_q_down_proj.weight": ((12, HIDDEN), None),
        f"{at}linear_q_up_proj.layer_norm_weight": ((12,), None),
        f"{at}linear_q_up_proj.weight": ((HEADS * 12, 12), 0),
        f"{at}linear_kv_down_proj.weight": ((20, HIDDEN), None),
        f"{at}linear_kv_up_proj.layer_norm_weight": ((16,), None),
        f"{at}linear_kv_up_proj.weight": ((HEADS * 16, 16), 0),
        f"{at}linear_proj.weight": ((HIDDEN, HEADS * 8), 1),
    }


def dense_mlp(layer: int) -> Weights:
    at = f"decoder.layers.{layer}.mlp."
    return {
        f"{at}linear_fc1.layer_norm_weight": ((HIDDEN,), None),
        f"{at}linear_fc1.weight": ((2 * WIDTH, HIDDEN), 0),
        f"{at}linear_fc2.weight": ((HIDDEN, WIDTH), 1),
    }


def moe_mlp(layer: int, *, shared: bool = False, bias: bool = False) -> Weights:
    at = f"decoder.layers.{layer}."
    weights: Weights = {
        f"{at}pre_mlp_layernorm.weight": ((HIDDEN,), None),
        f"{at}mlp.router.weight": ((EXPERTS, HIDDEN), None),
    }
    if bias:
        weights[f"{at}mlp.router.expert_bias"] = ((EXPERTS,), None)
    if shared:
        weights[f"{at}mlp.shared_experts.linear_fc1.weight"] = ((2 * EXPERT_WIDTH, HIDDEN), 0)
        weights[f"{at}mlp.shared_experts.linear_fc2.weight"] = ((HIDDEN, EXPERT_WIDTH), 1)
    for expert in range(EXPERTS):
        weights[f"{at}mlp.experts.linear_fc1.weight{expert}"] = ((2 * EXPERT_WIDTH, HIDDEN), 0)
        weights[f"{at}mlp.experts.linear_fc2.weight{expert}"] = ((HIDDEN, EXPERT_WIDTH), 1)
    return weights


@dataclass
class Job:
    """A model on all ranks of a trainer, every parameter random."""

    model_type: str
    layers: list[Weights]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1  # virtual pipeline stages per rank
    vocab: int = 64
    padded_vocab: int = 64
    tied: bool = False
    sequential: bool = False  # experts as modules of their own
    buffers: bool = True  # parameters in one buffer, as Megatron's DDP has them
    moe: bool = False
    latent: bool = False  # multi-head latent attention
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.whole = dict(self._random())
        self.ranks = [
            (pp, r % self.tp, r // self.etp % self.ep, r % self.etp)
            for pp in range(self.pp)
            for r in range(max(self.tp, self.ep * self.etp))
        ]
        self.sources = [self._source(*rank) for rank in self.ranks]

    def _weights(self) -> Weights:
        weights: Weights = {"embedding.word_embeddings.weight": ((self.padded_vocab, HIDDEN), 0)}
        for layer in self.layers:
            weights |= layer
        weights["decoder.final_layernorm.weight"] = ((HIDDEN,), None)
        if not self.tied or self.pp > 1:
            weights["output_layer.weight"] = ((self.padded_vocab, HIDDEN), 0)
        return weights

    def _random(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, (shape, _) in self._weights().items():
            dtype = torch.float32 if name.endswith("expert_bias") else torch.bfloat16
            bits = torch.randint(0, 1 << 15, shape, generator=generator)
            yield name, bits.to(torch.int16).view(torch.bfloat16).to(dtype)

    def hf_config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.for_model(
            self.model_type,
            vocab_size=self.vocab,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_hidden_layers=len(self.layers),
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            tie_word_embeddings=self.tied,
            moe_intermediate_size=EXPERT_WIDTH,
            **self.config,
        )
        config.rope_theta = 10000.0  # transformers 5 has it elsewhere; mbridge looks here
        return config

    def bridge(self, pp: int = 0, tp: int = 0, ep: int = 0, etp: int = 0, **sizes: int) -> Any:
        from mbridge.core.bridge import _MODEL_REGISTRY
        from mbridge.core.parallel_states import ParallelStates

        sizes = sizes or {
            "tp_size": self.tp,
            "pp_size": self.pp,
            "ep_size": self.ep,
            "etp_size": self.etp,
        }
        states = ParallelStates(
            tp_rank=tp, pp_rank=pp, ep_rank=ep, etp_rank=etp, vpp_size=None, **sizes
        )
        known = _MODEL_REGISTRY[self.model_type]
        own = type(known.__name__, (known,), {"_DIRECT_MAPPING": dict(known._DIRECT_MAPPING)})
        if self.model_type == "deepseek_v3":
            # mbridge 0.15.1 cannot make this one's config with megatron-core 0.16.
            own._build_config = lambda _: SimpleNamespace(
                gated_linear_unit=True, mtp_num_layers=None, num_layers=len(self.layers)
            )
        return own(self.hf_config(), dtype=torch.bfloat16, parallel_states=states)

    def _source(self, pp: int, tp: int, ep: int, etp: int) -> MBridgeSource:
        bridge = self.bridge(pp, tp, ep, etp)
        models = [self._model(pp + i * self.pp, tp, ep, etp) for i in range(self.chunks)]
        return MBridgeSource(models, self.hf_config(), bridge=bridge)

    def _model(self, stage: int, tp: int, ep: int, etp: int) -> nn.Module:
        """What one (virtual) stage has on one rank, in modules named as Megatron names them."""
        splitter = self.bridge(tp_size=1)
        stages = self.pp * self.chunks
        per_stage = len(self.layers) // stages
        first = stage * per_stage
        root = nn.Module()
        root.config = SimpleNamespace(  # type: ignore[assignment]
            num_moe_experts=EXPERTS if self.moe else None, multi_latent_attention=self.latent
        )
        found: list[tuple[str, torch.Tensor, int | None]] = []
        for name, (shape, dim) in self._weights().items():
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            expert = re.search(r"experts\.(linear_fc[12])\.weight(\d+)$", name)
            if layer:
                if not first <= int(layer[1]) < first + per_stage:
                    continue
            elif stage != (0 if name.startswith("embedding") else stages - 1):
                continue
            size, rank = (self.etp, etp) if expert else (self.tp, tp)
            value = self.whole[name]
            if dim is not None:
                stub = SimpleNamespace(shape=_replace(shape, dim, shape[dim] // size))
                value = splitter._weight_split_across_tp(name, value, stub, size)[rank]
            if layer:
                name = name.replace(f"layers.{layer[1]}.", f"layers.{int(layer[1]) - first}.", 1)
            if expert:
                here = EXPERTS // self.ep
                if not ep * here <= int(expert[2]) < (ep + 1) * here:
                    continue
                number = int(expert[2]) - ep * here
                spelled = (
                    f"local_experts.{number}.{expert[1]}.weight"
                    if self.sequential
                    else f"{expert[1]}.weight{number}"
                )
                name = name[: expert.start()] + f"experts.{spelled}"
            found.append((name, value, dim))
        memory = _Memory(found) if self.buffers else None
        for name, value, dim in found:
            live = memory.take(value) if memory else value.clone()
            _put(root, name, live, dim)
        layers = list(root.decoder.layers.children()) if hasattr(root, "decoder") else []
        for i, module in enumerate(layers):
            module.layer_number = first + i + 1  # type: ignore[assignment]
        root.decoder.layers = nn.ModuleList(layers)
        return root

    def expected(self) -> dict[str, torch.Tensor]:
        """HF tensors of the whole parameters, by mbridge alone."""
        bridge = self.bridge(tp_size=1)
        bridge.make_vocab_size_divisible_by = bridge.padded_vocab_size = self.padded_vocab
        bridge.vocab_size = self.vocab
        out = {}
        for name, value in self.whole.items():
            if not (self.tied and name == "output_layer.weight"):
                out.update(zip(*bridge._weight_to_hf_format(name, value), strict=True))
        return out

    def check(self) -> list[Holdings]:
        """Puts every HF tensor together from what all ranks hold, and compares."""
        expected = self.expected()
        self._check_export(expected)
        rebuilt = {name: torch.zeros_like(t).flatten() for name, t in expected.items()}
        covered = {name: torch.zeros(t.numel(), dtype=torch.bool) for name, t in expected.items()}
        all_holdings = []
        for source in self.sources:
            holdings = source.holds()
            all_holdings.append(holdings)
            specs = {spec.name: spec for spec in source.specs()}
            once = {name: torch.zeros(t.numel(), dtype=torch.int8) for name, t in expected.items()}
            for hold in holdings.holds:
                spec = specs[hold.source]
                assert spec.dtype == hold.dtype
                assert spec.shape == expected[hold.source].shape
                slices.check(hold.hf, spec.numel, "hf")
                value = read(holdings, hold)
                placed = as_strided(rebuilt[hold.source], hold.hf)
                before = as_strided(covered[hold.source], hold.hf)
                assert same(placed[before], value[before]), "replicas differ"
                placed.copy_(value)
                before.fill_(True)
                as_strided(once[hold.source], hold.hf).add_(1)
            assert all(int(c.max()) <= 1 for c in once.values()), "held twice by one rank"
        for name, tensor in expected.items():
            assert bool(covered[name].all()), f"{name} is not held completely"
            assert same(rebuilt[name].view(tensor.shape), tensor), name
        return all_holdings

    def _check_export(self, expected: dict[str, torch.Tensor]) -> None:
        """What is expected is what mbridge makes of all ranks' shards."""
        shards = {
            (rank[0], local.name, local.group_rank): local.tensor
            for rank, source in zip(self.ranks, self.sources, strict=True)
            for local in source._params
        }
        for rank, source in zip(self.ranks, self.sources, strict=True):
            for local in source._params:
                mine = [shards[rank[0], local.name, i] for i in range(local.group_size)]
                for name, tensor in source._convert(local, mine):
                    assert same(tensor, expected[name]), name


class _Memory:
    """One buffer per dtype, every parameter at a multiple of 64 elements."""

    def __init__(self, found: list[tuple[str, torch.Tensor, int | None]]) -> None:
        sizes: dict[torch.dtype, int] = {}
        for _, value, _ in found:
            sizes[value.dtype] = sizes.get(value.dtype, 64) + -(-value.numel() // 64) * 64
        self._left = {dtype: torch.zeros(n, dtype=dtype)[64:] for dtype, n in sizes.items()}

    def take(self, value: torch.Tensor) -> torch.Tensor:
        left = self._left[value.dtype]
        self._left[value.dtype] = left[-(-value.numel() // 64) * 64 :]
        return left[: value.numel()].view(value.shape).copy_(value)


def _replace(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _put(root: nn.Module, name: str, value: torch.Tensor, dim: int | None) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if last == "expert_bias":
        module.register_buffer(last, value)
        return
    parameter = nn.Parameter(value, requires_grad=False)
    if dim is not None:
        parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
    module.register_parameter(last, parameter)


def as_strided(flat: torch.Tensor, s: Slice) -> torch.Tensor:
    return flat.as_strided(s.shape, s.stride, s.offset)


def read(holdings: Holdings, hold: Hold) -> torch.Tensor:
    memory = holdings.tensors[hold.block].view(torch_dtype(hold.dtype))
    slices.check(hold.local, memory.numel(), "local")
    return as_strided(memory, hold.local)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte: random bits make NaNs."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def qwen3(layers: int = 2, **kwargs: Any) -> Job:
    return Job("qwen3", [attention(i) | dense_mlp(i) for i in range(layers)], **kwargs)


def qwen3_moe(**kwargs: Any) -> Job:
    layers = [attention(i) | moe_mlp(i) for i in range(2)]
    config = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    return Job("qwen3_moe", layers, moe=True, config=config, **kwargs)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("buffers", [True, False])
def test_qwen3(tp: int, buffers: bool) -> None:
    for holdings in qwen3(tp=tp, buffers=buffers).check():
        assert (len(holdings.blocks) == 1) is buffers
        # Every slice of an HF tensor is one rectangle of this rank's memory.
        assert len(holdings.holds) == len({h.source for h in holdings.holds})


def test_more_tp_ranks_than_kv_heads() -> None:
    """A group of heads is cut between ranks; Megatron refuses it, the tracer need not."""
    qwen3(tp=8).check()


def test_padded_vocabulary() -> None:
    """61 of 64 rows: the last rank holds fewer, and at TP 4 some of its rows belong to nobody."""
    for tp in (1, 4):
        held = qwen3(tp=tp, vocab=61).check()[-1].holds
        rows = sum(h.hf.numel for h in held if h.source == "lm_head.weight") // HIDDEN
        assert rows == 61 - 64 // tp * (tp - 1)


def test_a_rank_with_padding_only_holds_nothing_of_the_vocabulary() -> None:
    last = qwen3(tp=4, vocab=40).check()[-1]
    assert not [
        h for h in last.holds if h.source in ("lm_head.weight", "model.embed_tokens.weight")
    ]


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_tied_embeddings_and_pipeline_stages(pp: int, chunks: int) -> None:
    job = qwen3(layers=4, tp=2, pp=pp, chunks=chunks, tied=True)
    all_holdings = job.check()
    for (stage, *_), holdings in zip(job.ranks, all_holdings, strict=True):
        embedding = [h for h in holdings.holds if h.source == "model.embed_tokens.weight"]
        # The last stage's copy of the embedding is not exported.
        assert len(embedding) == (1 if stage == 0 else 0)


def test_qwen2_with_biases() -> None:
    layers = [attention(i, bias=True, norms=False) | dense_mlp(i) for i in range(2)]
    Job("qwen2", layers, tp=2).check()


def test_llama() -> None:
    Job("llama", [attention(i, norms=False) | dense_mlp(i) for i in range(2)], tp=2).check()


def test_mixtral() -> None:
    layers = [attention(i, norms=False) | moe_mlp(i) for i in range(2)]
    config = {"num_local_experts": EXPERTS}
    Job("mixtral", layers, tp=2, ep=2, etp=2, moe=True, config=config).check()


def test_qwen2_moe() -> None:
    layers = [attention(i, bias=True, norms=False) | moe_mlp(i, shared=True) for i in range(2)]
    for i, layer in enumerate(layers):
        layer[f"decoder.layers.{i}.mlp.shared_experts.gate_weight"] = ((1, HIDDEN), None)
    config = {"num_experts": EXPERTS, "shared_expert_intermediate_size": EXPERT_WIDTH}
    Job("qwen2_moe", layers, tp=2, ep=2, moe=True, config=config).check()


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    ("tp", "ep", "etp"), [(1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2), (4, 1, 2)]
)
def test_qwen3_moe(tp: int, ep: int, etp: int, sequential: bool) -> None:
    qwen3_moe(tp=tp, ep=ep, etp=etp, sequential=sequential).check()


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_glm4_moe(tp: int, ep: int, etp: int) -> None:
    """Biases, a dense layer first, shared experts, a correction bias that is a float32 buffer."""
    layers = [
        attention(0, bias=True) | dense_mlp(0),
        attention(1, bias=True) | moe_mlp(1, shared=True, bias=True),
    ]
    config = {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "use_qk_norm": True}
    job = Job("glm4_moe", layers, tp=tp, ep=ep, etp=etp, moe=True, config=config)
    assert {h.dtype for h in job.check()[0].holds} == {"bfloat16", "float32"}


def test_deepseek_v3() -> None:
    """TE does not fuse the norm before latent attention, but those within it."""
    layers = [
        latent_attention(0) | dense_mlp(0),
        latent_attention(1) | moe_mlp(1, shared=True, bias=True),
    ]
    config = {
        "n_routed_experts": EXPERTS,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    Job("deepseek_v3", layers, tp=2, ep=2, moe=True, latent=True, config=config).check()


# Blocks and addresses.


def test_blocks_are_the_live_memory() -> None:
    (source,) = qwen3().sources
    holdings = source.holds()
    (memory,) = holdings.tensors
    assert holdings.blocks == (
        Block("embedding.word_embeddings.weight and 18 more", memory.numel()),
    )
    parameter = source._params[0].tensor
    assert memory.dtype is torch.uint8
    assert memory.data_ptr() == parameter.data_ptr() - 64 * 2
    assert memory.untyped_storage()._cdata == parameter.untyped_storage()._cdata
    hold = next(h for h in holdings.holds if h.source == "model.norm.weight")
    live = next(p.tensor for p in source._params if "final" in p.name)
    live.data.fill_(3.0)
    assert read(holdings, hold).tolist() == [3.0] * HIDDEN


def test_parameters_of_their_own_are_blocks_of_their_own() -> None:
    (source,) = qwen3(buffers=False).sources
    holdings = source.holds()
    assert [b.name for b in holdings.blocks] == [local.name for local in source._params]
    assert all(h.local.offset < holdings.blocks[h.block].nbytes for h in holdings.holds)


def test_memory_that_moved_is_noticed_and_asked_for_again() -> None:
    (source,) = qwen3(buffers=False).sources
    old = source.holds()
    assert source.addresses() == old.addresses
    moved = source._params[3].tensor
    moved.data = moved.data.clone()
    assert source.addresses() != old.addresses
    new = source.holds()
    assert source.addresses() == new.addresses
    assert new.holds == old.holds
    assert new.tensors[3].data_ptr() == moved.data_ptr() != old.tensors[3].data_ptr()


def test_a_correction_bias_is_what_it_was_when_parameters_were_final() -> None:
    """Megatron changes it at the end of the backward pass, under a sync that overlaps with it."""
    layers = [attention(0) | moe_mlp(0, bias=True)]
    config = {"n_routed_experts": EXPERTS, "first_k_dense_replace": 0, "use_qk_norm": True}
    (source,) = Job("glm4_moe", layers, moe=True, config=config).sources
    holdings = source.holds()
    hold = next(h for h in holdings.holds if h.source.endswith("e_score_correction_bias"))
    live = next(p.tensor for p in source._params if p.name.endswith("expert_bias"))
    live.fill_(1.0)
    source.refresh()
    assert read(holdings, hold).tolist() == [1.0] * EXPERTS
    live.fill_(2.0)
    assert read(holdings, hold).tolist() == [1.0] * EXPERTS
    assert source.addresses() == holdings.addresses


# Refusals.


class Quantized(torch.Tensor):
    pass


def offloaded() -> torch.Tensor:
    tensor = torch.zeros(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(4, 4).as_subclass(Quantized), r"Quantized, not a plain tensor"),
        (lambda: nn.Parameter(torch.zeros(4, 4).as_subclass(Quantized)), "not a plain tensor"),
        (lambda: torch.zeros(4, 4, device="meta"), "on the meta device"),
        (lambda: torch.zeros(4, 4).t()[:2], r"not contiguous: shape \[2, 4\], stride \(1, 4\)"),
        (lambda: torch.zeros(4, 4).to_sparse(), "torch.sparse_coo"),
        (offloaded, "has 0 bytes only"),
    ],
)
def test_what_is_no_plain_memory_is_refused_by_name(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ExportError, match=f"decoder.x cannot be read from where it lies: .*{why}"):
        check_plain("decoder.x", make())


def test_plain_memory_is_not_refused() -> None:
    for plain in (
        torch.zeros(8)[3:],
        nn.Parameter(torch.zeros(2, 2)),
        torch.zeros(0),
        torch.zeros(()),
    ):
        check_plain("x", plain)


def converting(source: MBridgeSource, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The bridge does something more with o_proj."""
    original = source._bridge._weight_to_hf_format

    def changed(name: str, tensor: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        names, tensors = original(name, tensor)
        return names, [convert(t) for t in tensors] if "linear_proj" in name else tensors

    source._bridge._weight_to_hf_format = changed


@pytest.mark.parametrize(
    ("convert", "why"),
    [
        (
            lambda t: t * 2,
            r"o_proj.weight is no slice of .*0\S*linear_proj.weight: .*aten.mul.Tensor",
        ),
        (lambda t: t.float(), "linear_proj.weight: .*cast from bfloat16 to float32"),
        (lambda t: t if t.sum() > 0 else -t, "linear_proj.weight cannot be traced: .*without data"),
        (lambda t: t.cpu(), "linear_proj.weight cannot be traced: .*meta tensor"),
        (lambda t: t.zero_(), "writes into the parameter itself"),
        (lambda t: torch.zeros(1 << 24).to(t), "linear_proj.weight cannot be traced: .*allocates"),
    ],
)
def test_what_a_bridge_computes_is_refused_by_name(
    convert: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    (source,) = qwen3().sources
    converting(source, convert)
    with pytest.raises(ExportError, match=why):
        source.holds()


def test_a_bridge_that_moves_more_is_followed() -> None:
    (source,) = qwen3().sources
    converting(source, lambda t: t.view(4, 8, HEADS, -1).transpose(0, 2).reshape(-1, HIDDEN).T)
    holdings = source.holds()
    local = next(
        p for p in source._params if p.name == "decoder.layers.1.self_attention.linear_proj.weight"
    )
    ((name, expected),) = source._convert(local, [local.tensor])
    rebuilt = torch.zeros(expected.shape, dtype=expected.dtype).flatten()
    for hold in holdings.holds:
        if hold.source == name:
            as_strided(rebuilt, hold.hf).copy_(read(holdings, hold))
    assert same(rebuilt.view(expected.shape), expected)
    assert whole(expected.shape).numel == math.prod(expected.shape)
