from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sglang_rdt.upstream import MEGATRON_VERSIONS, RAY_VERSIONS, SGLANG_VERSIONS
from sglang_rdt.versions import in_range, range_text, release


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.12.post1", (0, 5, 12)),
        ("0.5.23rc2", (0, 5, 23)),
        ("0.16.1+abc", (0, 16, 1)),
        ("2.56", (2, 56)),
        ("3", (3,)),
    ],
)
def test_release(version: str, parts: tuple[int, ...]) -> None:
    assert release(version) == parts


@pytest.mark.parametrize("version", ["", "main", "v0.5"])
def test_what_is_no_version(version: str) -> None:
    with pytest.raises(ValueError, match="not a version"):
        release(version)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_release_agrees_with_packaging(parts: list[int]) -> None:
    version = ".".join(map(str, parts))
    assert release(version) == Version(version).release


@pytest.mark.parametrize(
    "version", [f"0.5.{n}" for n in range(16, 24)] + ["0.5.23.post1", "0.5.23.1", "0.5.16.1"]
)
def test_supported_sglang(version: str) -> None:
    assert in_range(version, *SGLANG_VERSIONS)


@pytest.mark.parametrize(
    "version", ["0.5.15", "0.5.15.post9", "0.4.99", "0.5.24", "0.6.0", "1.0", "0.5.100"]
)
def test_unsupported_sglang(version: str) -> None:
    assert not in_range(version, *SGLANG_VERSIONS)


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.16.0", False), ("0.16.1", True), ("0.17.0rc1", True), ("0.19.2", True), ("0.19.3", False)],
)
def test_megatron(version: str, inside: bool) -> None:
    assert in_range(version, *MEGATRON_VERSIONS) is inside


def test_an_open_range() -> None:
    assert in_range("2.56.0", *RAY_VERSIONS)
    assert in_range("3.0.0", *RAY_VERSIONS)
    assert not in_range("2.55.9", *RAY_VERSIONS)


def test_ranges_in_words() -> None:
    assert range_text("0.5.16", "0.5.23") == "0.5.16 to 0.5.23"
    assert range_text("2.56", None) == "2.56 or newer"
