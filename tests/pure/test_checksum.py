from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt import checksum
from sglang_rdt.checksum import slice_sum

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
# Sums must not depend on the size of a block; small blocks reach every branch.
BLOCKS = [1, 2, 3, 7, 8192]


def reference(view: torch.Tensor, offset: int, stride: tuple[int, ...]) -> int:
    """Big integers, one element at a time, from the raw bytes."""
    size = view.element_size()
    packed = torch.empty(view.numel(), dtype=view.dtype).copy_(view.flatten())
    raw = packed.view(torch.uint8).tolist()
    total = 0
    indices = itertools.product(*(range(n) for n in view.shape))
    for i, index in enumerate(indices):
        element = bytes(raw[i * size : (i + 1) * size])
        at = offset + sum(k * t for k, t in zip(index, stride, strict=True))
        if size == 8:  # as two halves, with weights of their own
            high = int.from_bytes(element[4:], "little")
            total += high * (1 + 2 * 0xC2B2AE3D27D4EB4F * at)
            element = element[:4]
        bits = int.from_bytes(element, "little", signed=1 < size < 8)
        total += bits * (1 + 2 * 0x9E3779B97F4A7C15 * at)
    return total % 2**64


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits; for bool 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A random piece of a random tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    t = random(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    for dim in range(t.dim()):
        start = draw(st.integers(0, t.shape[dim] - 1))
        t = t.narrow(dim, start, draw(st.integers(1, t.shape[dim] - start)))
    return t.permute(draw(st.permutations(range(t.dim()))))


@pytest.fixture(params=BLOCKS)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(checksum, "_ROWS", request.param)
    monkeypatch.setattr(checksum, "_COLS", request.param)
    return request.param


@given(strided(), st.integers(0, 1 << 40), st.sampled_from(BLOCKS))
def test_agrees_with_big_integers(view: torch.Tensor, offset: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_ROWS", block)
        patch.setattr(checksum, "_COLS", block)
        assert slice_sum(view, offset) == reference(view, offset, tuple(view.stride()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, block: int) -> None:
    t = random((3, 5), dtype)
    assert slice_sum(t, 11) == reference(t, 11, (5, 1))
    assert slice_sum(t[:, 1:3], 1) == reference(t[:, 1:3], 1, (5, 1))


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2"])
def test_rare_dtypes_sum_like_bytes(name: str) -> None:
    raw = random((4, 6), torch.uint8)
    assert slice_sum(raw.view(getattr(torch, name)), 0) == slice_sum(raw, 0)


@given(strided(), st.integers(0, 1000))
def test_a_packed_copy_sums_to_the_same_with_the_stride_given(
    view: torch.Tensor, offset: int
) -> None:
    packed = view.clone(memory_format=torch.contiguous_format)
    assert slice_sum(packed, offset, tuple(view.stride())) == slice_sum(view, offset)


@given(st.data())
def test_parts_add_up_to_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    t = random(shape, data.draw(st.sampled_from(DTYPES)))
    tiles = [t]
    for _ in range(data.draw(st.integers(0, 5))):
        tile = tiles.pop(data.draw(st.integers(0, len(tiles) - 1)))
        dim = data.draw(st.integers(0, t.dim() - 1))
        cut = data.draw(st.integers(1, tile.shape[dim]))
        tiles += [part for part in tile.tensor_split([cut], dim) if part.numel()]
    total = sum(slice_sum(tile, tile.storage_offset()) for tile in tiles) % 2**64
    assert total == slice_sum(t, 0)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    t = random((2, 3), dtype)
    before = slice_sum(t, 0)
    raw = t.view(torch.uint8).flatten()
    for byte, bit in itertools.product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        assert slice_sum(t, 0) != before, (byte, bit)
        raw[byte] ^= 1 << bit
    assert slice_sum(t, 0) == before


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_swapped_elements_are_noticed(dtype: torch.dtype) -> None:
    t = random((40,), dtype, seed=3)
    before = slice_sum(t, 0)
    ints = t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    for i, j in itertools.combinations(range(40), 2):
        if ints[i] == ints[j]:
            continue
        ints[[i, j]] = ints[[j, i]]
        assert slice_sum(t, 0) != before, (i, j)
        ints[[i, j]] = ints[[j, i]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_swapped_signs_are_noticed(dtype: torch.dtype) -> None:
    t = torch.ones(65, dtype=dtype)
    t[0] = -1
    before = slice_sum(t, 0)
    for i in range(1, 65):
        t[0], t[i] = 1, -1
        assert slice_sum(t, 0) != before, i
        t[0], t[i] = -1, 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_swapped_signs_of_wide_elements_are_noticed(dtype: torch.dtype) -> None:
    t = torch.zeros(3, dtype=dtype)
    t.view(torch.int64)[0] = -(2**63)  # -0.0, or the lowest integer
    assert slice_sum(t, 0) != slice_sum(t.flip(0), 0)


def test_swapped_tensors_and_missing_slices_are_noticed() -> None:
    t = random((8, 16), torch.bfloat16)
    gate, up = t[:4], t[4:]
    assert slice_sum(torch.cat([up, gate]), 0) != slice_sum(t, 0)
    whole = slice_sum(t, 0)
    for row in range(8):
        assert slice_sum(t[:row], 0) + slice_sum(t[row + 1 :], (row + 1) * 16) != whole
    # The same bytes at another place of the parameter.
    assert slice_sum(gate, 0) != slice_sum(gate, 64)
    assert slice_sum(t.t(), 0, (8, 1)) != slice_sum(t.t(), 0)


def test_empty_and_scalar() -> None:
    assert slice_sum(torch.empty(0, 3), 5) == 0
    assert slice_sum(torch.empty(3, 0), 5) == 0
    t = torch.tensor(1.5)
    assert slice_sum(t, 9) == reference(t.view(1), 9, (1,))


def test_more_than_one_block_of_the_real_size() -> None:
    # Zero but for a few elements on both sides of borders, so that the reference is quick.
    for count in (2 * 256 * 8192 + 5, 300 * 8192):
        t = torch.zeros(count, dtype=torch.int16)
        at = [0, 8191, 8192, 256 * 8192 - 1, 256 * 8192, count - 1]
        t[at] = -32768
        expected = sum(-32768 * (1 + 2 * 0x9E3779B97F4A7C15 * i) for i in at) % 2**64
        assert slice_sum(t, 0) == expected
        t[:] = -32768  # nothing overflows on the way
        whole = -32768 * (count + 2 * 0x9E3779B97F4A7C15 * (count * (count - 1) // 2))
        assert slice_sum(t, 0) == whole % 2**64


@given(strided(), st.integers(0, 1 << 40))
def test_the_way_of_a_gpu_gives_the_same(view: torch.Tensor, offset: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_moments_cpu", checksum._moments_cuda)
        found = slice_sum(view, offset)
    assert found == slice_sum(view, offset)
