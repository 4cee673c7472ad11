from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.errors import SettingError
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.staging import DIRECT, PACK, UNPACK, decide
from sglang_rdt.plan.strided import count_runs, padded

BF16 = 2


def decided(
    pairs: list[tuple[Slice, Slice]],
    costs: LinkCosts | None = None,
    items: tuple[int, int] = (BF16, BF16),
    cast: bool = False,
) -> list[int]:
    """``(dst, src)`` slices; ``items``: bytes per element of dst and src."""
    n = len(pairs)
    how = decide(
        padded([d.shape for d, _ in pairs], 1),
        padded([d.stride for d, _ in pairs], 0),
        padded([s.stride for _, s in pairs], 0),
        np.full(n, items[0]),
        np.full(n, items[1]),
        np.full(n, cast),
        costs or LinkCosts(),
    )
    return how.tolist()


def columns(rows: int, width: int, of: int) -> Slice:
    """``width`` columns of a matrix with ``of``."""
    return Slice(0, (rows, width), (of, 1))


def whole(rows: int, width: int) -> Slice:
    return columns(rows, width, width)


def test_a_piece_is_staged_where_its_runs_cost_more_than_a_copy() -> None:
    big = whole(1 << 16, 8192), whole(1 << 16, 8192)  # one run
    small = columns(500, 64, 128), whole(500, 64)  # 500 descriptors: 1.75 ms; a copy: 50 ns
    # Runs of 8 MB: a copy takes longer than a descriptor.
    large = columns(4, 1 << 22, 1 << 23), whole(4, 1 << 22)
    assert decided([big, small, large]) == [DIRECT, UNPACK, DIRECT]
    assert decided([small]) == [UNPACK]


def test_the_side_with_the_gaps_copies() -> None:
    n = 7168
    gaps_here = columns(n, 512, 1024), whole(n, 512)
    gaps_there = whole(n, 512), columns(n, 512, 1024)
    assert decided([gaps_here]) == [UNPACK]
    assert decided([gaps_there]) == [PACK]
    assert decided([gaps_here, gaps_there]) == [UNPACK, PACK]


def test_with_gaps_on_both_sides_the_source_packs_only_what_it_has_in_many_runs() -> None:
    n = 1 << 14
    # On the source 4 long runs; here one for each row.
    four = Slice(0, (4, n, 64), (n * 64 * 2, 64, 1))
    rows = Slice(0, (4, n, 64), (n * 128, 128, 1))
    assert decided([(rows, four)]) == [UNPACK]
    assert decided([(rows, Slice(0, (4, n, 64), (n * 256, 256, 1)))]) == [PACK]


def test_pieces_are_decided_one_by_one() -> None:
    big = whole(1 << 17, 8192), whole(1 << 17, 8192)
    small = columns(1000, 16, 32), whole(1000, 16)
    large = columns(1000, 1 << 22, 1 << 23), whole(1000, 1 << 22)
    assert decided([big, large, small]) == [DIRECT, DIRECT, UNPACK]


def test_a_round_for_little_is_not_worth_packing() -> None:
    few = whole(100, 64), columns(100, 64, 128)  # 0.35 ms of descriptors, a round takes 2
    assert decided([few]) == [DIRECT]
    assert decided([few], LinkCosts(round_s=1e-6)) == [PACK]
    assert decided([few] * 100) == [PACK] * 100


def test_a_dtype_difference_is_never_direct() -> None:
    same = whole(100, 64), whole(100, 64)
    assert decided([same], items=(4, 2), cast=True) == [UNPACK]  # widening
    assert decided([same], items=(2, 4), cast=True) == [PACK]  # narrowing
    assert decided([same], items=(2, 2), cast=True) == [UNPACK]
    # Widening what the source has in a swarm of runs.
    swarm = whole(1 << 16, 4), columns(1 << 16, 4, 8)
    assert decided([swarm], items=(4, 2), cast=True) == [PACK]


def test_columns_across_are_staged() -> None:
    n = 4096
    turned = Slice(0, (n, n), (1, n)), whole(n, n)
    assert decided([turned]) == [UNPACK]


def test_nothing_to_decide() -> None:
    assert decided([]) == []
    assert decided([(Slice(0, (), ()), Slice(5, (), ()))]) == [DIRECT]


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[Slice, Slice]]:
    out = []
    for _ in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 3, 64, 1000]), min_size=1, max_size=3)))
        sides = []
        for _ in range(2):
            stride, step = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 3]))
            for d in draw(st.permutations(range(len(shape)))):
                stride[d], step = step, step * shape[d] * draw(st.sampled_from([1, 1, 2]))
            sides.append(Slice(0, shape, tuple(stride)))
        out.append((sides[0], sides[1]))
    return out


def seconds(pairs: list[tuple[Slice, Slice]], how: list[int], costs: LinkCosts) -> float:
    """The model, written down once more."""
    link = copied = 0.0
    runs = 0
    for (dst, src), one in zip(pairs, how, strict=True):

        def count(*sides: Slice) -> int:
            shape = padded([sides[0].shape], 1)
            return int(count_runs(shape, *(padded([s.stride], 0) for s in sides))[0])

        nbytes = dst.numel * BF16
        link += nbytes / costs.link_bytes_per_s
        if one == DIRECT:
            runs += count(dst, src)
        else:
            runs += count(src) if one == UNPACK else 1
            twice = one == PACK and count(dst) > 1
            copied += nbytes / costs.copy_bytes_per_s * (2 if twice else 1)
    packs = costs.round_s if PACK in how else 0.0
    return link + runs * costs.descriptor_s + copied + packs


@given(pieces(), st.sampled_from([1e-9, 1e-7, 3.5e-6, 1e-3]), st.sampled_from([1e-9, 2e-3]))
def test_staging_never_costs_more_than_reading_everything_directly(
    pairs: list[tuple[Slice, Slice]], descriptor_s: float, round_s: float
) -> None:
    costs = LinkCosts(descriptor_s=descriptor_s, round_s=round_s)
    how = decided(pairs, costs)
    took = seconds(pairs, how, costs)
    assert took <= seconds(pairs, [DIRECT] * len(pairs), costs) * (1 + 1e-9)
    # What is one run can only lose by a detour.
    for (dst, src), one in zip(pairs, how, strict=True):
        if dst.contiguous and src.contiguous:
            assert one == DIRECT


# Costs.


def test_costs_survive_a_file(tmp_path: Path) -> None:
    costs = LinkCosts(50e9, 1e-6, 2e12, 1e-3)
    costs.save(tmp_path / "costs.json")
    assert LinkCosts.load(tmp_path / "costs.json") == costs
    (tmp_path / "one.json").write_text(json.dumps({"link_bytes_per_s": 1e9}))
    assert LinkCosts.load(tmp_path / "one.json") == LinkCosts(link_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"link": 1}', "link.*unknown; there are link_bytes_per_s"),
        ('{"round_s": 0}', "round_s.*finite number above 0"),
        ('{"round_s": -1}', "round_s.*finite number above 0"),
        ('{"round_s": NaN}', "round_s.*finite number above 0"),
        ('{"round_s": Infinity}', "round_s.*finite number above 0"),
        ('{"round_s": true}', "round_s.*finite number above 0"),
        ('{"round_s": "1"}', "round_s.*finite number above 0"),
        ('{"round_s": null}', "round_s.*finite number above 0"),
    ],
)
def test_costs_that_cannot_be_used_are_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(SettingError, match=why):
        LinkCosts.load(tmp_path / "costs.json")


def test_bytes_of_a_descriptor() -> None:
    assert LinkCosts().descriptor_bytes == 1_386_000
    assert LinkCosts(link_bytes_per_s=1.0, descriptor_s=1e-9).descriptor_bytes == 1
