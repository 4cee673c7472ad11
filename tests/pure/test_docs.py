"""The documents say what the code says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sglang_rdt import settings
from sglang_rdt.upstream import MEGATRON_VERSIONS, PATCHES, SGLANG_VERSIONS, SOURCE_PATCHES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "benchmarks/README.md",
    "docs/architecture.md",
    "docs/placement.md",
    "docs/security.md",
    "docs/settings.md",
]
SCRIPTS = ["scripts/demo.sh", "scripts/test.sh"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def test_the_settings_table_is_the_one_in_the_code() -> None:
    rows = [_cells(line) for line in _text("docs/settings.md").splitlines() if line.startswith("|")]
    assert rows[:2] == [("variable", "default", "meaning"), ("---", "---", "---")]
    assert rows[2:] == [
        (f"`{name}`", f"`{default}`" if default else "", meaning)
        for name, default, meaning in settings.table()
    ]


def test_the_readme_begins_with_three_lines_and_two_commands() -> None:
    text = _text("README.md")
    before, block, _ = text.split("```", 2)
    title, *lead = [line for line in before.splitlines() if line]
    assert title == "# sglang-rdt"
    assert len(lead) == 3
    commands = [line.split()[0] for line in block.splitlines()[1:] if line]
    assert commands == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_of_the_readme_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def test_the_readme_names_the_supported_versions() -> None:
    text = _text("README.md")
    for low, high in (SGLANG_VERSIONS, MEGATRON_VERSIONS):
        assert f"{low} to {high}" in text


def test_the_architecture_names_every_patch() -> None:
    text = _text("docs/architecture.md")
    for patch in (*PATCHES, *SOURCE_PATCHES):
        assert f"`{patch.name}`" in text


def test_every_setting_in_the_documents_exists() -> None:
    known = {name for name, _, _ in settings.table()}
    for document in DOCUMENTS:
        named = set(re.findall(r"\b(?:SGLANG|MEGATRON)_RDT_[A-Z0-9_]*[A-Z0-9]\b", _text(document)))
        assert named <= known, document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_files_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", _text(document)):
        if not target.startswith("http"):
            assert (ROOT / document).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_compile(document: str) -> None:
    for snippet in re.findall(r"```python\n(.*?)```", _text(document), re.DOTALL):
        compile(snippet, document, "exec")
