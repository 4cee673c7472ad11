"""The adapter's own part: slices of tasks, the vocabulary, what is said where it cannot work.

Megatron-Bridge itself needs Python 3.12; here something with its interface stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rdt.sources.megatron_bridge import MegatronBridgeSource
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.errors import ExportError

GPT = torch.nn.Linear(1, 1)


def task(name: str, group: str | None = None) -> Any:
    return SimpleNamespace(name=name, param_name=name, mapping=SimpleNamespace(group_key=group))


class Bridge:
    """``tasks``: name -> group. A group comes out when its last task is converted, and only if
    all of it is in one call."""

    def __init__(self, tasks: dict[str, str | None], rows: int = 8) -> None:
        self.tasks = tasks
        self.rows = rows
        self.hf_pretrained = SimpleNamespace(config=SimpleNamespace(vocab_size=6))
        self.calls: list[list[str]] = []

    def get_conversion_tasks(self, models: list[Any]) -> list[Any]:
        assert models == [GPT]
        return [task(name, group) for name, group in self.tasks.items()]

    def export_hf_weights(
        self, models: list[Any], *, cpu: bool, show_progress: bool, conversion_tasks: list[Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.calls.append([t.name for t in conversion_tasks])
        members: dict[str, int] = {}
        for one in conversion_tasks:
            group = one.mapping.group_key
            if group is None:
                yield one.name, torch.ones(self.rows, 2)
                continue
            members[group] = members.get(group, 0) + 1
            if members[group] == sum(g == group for g in self.tasks.values()):
                yield group, torch.ones(members[group], 2)


def test_slices_do_not_part_what_becomes_one_tensor() -> None:
    bridge = Bridge(
        {"a": None, "e0": "experts", "f0": "down", "e1": "experts", "f1": "down", "b": None}
    )
    source = MegatronBridgeSource([GPT], bridge, tasks_at_once=2)
    assert [s.name for s in source.specs()] == ["a", "experts", "down", "b"]
    assert bridge.calls == [["a", "e0", "f0", "e1", "f1"], ["b"]]
    assert [n for n, _ in source.export(PhaseTimer())] == ["a", "experts", "down", "b"]
    assert len(bridge.calls) == 4


def test_tasks_are_those_of_now() -> None:
    bridge = Bridge({"a": None})
    source = MegatronBridgeSource([GPT], bridge)
    assert len(list(source.export(PhaseTimer()))) == 1
    bridge.tasks["b"] = None
    assert len(list(source.export(PhaseTimer()))) == 2


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    bridge = Bridge(
        {"model.embed_tokens.weight": None, "lm_head.weight": None, "model.x.weight": None}
    )
    shapes = [s.shape for s in MegatronBridgeSource([GPT], bridge).specs()]
    assert shapes == [(6, 2), (6, 2), (8, 2)]


def test_a_parameter_without_a_mapping_is_refused_by_name() -> None:
    bridge = Bridge({"weight": None})
    bridge.get_conversion_tasks = lambda models: [task("weight"), None]  # type: ignore[method-assign]
    with pytest.raises(ExportError, match="no mapping for 1 parameters, such as bias;"):
        MegatronBridgeSource([GPT], bridge).specs()


def test_too_small_a_vocabulary_is_refused_by_name() -> None:
    bridge = Bridge({"lm_head.weight": None}, rows=5)
    with pytest.raises(ExportError, match=r"lm_head\.weight has 5 rows, fewer than .* 6"):
        MegatronBridgeSource([GPT], bridge).specs()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="says so on older Pythons")
def test_an_old_python_is_told_so_in_one_sentence() -> None:
    with pytest.raises(
        ExportError, match=r"needs Python 3\.12 and megatron-core 0\.17 .*use MBridgeSource$"
    ):
        MegatronBridgeSource([GPT], SimpleNamespace(vocab_size=6))


def test_a_missing_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_rdt.sources.megatron_bridge.sys", SimpleNamespace(version_info=(3, 12))
    )
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ExportError, match=r"cannot be imported .*install megatron-bridge"):
        MegatronBridgeSource([GPT], SimpleNamespace(vocab_size=6))
