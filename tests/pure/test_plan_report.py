"""The report of a live plan: every byte of every parameter goes one way, and each is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_rdt.cli.app import app
from sglang_rdt.plan import report
from sglang_rdt.plan.direct import make_direct_plan
from sglang_rdt.plan.planner import make_plan
from sglang_rdt.plan.selection import keep
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Block,
    Constant,
    EngineRankLayout,
    Hold,
    Recording,
    TrainerRank,
    Want,
)

from .builders import copy, engine_rank, layout, param, rect, row_major, spec, trainer

Q, K, E = spec("q", (4, 2), "bfloat16"), spec("k", (2, 2)), spec("e", (5, 2))
MTP = spec("mtp", (3,))


def engine(tp: int = 0, kept: tuple[str, ...] = ()) -> EngineRankLayout:
    qkv, embed = param("qkv", (6, 2)), param("embed", (6, 2))
    wants = [
        Want("qkv", rect((6, 2), (0, 4)), "q", rect((4, 2))),
        Want("qkv", rect((6, 2), (4, 6)), "k", rect((2, 2))),
        Want("embed", rect((6, 2), (0, 5)), "e", rect((5, 2))),
    ]
    one = layout(
        [qkv, embed], wants, [Constant("embed", rect((6, 2), (5, 6)), 0.0)], rank=engine_rank(tp)
    )
    return replace(one, recording=keep(one.recording, kept))


def holder() -> TrainerRank:
    specs = (Q, K, E, MTP)
    holds = tuple(
        Hold(s.name, whole, i, whole, s.dtype)
        for i, s in enumerate(specs)
        for whole in [Slice(0, s.shape, row_major(s.shape))]
    )
    return TrainerRank(
        0, "10.0.0.9", specs, blocks=tuple(Block(s.name, s.nbytes) for s in specs), holds=holds
    )


def test_a_bucketed_plan() -> None:
    layouts = [engine()]
    found = report.report(layouts, make_plan([trainer(0, [Q, K, E])], layouts, 1 << 16))
    rank = str(layouts[0].rank)
    assert found.lines == (
        report.Line(rank, "qkv", "bucketed", ("q", "k"), 48, "float32", "bfloat16 to float32"),
        report.Line(rank, "embed", "bucketed", ("e",), 40, "float32"),
        report.Line(rank, "embed", "constant", (), 8, "float32"),
    )
    assert found.totals() == {"bucketed": (2, 88), "constant": (1, 8)}
    assert (found.mode, found.moved, found.unused) == ("bucketed", 88, ())


def test_a_direct_plan_with_a_filter() -> None:
    layouts = [engine(0, ("e", "mtp")), engine(1, ("e", "mtp"))]
    plan = make_direct_plan([holder()], layouts)
    found = report.report(layouts, plan)
    assert found.moved == plan.nbytes
    assert found.unused == ("mtp",)
    for one in layouts:
        ways = {(x.param, x.way): x for x in found.lines if x.rank == str(one.rank)}
        # bf16 travels as it is, and becomes fp32 on the engine.
        assert ways["qkv", "staged"].nbytes == Q.nbytes
        assert ways["qkv", "staged"].cast == "bfloat16 to float32"
        assert ways["qkv", "direct"].nbytes == K.nbytes
        assert ways["embed", "kept"].nbytes == 48
        assert ways["embed", "kept"].sources == ("e",)
        assert len(ways) == 3


@dataclass(frozen=True)
class Computed:
    params: tuple[str, ...]
    sources: tuple[str, ...]
    writes: tuple[Want, ...]
    why: str


@dataclass(frozen=True)
class WithComputed(Recording):
    computed: tuple[Computed, ...] = ()


def test_what_the_loader_computes() -> None:
    norm, scratch = param("norm", (3,)), param("computed:n", (3,))
    n = spec("n", (3,))
    want = copy(scratch, n)
    made = Computed(("norm",), ("n",), (replace(want, param="norm"),), "aten.add of n")
    one = EngineRankLayout(engine_rank(), (norm, scratch), WithComputed((want,), computed=(made,)))
    plan = make_plan([trainer(0, [n])], [layout([norm], [copy(norm, n)])], 1 << 16)
    found = report.report([one], plan)
    assert [(x.param, x.way, x.nbytes, x.why) for x in found.lines] == [
        ("computed:n", "bucketed", 12, ""),
        ("norm", "computed", 12, "aten.add of n"),
    ]


def test_the_command_shows_it(tmp_path: Path) -> None:
    layouts = [engine(0, ("e", "mtp"))]
    path = tmp_path / "new" / "plan.json"
    found = report.report(layouts, make_direct_plan([holder()], layouts))
    report.save(found, path)
    assert report.load(path) == found
    shown = CliRunner().invoke(app, ["plan", "--report", str(path)])
    assert shown.exit_code == 0, shown.output
    for text in ("qkv", "staged", "kept", "bfloat16 to float32", "over links", "mtp", "32 B"):
        assert text in shown.output
    both = CliRunner().invoke(app, ["plan", "--report", str(path), "--simulate"])
    assert both.exit_code == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"mode": "direct", "lines": [{}]}'])
def test_a_file_that_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json is no report of SGLANG_RDT_PLAN_REPORT"):
        report.load(path)
    assert CliRunner().invoke(app, ["plan", "--report", str(path)]).exit_code == 1
    assert CliRunner().invoke(app, ["plan", "--report", "/nowhere/x"]).exit_code == 1
