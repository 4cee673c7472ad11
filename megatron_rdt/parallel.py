"""This rank's place in Megatron's parallel layout, and talk between trainer ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from sglang_rdt.coordinator import trainers
from sglang_rdt.engine.sync_request import Trainer
from sglang_rdt.errors import RdtError, TrainerLostError

T = TypeVar("T")

_NOTICE_S = 3.0


def coordinates() -> dict[str, int]:
    """Coordinates of this rank in every dimension that is larger than one."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        return {}
    found = {
        "tp": (ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
        "pp": (ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size()),
        "ep": (ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size()),
        "etp": (ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()),
        "dp": (ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()),
        "cp": (ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()),
    }
    return {name: rank for name, (rank, size) in found.items() if size > 1}


class TrainerGroup:
    """All trainer ranks, over a CPU group of their own. Every method is collective.

    Args:
        timeout_s: how long a rank waits for the others before the group fails.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = None
        self._timeout_s = timeout_s
        self._closed = False
        # For messages: who the ranks are, once they have told one another, and what they are doing.
        self.members: list[Trainer] = []
        self.doing = "connect"
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                # A group of its own: objects must not travel through NCCL, nor mix with training.
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def leads(self) -> bool:
        """Whether this rank drives the engines."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._meet(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def collect(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on rank 0; empty elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.leads else None
        self._meet(lambda: dist.gather_object(value, values, dst=0, group=self._group))
        return values or []

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        self._meet(lambda: dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def alone(self, run: Callable[[], T]) -> T | None:
        """Runs ``run`` on rank 0 only; if it raises there, every rank raises."""
        made: list[T] = []
        self.lead(lambda: made.append(run()))
        return made[0] if made else None

    def scatter(self, values: Sequence[T] | None) -> T:
        """The value of this rank, out of those (one per rank) that rank 0 has."""
        if self.size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        given = list(values) if values is not None else None
        self._meet(lambda: dist.scatter_object_list(box, given, src=0, group=self._group))
        return box[0]

    def _meet(self, run: Callable[[], None]) -> None:
        if self._closed:
            raise RdtError("this WeightSync is closed; make a new one")
        try:
            run()
        except RuntimeError as error:
            if isinstance(error, RdtError):
                raise
            raise TrainerLostError(self._lost(error)) from None

    def _lost(self, error: RuntimeError) -> str:
        reason = str(error).splitlines()[0][:200]
        start = f"trainer rank {self.rank}, in phase {self.doing!r}: "
        dead = self._dead()
        if dead:
            return f"{start}{' and '.join(dead)} died ({reason})"
        others = [r for r in range(self.size) if r != self.rank]
        who = f"rank {others[0]}" if len(others) == 1 else f"one of the other {len(others)} ranks"
        return f"{start}{who} died, or did not come within {self._timeout_s:g} s ({reason})"

    def _dead(self) -> list[str]:
        """Which ranks are, as far as Ray knows; it needs a moment to notice."""
        deadline = time.monotonic() + _NOTICE_S
        while self.members:
            dead = [
                f"trainer rank {rank} ({member.where})"
                for rank, member in enumerate(self.members)
                if rank != self.rank and not trainers.is_there(member)
            ]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(0.1)
        return []

    def together(self, run: Callable[[], T]) -> T:
        """Runs ``run`` on every rank. If it fails on any, every rank raises, and says which."""
        error: BaseException | None = None
        try:
            value = run()
        except Exception as caught:
            error = caught
        failed = {r: e for r, e in enumerate(self.gather(_portable(error))) if e is not None}
        if not failed:
            return value
        if error is not None:
            raise error
        rank, first = next(iter(failed.items()))
        raise first from RdtError(f"raised on trainer rank {rank}")

    def lead(self, run: Callable[[], T]) -> T:
        """Runs ``run`` on rank 0; every rank returns its value or raises its error."""
        outcome: tuple[Any, BaseException | None] = (None, None)
        if self.leads:
            try:
                outcome = (run(), None)
            except Exception as caught:
                outcome = (None, _portable(caught))
                if self.size == 1:
                    raise
        value, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Gives the group up."""
        self._closed = True
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _portable(error: BaseException | None) -> BaseException | None:
    """``error`` if it pickles, else its text in an RdtError."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RdtError(f"{type(error).__name__}: {error}")
    return error
