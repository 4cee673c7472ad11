"""Block-FP8 against numpy that knows the format by its bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rdt.sources.block_fp8 import BlockFp8Source, quantise
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError
from sglang_rdt.plan.specs import TensorSpec

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _values() -> np.ndarray:
    """What each of the 256 bit patterns of float8_e4m3fn means."""
    bits = np.arange(256)
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits >> 3) & 0xF, (bits & 7).astype(np.float64)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _rounded(x: np.ndarray) -> np.ndarray:
    """The pattern of the nearest value; of two equally near, the one with an even mantissa."""
    values = _values()[:0x7F]
    size = np.abs(x).astype(np.float64)
    above = np.clip(np.searchsorted(values, size), 0, 0x7E)
    below = np.clip(above - 1, 0, 0x7E)
    up, down = np.abs(values[above] - size), np.abs(values[below] - size)
    pattern = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (pattern | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def reference(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Patterns and scales, block by block."""
    x = tensor.float().numpy()
    height, width = block
    scales = np.ones((-(-x.shape[0] // height), -(-x.shape[1] // width)), dtype=np.float32)
    patterns = np.zeros(x.shape, dtype=np.uint8)
    for i, j in np.ndindex(*scales.shape):
        at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        scale = np.float32(np.abs(x[at]).max() / np.float32(448))
        if scale >= np.finfo(np.float32).tiny:
            scales[i, j] = scale
        patterns[at] = _rounded(np.clip(x[at] / scales[i, j], -448, 448))
    return patterns, scales


def _matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all magnitudes, with a block of zeros, one of tiny numbers, and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-20, 6, (rows, columns), generator=generator)
    x[:128, :128] = 0
    x[:3, :3] = -0.0
    if rows > 128:
        x[128:256, :128] = 1e-38
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (1, 1), (128, 7)])
def test_bits_of_numpy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _matrix(*shape, dtype)
    weight, scale = quantise(x, (128, 128))
    patterns, scales = reference(x, (128, 128))
    assert weight.dtype is torch.float8_e4m3fn
    assert weight.is_contiguous()
    assert scale.dtype is torch.float32
    np.testing.assert_array_equal(weight.view(torch.uint8).numpy(), patterns)
    np.testing.assert_array_equal(scale.numpy().view(np.uint32), scales.view(np.uint32))
    assert not torch.isnan(weight.float()).any()
    assert float(scale[0, 0]) == 1.0  # of zeros


def test_every_half_way_value_goes_to_the_even_one() -> None:
    values = _values()[:0x7F]
    middles = (values[1:] + values[:-1]) / 2
    row = torch.tensor(np.concatenate([[448.0], middles, -middles]), dtype=torch.float32)[None]
    weight, scale = quantise(row, (128, 512))
    assert float(scale) == 1.0
    np.testing.assert_array_equal(weight.view(torch.uint8).numpy(), _rounded(row.numpy()))


def test_what_comes_back_is_near() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    weight, scale = quantise(x, (128, 128))
    back = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    largest = x.abs().amax()
    assert ((back - x).abs() <= (x.abs() / 16).clamp(min=float(largest) * 2.0**-10)).all()


class Source:
    """Yields what it was given."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(n, tuple(t.shape), dtype_name(t.dtype)) for n, t in self.tensors.items()]

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def _exported(source: BlockFp8Source) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source.export(PhaseTimer())}


PROJ = "model.layers.0.self_attn.o_proj.weight"


def test_the_second_export_is_the_first() -> None:
    """Nothing of the first one is left behind, in the source or in the weights."""
    x = _matrix(300, 200, torch.bfloat16)
    before = x.clone()
    inner = Source(**{PROJ: x, "model.norm.weight": torch.ones(3)})
    source = BlockFp8Source(inner, CONFIG)
    first, second = _exported(source), _exported(source)
    assert (
        list(first)
        == [s.name for s in source.specs()]
        == [PROJ, f"{PROJ}_scale_inv", "model.norm.weight"]
    )
    for name, spec in zip(first, source.specs(), strict=True):
        assert (tuple(first[name].shape), dtype_name(first[name].dtype)) == (spec.shape, spec.dtype)
        assert torch.equal(
            first[name].contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8)
        )
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.router.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.head.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.7.self_attn.q_proj.weight",  # modules_to_not_convert, by its path
        "model.layers.0.linear_attn.in_proj_b.weight",  # by its name alone
    ],
)
def test_what_is_never_quantised(name: str) -> None:
    config = {**CONFIG, "modules_to_not_convert": ["model.layers.7.self_attn", "in_proj_b"]}
    source = BlockFp8Source(Source(), config)
    assert not source.quantises(TensorSpec(name, (256, 256), "bfloat16"))


@pytest.mark.parametrize(
    "name",
    [
        PROJ,
        "model.layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.70.self_attn.q_proj.weight",  # 7 is not 70
    ],
)
def test_what_is_quantised(name: str) -> None:
    config = {**CONFIG, "modules_to_not_convert": ["model.layers.7", "mlp.gate"]}
    assert BlockFp8Source(Source(), config).quantises(TensorSpec(name, (256, 256), "bfloat16"))


def test_direct_mode_is_refused_by_name() -> None:
    source = BlockFp8Source(Source(**{PROJ: torch.ones(2, 2)}), CONFIG)
    with pytest.raises(ExportError, match=r"o_proj\.weight is quantised .*bucketed"):
        source.holds()


def test_a_weight_that_is_not_finite_is_named() -> None:
    tensors = {
        PROJ: torch.ones(2, 2),
        "model.layers.1.mlp.up_proj.weight": torch.tensor([[1.0, float("nan")]]),
    }
    with pytest.raises(ExportError, match=r"not finite.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        _exported(BlockFp8Source(Source(**tensors), CONFIG))


def test_a_block_of_experts_is_refused_by_name() -> None:
    inner = Source(**{"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 2, 2)})
    with pytest.raises(ExportError, match=r"experts\.gate_up_proj \[2, 2, 2\]: all experts"):
        BlockFp8Source(inner, CONFIG).specs()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({**CONFIG, "quant_method": "awq"}, "quant_method 'awq'"),
        ({**CONFIG, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**CONFIG, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        (None, "no quantization_config"),
    ],
)
def test_other_quantisations_are_refused(config: Any, why: str) -> None:
    with pytest.raises(ExportError, match=why):
        BlockFp8Source(Source(), config)
