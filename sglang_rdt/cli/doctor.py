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
    Patch,
)
from sglang_rdt.versions import in_range, range_text

_WANTED = {
    "sglang": SGLANG_VERSIONS,
    "megatron-core": MEGATRON_VERSIONS,
    "ray": RAY_VERSIONS,
}


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
    console.print(patches)
    segments = expandable_segments()
    if segments:
        good = False
        console.print(
            f"[bold red]{segments}[/]: memory from expandable segments cannot be registered with NIXL"
        )
    return good


def _finding(patch: Patch) -> str:
    """Looks at the source without importing the module."""
    top = patch.module.split(".")[0]
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *patch.module.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
            if f"\n{patch.marker} = True\n" in source:
                return "in the source (patch set)"
            mismatch = patch.mismatch(source)
            return f"REFUSED: {mismatch[0]} {mismatch[1]}" if mismatch else "fits"
    return "not installed"
