"""Transfers: when they are done, and what becomes of those that were given up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_rdt.transport import unfinished
from sglang_rdt.transport.transfer import Transfer


class Handle:
    """One of NIXL's, and what its agent says of it."""

    def __init__(self, state: Any = "PROC") -> None:
        self.state, self.released, self.posted = state, False, 0

    def release(self) -> None:
        self.released = True


class Agent:
    """NIXL's, as far as it is asked."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.rows: list[Any] = []

    def get_xfer_descs(self, rows: Any, mem_type: str) -> Any:
        self.rows.append(np.asarray(rows).tolist())
        return rows

    def initialize_xfer(self, *_: Any) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        handle.posted += 1
        if isinstance(handle.state, Exception):
            raise handle.state
        return "ERR" if handle.state == "ERR" else "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        if isinstance(handle.state, Exception):
            raise handle.state
        return str(handle.state)


GONE = RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")


def made(remote: str = "a") -> tuple[Transfer, Handle, Handle]:
    agent = Agent()
    transfer = Transfer(agent, remote, [(1000, 64, 0)], [(2000, 64, 1)], ("cpu", "cpu"))
    return transfer, *agent.handles


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    unfinished._transfers.clear()
    yield
    unfinished._transfers.clear()


def test_behind_each_read_comes_its_last_byte_once_more() -> None:
    agent = Agent()
    rows = np.array([(1000, 64, 0), (5000, 8, 0)], dtype=np.uint64)
    Transfer(agent, "a", rows, [(2000, 72, 1)], ("cpu", "cuda"))
    assert agent.rows[2:] == [[[5007, 1, 0]], [[2071, 1, 1]]]


def test_done_is_done_when_the_byte_behind_it_is() -> None:
    transfer, whole, byte = made()
    for _ in range(2):
        whole.state = byte.state = "PROC"
        transfer.post()
        assert transfer.under_way()
        whole.state = "DONE"
        assert transfer.state() == "PROC"
        byte.state = "DONE"
        assert transfer.state() == "DONE"
        assert not transfer.under_way()
    assert (whole.posted, byte.posted) == (2, 2)


def test_a_done_that_was_none_is_found() -> None:
    """What NIXL does of a copy that failed at once."""
    transfer, whole, byte = made()
    transfer.post()
    whole.state, byte.state = "DONE", GONE
    with pytest.raises(RuntimeError, match="REMOTE_DISCONNECT"):
        transfer.state()
    assert not transfer.under_way()


@pytest.mark.parametrize("end", ["DONE", "ERR", GONE])
def test_a_transfer_is_kept_until_it_ends(end: Any) -> None:
    (first, whole, byte), (second, *_) = made("a"), made("b")
    for transfer in (first, second):
        transfer.post()
    unfinished.release("trainer rank 0", first)
    unfinished.release("trainer rank 1", second)
    assert unfinished.unfinished() == ["trainer rank 0", "trainer rank 1"]
    assert unfinished.remotes() == {"a", "b"}
    whole.state = byte.state = end
    assert unfinished.unfinished() == ["trainer rank 1"]
    assert whole.released
    assert byte.released
    assert unfinished.remotes() == {"b"}


def test_nothing_follows_a_read_that_was_given_up() -> None:
    """The byte behind it would be one more late write."""
    transfer, whole, byte = made()
    transfer.post()
    unfinished.release("trainer rank 0", transfer)
    whole.state = "DONE"
    assert unfinished.unfinished() == []
    assert (whole.released, byte.posted) == (True, 0)


def test_one_that_has_ended_is_released_at_once() -> None:
    transfer, whole, byte = made()
    transfer.post()
    whole.state = byte.state = "DONE"
    unfinished.release("trainer rank 0", transfer)
    assert (whole.released, byte.released) == (True, True)
    assert unfinished.unfinished() == []


def test_scratch_memory_outlives_what_may_write_into_it() -> None:
    class Memory:
        closed = False

        def close(self) -> None:
            self.closed = True

    transfer, whole, byte = made()
    transfer.post()
    unfinished.release("trainer rank 0", transfer)
    memory, other = Memory(), Memory()
    unfinished.close(memory)  # type: ignore[arg-type]
    assert not memory.closed
    whole.state = byte.state = "DONE"
    assert unfinished.unfinished() == []
    assert memory.closed
    unfinished.close(other)  # type: ignore[arg-type]
    assert other.closed


def test_a_transfer_ends_with_the_registration_of_the_memory_that_it_reads_into() -> None:
    transfer, first, second = made()
    assert not transfer.reads_into(1064, 64)
    assert not transfer.reads_into(900, 100)
    assert transfer.reads_into(1000, 1)
    transfer.lose_memory()
    assert transfer.lost
    assert first.released
    assert second.released
    with pytest.raises(RuntimeError, match="was deregistered since"):
        transfer.post()
    assert first.posted == 0


def test_one_under_way_is_not_released_before_it_has_ended_and_posts_nothing_more() -> None:
    transfer, first, second = made()
    transfer.post()
    transfer.lose_memory()
    assert not first.released
    first.state = "DONE"
    with pytest.raises(RuntimeError, match="was deregistered since"):
        transfer.state()
    assert second.posted == 0
    assert not transfer.under_way()


def test_one_whose_memory_went_while_it_was_awaited_is_never_done() -> None:
    transfer, first, _ = made()
    transfer.post()
    first.state = "DONE"  # and the byte behind it was not posted
    transfer.lose_memory()
    with pytest.raises(RuntimeError, match="was deregistered since"):
        transfer.state()


def test_an_agent_that_is_spared_for_a_late_transfer_is_forgotten_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray.experimental.rdt.nixl_tensor_transport")
    from sglang_rdt.transport.agent import RemoteMemory, WeightTransport

    removed: list[str] = []
    agent = SimpleNamespace(remove_remote_agent=removed.append)
    monkeypatch.setattr(WeightTransport, "get_nixl_agent", lambda self: agent)
    transport = WeightTransport()
    transport._memory = {"object": RemoteMemory("a", (1,), (1,), 0, "cpu")}
    late, first, _ = made()
    late.post()
    unfinished.release("the source", late)
    transport.doubt()
    transport.forget()
    assert removed == []  # NIXL dies of the answer otherwise
    first.state = "ERR"
    transport.forget()
    assert removed == ["a"]
    transport.forget()
    assert removed == ["a"]
