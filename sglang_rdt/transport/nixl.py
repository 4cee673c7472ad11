"""NIXL through Ray's RDT calls: register once, put once, pull again and again.

What these wrappers add to Ray's calls: a storage is registered exactly once per process, targets
stay referenced until the bytes have landed (Ray keeps them by weak reference: temporaries make
the pull a silent no-op), every wait has a deadline, and errors name both ends. The transport is
this package's own, see :mod:`sglang_rdt.transport.agent`; references from Ray's stock one can be
pulled too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_rdt.errors import DeadlineError, TransportError
from sglang_rdt.transport.memory import check_registrable, cuda_segments

if TYPE_CHECKING:
    import torch

    from sglang_rdt.transport.agent import RemoteMemory

_lock = threading.Lock()


@dataclass(frozen=True)
class _Registration:
    """As it was made: the storage may be emptied, resized or moved afterwards (offloading)."""

    address: int
    nbytes: int
    tensor: torch.Tensor  # keeps the storage, and so its identity

    def holds(self) -> bool:
        """Whether the storage still is where it was registered."""
        storage = self.tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) == (self.address, self.nbytes)


# By identity of the storage.
_registered: dict[int, _Registration] = {}


def register(tensors: Iterable[torch.Tensor]) -> int:
    """Registers the whole storage behind each tensor with NIXL, once per process.

    One that has moved since it was registered is registered anew.

    Returns:
        How many storages were new.

    Raises:
        TransportError: the memory cannot be registered (see :mod:`sglang_rdt.transport.memory`).
    """
    from sglang_rdt.transport.agent import transport

    manager = transport()
    new = 0
    with _lock:
        fresh = []
        for tensor in tensors:
            known = _registered.get(tensor.untyped_storage()._cdata)
            if known is None or not known.holds():
                fresh.append(tensor)
        if fresh:
            # Before anything of ours lands at an address that somebody else has left.
            for key, known in list(_registered.items()):
                if not known.holds():
                    manager.give_back(known.address)
                    del _registered[key]
        segments = cuda_segments(fresh)
        for tensor in fresh:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage._cdata in _registered:
                continue
            check_registrable(tensor, segments)
            try:
                manager.register_nixl_memory(tensor)
            except Exception as error:
                raise TransportError(
                    f"NIXL cannot register {storage.nbytes()} bytes on {tensor.device}: {error}"
                ) from error
            _registered[storage._cdata] = _Registration(
                storage.data_ptr(), storage.nbytes(), tensor
            )
            new += 1
    return new


def deregister(tensors: Iterable[torch.Tensor]) -> None:
    """Undoes :func:`register` for the storages behind ``tensors``, wherever they are by now."""
    with _lock:
        known = [_registered.pop(t.untyped_storage()._cdata, None) for t in tensors]
        gone = [entry for entry in known if entry is not None]
        if gone:
            from sglang_rdt.transport.agent import transport

            for entry in gone:
                transport().give_back(entry.address)


def registrations() -> int:
    """How many storages this process has registered through :func:`register`."""
    with _lock:
        return len(_registered)


def put(views: Sequence[torch.Tensor]) -> Any:
    """A reference to the memory behind ``views`` (contiguous, one device type).

    The reference stays good for every later content of that memory: put once, change the bytes
    in place, pull again.
    """
    import ray

    from sglang_rdt.transport.agent import NAME, transport

    transport()
    return ray.put(list(views), _tensor_transport=NAME)


def memory_of(ref: Any, timeout_s: float) -> RemoteMemory:
    """Where the tensors lie that were :func:`put` behind ``ref``; no byte of them moves.

    Raises:
        TransportError: the reference is none of ours, or its owner is gone.
    """
    import ray

    from sglang_rdt.transport.agent import transport

    manager = transport()
    try:
        ray.get(ref, timeout=timeout_s)
        return manager.memory(ref.hex())
    except Exception as error:
        raise TransportError(
            f"cannot reach the memory behind reference {ref}: {type(error).__name__}: {error}"
        ) from None


def forget(*, closed: bool = False) -> None:
    """Releases prepared transfers and lets go of what is known of other processes' memory, if any.

    Args:
        closed: it will not come again.
    """
    agent = sys.modules.get("sglang_rdt.transport.agent")
    if agent is not None:
        agent.transport().forget(closed=closed)


def doubt() -> None:
    """A sync went wrong: nothing that is known of its connection is taken over into the next."""
    agent = sys.modules.get("sglang_rdt.transport.agent")
    if agent is not None:
        agent.transport().doubt()


def pull(ref: Any, targets: Sequence[torch.Tensor], timeout_s: float) -> None:
    """Reads the tensors behind ``ref`` into ``targets``; returns when every byte is there.

    Args:
        ref: from :func:`put`, in any process of the same Ray cluster.
        targets: contiguous tensors with exactly the shapes and dtypes that were put.

    Raises:
        DeadlineError: not complete after ``timeout_s``.
        TransportError: anything else that NIXL or Ray reports; also if Ray did not write into
            ``targets`` but somewhere else.
    """
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.experimental import set_target_for_ref

    from sglang_rdt.transport.agent import transport

    held = list(targets)
    if not held:
        return
    transport()
    failure: TransportError | DeadlineError | None = None
    got: list[torch.Tensor] = []
    try:
        set_target_for_ref(ref, held)
        got = ray.get(ref, timeout=timeout_s)
    except (GetTimeoutError, TimeoutError):
        failure = DeadlineError("the NIXL transfer", "pull", timeout_s)
    except Exception as error:
        failure = TransportError(f"pulling {len(held)} tensors failed: {error}")
    if failure is not None:
        # Outside of the handler: the original holds the transfer's handle through its frames.
        raise failure
    for target, result in zip(held, got, strict=True):
        if target.data_ptr() != result.data_ptr():
            raise TransportError(
                "Ray delivered the tensors into memory of its own instead of the given targets"
            )
