"""The other spellings of Megatron's parameters: TransformerEngine's, and grouped experts.

Megatron builds these on GPUs only. Here modules with such names hold a checkpoint that was cut up
by hand, for all ranks of a layout, and what is exported of them must be that checkpoint.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_rdt.sources.block_fp8 import BlockFp8Source, quantise
from megatron_rdt.sources.mbridge import MBridgeSource
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.errors import ExportError

from . import to_megatron
from .megatron_models import hf_config, hf_state
from .test_trainer_models import assert_equal
from .to_megatron import Whole
from .zoo import FAMILIES

pytest.importorskip("mbridge")
pytestmark = pytest.mark.families

_EXPERT = re.compile(r"^(.*experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
# tp, pp, ep, etp
LAYOUTS = [(1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2)]
_MTP = {"glm4_moe", "deepseek_v3", "glm4_moe_lite"}


def te_spelling(family: str, name: str, wholes: dict[str, Whole]) -> tuple[str, Whole]:
    """As a TransformerEngine spec names it."""
    whole = wholes[name]
    match = re.match(r"^(decoder\.layers\.\d+|mtp\.layers\.0\.transformer_layer)\.(.*)$", name)
    if match is None:
        return name, whole
    layer, tail = match[1], match[2]
    if FAMILIES[family].mla:
        for letter in ("q", "kv"):
            if tail == f"self_attention.{letter}_layernorm.weight":
                tail = f"self_attention.linear_{letter}_up_proj.layer_norm_weight"
        if tail in (
            "self_attention.linear_q_down_proj.weight",
            "self_attention.linear_kv_down_proj.weight",
        ):
            whole = replace(whole, cut=None)  # whole on every rank
    elif tail == "input_layernorm.weight":
        linear = "in_proj" if f"{layer}.self_attention.in_proj.weight" in wholes else "linear_qkv"
        tail = f"self_attention.{linear}.layer_norm_weight"
    if tail == "pre_mlp_layernorm.weight" and f"{layer}.mlp.router.weight" not in wholes:
        tail = "mlp.linear_fc1.layer_norm_weight"
    if family == "glm4":
        tail = tail.replace("post_self_attn_layernorm", "self_attention.linear_proj.post_layernorm")
        tail = tail.replace("post_mlp_layernorm", "mlp.linear_fc2.post_layernorm")
    return f"{layer}.{tail}", whole


class Fake:
    """All ranks of a layout."""

    def __init__(
        self, family: str, layout: tuple[int, int, int, int], experts: str, monkeypatch: Any
    ) -> None:
        from mbridge.core.parallel_states import ParallelStates

        self.family, self.experts = family, experts
        self.hf_config = hf_config(family)
        mtp = family in _MTP
        self.state = hf_state(family, torch.bfloat16, mtp)
        self.wholes = to_megatron.wholes(family, self.state, self.hf_config, 512)
        self.tp, self.pp, self.ep, self.etp = layout
        self.count = len({m[2] for m in map(_EXPERT.match, self.wholes) if m})
        self.config = SimpleNamespace(
            num_layers=self.hf_config.num_hidden_layers,
            mtp_num_layers=1 if mtp else None,
            gated_linear_unit=True,
            layernorm_zero_centered_gamma=True,
            multi_latent_attention=FAMILIES[family].mla,
            num_moe_experts=self.count or None,
            hidden_size=self.hf_config.hidden_size,
        )
        self.ranks = [
            (pp, r % self.tp, r // self.etp % self.ep, r % self.etp)
            for pp in range(self.pp)
            for r in range(math.lcm(self.tp, self.ep * self.etp))
        ]
        self.sources = []
        for pp, tp, ep, etp in self.ranks:
            states = ParallelStates(
                tp_size=self.tp, pp_size=self.pp, ep_size=self.ep, etp_size=self.etp,
                tp_rank=tp, pp_rank=pp, ep_rank=ep, etp_rank=etp, vpp_size=None,
            )  # fmt: skip
            monkeypatch.setattr(
                ParallelStates, "get_parallel_state", staticmethod(lambda s=states: s)
            )
            self.sources.append(MBridgeSource([self.model(pp, tp, ep, etp)], self.hf_config))

    def model(self, pp: int, tp: int, ep: int, etp: int) -> nn.Module:
        root = nn.Module()
        root.config = self.config  # type: ignore[assignment]
        root.pre_process = pp == 0  # type: ignore[assignment]
        per_stage = self.config.num_layers // self.pp
        blocks: dict[str, list[tuple[int, Tensor]]] = {}
        for name, whole in self.wholes.items():
            layer = re.match(r"^decoder\.layers\.(\d+)\.", name)
            last = pp == self.pp - 1
            if layer and int(layer[1]) // per_stage != pp:
                continue
            # The stage with multi-token prediction has its copy of the embedding.
            embeds = name.startswith("embedding") and (
                pp == 0 or (last and self.config.mtp_num_layers)
            )
            if not layer and not embeds and (name.startswith("embedding") or not last):
                continue
            expert = _EXPERT.match(name)
            if expert is None:
                name, whole = te_spelling(self.family, name, self.wholes)
                value, number = whole.shard(tp, self.tp), -1
            else:
                here = self.count // self.ep
                number = int(expert[2]) - ep * here
                if not 0 <= number < here:
                    continue
                value = whole.shard(etp, self.etp)
            if layer:
                name = name.replace(
                    f"layers.{layer[1]}.", f"layers.{int(layer[1]) % per_stage}.", 1
                )
            if expert is None:
                # Megatron does not mark the sinks.
                cut = None if "softmax_offset" in name else whole.cut
                self.put(root, name, value, cut)
            else:
                at = _EXPERT.match(name)
                assert at is not None
                blocks.setdefault(f"{at[1]}{at[3]}", []).append((number, value))
        for name, values in blocks.items():
            self.put_experts(root, name, [value for _, value in sorted(values, key=lambda v: v[0])])
        layers = list(root.decoder.layers.children())
        for i, module in enumerate(layers):
            module.layer_number = pp * per_stage + i + 1  # type: ignore[assignment]
        root.decoder.layers = nn.ModuleList(layers)
        if hasattr(root, "mtp"):
            root.mtp.layers = nn.ModuleList(root.mtp.layers.children())
        return root

    def put_experts(self, root: nn.Module, name: str, values: list[Tensor]) -> None:
        if self.experts == "grouped":
            for i, value in enumerate(values):
                self.put(root, f"{name}{i}", value, None)
        elif self.experts == "single":
            self.put(root, name, torch.stack(values), None)
        else:
            # [hidden, experts x width] by shape, experts after one another in memory.
            flat = torch.cat([value.t().contiguous().flatten() for value in values])
            hidden, fc1 = self.config.hidden_size, "linear_fc1" in name
            shape = (hidden, -1) if fc1 else (-1, hidden)
            name = re.sub(r"linear_fc([12])\.weight$", r"weight\1", name)
            self.put(root, name, flat.view(shape), None)

    @staticmethod
    def put(root: nn.Module, name: str, value: Tensor, cut: int | None) -> None:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        if last == "expert_bias":
            module.register_buffer(last, value.clone())
            return
        parameter = nn.Parameter(value.clone().contiguous(), requires_grad=False)
        if cut is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, cut  # type: ignore[attr-defined]
        module.register_parameter(last, parameter)

    def exported(self) -> dict[str, Tensor]:
        """With the shards that other ranks would have sent."""
        shards = {
            (rank[0], local.name, local.group_rank): local.tensors
            for rank, source in zip(self.ranks, self.sources, strict=True)
            for local in source._params
        }
        out: dict[str, Tensor] = {}
        stages: dict[str, int] = {}
        for rank, source in zip(self.ranks, self.sources, strict=True):
            for local in source._params:
                every = [shards[rank[0], local.name, i] for i in range(local.group_size)]
                flat = [
                    every[i][j] for j in range(len(local.tensors)) for i in range(local.group_size)
                ]
                for name, tensor in source._convert(local, flat):
                    assert torch.equal(out.setdefault(name, tensor), tensor), name
                    # What two pipeline stages have, one of them exports.
                    assert stages.setdefault(name, rank[0]) == rank[0], name
        return out

    def held(self) -> dict[str, Tensor]:
        """Put together from live memory."""
        found = {n: torch.zeros_like(t).flatten() for n, t in self.exported().items()}
        count = {n: torch.zeros(t.numel(), dtype=torch.bool) for n, t in found.items()}
        for source in self.sources:
            holdings = source.holds()
            for hold in holdings.holds:
                memory = holdings.tensors[hold.block].view(torch_dtype(hold.dtype))
                value = memory.as_strided(hold.local.shape, hold.local.stride, hold.local.offset)
                at = hold.hf
                found[hold.source].as_strided(at.shape, at.stride, at.offset).copy_(value)
                count[hold.source].as_strided(at.shape, at.stride, at.offset).fill_(True)
        assert all(bool(c.all()) for c in count.values())
        return {
            n: t.view(s.shape)
            for (n, t), s in zip(found.items(), self.exported().values(), strict=True)
        }


def _cases() -> list[Any]:
    out = []
    for family, of in FAMILIES.items():
        for layout in LAYOUTS:
            kinds = ["grouped", "single"] if of.moe else ["grouped"]
            if of.moe and family != "gpt_oss":
                kinds.append("transposed")  # it has no biases
            out += [
                pytest.param(family, layout, kind, id=f"{family}-{layout}-{kind}") for kind in kinds
            ]
    return out


@pytest.mark.parametrize(("family", "layout", "experts"), _cases())
def test_te_names(
    family: str, layout: tuple[int, int, int, int], experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(family, layout, experts, monkeypatch)
    assert_equal(fake.exported(), fake.state, family)
    if experts == "transposed" or layout == LAYOUTS[-1]:
        assert_equal(fake.held(), fake.state, family)


def test_a_tied_config_and_an_untied_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would serve the embedding for a head that is another one."""
    fake = Fake("qwen3", LAYOUTS[0], "grouped", monkeypatch)
    model = fake.model(0, 0, 0, 0)
    model.share_embeddings_and_output_weights = False  # type: ignore[assignment]
    tied = hf_config("qwen3", tied=True)
    with pytest.raises(ExportError, match=r"tie_word_embeddings is True .* output_layer\.weight"):
        MBridgeSource([model], tied)


def test_an_unknown_parameter_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("gpt_oss", LAYOUTS[0], "grouped", monkeypatch)
    model = fake.model(0, 0, 0, 0)
    fake.put(model, "decoder.layers.1.self_attention.more.weight", torch.ones(2), None)
    with pytest.raises(ExportError, match=r"decoder\.layers\.1\.self_attention\.more\.weight"):
        MBridgeSource([model], fake.hf_config).specs()


def test_block_fp8_of_deepseek_v3(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSeek-V3's own checkpoint has in FP8, and nothing else."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    fake = Fake("deepseek_v3", LAYOUTS[0], "grouped", monkeypatch)
    source = BlockFp8Source(fake.sources[0], config)
    found = dict(source.export(PhaseTimer()))
    assert [s.name for s in source.specs()] == list(found)
    linear = re.compile(r"(_proj|_proj_with_mqa)\.weight$")
    for name, tensor in fake.state.items():
        if linear.search(name) and "eh_proj" not in name:
            weight, scale = quantise(tensor, (128, 128))
            assert torch.equal(found.pop(name).view(torch.uint8), weight.view(torch.uint8)), name
            assert torch.equal(found.pop(f"{name}_scale_inv"), scale), name
        else:
            assert torch.equal(found.pop(name), tensor), name
    assert found == {}


def test_a_sum_that_is_rounded_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_rdt.sources.families import qwen3_5

    monkeypatch.setattr(qwen3_5, "_rounded", set())
    with caplog.at_level("WARNING", "megatron_rdt"):
        assert qwen3_5._plus(torch.zeros(2), 1).tolist() == [1, 1]
        assert not caplog.records
        small = torch.tensor([2.0**-10], dtype=torch.bfloat16)
        assert qwen3_5._plus(small, 1).tolist() == [1]
        qwen3_5._plus(small, 1)
    assert [r.getMessage() for r in caplog.records] == [
        "Qwen3.5: norms of the checkpoint are Megatron's +1, rounded to bfloat16; "
        "layernorm_zero_centered_gamma says which (docs/sources.md)"
    ]
