"""Switches the CPU stand-ins on and off for a whole Python environment.

An environment variable or an import in the driver would not do: SGLang starts processes by
multiprocessing and through Ray, and each of them needs the stand-ins before its first import.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "sglang_rdt_cpu.pth"
_BOOT = "sglang_rdt.cpu.boot"


def location() -> Path:
    """Return where the ``.pth`` file of this Python environment goes."""
    return Path(sysconfig.get_path("purelib")) / NAME


def line(boot_file: Path) -> str:
    """Return the ``.pth`` file's one line, which runs ``boot_file`` as ``sglang_rdt.cpu.boot``."""
    # Not a plain "import sglang_rdt.cpu.boot": see the second paragraph of boot.py.
    return (
        "import sys, importlib.util as u; "
        f"s = u.spec_from_file_location({_BOOT!r}, {str(boot_file)!r}); "
        "m = u.module_from_spec(s); sys.modules[s.name] = m; s.loader.exec_module(m); "
        "del sys.modules[s.name]\n"
    )


def is_installed() -> bool:
    """Say whether this environment has the ``.pth`` file."""
    return location().is_file()


def install() -> Path:
    """Write the ``.pth`` file and check that a new interpreter runs it.

    Returns:
        Its path.

    Raises:
        RuntimeError: If a new interpreter does not load it; the file is removed again.
    """
    target = location()
    target.write_text(line(Path(__file__).with_name("boot.py").resolve()), encoding="utf-8")
    found = "any(type(finder).__module__ == sys.argv[1] for finder in sys.meta_path)"
    probe = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.exit(not {found})", _BOOT],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0 or probe.stderr:
        target.unlink()
        raise RuntimeError(f"{target} does not work in a new interpreter: {probe.stderr.strip()}")
    return target


def uninstall() -> bool:
    """Remove the ``.pth`` file.

    Returns:
        Whether there was one.
    """
    present = is_installed()
    location().unlink(missing_ok=True)
    return present
