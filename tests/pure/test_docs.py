"""The documents say what the code says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from sglang_rdt import settings
from sglang_rdt.upstream import MEGATRON_VERSIONS, PATCHES, SGLANG_VERSIONS, SOURCE_PATCHES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "benchmarks/README.md",
    "docs/architecture.md",
    "docs/families.md",
    "docs/parts.md",
    "docs/quantised.md",
    "docs/placement.md",
    "docs/security.md",
    "docs/settings.md",
    "docs/sources.md",
    "docs/deployments/README.md",
]
DEPLOYMENTS = ROOT / "docs" / "deployments"
SHAPES = sorted(page.parent.name for page in DEPLOYMENTS.glob("*/README.md"))
DOCUMENTS += [f"docs/deployments/{shape}/README.md" for shape in SHAPES]
EXAMPLES = sorted(str(path.relative_to(DEPLOYMENTS)) for path in DEPLOYMENTS.glob("*/*.py"))
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


# docs/deployments


def test_the_deployments_are_listed() -> None:
    listed = re.findall(r"\]\(([a-z-]+)/README\.md\)", _text("docs/deployments/README.md"))
    assert sorted(listed) == SHAPES
    assert len(SHAPES) == 7


def _bound(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Names that the imports of an example bind, with what they stand for. SGLang itself is not
    imported: it takes half a minute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                assert one.asname is None
                importlib.import_module(one.name)
                top = one.name.partition(".")[0]
                yield top, importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.module.startswith("sglang."):
                assert importlib.util.find_spec("sglang") is None or node.module in SGLANG_MODULES
                continue
            module = importlib.import_module(node.module)
            for one in node.names:
                if not hasattr(module, one.name):
                    importlib.import_module(f"{node.module}.{one.name}")
                yield one.name, getattr(module, one.name)


SGLANG_MODULES = {patch.module for patch in PATCHES}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_name_in_an_example_exists(example: str) -> None:
    text = (DEPLOYMENTS / example).read_text(encoding="utf-8")
    tree = ast.parse(text)
    compile(tree, example, "exec")
    modules = {name: what for name, what in _bound(tree) if isinstance(what, ModuleType)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            assert module is None or hasattr(module, node.attr), f"{node.value.id}.{node.attr}"
    _check_calls_of_a_sync(text)


def _check_calls_of_a_sync(text: str) -> None:
    import megatron_rdt

    source = inspect.getsource(megatron_rdt.WeightSync)
    for name in re.findall(r"\bsync\.([a-z_]+)\b", text):
        assert re.search(rf"def {name}\(|self\.{name}\b", source), name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pages_call_what_exists(shape: str) -> None:
    text = _text(f"docs/deployments/{shape}/README.md")
    _check_calls_of_a_sync(text)
    for program in re.findall(r"(?:^|[ /])([a-z_]+\.py)\b", text):
        assert (DEPLOYMENTS / shape / program).exists() or list(ROOT.rglob(program)), program


@pytest.mark.parametrize("shape", SHAPES)
def test_job_files_are_runtime_environments(shape: str) -> None:
    text = _text(f"docs/deployments/{shape}/job.yaml")
    job = yaml.safe_load(text)
    assert set(job) == {"working_dir", "env_vars"}
    _check_variables(job["env_vars"])
    submitted = re.findall(r"^#   ray job submit .*--runtime-env job\.yaml -- (.+)$", text, re.M)
    assert submitted
    for command in submitted:
        for program in re.findall(r"\S+\.py", command):
            assert (DEPLOYMENTS / shape / program).exists()


def _check_variables(variables: dict[str, Any]) -> None:
    assert all(isinstance(value, str) for value in variables.values()), "Ray wants text"
    settings.load(variables)


@pytest.mark.parametrize("shape", [s for s in SHAPES if (DEPLOYMENTS / s / "rayjob.yaml").exists()])
def test_kuberay_jobs_are_the_same_jobs(shape: str) -> None:
    manifest = yaml.safe_load(_text(f"docs/deployments/{shape}/rayjob.yaml"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    program = spec["entrypoint"].removeprefix("python /app/")
    assert (DEPLOYMENTS / shape / program).exists()
    job = yaml.safe_load(_text(f"docs/deployments/{shape}/job.yaml"))
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": job["env_vars"]}
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "your/image"


def _sources() -> str:
    """All sources, with strings over several lines joined."""
    files = [*ROOT.glob("sglang_rdt/**/*.py"), *ROOT.glob("megatron_rdt/**/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r'"\s*\n\s*(?:\+ )?f?"', "", text)


@pytest.mark.parametrize("shape", SHAPES)
def test_errors_on_the_pages_are_errors_of_the_code(shape: str) -> None:
    """Three words that follow one another there, none of them a value, do so in the sources: at least
    half of such threes. Errors of SGLang and Ray are marked as theirs."""
    sources = _sources()
    rows = re.findall(r"^\| (.*?) \| .*\|$", _text(f"docs/deployments/{shape}/README.md"), re.M)
    checked = 0
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        others = re.search(r"SGLang|Ray\b", re.sub(r"`[^`]*`", "", row))
        if not quoted or len(quoted[0].split()) < 4 or others:
            continue
        words = re.sub(
            r"\S*(?:[\d'.\[]|[A-Z]{2}|Error:)\S*", "|", quoted[0].replace(". ", " | ")
        ).split()
        threes = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
        threes = [three for three in threes if "|" not in three and "Ray namespace" not in three]
        missing = [three for three in threes if three not in sources]
        assert 2 * len(missing) <= len(threes), (quoted[0], missing)
        checked += len(threes)
    assert checked
