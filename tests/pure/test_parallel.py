"""Threads stand for trainer ranks; torch.distributed is four functions over a meeting point."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rdt import parallel
from megatron_rdt.parallel import TrainerGroup
from megatron_rdt.progress import Progress
from sglang_rdt.errors import ExportError, PlanError, RdtError, TrainerLostError

from .ranks import Group, together

SIZE = 3


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrainerGroup], Any]], list[Any]]:
    """Runs a function on every rank of a fresh group; what each returned or raised."""
    meeting = Group(SIZE)
    here = threading.local()

    def all_gather_object(values: list[Any], value: Any, group: Any) -> None:
        values[:] = [copied(v) for v in meeting.meet(here.rank, "gather", copied(value))]

    def broadcast_object_list(box: list[Any], src: int, group: Any) -> None:
        box[0] = copied(meeting.meet(here.rank, "broadcast", copied(box[0]))[src])

    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: here.rank,
        get_world_size=lambda: SIZE,
        new_group=lambda backend, timeout: f"{backend} {timeout.total_seconds():g}",
        all_gather_object=all_gather_object,
        broadcast_object_list=broadcast_object_list,
        destroy_process_group=lambda group: None,
    )
    monkeypatch.setattr(parallel, "dist", fake)

    def on_rank(rank: int, run: Callable[[TrainerGroup], Any]) -> Any:
        here.rank = rank
        group = TrainerGroup(5.0)
        try:
            return run(group)
        finally:
            group.close()

    return lambda run: together([partial(on_rank, r, run) for r in range(SIZE)])


Ranks = Callable[[Callable[[TrainerGroup], Any]], list[Any]]


def test_gather_and_broadcast(ranks: Ranks) -> None:
    assert ranks(lambda g: (g.gather(g.rank * 10), g.broadcast(f"from {g.rank}"), g.leads)) == [
        ([0, 10, 20], "from 0", r == 0) for r in range(SIZE)
    ]


def test_together_returns_each_ranks_own_value(ranks: Ranks) -> None:
    assert ranks(lambda g: g.together(lambda: g.rank + 1)) == [1, 2, 3]


def test_one_failure_is_everybodys(ranks: Ranks) -> None:
    def run(group: TrainerGroup) -> None:
        def fail() -> None:
            if group.rank == 1:
                raise PlanError("does not fit", ["w"])

        group.together(fail)

    for rank, error in enumerate(ranks(run)):
        assert isinstance(error, PlanError)
        assert error.problems == ("w",)
        if rank != 1:
            assert "raised on trainer rank 1" in str(error.__cause__)


def test_several_failures_keep_their_own(ranks: Ranks) -> None:
    def run(group: TrainerGroup) -> None:
        def fail() -> None:
            if group.rank:
                raise ExportError(f"rank {group.rank}")

        group.together(fail)

    assert [str(e) for e in ranks(run)] == ["rank 1", "rank 1", "rank 2"]


def test_errors_that_do_not_travel_become_text(ranks: Ranks) -> None:
    def run(group: TrainerGroup) -> None:
        def fail() -> None:
            if group.rank == 2:
                error = ValueError("odd")
                error.lock = threading.Lock()  # type: ignore[attr-defined]
                raise error

        group.together(fail)

    zero, one, two = ranks(run)
    assert isinstance(two, ValueError)
    for error in (zero, one):
        assert type(error) is RdtError
        assert str(error) == "ValueError: odd"


def test_the_leader_answers_for_all(ranks: Ranks) -> None:
    ran: list[int] = []

    def run(group: TrainerGroup) -> Any:
        return group.lead(lambda: (ran.append(group.rank), "plan")[1])

    assert ranks(run) == ["plan"] * SIZE
    assert ran == [0]


def test_the_leaders_failure_is_everybodys(ranks: Ranks) -> None:
    def fail() -> None:
        raise PlanError("does not fit", ["w"])

    for error in ranks(lambda g: g.lead(fail)):
        assert isinstance(error, PlanError)
        assert error.problems == ("w",)


def test_after_a_failure_the_group_goes_on(ranks: Ranks) -> None:
    def run(group: TrainerGroup) -> Any:
        def fail() -> None:
            if group.rank == 1:
                raise ExportError("once")

        with pytest.raises(ExportError):
            group.together(fail)
        return group.gather(group.rank)

    assert ranks(run) == [[0, 1, 2]] * SIZE


def test_alone() -> None:
    group = TrainerGroup(5.0)
    assert (group.rank, group.size, group.leads) == (0, 1, True)
    assert group.gather("x") == ["x"]
    assert group.broadcast("x") == "x"
    assert group.together(lambda: 5) == 5
    assert group.lead(lambda: 6) == 6
    error = ValueError("as it is")
    error.lock = threading.Lock()  # type: ignore[attr-defined]

    def fail() -> None:
        raise error

    for method in (group.together, group.lead):
        with pytest.raises(ValueError, match="as it is") as caught:
            method(fail)
        assert caught.value is error
    group.close()


# The progress bar.


@pytest.mark.parametrize(("enabled", "tty"), [(True, False), (False, True)])
def test_no_bar_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], enabled: bool, tty: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty, raising=False)
    monkeypatch.setattr("megatron_rdt.progress.APPEARS_AFTER_S", 0.0)
    with Progress(100, "sync", enabled=enabled) as progress:
        progress.advance(50)
        assert progress._bar is None
    assert capsys.readouterr() == ("", "")


def test_no_bar_for_a_short_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(100, "sync", enabled=True) as progress:
        progress.advance(50)
        assert progress._bar is None


def test_a_long_sync_draws_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("megatron_rdt.progress.APPEARS_AFTER_S", 0.0)
    with Progress(100, "sync", enabled=True) as progress:
        progress.advance(20)
        progress.advance(30)
        assert progress._bar.tasks[0].completed == 50
        assert progress._bar.tasks[0].total == 100
    assert not progress._bar.live.is_started


def test_a_lost_rank_is_named_with_the_phase(
    ranks: Callable[[Callable[[TrainerGroup], Any]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's table knows who is dead; gloo only says that somebody is."""
    from sglang_rdt.engine.sync_request import Trainer

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(parallel.trainers, "is_there", lambda t: t.token != "t1")

    def run(group: TrainerGroup) -> None:
        group.members = [Trainer(f"t{r}", f"host:{r}") for r in range(SIZE)]
        group.doing = "pull"
        parallel.dist.all_gather_object = broken  # type: ignore[assignment]
        group.gather(1)

    outcomes = ranks(run)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], TrainerLostError)
        assert str(outcomes[rank]) == (
            f"trainer rank {rank}, in phase 'pull': trainer rank 1 (host:1) died "
            "(Connection closed by peer)"
        )


def test_a_rank_that_only_is_late_is_not_called_dead(
    ranks: Callable[[Callable[[TrainerGroup], Any]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")

    monkeypatch.setattr(parallel, "_NOTICE_S", 0.1)

    def run(group: TrainerGroup) -> None:
        parallel.dist.all_gather_object = late  # type: ignore[assignment]
        group.gather(1)

    for outcome in ranks(run):
        assert "one of the other 2 ranks died, or did not come within 5 s" in str(outcome)
