"""The monkey-patch finds what it expects in the released sources, at both ends of both ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_rdt.upstream import MEGATRON_VERSIONS, PATCHES, SGLANG_VERSIONS, Patch

ENDS = {"sglang": SGLANG_VERSIONS, "megatron-core": MEGATRON_VERSIONS}


@pytest.mark.patchset
@pytest.mark.parametrize(
    ("patch", "version"),
    [(patch, version) for patch in PATCHES for version in ENDS[patch.package]],
    ids=lambda value: value.name if isinstance(value, Patch) else value,
)
def test_released_sources_meet_the_expectations(
    patch: Patch, version: str, pristine: Callable[[str, str], Path]
) -> None:
    source = pristine(patch.package, version) / Path(*patch.module.split(".")).with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    assert patch.mismatch(text) is None
    # And it would notice: the same source without the symbol is refused by name.
    symbol = patch.expects[0].qualname.split(".")[-1]
    mismatch = patch.mismatch(text.replace(f"def {symbol}(", f"def not_{symbol}("))
    assert mismatch is not None
    assert mismatch[1] == "does not exist"
