"""This package's tensor transport: Ray's NIXL transport, made for weights that stay where they are.

A subclass of ``ray.experimental.rdt.nixl_tensor_transport.NixlTensorTransport`` (Ray 2.56 to
2.60), registered by Ray's public ``register_tensor_transport``. The stock one would do, but:

- its agent is not safe to use from two threads, and Ray collects garbage on another one than the
  one that pulls; and its progress thread spins on a core, always, and on the lock that a transfer
  needs. Ours has NIXL's strict synchronisation and a progress thread that sleeps (measured on
  2xH200, 16.4 GB in 1,119 descriptors: 46.1 ms instead of 55, and 45.5 with threads that post);
- it prepares a transfer anew at every ``ray.get`` and releases it afterwards: ours prepares once
  per reference and target, and posts again;
- it waits with 1 ms sleeps, and synchronises the whole device at every put;
- ``ray.get`` without targets allocates and pulls everything. An object of this transport *is*
  memory: without targets one gets meta tensors, and :meth:`WeightTransport.memory` says where the
  bytes lie, so that any part of them can be read (direct mode).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import uuid
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt.nixl_tensor_transport import (
    NixlCommunicatorMetadata,
    NixlFetchRequest,
    NixlTensorTransport,
    NixlTransportMetadata,
)

from sglang_rdt import settings as settings_module
from sglang_rdt.transport import unfinished
from sglang_rdt.transport.transfer import Rows, Transfer
from sglang_rdt.transport.waiting import poll

logger = logging.getLogger("sglang_rdt")

NAME = "SGLANG_RDT"

# Of what size a trial registration must succeed before EFA is preferred: small ones succeed on
# hosts where a model's do not.
_EFA_TRIAL_BYTES = 1 << 30
# Prepared transfers kept per process; each is one bucket round of one source.
_MAX_PREPARED = 4096
_PROGRESS_DELAY_US = 100
# A thread gets at least this many descriptors of a transfer.
_DESCRIPTORS_PER_THREAD = 128


@dataclass(frozen=True)
class RemoteMemory:
    """Memory of another process that an object of this transport stands for.

    ``agent``: NIXL agent of its owner, known to this process's agent. ``addresses``, ``sizes``
    (bytes): one per tensor that was put. ``device``: index of the owner's device; ``kind``:
    ``cuda`` or ``cpu``. ``access``: digest of what NIXL needs to reach it: registrations, keys,
    connections.
    """

    agent: str
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    device: int
    kind: str
    access: bytes = b""


class WeightTransport(NixlTensorTransport):
    """See the module. One per process, made by Ray at first use."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[str, RemoteMemory] = {}
        # Of the connection before: a trainer that connects again mostly offers the same objects.
        self._former: dict[str, RemoteMemory] = {}
        # Agents that were to be forgotten while a transfer from them was under way.
        self._spared: set[str] = set()
        self._doubtful = False  # whether something went wrong: a broken connection breaks others
        # Object -> where its storages were when it was put.
        self._put_at: dict[str, list[int]] = {}
        self._prepared: OrderedDict[tuple[str, tuple[int, ...]], Transfer] = OrderedDict()
        self._prepared_lock = threading.Lock()
        # All transfers of this process, so that none outlives the registration that it needs.
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()

    def tensor_transport_backend(self) -> str:
        """The name under which it is registered."""
        return NAME

    # The agent.

    def _init_nixl_agent(self) -> Any:
        backend = self.select_backend()
        if backend == "LIBFABRIC":
            try:
                agent = self._make_nixl_agent(backend)
                _try_large_registration(agent)
                self._backend = backend
                return agent
            except Exception as error:
                logger.warning(
                    "EFA is there, but registering %d MiB through LIBFABRIC failed, so UCX is used: %s",
                    _EFA_TRIAL_BYTES >> 20,
                    error,
                )
        agent = self._make_nixl_agent("UCX")
        self._backend = "UCX"
        return agent

    def _make_nixl_agent(self, backend: str) -> Any:
        import nixl._api as api

        actor = ray.get_runtime_context().get_actor_id() or f"driver-{uuid.uuid4()}"
        # Ray's own transport has the plain actor id in the same process.
        name = f"{actor}-weights"
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
        # NIXL's Python gives its progress thread no delay, and so a core of each process to spin
        # on: 3.3 s of every 4, against 0.05 with this one. A reader makes progress by itself while
        # it waits; on the other side the thread only answers connections.
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
        agent.agent = api.nixlBind.nixlAgent(name, config)
        agent.create_backend(backend, _backend_options(backend))
        return agent

    # The side that owns the memory.

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> NixlTransportMetadata:
        """Like Ray's, without a device-wide synchronise: whoever puts knows what it waits for."""
        with self._cache_lock:
            devices = {t.device for t in rdt_object}
            if len(devices) != 1:
                raise ValueError(f"tensors of one object must share a device, not {devices}")
            if not all(t.is_contiguous() for t in rdt_object):
                raise ValueError("tensors of an object must be contiguous")
            agent = self.get_nixl_agent()
            self._add_tensor_descs(rdt_object)
            descs = agent.get_serialized_descs(agent.get_xfer_descs(rdt_object))
            meta = NixlTransportMetadata(
                tensor_meta=[(t.shape, t.dtype) for t in rdt_object],
                tensor_device=rdt_object[0].device.type,
                nixl_serialized_descs=descs,
                nixl_agent_meta=self._metadata(rdt_object),
                nixl_agent_name=agent.name,
            )
            self._put_meta(obj_id, meta)
            self._put_at[obj_id] = [t.untyped_storage().data_ptr() for t in rdt_object]
            return meta

    def garbage_collect(
        self,
        obj_id: str,
        tensor_transport_meta: NixlTransportMetadata,
        tensors: list[torch.Tensor],
    ) -> None:
        """Gives back what the put registered, where it did: storages may have moved since."""
        with self._cache_lock:
            self._managed_meta_nixl.pop(obj_id, None)
            for address in self._put_at.pop(obj_id, ()):
                self.give_back(address)

    def give_back(self, address: int) -> None:
        """One user less of the storage that was registered at ``address``."""
        with self._cache_lock:
            known = self._tensor_desc_cache.get(address)
            if known is None:
                return
            known.metadata_count -= 1
            if not known.metadata_count:
                del self._tensor_desc_cache[address]
                self._lose(known.reg_desc)
                self.get_nixl_agent().deregister_memory(known.reg_desc)

    def _lose(self, registration: Any) -> None:
        """No transfer that was prepared for this memory may be posted again."""
        with self._prepared_lock:
            transfers = list(self._transfers)
        for i in range(registration.descCount()):
            address, nbytes = (int(v) for v in registration[i][:2])
            for transfer in transfers:
                if not transfer.lost and transfer.reads_into(address, nbytes):
                    transfer.lose_memory()

    def _metadata(self, tensors: list[torch.Tensor]) -> bytes:
        """How to reach this agent and these tensors' storages, and nothing else.

        The whole agent's metadata changes with every registration, and a reader that loads another
        version of it must drop the agent first, and with it every transfer that it has prepared.
        """
        storages = {t.untyped_storage().data_ptr(): t for t in tensors}
        rows = [
            (address, t.untyped_storage().nbytes(), max(t.get_device(), 0), "")
            for address, t in storages.items()
        ]
        agent = self.get_nixl_agent()
        descs = agent.get_reg_descs(rows, mem_type="cuda" if tensors[0].is_cuda else "cpu")
        return agent.get_partial_agent_metadata(  # type: ignore[no-any-return]
            descs, inc_conn_info=True, backends=[self._backend]
        )

    # The side that reads.

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: NixlTransportMetadata,
        communicator_metadata: NixlCommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> NixlFetchRequest:
        """With targets: posts the transfer that was prepared for them. Without: meta tensors."""
        meta = tensor_transport_metadata
        memory = self._know(obj_id, meta)
        if target_buffers is None:
            shells = [torch.empty(s, dtype=d, device="meta") for s, d in meta.tensor_meta]
            return NixlFetchRequest(obj_id=obj_id, tensors=shells)
        handle, key = self._prepare(obj_id, memory, target_buffers)
        # `transport` stays None: the handle is kept, so nothing is cleaned up with the request.
        request = NixlFetchRequest(
            obj_id=obj_id, tensors=target_buffers, xfer_handle=handle, remote_name=memory.agent
        )
        try:
            if handle.under_way():
                raise RuntimeError("the one before, which was given up, is still under way")
            handle.post()
        except Exception as error:
            self._drop(key)
            raise RayDirectTransportError(f"NIXL transfer from {memory.agent}: {error}") from None
        return request

    def wait_fetch_complete(
        self, fetch_request: NixlFetchRequest, timeout: float = -1
    ) -> list[torch.Tensor]:
        """Busy-waits; see :mod:`sglang_rdt.transport.waiting`."""
        handle = fetch_request.xfer_handle
        if handle is None:
            return fetch_request.tensors
        failure: Exception | None = None
        try:
            done = poll(handle.state, timeout if timeout >= 0 else float("inf"))
            if not done:
                failure = TimeoutError(f"NIXL transfer not complete after {timeout} s")
        except Exception as error:
            failure = RayDirectTransportError(
                f"NIXL transfer from {fetch_request.remote_name}: {error}"
            )
        if failure is not None:
            self._drop(_key(fetch_request))
            raise failure
        return fetch_request.tensors

    def memory(self, obj_id: str) -> RemoteMemory:
        """Where the bytes of an object lie that this process has got (``ray.get``)."""
        return self._memory[obj_id]

    def forget(self, *, closed: bool = False) -> None:
        """Releases every prepared transfer, and lets go of other processes' objects.

        Due before objects of a new connection come. An object that comes again is the memory that
        it was, and is known at once; an agent whose objects are others is taken anew, since memory
        that its owner gave up, and registered again, must not meet what was known of it.

        Args:
            closed: nothing of this will come again. (UCX, by way of NIXL 1.5.1, closes no
                connection over TCP whose other end it made by itself: each time that an agent is
                taken anew costs a socket on both sides until one of the processes ends.)
        """
        with self._prepared_lock:
            handles = list(self._prepared.values())
            self._prepared.clear()
        for handle in handles:
            _release(handle)
        if not (self._memory or closed or self._doubtful or self._spared):
            return
        known = {memory.agent for memory in (*self._memory.values(), *self._former.values())}
        again = not (closed or self._doubtful)
        staying = {m.agent for m in self._memory.values()} if again else set()
        gone, late = (known - staying) | self._spared, unfinished.remotes()
        for name in gone - late:
            self._remove(name)
        self._spared = gone & late
        self._former = {k: m for k, m in self._memory.items() if m.agent in staying}
        self._memory, self._doubtful = {}, False

    def _remove(self, name: str) -> None:
        # One that is gone already is what was wanted.
        with contextlib.suppress(Exception):
            self.get_nixl_agent().remove_remote_agent(name)

    def prepare(self, remote: str, local: Rows, source: Rows, kinds: tuple[str, str]) -> Transfer:
        """A transfer that ends with the registration of its local memory; see :class:`Transfer`."""
        transfer = Transfer(self.get_nixl_agent(), remote, local, source, kinds)
        with self._prepared_lock:
            self._transfers.add(transfer)
        return transfer

    def _know(self, obj_id: str, meta: NixlTransportMetadata) -> RemoteMemory:
        known = self._memory.get(obj_id) or self._former.pop(obj_id, None)
        if known is not None:
            self._memory[obj_id] = known
            return known
        agent, name = self.get_nixl_agent(), meta.nixl_agent_name
        descs = agent.deserialize_descs(meta.nixl_serialized_descs)
        rows = [descs[i] for i in range(descs.descCount())]
        if len(rows) != len(meta.tensor_meta):
            raise RayDirectTransportError(
                f"NIXL merged {len(meta.tensor_meta)} tensors into {len(rows)} descriptors"
            )
        memory = RemoteMemory(
            agent=name,
            addresses=tuple(int(r[0]) for r in rows),
            sizes=tuple(int(r[1]) for r in rows),
            device=int(rows[0][2]),
            kind="cuda" if meta.tensor_device == "cuda" else "cpu",
            access=hashlib.sha256(meta.nixl_agent_meta).digest(),
        )
        former = [key for key, m in self._former.items() if m.agent == name]
        same = next((key for key in former if self._former[key] == memory), None)
        if same is not None and name not in self._spared:
            # Put anew, and reached in the same way in every bit.
            del self._former[same]
            self._memory[obj_id] = memory
            return memory
        if former or name in self._spared:
            if not any(m.agent == name for m in self._memory.values()):
                self._remove(name)
            self._spared.discard(name)
        for key in former:
            del self._former[key]
        try:
            agent.add_remote_agent(meta.nixl_agent_meta)
        except Exception:
            self.doubt()
            raise
        self._memory[obj_id] = memory
        return memory

    def _prepare(
        self, obj_id: str, memory: RemoteMemory, targets: list[torch.Tensor]
    ) -> tuple[Any, tuple[str, tuple[int, ...]]]:
        key = (obj_id, _addresses(targets))
        with self._prepared_lock:
            handle = self._prepared.get(key)
            # Other memory may have come to lie at the same address since.
            if handle is not None and not handle.lost:
                self._prepared.move_to_end(key)
                return handle, key
        with self._cache_lock:
            if not all(self._tensor_memory_registered(t) for t in targets):
                raise RayDirectTransportError("a target's memory is not registered")
        kind = "cuda" if targets[0].is_cuda else "cpu"
        local = [
            (t.data_ptr(), t.numel() * t.element_size(), max(t.get_device(), 0)) for t in targets
        ]
        remote = [
            (a, n, memory.device) for a, n in zip(memory.addresses, memory.sizes, strict=True)
        ]
        handle = self.prepare(memory.agent, local, remote, (kind, memory.kind))
        with self._prepared_lock:
            self._prepared[key] = handle
            old = (
                self._prepared.popitem(last=False)[1]
                if len(self._prepared) > _MAX_PREPARED
                else None
            )
        if old is not None:
            _release(old)
        return handle, key

    def _drop(self, key: tuple[str, tuple[int, ...]]) -> None:
        with self._prepared_lock:
            handle = self._prepared.pop(key, None)
        if handle is not None:
            self.doubt()
            _release(handle)

    def doubt(self) -> None:
        """Something went wrong: nothing of this connection is taken over into the next."""
        self._doubtful = True


def _release(transfer: Transfer) -> None:
    unfinished.release(f"NIXL agent {transfer.remote}", transfer)


def _key(request: NixlFetchRequest) -> tuple[str, tuple[int, ...]]:
    return request.obj_id, _addresses(request.tensors)


def _addresses(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


def _backend_options(backend: str) -> dict[str, str]:
    threads = settings_module.load().nixl_threads
    # Without a GPU the threads copy themselves, and take the cores from whoever computes.
    if not threads or not torch.cuda.is_available():
        return {}
    options = {"num_threads": str(min(threads, os.cpu_count() or 1))}
    if backend == "UCX":
        options["split_batch_size"] = str(_DESCRIPTORS_PER_THREAD)
    return options


def _try_large_registration(agent: Any) -> None:
    """Registers and gives back as much GPU memory as a model's layer takes."""
    if not torch.cuda.is_available():
        return
    trial = torch.empty(_EFA_TRIAL_BYTES, dtype=torch.uint8, device="cuda")
    row = (trial.data_ptr(), trial.numel(), trial.get_device(), "")
    agent.deregister_memory(agent.register_memory([row], mem_type="cuda"))


_lock = threading.Lock()


def transport() -> WeightTransport:
    """The transport of this process; registers it with Ray at the first call."""
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.util import get_tensor_transport_manager, transport_manager_info

    with _lock:
        if NAME not in transport_manager_info:
            register_tensor_transport(NAME, ["cuda", "cpu"], WeightTransport, torch.Tensor)
    manager = get_tensor_transport_manager(NAME)
    assert isinstance(manager, WeightTransport)
    return manager
