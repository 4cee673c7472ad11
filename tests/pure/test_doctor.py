"""What ``doctor`` says of a patch that only the patch set has."""

from __future__ import annotations

import pytest

from sglang_rdt.cli import doctor
from sglang_rdt.upstream import SOURCE_PATCHES, SourcePatch

NEW, OLD = "sglang.srt.arg_groups.fields.model", "sglang.srt.server_args"
MARKED = "import x\n\n_SGLANG_RDT_PATCHED_ARGUMENT = True\n"


@pytest.mark.parametrize("patch", SOURCE_PATCHES, ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("sources", "module", "finding"),
    [
        ({}, NEW, "not installed"),
        ({NEW: "", OLD: ""}, NEW, "patch set only; without it: SGLANG_RDT_ENGINE_INFO=1"),
        ({OLD: ""}, OLD, "patch set only"),
        ({NEW: MARKED, OLD: ""}, NEW, "in the source"),
        ({OLD: MARKED}, OLD, "in the source"),
        ({NEW: "", OLD: MARKED}, OLD, "in the source"),
    ],
)
def test_a_patch_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
    patch: SourcePatch,
    sources: dict[str, str],
    module: str,
    finding: str,
) -> None:
    monkeypatch.setattr(doctor, "_source", sources.get)
    found = doctor._source_finding(patch)
    assert found[0] == module
    assert found[1].startswith(finding)
