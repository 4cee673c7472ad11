"""What of WeightSync needs neither a cluster nor Megatron."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rdt.background import InBackground
from megatron_rdt.movers import Moved
from megatron_rdt.weight_sync import WeightSync
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.errors import RdtError
from sglang_rdt.settings import Settings


def with_pending(run: Any) -> WeightSync:
    sync = object.__new__(WeightSync)
    sync._pending = InBackground(run, torch.device("cpu"))
    return sync


def test_an_interrupted_wait_leaves_the_next_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    sync = with_pending(lambda: go.wait(20))
    thread = sync._pending._thread  # type: ignore[union-attr]

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync._before_step(None)
    assert sync._pending is not None  # the step that comes now must not go ahead
    go.set()
    assert sync.wait() is True  # type: ignore[comparison-overlap]
    assert sync.wait() is None


def test_an_error_is_raised_once_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("lost")

    sync = with_pending(fail)
    with pytest.raises(ValueError, match="lost"):
        sync.wait()
    assert sync.wait() is None


def test_ranks_that_a_filter_leaves_alone_report_nothing() -> None:
    sync = object.__new__(WeightSync)
    engine = SimpleNamespace(name="e", ranks=("e pp0", "e pp1"))
    lead = SimpleNamespace(taking_part={"e": engine}, untouched=lambda: {"e pp0"})
    sync._link = SimpleNamespace(coordinator=lead)  # type: ignore[assignment]
    moved = Moved(sums={("e pp1", "w"): 7}, finalised={"e pp0": {}, "e pp1": {"w": 7}})
    assert sync._lead_finalise("s", {}, [moved], PhaseTimer(), "checksum") == {}
    moved.finalised = {"e pp0": {}, "e pp1": {}}
    (failure,) = sync._lead_finalise("s", {}, [moved], PhaseTimer(), "checksum").values()
    assert "w is not held" in failure.text


def test_weights_that_change_after_the_step_are_not_synced_by_it() -> None:
    clipped = SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace(qk_clip=True)))
    with pytest.raises(RdtError, match="has qk_clip: its attention weights change after"):
        WeightSync([clipped], optimizer=object(), settings=Settings())
    sync = object.__new__(WeightSync)
    sync._chunks = [clipped]
    with pytest.raises(RdtError, match="would change under them"):
        sync._refuse_late_changes("what engines read would change under them")
    sync._chunks = [SimpleNamespace(config=SimpleNamespace(qk_clip=False))]
    sync._refuse_late_changes("nothing")
