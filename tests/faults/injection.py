"""Where a sync is hit, and how: installed at run time in the process where the phase happens.

This module travels to actors by value: it imports nothing of the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# How long whoever was hit has to vanish (a raylet's or a server's workers follow it).
GONE_S = 25.0
_NO_ACCESS = 0  # PROT_NONE


@dataclass(frozen=True)
class Point:
    """A function that is reached when a phase is: ``name`` of ``owner`` (module, or module:Class).

    ``side``: where it runs. ``at``: for a generator, the item before which it is hit.
    """

    side: Literal["engine", "trainer"]
    owner: str
    name: str
    at: int | None = None


_CONTROL = "sglang_rdt.engine.scheduler_control:SchedulerControl"
_WEIGHTS = "sglang_rdt.engine.live_weights:LiveWeights"
_READER = "sglang_rdt.engine.direct_reader:DirectReader"

# (phase, mode) -> point; mode None: both.
POINTS: dict[tuple[str, str | None], Point] = {
    ("connect", None): Point("engine", _WEIGHTS, "record"),
    ("plan", "direct"): Point("trainer", "sglang_rdt.coordinator.coordinator", "make_direct_plan"),
    ("plan", "bucketed"): Point("trainer", "sglang_rdt.coordinator.coordinator", "make_plan"),
    ("pause", None): Point("engine", _CONTROL, "pause"),
    ("gather", None): Point("trainer", "megatron_rdt.sources.mbridge:MBridgeSource", "export", 4),
    ("put", None): Point("trainer", "megatron_rdt.sender:RouteSender", "_send"),
    ("pull", "direct"): Point("engine", _READER, "read"),
    ("pull", "bucketed"): Point("engine", _WEIGHTS, "pull"),
    ("finalise", None): Point("engine", _CONTROL, "end_session"),
    ("verify", None): Point("engine", _WEIGHTS, "checksums"),
    ("verify again", "direct"): Point("engine", _READER, "compare"),
    ("version", None): Point("engine", _CONTROL, "set_version"),
    ("continue", None): Point("engine", _CONTROL, "resume"),
}


def point(phase: str, mode: str) -> Point:
    """Where ``phase`` of a sync in ``mode`` is hit."""
    return POINTS.get((phase, mode)) or POINTS[phase, None]


@dataclass(frozen=True)
class Fault:
    """What happens there, once.

    Args:
        marker: file that says when it did (seconds since the epoch).
        kill: processes ended with SIGKILL; ``stop``: with SIGSTOP.
        gone: processes that must be gone before the phase goes on.
        unmap: whether live weights of this process are made inaccessible while the phase runs, so
            that NIXL's transfer into them fails.
    """

    marker: str
    kill: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    unmap: bool = False


def arm(me: Any, where: Point, fault: Fault) -> int:
    """Installs ``fault`` in this process; ``me`` is the actor. Returns the process id."""
    holder = _holder(where)
    original = getattr(holder, where.name)

    def strike() -> contextlib.AbstractContextManager[None]:
        setattr(holder, where.name, original)
        Path(fault.marker).write_text(str(time.time()))
        for pid in fault.stop:
            os.kill(pid, signal.SIGSTOP)
        # Itself last.
        for pid in sorted(fault.kill, key=lambda p: p == os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_gone(fault.gone)
        return _inaccessible(me) if fault.unmap else contextlib.nullcontext()

    def hooked(*args: Any, **kwargs: Any) -> Any:
        with strike():
            return original(*args, **kwargs)

    def hooked_items(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for i, item in enumerate(original(*args, **kwargs)):
            if i == where.at:
                strike()
            yield item

    hook: Callable[..., Any] = hooked if where.at is None else hooked_items
    hook.undo = lambda: setattr(holder, where.name, original)  # type: ignore[attr-defined]
    setattr(holder, where.name, hook)
    return os.getpid()


def disarm(_me: Any, where: Point) -> None:
    """Takes a fault away that was never reached."""
    undo = getattr(getattr(_holder(where), where.name), "undo", None)
    if undo is not None:
        undo()


def wait_gone(pids: tuple[int, ...], timeout_s: float = GONE_S) -> list[int]:
    """Waits until none of ``pids`` runs; those that still do."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if _runs(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if _runs(pid)]
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _holder(where: Point) -> Any:
    module, _, cls = where.owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, cls) if cls else found


@contextlib.contextmanager
def _inaccessible(actor: Any) -> Iterator[None]:
    """Takes every page away that lies whole in a live parameter of this engine rank.

    What the kernel copies for UCX fails with EFAULT then, as on memory that was unmapped.
    """
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(start: int, size: int, access: int) -> None:
        if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), access):
            raise OSError(ctypes.get_errno(), "mprotect")

    weights = actor._session.weights
    taken = []
    for name, spec in weights.specs.items():
        if spec.buffer:
            continue
        tensor = weights._tensors[name]
        start = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
        if end > start:
            taken.append((start, end - start))
    if not taken:
        raise RuntimeError("no parameter spans a whole page; the fault cannot be made")
    try:
        for start, size in taken:
            protect(start, size, _NO_ACCESS)
        yield
    finally:
        for start, size in taken:
            protect(start, size, mmap.PROT_READ | mmap.PROT_WRITE)


def over_tcp(_actor: Any) -> str | None:
    """UCX of this process may only use TCP, where a read needs the other side's help.

    Before the first registration.

    Returns:
        Why it is too late, or None.
    """
    import sys

    agent = sys.modules.get("sglang_rdt.transport.agent")
    if agent is not None and agent.transport()._nixl_agent is not None:
        return "the NIXL agent was there already"
    os.environ["UCX_TLS"] = "tcp"
    return None


def collect_garbage(_me: Any) -> int:
    """Frees what the failed sync left behind, here and now."""
    import gc

    return gc.collect()


def held(me: Any) -> dict[str, int]:
    """What this process holds for syncs: none of it may grow from one sync to the next."""
    import sys
    import threading

    found = {
        # Ray's own threads come and go under other names.
        "threads": sum(not isinstance(t, threading._DummyThread) for t in threading.enumerate()),
    }
    agent = sys.modules.get("sglang_rdt.transport.agent")
    if agent is not None:
        from sglang_rdt.transport import nixl

        manager = agent.transport()
        found["registrations"] = nixl.registrations()
        found["registered storages"] = len(manager._tensor_desc_cache)
        found["references"] = len(manager._managed_meta_nixl)
        found["known memory"] = len(manager._memory)
        found["prepared"] = len(manager._prepared)
    session = getattr(me, "_session", None)
    if session is not None:
        found["sources"] = len(session.weights.sources)
        found["calls"] = len(me._gate._calls)
        found["commands"] = me._gate._commands.qsize()
    return found


def native_threads(_me: Any) -> int:
    """All threads of this process, those of UCX and Ray among them."""
    return len(os.listdir("/proc/self/task"))


def process_id(_me: Any) -> int:
    """Of the actor."""
    return os.getpid()
