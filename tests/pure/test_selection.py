"""A name filter: what it chooses, and that the proof is still about the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sglang_rdt.errors import PlanError, RecordError
from sglang_rdt.plan import coverage, forms
from sglang_rdt.plan.direct import make_direct_plan
from sglang_rdt.plan.planner import make_plan
from sglang_rdt.plan.selection import keep, leave, select, unmatched
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Block,
    Constant,
    EngineRankLayout,
    Hold,
    Kept,
    Recording,
    TrainerRank,
    Want,
)

from .builders import copy, layout, param, rect, row_major, spec, trainer

Q, K, OUT, E = spec("q", (4, 2)), spec("k", (2, 2)), spec("o", (3,)), spec("e", (5, 2))
ALL = [Q, K, OUT, E]


def model(**changes: Any) -> EngineRankLayout:
    """A fused parameter, a plain one, and an embedding with a padding row."""
    qkv, out, embed = param("qkv", (6, 2)), param("out", (3,)), param("embed", (6, 2))
    wants = [
        Want("qkv", rect((6, 2), (0, 4)), "q", rect((4, 2))),
        Want("qkv", rect((6, 2), (4, 6)), "k", rect((2, 2))),
        copy(out, OUT),
        Want("embed", rect((6, 2), (0, 5)), "e", rect((5, 2))),
    ]
    one = layout([qkv, out, embed], wants, [Constant("embed", rect((6, 2), (5, 6)), 0.0)])
    return replace(one, **changes)


def filtered(*kept: str) -> EngineRankLayout:
    one = model()
    return replace(one, recording=keep(one.recording, kept))


def holder(*specs: Any) -> TrainerRank:
    blocks = tuple(Block(s.name, s.nbytes) for s in specs)
    holds = tuple(
        Hold(s.name, whole, i, whole, s.dtype)
        for i, s in enumerate(specs)
        for whole in [Slice(0, s.shape, row_major(s.shape))]
    )
    return TrainerRank(0, "10.0.0.9", tuple(specs), blocks=blocks, holds=holds)


# What is chosen


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ((), (), ""),
        (("q", "k"), (), "eo"),
        (("?",), ("[ko]",), "ko"),
        ((), ("o",), "o"),
        (("*",), (), ""),
    ],
)
def test_patterns(include: tuple[str, ...], exclude: tuple[str, ...], kept: str) -> None:
    chosen = select(ALL, include, exclude)
    assert chosen.kept == set(kept)
    assert (chosen.tensors, chosen.nbytes) == (4, sum(s.nbytes for s in ALL))
    assert chosen.kept_bytes == sum(s.nbytes for s in ALL if s.name in kept)


@pytest.mark.parametrize(
    ("include", "exclude", "why"),
    [
        (("v",), (), "include pattern 'v' matches none of the trainer's 4 HF tensors"),
        (("q", "Q*"), (), r"include pattern 'Q\*' matches none"),
        ((), ("q", "lora_*"), r"exclude pattern 'lora_\*' matches none"),
        (("q",), ("?",), "leave none of 4 HF tensors to sync"),
        (("",), (), "include pattern '' matches none"),
    ],
)
def test_what_is_no_filter(include: tuple[str, ...], exclude: tuple[str, ...], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        select(ALL, include, exclude)


# What is kept aside


def test_slices_of_a_fused_parameter_go_alone_and_constants_with_the_rest() -> None:
    whole = model().recording
    assert keep(whole, ()) == whole
    one = keep(whole, {"k", "e", "unused"})
    assert [w.source for w in one.wants] == ["q", "o"]
    assert one.constants == ()
    assert one.kept == Kept(
        frozenset({"k", "e", "unused"}), (whole.wants[1], whole.wants[3]), whole.constants
    )
    assert sorted(w.source for w in one.whole().wants) == ["e", "k", "o", "q"]
    assert keep(whole, {"k"}).constants == whole.constants


@dataclass(frozen=True)
class Computed:
    params: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class WithComputed(Recording):
    computed: tuple[Computed, ...] = ()


def test_what_is_computed_from_several_is_not_cut() -> None:
    whole = model().recording
    recording = WithComputed(whole.wants, computed=(Computed(("out",), ("o", "q")),))
    keep(recording, {"e"})
    keep(recording, {"o", "q"})
    with pytest.raises(
        RecordError, match="out: computed from o, q, of which the name filter keeps q"
    ):
        keep(recording, {"q", "e"})


# What is proved


def problems(one: EngineRankLayout) -> list[str]:
    specs = {s.name: s for s in ALL}
    return [
        *forms.check_layout(one),
        *coverage.check_sizes(one, specs),
        *coverage.check_rank(one, specs),
        *coverage.check_engine([one], specs),
    ]


@pytest.mark.parametrize("kept", ["", "q", "k", "qk", "e", "qkoe", "o"])
def test_every_filter_of_a_whole_model_is_proved(kept: str) -> None:
    assert problems(filtered(*kept)) == []


def test_what_nobody_fills_is_named_whatever_is_kept() -> None:
    one = filtered("e")
    cut = replace(one, recording=replace(one.recording, wants=one.recording.wants[1:]))
    assert "qkv: 8 of 12 elements are covered by nothing" in " ".join(problems(cut))
    kept = one.recording.kept
    cut = replace(one, recording=replace(one.recording, kept=replace(kept, wants=())))
    found = " ".join(problems(cut))
    assert "embed: 10 of 12 elements are covered by nothing" in found


def test_what_is_kept_and_written_is_named() -> None:
    one = filtered("k")
    twice = Want("qkv", rect((6, 2), (4, 6)), "q", rect((4, 2), (0, 2)))
    recording = replace(one.recording, wants=(*one.recording.wants, twice))
    found = " ".join(problems(replace(one, recording=recording)))
    assert "qkv: the same elements come from" in found


def test_what_is_kept_need_not_be_used_and_the_rest_must() -> None:
    specs = {s.name: s for s in [*ALL, spec("mtp", (7,))]}
    assert coverage.check_engine([filtered("e")], specs) == [
        "10.0.0.1:30000: HF tensor mtp float32[7] goes nowhere"
    ]
    assert coverage.check_engine([filtered("e", "mtp")], specs) == []


# What the trainer has nothing for


def beside_a_tower(*patterns: str) -> EngineRankLayout:
    """Two parameters, and a buffer, that no tensor of the trainer's is for."""
    more = (param("tower.w", (7, 2)), param("tower.b", (7,)))
    one = model(params=(*model().params, *more, replace(param("tower.rope", (3,)), buffer=True)))
    return replace(one, recording=leave(one.recording, one.params, patterns))


def test_parameters_that_the_trainer_has_nothing_for_are_kept_when_asked_for() -> None:
    assert problems(beside_a_tower("tower.*")) == []
    assert beside_a_tower("tower.*").recording.kept.params == {"tower.w", "tower.b"}
    (why,) = problems(beside_a_tower("*.b"))
    assert "tower.w float32[7, 2] is covered by no HF tensor (what the trainer does not" in why
    assert len(problems(beside_a_tower())) == 2
    assert make_plan([trainer(0, ALL)], [beside_a_tower("tower.*")], 1 << 16).nbytes == sum(
        s.nbytes for s in ALL
    )
    direct = make_direct_plan([holder(*ALL)], [beside_a_tower("tower.*")])
    assert {t.param for t in direct.transfers(0)} == {"qkv", "out", "embed"}


def test_what_the_trainer_has_is_not_kept_by_the_name_of_its_parameter() -> None:
    (why,) = problems(beside_a_tower("tower.*", "qkv"))
    assert "qkv is to be kept (SGLANG_RDT_KEEP), but comes from k, q" in why
    with pytest.raises(PlanError, match="SGLANG_RDT_EXCLUDE"):
        make_direct_plan([holder(*ALL)], [beside_a_tower("*")])
    # Nor because a filter keeps it already.
    one = beside_a_tower("tower.*", "out")
    assert problems(replace(one, recording=keep(one.recording, {"o"})))


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("pattern", ["embed", "head"])
def test_a_tied_parameter_is_kept_under_all_its_names_or_not_at_all(
    pattern: str, filled: bool
) -> None:
    one = model()
    head = replace(one.params[2], name="head")
    recording = one.recording
    if not filled:
        wants = tuple(w for w in recording.wants if w.param != "embed")
        recording = replace(recording, wants=wants, constants=())
    one = replace(one, params=(*one.params, head), recording=recording)
    (why, *more) = problems(replace(one, recording=leave(recording, one.params, [pattern])))
    if filled:
        assert f"{pattern} is to be kept (SGLANG_RDT_KEEP), but comes from e, the constant 0" in why
    else:
        assert "is covered by no HF tensor" in why
        both = replace(one, recording=leave(recording, one.params, ["embed", "head"]))
        assert problems(both) == more  # an HF tensor that goes nowhere


def test_a_pattern_that_no_parameter_matches_is_named() -> None:
    ranks = [model(), beside_a_tower()]
    assert unmatched(ranks, ["tower.*", "out"]) == []
    (why,) = unmatched(ranks, ["tower.rope", "*.b"])
    assert "keep pattern 'tower.rope' (SGLANG_RDT_KEEP) matches none of the engine's 5" in why


def test_a_report_that_is_none_is_named() -> None:
    one = model()
    for kept in (
        None,
        Kept(params=["e"]),
        Kept(params=frozenset({None})),
        Kept(["e"]),
        Kept(frozenset({1})),
        Kept(frozenset({"e"}), (None,)),
    ):  # type: ignore[arg-type]
        bad = replace(one, recording=replace(one.recording, kept=kept))  # type: ignore[arg-type]
        assert forms.check_layout(bad), kept


# What moves


@pytest.mark.parametrize("kept", ["", "q", "k", "e", "qo"])
def test_plans_move_what_is_synced_and_nothing_else(kept: str) -> None:
    one = filtered(*kept)
    nbytes = sum(s.nbytes for s in ALL if s.name not in kept)
    plan = make_plan([trainer(0, ALL)], [one], 1 << 16)
    assert plan.nbytes == nbytes
    sources = {p.source for route in plan.routes for r in route.rounds for p in r.pieces}
    assert sources == {s.name for s in ALL} - set(kept)
    direct = make_direct_plan([holder(*ALL)], [one])
    assert direct.nbytes == nbytes
    moved = sum(t.dst.numel for t in direct.transfers(0))
    assert moved == nbytes // 4


def test_a_kept_tensor_may_have_any_dtype() -> None:
    others = [*ALL[:3], spec("e", (5, 2), "float64")]
    with pytest.raises(PlanError, match="e is float64, embed is float32"):
        make_plan([trainer(0, others)], [model()], 1 << 16)
    make_plan([trainer(0, others)], [filtered("e")], 1 << 16)
    make_direct_plan([holder(*others)], [filtered("e")])


def test_engines_with_and_without_a_filter_are_not_alike() -> None:
    plan = make_plan(
        [trainer(0, ALL)],
        [
            filtered("e"),
            replace(model(), rank=replace(model().rank, engine="10.0.0.2:30000")),
        ],
        1 << 16,
    )
    sizes = {r.target.engine: r.nbytes for r in plan.routes}
    assert sizes["10.0.0.2:30000"] - sizes["10.0.0.1:30000"] == E.nbytes
