"""``apply.sh`` and the patch files: on a small made-up tree (fast), and on released wheels.

The wheels are downloaded: ``-m "patchset and not patchset_all"`` takes both ends of both ranges,
``-m patchset_all`` every supported release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_rdt import upstream

REPO = Path(__file__).resolve().parents[2]
# What apply.sh needs besides git or patch, for a PATH without one of them.
# fmt: off
TOOLS = (
    "bash", "cat", "chmod", "cmp", "cp", "dirname", "env", "find", "grep", "ls", "mkdir", "mktemp",
    "mv", "paste", "readlink", "rm", "sed", "sort", "stat", "tr",
)
# fmt: on
HOOK_NAMES = {
    "scheduler_actor": "_rdt_scheduler_actor_class",
    "event_loop": "_rdt_add_loop_calls",
    "weight_version": "_rdt_follow_weight_version",
    "quantised_weights": "_rdt_quantised",
    "dp_controller": "_rdt_dp_server_args",
    "placement": "_rdt_placement",
    "optimizer_step": "_rdt_instrument_optimizers",
}
MINI_VERSIONS = {"sglang": "0.5.23", "megatron-core": "0.19.2"}
MINI_SOURCES = {
    "sglang/__init__.py": "",
    "sglang/srt/ray/engine.py": """\
import logging

from sglang.srt.ray.scheduler_actor import SchedulerActor

logger = logging.getLogger(__name__)


def launch():
    one_more_line = None
    return SchedulerActor


def _find_engine_bundle(
    placement_group,
    nnodes,
):
    return 0


class RayEngine(Engine):
    # Engine using Ray actors for scheduler processes.

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def _launch_dp_scheduler_processes(self, server_args, port_args, rank0_node_ip):
        \"\"\"Launch DP schedulers via RayDataParallelController.\"\"\"
        return server_args
""",
    "sglang/srt/managers/scheduler_components/request_receiver.py": """\
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class SchedulerRequestReceiver:
    def recv_requests(self):
        recv_reqs = self._pull_raw_reqs()

        return recv_reqs
""",
    "sglang/srt/arg_groups/fields/model.py": """\
import msgspec

from sglang.srt.arg_groups.arg_utils import A


class Model(msgspec.Struct):
    # Namespace model.

    _NS_PATH = "model"

    some_seed: A[
        bool,
        "Start it.",
    ] = False
    engine_info_bootstrap_port: A[
        int,
        "Its port.",
    ] = 6789
""",
    "sglang/srt/managers/tokenizer_manager.py": """\
from sglang.srt.utils.watchdog import Watchdog
from sglang.utils import TypeBasedDispatcher, get_exception_traceback

_TIMEOUT = 1


class TokenizerManager:
    def init_request_dispatcher(self):
        self._result_dispatcher = TypeBasedDispatcher([])
        self.init_communicators()

        self.sampling_params_class = SamplingParams
        self.signal_handler_class = SignalHandler

    async def generate_request(self, obj):
        pass
""",
    "sglang/srt/layers/quantization/fp8.py": """\
class Fp8LinearMethod:
    def process_weights_after_loading(self, layer):
        pass
""",
    "megatron/core/optimizer/optimizer.py": """\
class ChainedOptimizer:
    def restore_from_cpu(self):
        for optimizer in self.chained_optimizers:
            optimizer.restore_from_cpu()
""",
}


def load_regenerate() -> ModuleType:
    """``patches/regenerate.py`` as a module (it is a script, in no package)."""
    spec = importlib.util.spec_from_file_location(
        "patches_regenerate", REPO / "patches" / "regenerate.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


regenerate = load_regenerate()
RELEASES = [(p, v) for p, versions in regenerate.VERSIONS.items() for v in versions]
ENDS = [(p, v[i]) for p, v in regenerate.VERSIONS.items() for i in (0, -1)]
PATCH_FILES = sorted(REPO.glob("patches/*/*/*.patch"))


def release_name(release: tuple[str, str]) -> str:
    return "-".join(release)


def patch_name(path: Path) -> str:
    return "/".join(path.parts[-3:])


def fingerprint(tree: Path) -> dict[str, tuple[int, str]]:
    """Mode and contents of every file below ``tree``."""
    return {
        str(path.relative_to(tree)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


def changed(before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def replace(path: Path, text: str) -> None:
    """Writes a new file at ``path``: what the old one was hard-linked to stays."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def tools_without(folder: Path, *missing: str) -> str:
    """A PATH with everything that apply.sh needs but the ``missing`` programs."""
    folder.mkdir()
    for tool in {*TOOLS, "git", "patch"} - set(missing):
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is not installed")
        (folder / tool).symlink_to(found)
    return str(folder)


class Kit:
    """One copy of apply.sh with its patches/ folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        user: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.folder / "apply.sh", *args],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd or "/",
            env={**os.environ, **(env or {})},
            user=user,
        )

    def ok(self, *args: str | Path, **kwargs: object) -> str:
        """The output of a run that must succeed."""
        done = self.run(*args, **kwargs)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    def refused(self, *args: str | Path, **kwargs: object) -> str:
        """The message of a run that must be refused."""
        done = self.run(*args, **kwargs)  # type: ignore[arg-type]
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout + done.stderr


REAL_KIT = Kit(REPO)


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[..., Path]:
    """``make_site(folder)``: a small site-packages folder with both packages."""

    def make(folder: str = "site packages") -> Path:
        site = tmp_path / folder
        for name, source in MINI_SOURCES.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(source)
        set_version(site, "sglang", MINI_VERSIONS["sglang"])
        set_version(site, "megatron-core", MINI_VERSIONS["megatron-core"])
        return site

    return make


@pytest.fixture
def site(make_site: Callable[..., Path]) -> Path:
    return make_site()


@pytest.fixture
def kit(tmp_path: Path, make_site: Callable[..., Path]) -> Kit:
    """apply.sh with patches made for the small tree, in a folder with a space in its name."""
    folder = tmp_path / "a kit"
    source = make_site("source of the kit")
    for package, other in (("sglang", "megatron"), ("megatron-core", "sglang")):
        tree = tmp_path / f"only {package}"
        shutil.copytree(source, tree)
        shutil.rmtree(tree / other)
        version = MINI_VERSIONS[package]
        assert regenerate.main([str(tree), version, "--out", str(folder / "patches")]) == 0
    shutil.rmtree(source)
    shutil.copy(REPO / "apply.sh", folder)
    return Kit(folder)


def set_version(site: Path, package: str, version: str) -> None:
    """Writes ``version`` where a build of ``package`` has it."""
    if package == "sglang":
        replace(site / "sglang/_version.py", f"__version__ = version = '{version}'\n")
        return
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(.*)", version)
    assert match is not None
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [f"{name} = {value}\n" for name, value in zip(names, match.groups(), strict=False)]
    replace(
        site / "megatron/core/package_info.py", "".join(lines) + f'PRE_RELEASE = "{match[4]}"\n'
    )


def assert_round_trip(
    kit: Kit, site: Path, versions: dict[str, str] = MINI_VERSIONS, **kwargs: object
) -> None:
    """--check, apply twice, --check, --reverse twice; ends with the tree as it was."""
    before = fingerprint(site)
    check = kit.ok("--check", site, **kwargs)
    assert "applicable" in check
    assert "match" not in check
    assert fingerprint(site) == before

    kit.ok(site, **kwargs)
    patched = fingerprint(site)
    paths = {path for path in patched_paths(versions) if (site / path).exists()}
    assert changed(before, patched) == paths
    with tempfile.TemporaryDirectory() as compiled:
        for path in paths:
            py_compile.compile(str(site / path), cfile=f"{compiled}/out.pyc", doraise=True)
    assert not re.search(r" applicable$", kit.ok("--check", site, **kwargs), re.MULTILINE)
    assert fingerprint(site) == patched
    assert "every patch is already applied" in kit.ok(site, **kwargs)
    assert fingerprint(site) == patched

    kit.ok("--reverse", site, **kwargs)
    assert fingerprint(site) == before
    assert "no patch is applied" in kit.ok("--reverse", site, **kwargs)
    assert fingerprint(site) == before


def patched_paths(versions: dict[str, str]) -> set[str]:
    """What is patched in these releases, one per package."""
    return {p.at(versions[p.package]).path for p in regenerate.PATCHES if p.package in versions}


# ---------------------------------------------------------------------------- the files in patches/


def test_every_supported_release_has_every_patch() -> None:
    expected = {
        (patch.package, version, patch.filename)
        for patch in regenerate.PATCHES
        for version in regenerate.VERSIONS[patch.package]
    }
    assert {path.parts[-3:] for path in PATCH_FILES} == expected


def test_the_ranges_are_those_of_the_monkey_patch() -> None:
    for package, ends in (
        ("sglang", upstream.SGLANG_VERSIONS),
        ("megatron-core", upstream.MEGATRON_VERSIONS),
    ):
        versions = regenerate.VERSIONS[package]
        assert (versions[0], versions[-1]) == ends


def test_the_patches_are_those_of_the_monkey_patch() -> None:
    def path(module: str) -> str:
        return module.replace(".", "/") + ".py"

    assert {
        (p.name, p.package, p.marker, path_of_it)
        for p in regenerate.PATCHES
        for path_of_it in (p.path, *(older.path for older in p.older))
    } == {(p.name, p.package, p.marker, path(p.module)) for p in upstream.PATCHES} | {
        (p.name, p.package, p.marker, path(module))
        for p in upstream.SOURCE_PATCHES
        for module in p.modules
    }


def test_older_releases_may_have_a_patch_elsewhere(tmp_path: Path) -> None:
    patch = next(p for p in regenerate.PATCHES if p.older)
    places = [(v, patch.at(v).path) for v in regenerate.VERSIONS[patch.package]]
    assert {path for version, path in places if version <= "0.5.19"} == {
        "sglang/srt/server_args.py"
    }
    assert {path for version, path in places if version > "0.5.19"} == {patch.path}
    # Numbers, not letters; and a release that is not there yet has the newest form.
    assert patch.at("0.5.9").path == "sglang/srt/server_args.py"
    assert patch.at("0.10.0").path == patch.path
    assert patch.at("0.5.16").edits != patch.at("0.5.17").edits
    # As they stand before 0.5.20: rendered with the lines around them.
    source = "logger = logging.getLogger(__name__)\n\n    engine_info_bootstrap_port: A[\n"
    for version, says in (("0.5.16", False), ("0.5.19", True)):
        text = patch.at(version).render(source, version)
        assert ('NS("model")' in text) is says
        assert "+    ] = dataclasses.field(default=False, kw_only=True)\n" in text
    with pytest.raises(ValueError, match=r"fields/model\.py: .* occurs 0 times"):
        patch.at("0.5.23").render(source, "0.5.23")


@pytest.mark.parametrize("path", PATCH_FILES, ids=patch_name)
def test_patch_file_has_its_header_and_only_adds_a_few_lines(path: Path) -> None:
    text = path.read_text()
    header, _, diff = text.partition("\n\n--- ")
    fields = dict(line.split(": ", 1) for line in header.split("\n"))
    assert list(fields) == ["What", "Why", "Upstream", "Versions", "Drop when"]
    assert fields["Versions"].endswith(f"this file: {path.parts[-2]}")
    pull = "radixark/miles#1313" if "megatron" in str(path) else "sgl-project/sglang#27723"
    others = {"0004": "no issue found", "0007": "sgl-project/sglang#7421"}
    assert others.get(path.name[:4], pull) in fields["Upstream"]
    body = diff.split("\n")[2:]
    assert not [line for line in body if line.startswith("-")]
    added = [line[1:] for line in body if line.startswith("+")]
    assert len([line for line in added if line]) <= 4
    marker = next(p.marker for p in regenerate.PATCHES if p.filename == path.name)
    assert f"{marker} = True" in added
    imported = [i for i, line in enumerate(added) if line.startswith("from ")]
    if marker == upstream.ARGUMENT_MARKER:  # calls nothing
        assert not imported
        return
    # The import of the package runs the monkey-patch's hooks, which look for the marker.
    assert added.index(f"{marker} = True") < imported[0]


@pytest.mark.parametrize(
    "patch",
    [p for p in regenerate.PATCHES if p.name in HOOK_NAMES],
    ids=lambda patch: patch.name,
)
def test_the_hook_that_a_patch_calls_exists(patch: object) -> None:
    lines = [line for edit in patch.edits for line in edit.lines]  # type: ignore[attr-defined]
    statement = next(line for line in lines if line.startswith("from "))
    (node,) = ast.parse(statement).body
    assert isinstance(node, ast.ImportFrom)
    assert node.module is not None
    source = REPO / (node.module.replace(".", "/") + ".py")
    assert source.is_file(), f"there is no {node.module}"
    functions = {
        n.name for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)
    }
    assert node.names[0].name in functions


def test_the_index_names_every_patch() -> None:
    index = (REPO / "patches/README.md").read_text()
    for patch in regenerate.PATCHES:
        (row,) = [line for line in index.split("\n") if f"`{patch.filename}`" in line]
        assert patch.upstream.split(" ")[0] in row
        supported = regenerate.VERSIONS[patch.package]
        assert f"{supported[0]} to {supported[-1]}" in row
    for package, versions in regenerate.VERSIONS.items():
        assert f"{package}: {', '.join(versions)}" in index


def test_regenerate_refuses_what_it_cannot_patch(site: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert regenerate.main([str(site), "0.5.23", *out]) == 1  # both packages
    shutil.rmtree(site / "megatron")
    engine = site / "sglang/srt/ray/engine.py"
    source = engine.read_text()
    engine.write_text(source + "logger = logging.getLogger(__name__)\n")
    assert regenerate.main([str(site), "0.5.23", *out]) == 1  # the anchor is there twice
    engine.write_text(f"{regenerate.MARKER} = True\n{source}")
    assert regenerate.main([str(site), "0.5.23", *out]) == 1  # patched already
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------- apply.sh, on the small made-up tree


def test_round_trip(kit: Kit, site: Path) -> None:
    assert_round_trip(kit, site)


def test_round_trip_with_patch_instead_of_git(kit: Kit, site: Path, tmp_path: Path) -> None:
    assert_round_trip(kit, site, env={"PATH": tools_without(tmp_path / "bin", "git")})


def test_without_any_tool(kit: Kit, site: Path, tmp_path: Path) -> None:
    path = tools_without(tmp_path / "bin", "git", "patch")
    assert "neither git nor patch is on PATH" in kit.refused(site, env={"PATH": path})


def test_target_relative_to_the_current_folder(kit: Kit, site: Path) -> None:
    kit.ok("site packages", cwd=site.parent)
    assert "already applied" in kit.ok("./", cwd=site)


def test_through_a_link_to_the_script(kit: Kit, site: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apply.sh").symlink_to(kit.folder / "apply.sh")
    assert "applicable" in Kit(tmp_path / "bin").ok("--check", site)


@pytest.mark.parametrize(
    "inside", ["python", "lib/python3.12/site-packages", "lib/python3/dist-packages"]
)
def test_layouts(kit: Kit, site: Path, tmp_path: Path, inside: str) -> None:
    target = tmp_path / "a target"
    (target / inside).parent.mkdir(parents=True)
    site.rename(target / inside)
    if inside.startswith("lib/"):
        (target / "lib64").symlink_to("lib")
    kit.ok(target)
    assert "_rdt_" in (target / inside / "sglang/srt/ray/engine.py").read_text()


def test_linked_packages_are_patched_where_they_are(kit: Kit, site: Path, tmp_path: Path) -> None:
    linked = tmp_path / "links"
    linked.mkdir()
    (linked / "sglang").symlink_to(site / "sglang")
    (linked / "megatron").symlink_to(site / "megatron")
    kit.ok(linked)
    assert "_rdt_" in (site / "sglang/srt/ray/engine.py").read_text()
    assert "_rdt_" in (site / "megatron/core/optimizer/optimizer.py").read_text()
    assert (linked / "sglang").is_symlink()


def test_hard_links_and_modes_are_respected(kit: Kit, site: Path, tmp_path: Path) -> None:
    engine = site / "sglang/srt/ray/engine.py"
    engine.chmod(0o640)
    elsewhere = tmp_path / "another environment.py"
    elsewhere.hardlink_to(engine)
    kit.ok(site)
    assert engine.stat().st_mode & 0o777 == 0o640
    assert "_rdt_" in engine.read_text()
    assert elsewhere.read_text() == MINI_SOURCES["sglang/srt/ray/engine.py"]


def test_a_read_only_file_in_a_writable_folder(kit: Kit, site: Path) -> None:
    engine = site / "sglang/srt/ray/engine.py"
    engine.chmod(0o444)
    kit.ok(site)
    assert "_rdt_" in engine.read_text()
    assert engine.stat().st_mode & 0o777 == 0o444


def test_inside_another_repository(kit: Kit, site: Path, tmp_path: Path) -> None:
    """git apply, run in a subfolder of a repository, skips paths and says that all is well."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for command in (["init", "-q"], ["config", "apply.whitespace", "fix"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    engine = site / "sglang/srt/ray/engine.py"
    engine.write_text(engine.read_text() + "x = 1   \n")
    env = {"GIT_DIR": str(tmp_path / ".git"), "GIT_WORK_TREE": str(tmp_path)}
    env |= {"TMPDIR": str(tmp_path), "GIT_PREFIX": "site packages/"}
    assert_round_trip(kit, site, env=env)
    kit.ok(site, env={"TMPDIR": str(tmp_path)}, cwd=site)


def test_no_temporary_files_stay(kit: Kit, site: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {"TMPDIR": str(scratch)}
    for args in (["--check"], [], ["--reverse"]):
        kit.ok(*args, site, env=env)
    replace(site / "sglang/srt/ray/engine.py", "# nothing here\n")
    kit.refused(site, env=env)
    assert not list(scratch.iterdir())
    assert not list(site.rglob("*.sglang-rdt-*"))


def test_the_packages_of_python_are_the_default(
    kit: Kit, site: Path, make_site: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_site("current folder")
    python = tmp_path / "a python"
    # -S: without the packages that are really installed, which a test must not patch.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    output = kit.ok(env={"PYTHON": str(python), "PYTHONPATH": str(site)}, cwd=other)
    assert str(site) in output
    assert "_rdt_" in (site / "sglang/srt/ray/engine.py").read_text()
    assert "_rdt_" in (site / "megatron/core/optimizer/optimizer.py").read_text()
    assert "_rdt_" not in (other / "megatron/core/optimizer/optimizer.py").read_text()


def test_without_a_python(kit: Kit) -> None:
    assert "no-such-python" in kit.refused(env={"PYTHON": "no-such-python"})


def test_nothing_to_patch(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "found no sglang and no megatron-core in" in kit.refused(tmp_path / "empty")
    assert "is not a folder" in kit.refused(tmp_path / "missing")


@pytest.mark.parametrize("args", [["--check"], [], ["--reverse"]], ids=" ".join)
def test_a_modified_file_is_refused_and_nothing_changes(
    kit: Kit, site: Path, args: list[str]
) -> None:
    if args == ["--reverse"]:
        kit.ok(site)
    receiver = site / "sglang/srt/managers/scheduler_components/request_receiver.py"
    replace(receiver, receiver.read_text().replace("_pull_raw_reqs()", "_pull()"))
    before = fingerprint(site)
    message = kit.refused(*args, site)
    assert re.search(r"0002-event-loop\.patch +does not match: ", message)
    if args != ["--check"]:
        assert "nothing was changed" in message
        assert "0001-" not in message
    assert fingerprint(site) == before


def test_a_missing_file_is_refused(kit: Kit, site: Path) -> None:
    (site / "megatron/core/optimizer/optimizer.py").unlink()
    before = fingerprint(site)
    assert "there is no megatron/core/optimizer/optimizer.py" in kit.refused(site)
    assert fingerprint(site) == before


def test_lines_of_another_release_of_the_patch_set(kit: Kit, site: Path) -> None:
    kit.ok(site)
    engine = site / "sglang/srt/ray/engine.py"
    replace(engine, engine.read_text().replace("_rdt_", "_older_"))
    assert "has other sglang-rdt lines" in kit.refused("--check", site)


def test_changes_elsewhere_in_a_file_are_kept(kit: Kit, site: Path) -> None:
    engine = site / "sglang/srt/ray/engine.py"
    mine = "# mine\n" * 20 + engine.read_text() + "# mine too\n"
    replace(engine, mine)
    kit.ok(site)
    assert "_rdt_" in engine.read_text()
    kit.ok("--reverse", site)
    assert engine.read_text() == mine


@pytest.mark.parametrize("args", [[], ["--reverse"]], ids=["apply", "reverse"])
def test_a_partly_applied_tree(kit: Kit, site: Path, args: list[str]) -> None:
    before = fingerprint(site)
    kit.ok(site)
    complete = fingerprint(site)
    name = "sglang/srt/managers/tokenizer_manager.py"
    replace(site / name, MINI_SOURCES[name])
    check = kit.ok("--check", site)
    assert re.search(r"0001-scheduler-actor\.patch +applied$", check, re.MULTILINE)
    assert re.search(r"0003-weight-version\.patch +applicable$", check, re.MULTILINE)
    kit.ok(*args, site)
    assert fingerprint(site) == (before if args else complete)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("sglang", "0.5.12"),
        ("sglang", "0.5.24.dev3+g123"),
        ("sglang", "0.5.23.post1"),
        ("megatron-core", "0.15.3"),
        ("megatron-core", "0.19.2rc0"),
    ],
)
def test_an_unsupported_release_is_refused_by_name(
    kit: Kit, site: Path, package: str, version: str
) -> None:
    set_version(site, package, version)
    before = fingerprint(site)
    for args in ([], ["--check"], ["--reverse"]):
        message = kit.refused(*args, site)
        assert f"{package} {version.partition('+')[0]} in " in message
        assert f"supported are: {MINI_VERSIONS[package]}" in message
        assert message.count("\n") == 1
    assert fingerprint(site) == before
    other = "sglang" if package == "megatron-core" else "megatron-core"
    kit.ok("--only", other, site)


def test_supported_releases_are_listed_in_order(site: Path) -> None:
    set_version(site, "sglang", "0.5.9")
    listed = ", ".join(regenerate.VERSIONS["sglang"])
    assert f"supported are: {listed}\n" in REAL_KIT.refused("--only=sglang", site)


def test_the_version_may_say_how_it_was_built(kit: Kit, site: Path) -> None:
    set_version(site, "sglang", "0.5.23+cu130")
    assert "applicable" in kit.ok("--check", "--only", "sglang", site)


def test_the_version_from_the_metadata(kit: Kit, site: Path) -> None:
    for package, name in (("sglang", "sglang"), ("megatron-core", "megatron_core")):
        info = site / f"{name}-{MINI_VERSIONS[package]}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: {MINI_VERSIONS[package]}\n")
    (site / "sglang/_version.py").unlink()
    (site / "megatron/core/package_info.py").unlink()
    check = kit.ok("--check", site)
    for package, version in MINI_VERSIONS.items():
        assert f"{package} {version}: " in check


def test_the_version_from_the_tag_of_a_checkout(kit: Kit, site: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (site / "sglang/_version.py").unlink()
    (site / "sglang/version.py").write_text('try:\n    pass\nexcept:\n    __version__ = "0.0.0"\n')
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    site.rename(checkout / "python")
    assert "cannot tell which release of sglang" in kit.refused(checkout)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v0.5.23"]):
        subprocess.run([*git, *command], cwd=checkout, check=True, capture_output=True)
    kit.ok("--check", checkout)
    kit.ok(checkout)
    kit.ok("--reverse", checkout)
    status = subprocess.run(["git", "diff", "HEAD"], cwd=checkout, capture_output=True, check=True)
    assert status.stdout == b""


def test_only_leaves_the_other_package_alone(kit: Kit, site: Path) -> None:
    set_version(site, "sglang", "0.1.0")
    before = fingerprint(site)
    kit.ok("--only", "megatron-core", site)
    assert changed(before, fingerprint(site)) == {"megatron/core/optimizer/optimizer.py"}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may read (those of pytest are private)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_a_read_only_target(kit: Kit, site: Path, open_folder: Path) -> None:
    moved = Kit(Path(shutil.copytree(kit.folder, open_folder / "kit")))
    target = Path(shutil.copytree(site, open_folder / "site"))
    before = fingerprint(target)
    locked = [target / "sglang/srt/managers", target / "sglang/srt/ray"]
    for folder in locked:
        folder.chmod(0o555)
    # Permissions do not bind root: there, be somebody else. That one may write to megatron/ only.
    user = 65534 if os.geteuid() == 0 else None
    (target / "megatron/core/optimizer").chmod(0o777)
    env = {"TMPDIR": "/tmp"}
    try:
        assert "applicable" in moved.ok("--check", target, env=env, user=user)
        message = moved.refused(target, env=env, user=user)
    finally:
        for folder in locked:
            folder.chmod(0o755)
    assert "cannot write to" in message
    assert "nothing was changed" in message
    assert fingerprint(target) == before


def test_list(kit: Kit) -> None:
    output = kit.ok("--list")
    for patch in regenerate.PATCHES:
        assert patch.filename in output
        assert patch.what in output
    assert "sglang 0" not in kit.ok("--list", "--only", "megatron-core")


@pytest.mark.parametrize(
    "args",
    [
        ["--check", "--reverse"],
        ["--only"],
        ["--only", "torch"],
        ["--only=torch"],
        ["--nonsense"],
        ["a", "b"],
        ["a", "--", "b"],
        ["--list", "a"],
    ],
    ids=" ".join,
)
def test_wrong_arguments(kit: Kit, args: list[str]) -> None:
    done = kit.run(*args)
    assert done.returncode == 2
    assert "usage: apply.sh" in done.stderr


def test_help(kit: Kit) -> None:
    assert "Exit status" in kit.ok("--help")


# ----------------------------------------------------------------------------- on released sources


def copy_of(tree: Path, folder: Path) -> Path:
    """``tree`` again, with every file hard-linked: writing through a link would be noticed."""
    return Path(shutil.copytree(tree, folder / "site packages", copy_function=os.link))


def assert_patched_sources(site: Path, release: tuple[str, str]) -> None:
    """The hooks are where they must be, read from the syntax tree."""
    for patch in (p.at(release[1]) for p in regenerate.PATCHES if p.package == release[0]):
        tree = ast.parse((site / patch.path).read_text())
        assigned = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        assert assigned.count(f"{patch.marker} = True") == 1
        if patch.marker == upstream.ARGUMENT_MARKER:
            assert_argument(tree)
            continue
        hook = HOOK_NAMES[patch.name]
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == hook
        ]
        assert len(calls) == 1
        if patch.name == "scheduler_actor":
            assert f"SchedulerActor = {hook}(SchedulerActor)" in assigned
        elif patch.name == "event_loop":
            body = method(tree, "SchedulerRequestReceiver", "recv_requests")
            at = body.index("recv_reqs = self._pull_raw_reqs()")
            assert body[at + 1] == f"recv_reqs = {hook}(recv_reqs)"
        elif patch.name == "weight_version":
            body = method(tree, "TokenizerManager", "init_request_dispatcher")
            assert body[-1] == f"{hook}(self)"
            assert any(line.startswith("self.init_communicators(") for line in body[:-1])
        elif patch.name == "dp_controller":
            body = method(tree, "RayEngine", "_launch_dp_scheduler_processes")
            assert body[1].startswith(f"server_args = {hook}(server_args, ")
        elif patch.name == "placement":
            (engine,) = [n for n in tree.body if getattr(n, "name", "") == "RayEngine"]
            assert f"_rdt_placed = {hook}(globals())" in map(ast.unparse, engine.body)  # type: ignore[attr-defined]
        else:
            assert ast.unparse(tree.body[-1]) == f"{hook}(globals())"


def assert_argument(tree: ast.Module) -> None:
    """The field of the argument is like the one after it, but a switch that moves no other."""
    (cls,) = [
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in ("Model", "ServerArgs")
    ]
    fields = [n for n in cls.body if isinstance(n, ast.AnnAssign)]
    names = [ast.unparse(n.target) for n in fields]
    at = names.index("enable_engine_info_bootstrap")
    assert names[at + 1] == "engine_info_bootstrap_port"
    mine, other = (
        re.sub("'[^']*'", "''", ast.unparse(n.annotation), count=1) for n in fields[at : at + 2]
    )
    assert mine == other.replace("int", "bool")
    value = fields[at].value
    assert value is not None
    keyword_only = "dataclasses.field(default=False, kw_only=True)"
    assert ast.unparse(value) == ("False" if cls.name == "Model" else keyword_only)


def method(tree: ast.Module, class_name: str, name: str) -> list[str]:
    """The statements of a method, one string each."""
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    (function,) = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return [ast.unparse(statement) for statement in function.body]


def check_release(tree: Path, release: tuple[str, str], folder: Path, **kwargs: object) -> None:
    """The whole life of one release's patches, and that they are what its sources give."""
    rendered = list(regenerate.render_all(tree, release[1]))
    assert rendered
    for relative, text in rendered:
        assert (REPO / "patches" / relative).read_text() == text

    before = fingerprint(tree)
    site = copy_of(tree, folder)
    assert_round_trip(REAL_KIT, site, dict([release]), **kwargs)
    REAL_KIT.ok(site, **kwargs)
    assert_patched_sources(site, release)
    assert fingerprint(tree) == before


@pytest.mark.patchset
@pytest.mark.parametrize("release", ENDS, ids=release_name)
class TestReleases:
    def test_release(
        self,
        pristine: Callable[[str, str], Path],
        release: tuple[str, str],
        tmp_path: Path,
    ) -> None:
        check_release(pristine(*release), release, tmp_path)

    def test_release_with_patch_instead_of_git(
        self,
        pristine: Callable[[str, str], Path],
        release: tuple[str, str],
        tmp_path: Path,
    ) -> None:
        path = tools_without(tmp_path / "bin", "git")
        check_release(pristine(*release), release, tmp_path, env={"PATH": path})

    def test_a_modified_release_is_refused(
        self,
        pristine: Callable[[str, str], Path],
        release: tuple[str, str],
        tmp_path: Path,
    ) -> None:
        site = copy_of(pristine(*release), tmp_path)
        for patch in (p.at(release[1]) for p in regenerate.PATCHES if p.package == release[0]):
            path = site / patch.path
            source = path.read_text()
            anchor = patch.edits[0].anchor or source.rstrip("\n").rpartition("\n")[2]
            replace(path, source.replace(anchor, anchor + "  # mine"))
            before = fingerprint(site)
            for args in ([], ["--check"], ["--reverse"]):
                message = REAL_KIT.refused(*args, site)
                assert re.search(rf"{patch.filename} +does not match", message)
                assert fingerprint(site) == before
            replace(path, source)
        REAL_KIT.ok("--check", site)

    def test_a_partly_patched_release(
        self,
        pristine: Callable[[str, str], Path],
        release: tuple[str, str],
        tmp_path: Path,
    ) -> None:
        site = copy_of(pristine(*release), tmp_path)
        before = fingerprint(site)
        REAL_KIT.ok(site)
        complete = fingerprint(site)
        path = next(p.path for p in regenerate.PATCHES if p.package == release[0])
        replace(site / path, (pristine(*release) / path).read_text())
        (site / path).chmod(before[path][0] & 0o7777)
        assert "applicable" in REAL_KIT.ok("--check", site)
        REAL_KIT.ok(site)
        assert fingerprint(site) == complete


@pytest.mark.patchset
@pytest.mark.patchset_all
@pytest.mark.parametrize("release", RELEASES, ids=release_name)
def test_every_release(
    pristine: Callable[[str, str], Path], release: tuple[str, str], tmp_path: Path
) -> None:
    check_release(pristine(*release), release, tmp_path)
