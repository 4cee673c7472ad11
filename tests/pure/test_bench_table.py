"""The table in README.md is made from the results, and up to date."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_rdt.bench import report

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(**more: Any) -> dict[str, Any]:
    one = {
        "total_ms": {"median": 50.0, "min": 49.0, "max": 60.0},
        "phases_ms": {},
        "extra_bytes": {"trainer": 0, "engine": 0},
        "equal": True,
    }
    found = {
        "date": "2026-12-01 10:00 UTC",
        "machine": "2xH200",
        "command": "sglang-rdt bench",
        "model": "qwen3-8b",
        "bytes": 16_000_000_000,
        "layout": {"trainer": "tp=2,pp=1,ep=1,etp=2,dp=1", "engine": "tp=1", "engines": 2},
        "limit_gbps": None,
        "paths": {"direct": one},
        **more,
    }
    assert report.problems(found) == []
    return found


def test_the_readme_is_up_to_date(table: ModuleType) -> None:
    assert table.main(["--check"]) == 0, "run python benchmarks/table.py"


def test_every_result_can_be_shown(table: ModuleType) -> None:
    results = table.load(ROOT / "benchmarks" / "results")
    text = table.render(results)
    assert len(results) > 0
    assert all(f"benchmarks/results/{file})" in text for file, _ in results)


def test_a_result(table: ModuleType) -> None:
    text = table.render([("a.json", result())])
    assert (
        "| [qwen3-8b, 16.0 GB, 2xH200](benchmarks/results/a.json) | TP 2 to 2 × TP 1 | not measured "
        "| 50.0 ms, 320.0 GB/s | not measured | not measured | not measured |"
    ) in text
    assert "Not measured: raw copy (anywhere)" in text


def test_what_went_wrong_is_said(table: ModuleType) -> None:
    bad = result(failed={"sglang_disk": "no space"}, verify="checksum")
    bad["paths"]["direct"]["equal"] = False
    text = table.render([("a.json", bad)])
    assert "(1) |" in text
    assert (
        "1. Direct: BYTES DIFFERED; direct and bucketed with `checksum` verification; SGLang, disk: "
        "failed."
    ) in text


def test_a_trained_result(table: ModuleType) -> None:
    steps = [{"compared": 35, "differences": []}, {"compared": 35, "differences": ["x"]}]
    text = table.render([("b.json", result(trained={"direct": steps}))])
    assert "direct: 2 steps, 70 parameters compared, 1 DIFFERENCES." in text


def test_an_unknown_file(table: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"c\.json"):
        table.render([("c.json", {})])


def test_the_markers(table: ModuleType) -> None:
    text = f"a\n{table.BEGIN}\nold\n{table.END}\nb\n"
    assert table.replaced(text, "new") == f"a\n{table.BEGIN}\nnew\n{table.END}\nb\n"
    with pytest.raises(ValueError, match="once each"):
        table.replaced("a", "new")
