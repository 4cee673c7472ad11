"""Released wheels for the patch-set tests: downloaded once, unpacked once per session."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Only sources are read, so any wheel of the release will do; these tags name one that exists.
_TARGET = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312")
_PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (34, 28, 24, 17)] + ["any"]
_UNREACHABLE = re.compile(
    r"connection|timed? ?out|name resolution|temporary failure|proxy|unreachable|retrying|ssl"
    r"|(?<!\d)(403|407|429|5\d\d)(?!\d)",
    re.IGNORECASE,
)


def cache_folder() -> Path:
    """Where the wheels are kept between runs."""
    chosen = os.environ.get("SGLANG_RDT_TEST_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sglang-rdt", "wheels")


def _pip() -> list[str]:
    """A pip to call: this interpreter's, or (virtual environments may have none) another one."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        pytest.skip("pip is not installed, so released wheels cannot be downloaded")
    return [found]


def wheel_of(package: str, version: str) -> Path:
    """The wheel of a release, downloaded if it is not in the cache yet.

    Skips the test, by name, if the index cannot be reached.
    """
    cache = cache_folder()
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if cached := sorted(cache.glob(pattern)):
        return cached[0]
    cache.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", *_TARGET, *platforms]
        command += ["--timeout", "20", "--retries", "2", "--dest", scratch, f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            if _UNREACHABLE.search(done.stdout + done.stderr):
                pytest.skip(f"{package} {version}: the package index cannot be reached")
            pytest.fail(f"{package} {version} cannot be downloaded:\n{done.stderr}")
        (downloaded,) = Path(scratch).glob(pattern)
        return downloaded.replace(cache / downloaded.name)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``pristine(package, version)``: the unpacked wheel of that release. Not to be written to."""
    unpacked: dict[tuple[str, str], Path] = {}

    def unpack(package: str, version: str) -> Path:
        if (package, version) not in unpacked:
            wheel = wheel_of(package, version)
            folder = tmp_path_factory.mktemp(f"{package}-{version}-")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            unpacked[package, version] = folder
        return unpacked[package, version]

    return unpack
