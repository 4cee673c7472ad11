"""What of WeightSync needs neither a cluster nor Megatron."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatron_rdt.background import InBackground
from megatron_rdt.weight_sync import WeightSync


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
