from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_rdt.bench import calibrate, machine, measure, memory, plot, report
from sglang_rdt.bench.paths.base import Timing


def path(median: float, **more: Any) -> dict[str, Any]:
    return {
        "total_ms": {"median": median, "min": median - 1, "max": median + 1},
        "phases_ms": {"pause": 1.0, "pull": median / 2},
        "extra_bytes": {"trainer": 0, "engine": 1 << 20},
        "equal": True,
        **more,
    }


def result(**more: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-30 10:00 UTC",
        "machine": "2xH200",
        "command": "sglang-rdt bench",
        "model": "qwen3-8b",
        "bytes": 16_381_470_720,
        "layout": {"trainer": "tp=1,pp=1,ep=1,etp=1,dp=1", "engine": "tp=1", "engines": 1},
        "limit_gbps": 393.0,
        "paths": {
            "sglang_disk": path(9000.0, gbps=1.8),
            "direct": path(46.0, gbps=356.1),
            "peer_copy": path(41.6, gbps=393.0),
        },
        **more,
    }


def test_the_schema() -> None:
    assert report.problems(result()) == []
    assert report.problems(result(more=1, limit_gbps=None)) == []
    broken = result(bytes="many")
    del broken["machine"]
    broken["paths"]["nccl"] = path(1.0)
    broken["paths"]["direct"] = {"total_ms": {"median": 1, "min": 1}, "equal": "yes"}
    found = report.problems(broken)
    assert found == [
        "machine is missing",
        "bytes is a str",
        "paths.direct.total_ms.max is no number",
        "paths.direct.extra_bytes.trainer is no number",
        "paths.direct.extra_bytes.engine is no number",
        "paths.direct.phases_ms is no dictionary of numbers",
        "paths.direct.equal is neither true nor false",
        "paths.nccl: there is no such path",
    ]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "results"
    first = report.save(result(paths={}), out)
    assert first.name == "2026-11-30-2xH200-qwen3-8b.json"
    assert report.save(result(), out) == first
    assert json.loads(first.read_text()) == result()
    assert [p.name for p in out.iterdir()] == [first.name]
    with pytest.raises(ValueError, match="bytes is a NoneType"):
        report.save(result(bytes=None), out)
    assert json.loads(first.read_text()) == result()


def test_a_file_name_is_one() -> None:
    assert report.file_name(result(model="../my model")) == "2026-11-30-2xH200-..-my-model"


def test_the_table() -> None:
    console = Console(file=io.StringIO(), width=160)
    found = result()
    found["paths"]["direct"]["equal"] = False
    console.print(report.table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if "│" in line]
    assert ["peer_copy" in lines[0], "direct" in lines[1], "sglang_disk" in lines[2]] == [True] * 3
    assert "NO" in lines[1]
    assert "91 %" in lines[1]
    found["paths"]["direct"]["bucket_bytes"] = 1 << 21
    assert report.details(found)[1] == "direct (buckets of 2 MiB), ms: pause 1.0, pull 23.0"


def test_segments_fill_the_bar() -> None:
    assert plot.segments(path(46.0)) == [("pause", 1.0), ("pull", 23.0), ("other", 22.0)]
    crowded = {**path(10.0), "phases_ms": {"a": 15.0, "b": 5.0, "c": 0.0}}
    assert plot.segments(crowded) == [("a", 7.5), ("b", 2.5)]


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot.save(result(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot.save(result(), tmp_path / "a.png")
    assert "sglang-rdt[bench]" in plot.MISSING


def test_medians() -> None:
    timings = [
        Timing(0.010, {"pause": 0.001, "pull": 0.004}, 100),
        Timing(0.030, {"pause": 0.003}, 100),
        Timing(0.020, {"pause": 0.002, "pull": 0.008}, 100),
    ]
    found = measure.summary(timings)
    assert found.pop("samples_ms")[1] == {"total": 30.0, "pause": 3.0}
    assert found == {
        "total_ms": {"median": 20.0, "min": 10.0, "max": 30.0, "p90": 28.0},
        "phases_ms": {"pause": 2.0, "pull": 4.0},
    }
    assert measure.percentile([7.0], 90) == 7.0
    assert measure.gbps(16_000_000_000, 40.0) == 400.0
    assert measure.gbps(1, 0.0) == 0.0


def test_extra_memory() -> None:
    before, warm, top = memory.Mark(100), memory.Mark(150), memory.Mark(180)
    # A GPU's staging memory is the allocator's; a CPU's is known by what it says.
    assert memory.extra(before, warm, top, 40, "cuda") == 80
    assert memory.extra(before, warm, top, 40, "cpu") == 70
    assert memory.extra(top, top, before, 0, "cuda") == 0


def test_memory_of_this_process() -> None:
    import torch

    device = torch.device("cpu")
    mark = memory.mark(device)
    assert 10 << 20 < mark.now <= memory.peak(device).now


def test_the_cost_of_a_descriptor() -> None:
    rate = 1e9
    few, many = (100, 100 * (1e-6 + 5e-6)), (1100, 1100 * (1e-6 + 5e-6))
    assert calibrate.slope(few, many, 1000, rate) == pytest.approx(5e-6)
    assert calibrate.slope((100, 1.0), (200, 1.0), 1000, rate) == 1e-9


def test_the_machine_has_no_name() -> None:
    assert machine.slug(["NVIDIA H200", "NVIDIA H200"], 2) == "2xH200"
    assert machine.slug(["Tesla T4"], 1) == "1xT4"
    assert machine.slug(["", ""], 0).startswith("cpu-")
    assert machine.describe([""])["hardware"]["gpus"] == []


@pytest.mark.parametrize("asked", ["gpu", ""])
def test_devices(asked: str) -> None:
    with pytest.raises(ValueError, match="auto, cpu or cuda"):
        machine.pick_device(asked)
