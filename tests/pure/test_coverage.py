from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.errors import PlanError
from sglang_rdt.plan import coverage, forms, planner
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Computed,
    Constant,
    EngineRankLayout,
    ParamSpec,
    TensorSpec,
    Want,
    Write,
)

from .builders import copy, elements, engine_rank, layout, param, rect, spec, trainer

Bounds = tuple[tuple[int, int], ...]


@st.composite
def partitions(draw: st.DrawFn, dims: int = 3) -> tuple[tuple[int, ...], list[Bounds]]:
    """A shape, and rectangles that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=dims)))
    tiles: list[Bounds] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        victim = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low, high = victim[dim]
        if high - low < 2:
            tiles.append(victim)
            continue
        cut = draw(st.integers(low + 1, high - 1))
        for part in ((low, cut), (cut, high)):
            tiles.append((*victim[:dim], part, *victim[dim + 1 :]))
    return shape, draw(st.permutations(tiles))


@st.composite
def engines(draw: st.DrawFn) -> tuple[EngineRankLayout, dict[str, TensorSpec]]:
    """One rank that is covered exactly, and whose HF tensors are used up exactly."""
    params: list[ParamSpec] = []
    wants: list[Want] = []
    constants: list[Constant] = []
    specs: dict[str, TensorSpec] = {}
    for p in range(draw(st.integers(1, 3))):
        shape, tiles = draw(partitions())
        order = draw(st.permutations(range(len(shape))))
        if draw(st.booleans()):  # the parameter is stored in another order of dimensions
            stored = [shape[d] for d in order]
            stride = [math.prod(stored[order.index(d) + 1 :]) for d in range(len(shape))]
            live = param(f"p{p}", shape, stride=stride)
        else:
            live = param(f"p{p}", shape)
        params.append(live)
        for t, tile in enumerate(tiles):
            offset = sum(low * s for (low, _), s in zip(tile, live.stride, strict=True))
            dst = Slice(offset, tuple(b - a for a, b in tile), live.stride)
            if t and draw(st.booleans()) and draw(st.booleans()):
                constants.append(Constant(live.name, dst, 0.0))
                continue
            # Either one HF tensor for the tile, or the same tile of one HF tensor of the shape.
            name = f"hf{p}" if t % 2 else f"hf{p}.{t}"
            if t % 2:
                specs[name] = spec(name, shape)
                src = rect(shape, *tile)
            else:
                specs[name] = spec(name, dst.shape)
                src = rect(dst.shape)
            wants.append(Want(live.name, dst, name, src))
    return layout(params, wants, constants), specs


def unused(one: EngineRankLayout, specs: dict[str, TensorSpec]) -> dict[str, int]:
    used: dict[str, set[int]] = {name: set() for name in specs}
    for want in one.recording.wants:
        used[want.source] |= set(elements(want.src))
    return {n: specs[n].numel - len(u) for n, u in used.items() if len(u) < specs[n].numel}


@given(engines())
def test_exact_partitions_pass(case: tuple[EngineRankLayout, dict[str, TensorSpec]]) -> None:
    one, specs = case
    assert coverage.check_rank(one, specs) == []


@given(engines())
def test_unused_elements_are_counted_per_hf_tensor(
    case: tuple[EngineRankLayout, dict[str, TensorSpec]],
) -> None:
    one, specs = case
    wrong = unused(one, specs)
    problems = coverage.check_engine([one], specs)
    assert len(problems) == len(wrong)
    for line, (name, count) in zip(
        problems, ((n, wrong[n]) for n in specs if n in wrong), strict=True
    ):
        assert f"{count} of {specs[name].numel} elements of HF tensor {name} " in line


def rewrite(one: EngineRankLayout, wants: list[Want]) -> EngineRankLayout:
    return replace(one, recording=replace(one.recording, wants=tuple(wants)))


@given(engines(), st.data())
def test_a_dropped_want_is_named_with_its_elements(
    case: tuple[EngineRankLayout, dict[str, TensorSpec]], data: st.DataObject
) -> None:
    one, specs = case
    wants = list(one.recording.wants)
    gone = wants.pop(data.draw(st.integers(0, len(wants) - 1)))
    numel = next(p.numel for p in one.params if p.name == gone.param)
    left = [w for w in wants if w.param == gone.param]
    left += [c for c in one.recording.constants if c.param == gone.param]
    (line,) = coverage.check_rank(rewrite(one, wants), specs)
    assert gone.param in line
    assert "dp0_pp0_tp0" in line
    if left:
        assert f"{gone.dst.numel} of {numel} elements are covered by nothing" in line
    else:
        assert "covered by no HF tensor" in line


@given(engines(), st.data())
def test_a_doubled_want_is_named_with_both_sources(
    case: tuple[EngineRankLayout, dict[str, TensorSpec]], data: st.DataObject
) -> None:
    one, specs = case
    wants = list(one.recording.wants)
    twice = data.draw(st.sampled_from(wants))
    again = spec("again", twice.src.shape)
    specs = {**specs, "again": again}
    wants.append(Want(twice.param, twice.dst, "again", rect(again.shape)))
    (line,) = coverage.check_rank(rewrite(one, wants), specs)
    assert twice.param in line
    assert twice.source in line
    assert "again" in line


@given(engines(), st.data())
def test_a_shifted_want_is_never_accepted(
    case: tuple[EngineRankLayout, dict[str, TensorSpec]], data: st.DataObject
) -> None:
    one, specs = case
    wants = list(one.recording.wants)
    i = data.draw(st.integers(0, len(wants) - 1))
    by = data.draw(st.integers(-3, 3).filter(bool))
    moved = replace(wants[i].dst, offset=wants[i].dst.offset + by)
    wants[i] = replace(wants[i], dst=moved)
    problems = coverage.check_rank(rewrite(one, wants), specs)
    assert problems
    assert all(wants[i].param in line for line in problems)


@given(engines(), st.data())
def test_a_shifted_source_is_out_of_bounds_or_leaves_elements_unused(
    case: tuple[EngineRankLayout, dict[str, TensorSpec]], data: st.DataObject
) -> None:
    one, specs = case
    wants = list(one.recording.wants)
    i = data.draw(st.integers(0, len(wants) - 1))
    wants[i] = replace(wants[i], src=replace(wants[i].src, offset=wants[i].src.offset + 1))
    changed = rewrite(one, wants)
    inside = set(elements(wants[i].src)) <= set(range(specs[wants[i].source].numel))
    problems = coverage.check_rank(changed, specs)
    if inside:
        assert problems == []
        assert len(coverage.check_engine([changed], specs)) == len(unused(changed, specs))
    else:
        (line,) = problems
        assert wants[i].param in line
        assert wants[i].source in line


def test_different_shapes_are_named() -> None:
    p, s = param("p", (2, 3)), spec("hf", (3, 2))
    (line,) = coverage.check_rank(layout([p], [copy(p, s)]), {"hf": s})
    assert "p: shapes differ: [2, 3] from [3, 2] of hf" in line


def test_a_missing_hf_tensor_is_named_with_its_parameter() -> None:
    p, s = param("p", (4,)), spec("hf", (4,))
    (line,) = coverage.check_rank(layout([p], [copy(p, s)]), {})
    assert "p comes from hf, which the trainer does not yield" in line


def test_a_want_for_no_parameter_is_named() -> None:
    p, s = param("p", (4,)), spec("hf", (4,))
    one = layout([p], [copy(p, s), Want("ghost", rect((4,)), "hf", rect((4,)))])
    (line,) = coverage.check_rank(one, {"hf": s})
    assert "hf goes into ghost, which is no parameter" in line
    one = layout([p], [copy(p, s)], [Constant("ghost", rect((4,)), 1.0)])
    (line,) = coverage.check_rank(one, {"hf": s})
    assert "ghost" in line


def test_constants_count_as_coverage_and_collide_by_value() -> None:
    p, s = param("p", (6, 2)), spec("hf", (4, 2))
    wants = [Want("p", rect((6, 2), (0, 4)), "hf", rect((4, 2)))]
    padding = Constant("p", rect((6, 2), (4, 6)), 0.0)
    assert coverage.check_rank(layout([p], wants, [padding]), {"hf": s}) == []
    over = Constant("p", rect((6, 2), (3, 6)), 0.5)
    (line,) = coverage.check_rank(layout([p], wants, [over]), {"hf": s})
    assert "hf" in line
    assert "the constant 0.5" in line


def test_a_tensor_that_is_too_small_is_not_hidden_by_padding() -> None:
    p, s = param("embed", (8, 2)), spec("hf", (5, 2))
    wants = [Want("embed", rect((8, 2), (0, 5)), "hf", rect((5, 2)))]
    fill = [Constant("embed", rect((8, 2), (5, 8)), 0.0)]
    for asked in (6, 7):
        one = layout([p], wants, fill, padding={"embed": asked})
        assert coverage.check_rank(one, {"hf": s}) == []
    for padding in ({"embed": 4}, {}, {"other": 6}):
        one = layout([p], wants, fill, padding=padding)
        (line,) = coverage.check_rank(one, {"hf": s})
        assert "embed: the loader fills 6 elements with a constant" in line
        assert f"the model has {padding.get('embed', 0)} to pad: hf is too small for it" in line
        assert "SGLANG_RDT_ALLOW_PADDING=1" in line
        assert coverage.check_rank(one, {"hf": s}, allow_padding=True) == []
        with pytest.raises(PlanError, match="fills 6 elements"):
            planner.make_plan([trainer(0, [s])], [one], 1 << 10)
        assert planner.make_plan([trainer(0, [s])], [one], 1 << 10, allow_padding=True).nbytes == 40
    # Several fills of one parameter count together.
    rows = [Constant("embed", rect((8, 2), (row, row + 1)), 0.0) for row in (5, 6, 7)]
    one = layout([p], wants, rows, padding={"embed": 5})
    assert "fills 6 elements" in coverage.check_rank(one, {"hf": s})[0]


def test_tied_parameters_are_one_target() -> None:
    s = spec("embed", (4, 2))
    embed = param("embed_tokens.weight", (4, 2), storage=7)
    head = replace(embed, name="lm_head.weight")
    for loaded in (embed, head):
        assert coverage.check_rank(layout([embed, head], [copy(loaded, s)]), {"embed": s}) == []
    other = spec("lm_head", (4, 2))
    both = layout([embed, head], [copy(embed, s), copy(head, other)])
    (line,) = coverage.check_rank(both, {"embed": s, "lm_head": other})
    assert "embed" in line
    assert "lm_head" in line
    (line,) = coverage.check_rank(layout([embed, head], []), {})
    assert "covered by no HF tensor" in line


def test_untied_parameters_in_one_storage_are_two_targets() -> None:
    s = spec("a", (4,))
    a, b = param("a", (4,), storage=7), param("b", (4,), storage=7, offset=4)
    (line,) = coverage.check_rank(layout([a, b], [copy(a, s)]), {"a": s})
    assert ": b " in line


def test_buffers_count_only_where_the_loader_writes_them() -> None:
    s = spec("bias", (4,))
    buffer = param("expert_bias", (4,), buffer=True)
    assert coverage.check_rank(layout([buffer], []), {}) == []
    assert coverage.check_rank(layout([buffer], [copy(buffer, s)]), {"bias": s}) == []
    half = Want("expert_bias", rect((4,), (0, 2)), "bias", rect((4,), (0, 2)))
    (line,) = coverage.check_rank(layout([buffer], [half]), {"bias": s})
    assert "2 of 4 elements" in line


def test_empty_parameters_and_tensors_need_nothing() -> None:
    p, s = param("p", (0, 3)), spec("hf", (0, 3))
    assert coverage.check_rank(layout([p], []), {"hf": s}) == []
    assert coverage.check_engine([layout([p], [])], {"hf": s}) == []


def test_a_diagonal_is_checked_element_by_element() -> None:
    p, s = param("p", (3, 3)), spec("hf", (3,))
    diagonal = Want("p", Slice(0, (3,), (4,)), "hf", rect((3,)))
    (line,) = coverage.check_rank(layout([p], [diagonal]), {"hf": s})
    assert "6 of 9 elements are covered by nothing" in line
    rest = spec("rest", (6,))
    wants = [diagonal] + [
        Want("p", Slice(at, (1,), (1,)), "rest", Slice(i, (1,), (1,)))
        for i, at in enumerate(at for at in range(9) if at % 4)
    ]
    assert coverage.check_rank(layout([p], wants), {"hf": s, "rest": rest}) == []
    wants.append(Want("p", Slice(4, (1,), (1,)), "rest", Slice(0, (1,), (1,))))
    (line,) = coverage.check_rank(layout([p], wants), {"hf": s, "rest": rest})
    assert "element 4 comes from hf and from rest" in line


def test_what_is_too_large_to_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MAX_BRUTE_FORCE", 8)
    p, s = param("p", (3, 3)), spec("hf", (3, 3))
    diagonal = Want("p", Slice(0, (3,), (4,)), "hf", Slice(0, (3,), (4,)))
    one = layout([p], [diagonal])
    assert "cannot check its coverage" in coverage.check_rank(one, {"hf": s})[0]
    assert "cannot check its use" in coverage.check_engine([one], {"hf": s})[0]


def test_slices_outside_of_the_parameter_are_refused() -> None:
    p, s = param("p", (4,)), spec("hf", (6,))
    (line,) = coverage.check_rank(layout([p], [copy(replace(p, shape=(6,)), s)]), {"hf": s})
    assert "reaches element 5 of a tensor of 4 elements" in line
    # In the gap between the rows of a parameter that is a part of a larger storage.
    padded = param("p", (2, 2), stride=(4, 1))
    wants = [
        copy(padded, spec("hf", (2, 2))),
        Want("p", Slice(2, (1,), (1,)), "hf", Slice(0, (1,), (1,))),
    ]
    (line,) = coverage.check_rank(layout([padded], wants), {"hf": spec("hf", (2, 2))})
    assert "outside of the parameter" in line


def test_tensors_may_be_used_by_different_ranks_of_one_engine() -> None:
    s = spec("hf", (4, 2))
    halves = [
        layout(
            [param("p", (2, 2))],
            [Want("p", rect((2, 2)), "hf", rect((4, 2), (2 * tp, 2 * tp + 2)))],
            rank=engine_rank(tp, tp_size=2),
        )
        for tp in (0, 1)
    ]
    assert coverage.check_engine(halves, {"hf": s}) == []
    (line,) = coverage.check_engine(halves[:1], {"hf": s})
    assert "4 of 8 elements of HF tensor hf [4, 2] go nowhere" in line
    (line,) = coverage.check_engine(halves, {"hf": s, "extra": spec("extra", (3,))})
    assert "HF tensor extra float32[3] goes nowhere" in line
    # Replicated slices are counted once.
    assert coverage.check_engine([*halves, *halves], {"hf": s}) == []


LOSSLESS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}


@pytest.mark.parametrize(
    ("source", "target"),
    list(itertools.product(("float32", "bfloat16", "float16", "float8_e4m3fn", "int32"), repeat=2)),
)
def test_dtypes_may_widen_but_lose_bits_only_if_allowed(source: str, target: str) -> None:
    p, s = param("p", (4,), target), spec("hf", (4,), source)
    one = layout([p], [copy(p, s)])
    problems, casts = coverage.check_dtypes(one, {"hf": s}, allow_cast=False)
    if source == target:
        assert (problems, casts) == ([], [])
    elif (source, target) in LOSSLESS:
        assert problems == []
        assert casts == [f"{one.rank}: hf is {source}, p is {target}"]
    else:
        assert casts == []
        (line,) = problems
        assert f"hf is {source}, p is {target}" in line
        assert "SGLANG_RDT_ALLOW_CAST=1" in line
        problems, casts = coverage.check_dtypes(one, {"hf": s}, allow_cast=True)
        assert (problems, len(casts)) == ([], 1)


def test_contradicting_trainer_ranks_are_named() -> None:
    a, b = spec("hf", (4,)), spec("hf", (4,), "bfloat16")
    union, problems = coverage.union_of_specs([[a, spec("x", (1,))], [a], [b]])
    assert union == {"hf": a, "x": spec("x", (1,))}
    (line,) = problems
    assert "hf" in line
    assert "float32[4]" in line
    assert "bfloat16[4]" in line


def test_a_plan_error_lists_every_culprit() -> None:
    good, lonely, short = param("good", (2,)), param("lonely", (2,)), param("short", (4,))
    specs = [
        spec("hf_good", (2,)),
        spec("hf_short", (2,)),
        spec("hf_extra", (5,)),
        spec("hf_cast", (2,)),
    ]
    cast = param("cast", (2,), "bfloat16")
    one = layout(
        [good, lonely, short, cast],
        [
            copy(good, specs[0]),
            Want("short", rect((4,), (0, 2)), "hf_short", rect((2,))),
            copy(cast, specs[3]),
            Want("good", rect((2,)), "hf_gone", rect((2,))),
        ],
    )
    with pytest.raises(PlanError) as caught:
        planner.make_plan([trainer(0, specs)], [one], 1 << 20)
    problems = "\n".join(caught.value.problems)
    for culprit in ("lonely", "short", "hf_extra", "hf_cast", "hf_gone"):
        assert culprit in problems
        assert culprit in str(caught.value)
    assert "2 of 4 elements" in problems


@pytest.mark.parametrize(
    ("source", "dtype", "rounds"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("bfloat16", "float32", False),
        ("bfloat16", "bfloat16", False),
        ("float8_e4m3fn", "bfloat16", False),
        # How the engine quantises is how it was started.
        ("bfloat16", "float8_e4m3fn", False),
    ],
)
def test_what_a_loader_casts_needs_the_users_word_where_it_rounds(
    source: str, dtype: str, rounds: bool
) -> None:
    hf, p = spec("hf", (4,), source), param("p", (4,), dtype)
    scratch = param("computed:hf", (4,), source)
    computed = Computed(("hf",), (Write("p", Slice(0, (4,), (1,))),), "a cast")
    one = layout([p, scratch], [copy(scratch, hf)])
    one = replace(one, recording=replace(one.recording, computed=(computed,)))
    specs = {"hf": hf}
    assert coverage.check_rank(one, specs) == []
    problems, casts = coverage.check_dtypes(one, specs, allow_cast=False)
    assert casts == []
    assert len(problems) == rounds
    assert all("hf is" in line and "the loader casts" in line for line in problems)
    problems, casts = coverage.check_dtypes(one, specs, allow_cast=True)
    assert (problems, len(casts)) == ([], rounds)
    assert forms.check_layout(one) == []


def test_what_is_computed_is_looked_at() -> None:
    hf, p = spec("hf", (4,)), param("p", (4,))
    one = layout([p], [])
    write = Write("p", Slice(0, (4,), (1,)))
    for computed, word in (
        (Computed((), (write,), ""), "no HF tensors"),
        (Computed(("hf",), (write, "p"), ""), "no Write"),  # type: ignore[arg-type]
        (Computed(("hf",), (Write("", write.dst),), ""), "a computation"),
        (Computed(("hf",), (Write("p", Slice(-1, (4,), (1,))),), ""), "negative"),
    ):
        bad = replace(one, recording=replace(one.recording, computed=(computed,)))
        (problem,) = forms.check_layout(bad)
        assert word in problem
    unknown = Computed(("hf",), (Write("q", write.dst),), "a cast")
    bad = replace(one, recording=replace(one.recording, computed=(unknown,)))
    problems = coverage.check_rank(bad, {"hf": hf})
    assert any("hf goes in, and is not pulled" in line for line in problems)
    assert any("q is computed of hf, and is no parameter" in line for line in problems)
    assert any("p float32[4] is covered by no HF tensor" in line for line in problems)
