"""Transfers that were given up: kept until they end, and nothing is written before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_rdt.transport import unfinished


class Agent:
    """NIXL's, as far as it is asked."""

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}

    def check_xfer_state(self, handle: Any) -> str:
        state = self.states[handle]
        if isinstance(state, Exception):
            raise state
        return str(state)


class Handle:
    released = False

    def release(self) -> None:
        self.released = True


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    unfinished._transfers.clear()
    yield
    unfinished._transfers.clear()


@pytest.mark.parametrize("end", ["DONE", "ERR", RuntimeError("the peer is gone")])
def test_a_transfer_is_kept_until_it_ends(end: Any) -> None:
    agent, first, second = Agent(), Handle(), Handle()
    agent.states = {first: "PROC", second: "PROC"}
    unfinished.keep("trainer rank 0", "a", agent, first)
    unfinished.keep("trainer rank 1", "b", agent, second)
    assert unfinished.unfinished() == ["trainer rank 0", "trainer rank 1"]
    assert unfinished.remotes() == {"a", "b"}
    agent.states[first] = end
    assert unfinished.unfinished() == ["trainer rank 1"]
    assert (first.released, second.released) == (True, False)
    assert unfinished.remotes() == {"b"}


def test_a_handle_that_cannot_be_released_is_let_go() -> None:
    class Broken(Handle):
        def release(self) -> None:
            raise RuntimeError("no")

    agent, handle = Agent(), Broken()
    agent.states = {handle: "DONE"}
    unfinished.keep("trainer rank 0", "a", agent, handle)
    assert unfinished.unfinished() == []
