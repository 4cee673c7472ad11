"""``sglang-rdt doctor``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_rdt import settings as settings_module
from sglang_rdt.activation import installed_version
from sglang_rdt.transport.memory import expandable_segments
from sglang_rdt.upstream import (
    MEGATRON_VERSIONS,
    PATCHES,
    RAY_VERSIONS,
    SGLANG_VERSIONS,
    SOURCE_PATCHES,
    Patch,
    SourcePatch,
)
from sglang_rdt.versions import in_range, range_text

_WANTED = {
    "sglang": SGLANG_VERSIONS,
    "megatron-core": MEGATRON_VERSIONS,
    "ray": RAY_VERSIONS,
}

_PATCHED = "in the source (patch set)"


def diagnose(console: Console | None = None) -> bool:
    """Prints the findings; False if something that is installed will not work."""
    console = console or Console()
    good = True
    table = Table("package", "installed", "supported", "")
    for package in ("sglang", "megatron-core", "ray", "nixl", "torch", "mbridge"):
        version = installed_version(package)
        low_high = _WANTED.get(package)
        verdict = "" if version else "not installed"
        if version and low_high:
            fits = in_range(version, *low_high)
            good &= fits
            verdict = "ok" if fits else "NOT SUPPORTED"
        table.add_row(
            package, version or "-", range_text(*low_high) if low_high else "any", verdict
        )
    console.print(table)
    patches = Table("patch", "what it patches", "finding")
    settings = settings_module.load()
    for patch in PATCHES:
        finding = _finding(patch)
        if not (settings.enabled and getattr(settings, patch.toggle)):
            finding = "switched off"
        good &= not finding.startswith("REFUSED")
        patches.add_row(patch.name, patch.module, finding)
    for extra in SOURCE_PATCHES:
        module, finding = _source_finding(extra)
        if not (settings.enabled and getattr(settings, extra.toggle)):
            finding = "switched off"
        patches.add_row(extra.name, module, finding)
    console.print(patches)
    segments = expandable_segments()
    if segments:
        good = False
        console.print(
            f"[bold red]{segments}[/]: memory from expandable segments cannot be registered with NIXL"
        )
    return good


def _finding(patch: Patch) -> str:
    source = _source(patch.module)
    if source is None:
        return "not installed"
    if f"\n{patch.marker} = True\n" in source:
        return _PATCHED
    mismatch = patch.mismatch(source)
    return f"REFUSED: {mismatch[0]} {mismatch[1]}" if mismatch else "fits"


def _source_finding(patch: SourcePatch) -> tuple[str, str]:
    """(module, finding): not having it is no fault."""
    sources = {module: _source(module) for module in patch.modules}
    there = [module for module, source in sources.items() if source is not None]
    if not there:
        return patch.modules[0], "not installed"
    for module in there:
        if f"\n{patch.marker} = True\n" in (sources[module] or ""):
            return module, _PATCHED
    return there[0], f"patch set only; without it: {patch.instead}"


def _source(module: str) -> str | None:
    """The source of a module, without importing it; None if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *rest).with_suffix(".py")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
