from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rdt.errors import TransportError
from sglang_rdt.transport.memory import ALLOC_CONF_NAMES, check_registrable, expandable_segments


@pytest.mark.parametrize("name", ALLOC_CONF_NAMES)
@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "expandable_segments:true",
        "Expandable_Segments : TRUE",
        "max_split_size_mb:128,expandable_segments:True",
        " expandable_segments:1 ,garbage_collection_threshold:0.6",
    ],
)
def test_switched_on(name: str, value: str) -> None:
    assert expandable_segments({name: value}) == f"{name}={value}"


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "expandable_segments", "max_split_size_mb:128", ","]
)
def test_switched_off(value: str) -> None:
    assert expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": value}) is None
    assert expandable_segments({}) is None


def tensor(is_cuda: bool) -> Any:
    return SimpleNamespace(is_cuda=is_cuda)


def test_only_cuda_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOC_CONF_NAMES:
        monkeypatch.delenv(name, raising=False)
    check_registrable(tensor(True))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_registrable(tensor(False))
    with pytest.raises(
        TransportError, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True puts"
    ):
        check_registrable(tensor(True))
