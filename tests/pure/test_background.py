from __future__ import annotations

import threading

import pytest
import torch

from megatron_rdt.background import InBackground

CPU = torch.device("cpu")


def test_it_runs_beside_the_caller_and_returns_its_value() -> None:
    go = threading.Event()
    caller = threading.get_ident()

    def run() -> tuple[bool, int]:
        return go.wait(10), threading.get_ident()

    pending = InBackground(run, CPU)
    assert not pending.done
    go.set()
    waited, thread = pending.result()
    assert waited
    assert thread != caller
    assert pending.done


def test_its_error_is_raised_where_it_is_waited_for() -> None:
    def run() -> None:
        raise ValueError("no")

    pending = InBackground(run, CPU)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            pending.result()


def test_a_program_that_ends_waits_for_it() -> None:
    go = threading.Event()
    pending = InBackground(lambda: go.wait(10), CPU)
    (thread,) = [t for t in threading.enumerate() if t.name == "weight-sync"]
    assert not thread.daemon
    go.set()
    assert pending.result()
