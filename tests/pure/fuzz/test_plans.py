"""What engines and trainers describe, as the planner gets it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.errors import PlanError, SlicesError
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import EngineRankLayout, Recording, TrainerRank, Want
from sglang_rdt.plan.transfers import check_target_transfers, wanted_elements

from .. import resharding
from ..builders import NUMPY, elements, engine_rank, layout, param, rect, spec, trainer
from . import strategies as hostile

MEMORY = 300 << 20


@pytest.fixture(autouse=True)
def _no_gigabytes() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY, f"{grown >> 20} MiB more at the peak"


def plan_direct(trainers: Any, layouts: Any, **options: Any) -> DirectPlan | None:
    """The plan, or None if it was refused as it should be."""
    try:
        with hostile.quickly():
            return make_direct_plan(trainers, layouts, **options)
    except (PlanError, SlicesError) as error:
        hostile.check_sentence(error, 200_000)
        return None


def plan_buckets(trainers: Any, layouts: Any, bucket: int, **options: Any) -> Plan | None:
    """Likewise, bucketed."""
    try:
        with hostile.quickly():
            return make_plan(trainers, layouts, bucket, **options)
    except (PlanError, SlicesError) as error:
        hostile.check_sentence(error, 200_000)
        return None


def tensors_of(trainers: tuple[TrainerRank, ...]) -> dict[str, np.ndarray]:
    """Every HF tensor with numbers of its own, flat."""
    out: dict[str, np.ndarray] = {}
    for one in trainers:
        for s in one.exports:
            first = 100 * len(out)
            out.setdefault(s.name, np.arange(first, first + s.numel).astype(NUMPY[s.dtype]))
    return out


def expected_of(one: EngineRankLayout, hf: dict[str, np.ndarray]) -> dict[str, dict[int, Any]]:
    """Parameter -> element -> value, by enumeration of the wants."""
    out: dict[str, dict[int, Any]] = {p.name: {} for p in one.params}
    for want in one.recording.wants:
        pairs = zip(elements(want.dst), elements(want.src), strict=True)
        out[want.param] |= {to: hf[want.source][of] for to, of in pairs}
    return out


def check_direct(
    plan: DirectPlan, trainers: tuple[TrainerRank, ...], layouts: tuple[EngineRankLayout, ...]
) -> None:
    """A plan that was made moves what is wanted, and nothing twice, and stays inside."""
    hf = tensors_of(trainers)
    blocks: dict[int, list[np.ndarray]] = {}
    for one in trainers:
        blocks[one.rank] = [np.zeros(b.nbytes, np.uint8) for b in one.blocks]
        for hold in one.holds:
            memory = resharding.typed(blocks[one.rank][hold.block], hold.local, hold.dtype)
            memory[...] = hf[hold.source][elements(hold.hf)].reshape(hold.hf.shape)
    # Holds of different tensors in one place are what tied weights are; not with these numbers.
    contradict = any(
        (
            resharding.typed(blocks[t.rank][h.block], h.local, h.dtype).ravel()
            != hf[h.source][elements(h.hf)].astype(NUMPY[h.dtype])
        ).any()
        for t in trainers
        for h in t.holds
    )
    for target, one_layout in enumerate(layouts):
        check_target_transfers(
            one_layout.params, plan.transfers(target), wanted_elements(one_layout.recording.wants)
        )
    written = [
        EngineRankLayout(one.rank, tuple(p for p in one.params if p.dtype in NUMPY), one.recording)
        for one in layouts
    ]
    moved = resharding.run(plan, written, blocks, 1 << 10, 1 << 10)
    for one_layout, got in zip(written, moved, strict=True):
        expected = expected_of(one_layout, hf)
        for p in one_layout.params:
            item = np.dtype(NUMPY[p.dtype]).itemsize
            counts = got.writes[p.name].reshape(-1, item)
            assert {int(i) for i in np.flatnonzero(counts.any(axis=1))} == set(expected[p.name])
            assert counts.max(initial=0) <= 1
            values = got.memory[p.name].view(NUMPY[p.dtype])
            kind = np.dtype(NUMPY[p.dtype]).type
            for i, value in expected[p.name].items() if not contradict else ():
                assert values[i] == kind(value), (p.name, i, values[i], value)


def check_buckets(plan: Plan, layouts: tuple[EngineRankLayout, ...], bucket: int) -> None:
    """Every element that is wanted comes in one bucket, from the element that is wanted."""
    found: dict[str, dict[tuple[str, int], int]] = {}
    for route in plan.routes:
        mine = found.setdefault(str(route.target), {})
        for one in route.rounds:
            assert 0 < one.nbytes <= bucket
            for target in one.targets:
                for element in elements(target.dst):
                    key = target.param, element
                    mine[key] = mine.get(key, 0) + 1
    for one in layouts:
        wanted = {(w.param, e): 1 for w in one.recording.wants for e in elements(w.dst)}
        assert found.get(str(one.rank), {}) == wanted


@pytest.fixture(scope="module")
def good() -> tuple[tuple[TrainerRank, ...], tuple[EngineRankLayout, ...]]:
    return hostile.trainers(), hostile.layouts()


def test_what_is_mutated_is_good(good: Any) -> None:
    plan = plan_direct(*good)
    assert plan is not None
    check_direct(plan, *good)
    staged = plan_buckets(*good, 64)
    assert staged is not None
    check_buckets(staged, good[1], 64)


@hostile.examples(250)
@given(st.data(), st.booleans(), st.booleans())
def test_engines_that_describe_anything(data: st.DataObject, cast: bool, direct: bool) -> None:
    trainers = hostile.trainers()
    layouts = data.draw(hostile.mutated(hostile.layouts()))
    attempt(trainers, layouts, cast, direct)


@hostile.examples(250)
@given(st.data(), st.booleans(), st.booleans())
def test_trainers_that_report_anything(data: st.DataObject, cast: bool, direct: bool) -> None:
    trainers = data.draw(hostile.mutated(hostile.trainers()))
    attempt(trainers, hostile.layouts(), cast, direct)


def attempt(trainers: Any, layouts: Any, cast: bool, direct: bool) -> None:
    if not isinstance(trainers, tuple) or not isinstance(layouts, tuple):
        return  # made here, of what came
    options = {"allow_cast": cast, "allow_padding": cast}
    if direct:
        plan = plan_direct(trainers, layouts, **options)
        if plan is not None:
            check_direct(plan, trainers, layouts)
    else:
        staged = plan_buckets(trainers, layouts, 64, **options)
        if staged is not None:
            check_buckets(staged, layouts, 64)


SIZES = st.one_of(st.integers(0, 5), st.sampled_from([1 << 20, 1 << 24, 1 << 31, 1 << 48]))
SLICES = st.integers(0, 3).flatmap(
    lambda n: st.builds(
        Slice,
        SIZES,
        st.lists(SIZES, min_size=n, max_size=n).map(tuple),
        st.lists(SIZES, min_size=n, max_size=n).map(tuple),
    )
)


@hostile.examples(60)
@given(st.lists(st.tuples(SLICES, SLICES), max_size=4), SIZES, SIZES, st.booleans())
def test_slices_of_any_size(pairs: Any, rows: int, columns: int, direct: bool) -> None:
    """Large tensors, and slices that repeat elements, step, overlap or are larger than all."""
    p, s = param("p", (rows, columns)), spec("s", (rows, columns))
    wants = [
        Want(
            "p",
            Slice(d.offset, of.shape, d.stride if len(d.stride) == len(of.shape) else of.stride),
            "s",
            of,
        )
        for d, of in pairs
    ]
    one = layout([p], wants)
    if direct:
        plan_direct([trainer(0, [s])], [one], allow_padding=True)
    else:
        plan_buckets([trainer(0, [s])], [one], 1 << 16, allow_padding=True)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("dst", "src"),
    [
        (Slice(0, (1 << 40,), (0,)), Slice(0, (1 << 40,), (0,))),
        (Slice(0, (1 << 20, 1 << 20), (1, 1)), Slice(0, (1 << 20, 1 << 20), (1, 1))),
        (Slice(0, (1 << 23,), (2,)), Slice(0, (1 << 23,), (2,))),
        (Slice(0, (1 << 24,), (1,)), Slice(0, (1 << 24,), (0,))),
        (Slice(0, (1 << 12, 1 << 12), (1 << 12, 1)), Slice(0, (1 << 12, 1 << 12), (1, 1))),
    ],
)
def test_slices_that_repeat_or_step_take_no_memory(direct: bool, dst: Slice, src: Slice) -> None:
    p, s = param("p", (1 << 24,)), spec("s", (1 << 24,))
    one = layout([p], [Want("p", dst, "s", src)])
    if direct:
        plan_direct([trainer(0, [s])], [one])
    else:
        plan_buckets([trainer(0, [s])], [one], 1 << 16)


def test_more_rounds_than_there_may_be_are_refused_before_they_are_made() -> None:
    shape = (1 << 22, 1 << 22)
    p, s = param("p", shape), spec("s", shape)
    one = layout([p], [Want("p", rect(shape), "s", rect(shape))])
    with hostile.quickly(), pytest.raises(PlanError, match="rounds of 65536 bytes, more than"):
        make_plan([trainer(0, [s])], [one], 1 << 16)


def test_an_engine_rank_that_is_there_twice_is_refused() -> None:
    p, s = param("p", (2,)), spec("s", (2,))
    one = layout([p], [Want("p", rect((2,)), "s", rect((2,)))], rank=engine_rank(1, tp_size=2))
    for make in (lambda t, e: make_plan(t, e, 64), make_direct_plan):
        with pytest.raises(PlanError, match="dp0_pp0_tp1 is there twice"):
            make([trainer(0, [s])], [one, one])  # type: ignore[operator]


def test_nested_boxes_of_many_dimensions_are_counted_quickly() -> None:
    from sglang_rdt.plan.slices import Box, union_volume

    boxes = [Box((i,) * 16, (120 - i,) * 16) for i in range(30)]
    with hostile.quickly():
        assert union_volume(boxes) == 120**16


@hostile.examples(60)
@given(st.lists(hostile.FLOATS, min_size=4, max_size=4), st.booleans())
def test_costs_of_any_size_plan(values: list[float], keep: bool) -> None:
    from sglang_rdt.errors import SettingError

    try:
        costs = LinkCosts(*(abs(v) if keep else v for v in values))
    except SettingError as error:
        hostile.check_sentence(error)
        return
    trainers, layouts = hostile.trainers(), hostile.layouts()
    plan = plan_direct(trainers, layouts, costs=costs)
    assert plan is not None
    check_direct(plan, trainers, layouts)


def test_a_recording_of_nothing() -> None:
    one = EngineRankLayout(engine_rank(), (), Recording(()))
    assert plan_direct([TrainerRank(0, "", ())], [one]) is not None
