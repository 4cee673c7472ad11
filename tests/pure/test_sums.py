from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.checksum import MASK, slice_sum
from sglang_rdt.sums import Part, Sums


def part(view: torch.Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> Part:
    return Part(view, offset, tuple(view.stride()), dtype or view.dtype)


def test_slices_of_one_key_add_up_to_the_whole() -> None:
    whole = torch.randn(12, 5).to(torch.bfloat16)
    sums = Sums(
        [("w", part(whole[:7])), ("w", part(whole[7:], 35)), ("other", part(whole[:1].clone()))]
    )
    expected = {"w": slice_sum(whole, 0), "other": slice_sum(whole[:1], 0)}
    assert sums.result() == expected
    whole[3, 2] += 1  # prepared once, summed anew
    assert sums.result()["w"] == slice_sum(whole, 0) != expected["w"]


def test_a_conversion_comes_before_the_sum() -> None:
    stored = torch.randn(4, 4)
    assert Sums([("w", part(stored, dtype=torch.bfloat16))]).result() == {
        "w": slice_sum(stored.to(torch.bfloat16), 0)
    }


def test_nothing_sums_to_nothing() -> None:
    assert Sums([]).result() == {}
    assert Sums([("w", part(torch.empty(0, 3)))]).result() == {"w": 0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_the_kernel_sums_like_the_loop(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = []
    for i, shape in enumerate([(3,), (1, 1), (257, 129), (5, 7, 300_000), (1 << 18,), (2, 0)]):
        t = torch.randint(0, 250, shape, generator=generator).to(dtype)
        parts.append((i % 3, part(t, offset=i * 1000)))
        if len(shape) == 2 and shape[1] > 2:
            parts.append((i % 3, part(t[:, 1::2], offset=5)))
            parts.append((i % 3, part(t.t(), offset=7)))
    expected = Sums(parts).result()
    on_gpu = [(k, Part(_moved(p.view), p.offset, p.stride, p.dtype)) for k, p in parts]
    prepared = Sums(on_gpu)
    assert (prepared._kernel is None) == (dtype.itemsize == 8)
    assert prepared.result() == expected
    assert prepared.result() == expected


def _moved(view: torch.Tensor) -> torch.Tensor:
    """The same strides on the GPU."""
    if not view.numel():
        return view.cuda()
    base = view._base if view._base is not None else view
    return base.cuda().as_strided(view.shape, view.stride(), view.storage_offset())


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1 << 40))
def test_any_cut_of_rows_gives_one_sum(rows: int, cut: int, offset: int) -> None:
    t = torch.arange(rows * 3, dtype=torch.int16).view(rows, 3)
    cut = min(cut, rows)
    both = Sums([(0, part(t[:cut], offset)), (0, part(t[cut:], offset + cut * 3))]).result()[0]
    assert both == slice_sum(t, offset) <= MASK
