"""What is no copy of slices: the engine's own loader, run on HF tensors that were pulled whole.

The loader is given only those HF tensors that it computes something of, and may write only what
it wrote when it was recorded. Anything else is an error before it is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_rdt.dispatch import written_by
from sglang_rdt.engine.recorder import Live, Snapshot, describe_tensors, without_post_load
from sglang_rdt.errors import RecordError, listed
from sglang_rdt.plan.specs import Recording, Write


class _Guard(TorchDispatchMode):
    """Lets only ``allowed`` places of live parameters be written."""

    def __init__(self, live: Live, allowed: set[Write]) -> None:
        super().__init__()
        self._live, self._allowed = live, allowed
        self.written: set[Write] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            if tensor in self._live and tensor.numel():
                self._check(func, tensor)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        place = self._live.locate(tensor)
        if place is None or Write(*place) not in self._allowed:
            name = place[0] if place else "a parameter seen as another dtype"
            raise RecordError(f"{name}: {func} writes another part of it than when it was recorded")
        self.written.add(Write(*place))


def replay(
    model: torch.nn.Module, recording: Recording, scratch: Mapping[str, torch.Tensor]
) -> None:
    """Has ``model.load_weights`` compute what is no copy of slices.

    Args:
        recording: of this model.
        scratch: HF name -> the tensor, of every source of ``recording.computed``, in the order in
            which the loader got them when it was recorded. They are not changed.

    Raises:
        RecordError: the loader failed, or does not do what it did when it was recorded. Parameters
            may be half written.
    """
    expected = {write for one in recording.computed for write in one.writes}
    allowed = expected | {Write(w.param, w.dst) for w in recording.wants if w.source in scratch}
    allowed |= {Write(c.param, c.dst) for c in recording.constants}
    guard = _Guard(Live(describe_tensors(model)[1]), allowed)
    snapshot = Snapshot(model)
    who = f"{type(model).__name__}.load_weights"
    try:
        # Some loaders change what they are given.
        named = ((name, tensor.clone()) for name, tensor in scratch.items())
        with torch.no_grad(), without_post_load(model), _on_this_thread(), guard:
            model.load_weights(named)  # type: ignore[operator]
    except RecordError as error:
        raise RecordError(f"{who}: {error}") from None
    except Exception as error:
        raise RecordError(f"{who} failed: {type(error).__name__}: {error}") from error
    finally:
        replaced = snapshot.restore()
    if replaced:
        raise RecordError(f"{who} puts other tensors in the place of {', '.join(replaced[:5])}")
    left_out = dict.fromkeys(w.param for w in expected - guard.written)
    if left_out:
        raise RecordError(
            f"{who} did not write what it wrote when it was recorded:\n{listed(list(left_out))}"
        )


@contextlib.contextmanager
def _on_this_thread() -> Iterator[None]:
    """What this thread gives to a thread pool runs here: a dispatch mode sees its own thread only.

    SGLang's loaders copy tensors that lie on a CPU in pools of their own.
    """
    here, elsewhere = threading.get_ident(), ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, run: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != here:
            return elsewhere(pool, run, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(run(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = elsewhere  # type: ignore[method-assign]


def sources_in_order(recording: Recording, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that something is computed of, in that order."""
    sources = {name for one in recording.computed for name in one.sources}
    return [name for name in names if name in sources]
