"""The table in docs/families.md says what passed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import results, table

VERSIONS = {"sglang": "0.5.23"}
QWEN = {"family": "qwen3", "trainer": "TP 2", "engine": "TP 1", "bridge": "mbridge"}


def record(test: str = "t.py::a", date: str = "2026-12-01", **said: str) -> results.Record:
    return {"test": test, **results.checked(said), "date": date, "versions": VERSIONS}


def test_the_page_is_up_to_date() -> None:
    assert table.main(["--check"]) == 0, "run python -m tests.families.table"


def test_rows() -> None:
    text = table.render(
        [
            record(**QWEN, mode="direct", dtype="bfloat16"),
            record(**QWEN, mode="bucketed", dtype="bfloat16"),
            record(**QWEN, mode="both", dtype="float16"),
            record(family="glm4", engine="TP 2"),
        ]
    )
    assert "| qwen3 | TP 2 | TP 1 | mbridge | yes | yes | bfloat16 | – |" in text
    assert "| qwen3 | TP 2 | TP 1 | mbridge | yes | yes | float16 | – |" in text
    assert "| glm4 | – | TP 2 | – | – | – | – | – |" in text
    assert "4 records of 2026-12-01, with sglang 0.5.23." in text


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"trainer": "TP 2"}, "needs a family"),
        ({"family": "x", "tp": "2"}, "does not know tp"),
        ({"family": "x", "mode": "fast"}, "mode='fast'"),
        ({"family": "x|y"}, "a line of text"),
        ({"family": "x", "dtype": None}, "a line of text"),
    ],
)
def test_what_passed_does_not_take(said: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        results.checked(said)


def run(path: Path, date: str, *reports: tuple[str, str, str, dict[str, str]]) -> None:
    collected = results.Collected()
    for test, when, outcome, said in reports:
        collected.add(test, when, outcome, [results.checked(said)] if said else [])
    collected.save(path, today=date)


def test_only_what_passed_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run(
        path,
        "2026-12-01",
        ("a", "call", "passed", QWEN),
        ("b", "call", "failed", QWEN),
        ("c", "call", "passed", QWEN),
        ("c", "teardown", "failed", QWEN),
        ("d", "call", "skipped", QWEN),
    )
    assert [r["test"] for r in results.load(path)] == ["a"]
    # The same again changes nothing, and what others have proved stays.
    before = path.read_bytes()
    run(path, "2026-12-02", ("a", "call", "passed", QWEN))
    run(path, "2026-12-02")
    assert path.read_bytes() == before
    run(path, "2026-12-02", ("e", "call", "passed", {**QWEN, "dtype": "float32"}))
    assert [(r["test"], r["date"]) for r in results.load(path)] == [
        ("a", "2026-12-01"),
        ("e", "2026-12-02"),
    ]
    # A test that fails proves nothing any more.
    run(path, "2026-12-03", ("a", "call", "failed", {}))
    assert [r["test"] for r in results.load(path)] == ["e"]


def test_the_check_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, path = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"a\n{table.BEGIN}\nold\n{table.END}\nb\n")
    assert table.main(["--check"], page, path) == 1
    assert "not up to date" in capsys.readouterr().err
    assert table.main([], page, path) == 0
    assert table.main(["--check"], page, path) == 0
    run(path, "2026-12-01", ("a", "call", "passed", QWEN))
    assert table.main(["--check"], page, path) == 1
    with pytest.raises(ValueError, match="once each"):
        table.replaced("a", "new", table.BEGIN, table.END)
