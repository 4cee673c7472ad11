"""NIXL through Ray's public RDT calls: register once, put once, pull again and again.

What these wrappers add to Ray's calls: a storage is registered exactly once per process, targets
stay referenced until the bytes have landed (Ray keeps them by weak reference: temporaries make
the pull a silent no-op), every wait has a deadline, and errors name both ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.errors import DeadlineError, TransportError
from sglang_rdt.transport.memory import check_registrable

if TYPE_CHECKING:
    import torch

TRANSPORT = "nixl"

_lock = threading.Lock()
# data_ptr of a registered storage -> (bytes, one tensor that keeps it alive).
_registered: dict[int, tuple[int, torch.Tensor]] = {}


def register(tensors: Iterable[torch.Tensor]) -> int:
    """Registers the whole storage behind each tensor with NIXL, once per process.

    Returns:
        How many storages were new.

    Raises:
        TransportError: the memory cannot be registered (see :mod:`sglang_rdt.transport.memory`).
    """
    from ray.experimental import register_nixl_memory

    new = 0
    with _lock:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in _registered:
                continue
            check_registrable(tensor)
            try:
                register_nixl_memory(tensor)
            except Exception as error:
                raise TransportError(
                    f"NIXL cannot register {storage.nbytes()} bytes on {tensor.device}: {error}"
                ) from error
            _registered[storage.data_ptr()] = (storage.nbytes(), tensor)
            new += 1
    return new


def deregister(tensors: Iterable[torch.Tensor]) -> None:
    """Undoes :func:`register` for the storages behind ``tensors``."""
    from ray.experimental import deregister_nixl_memory

    with _lock:
        for tensor in tensors:
            if _registered.pop(tensor.untyped_storage().data_ptr(), None) is not None:
                deregister_nixl_memory(tensor)


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

    return ray.put(list(views), _tensor_transport=TRANSPORT)


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

    held = list(targets)
    if not held:
        return
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
