"""One route of a sync: stage HF slices in a bucket, let the engine rank pull, reuse the bucket.

The bucket is allocated and registered once, and one RDT reference per round is put once: the
references stay good for whatever the bucket holds later.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from sglang_rdt import checksum as checksums
from sglang_rdt.coordinator import calls
from sglang_rdt.coordinator.phases import PhaseTimer
from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.errors import DeadlineError, ExportError
from sglang_rdt.plan.buckets import Piece, Round, Target
from sglang_rdt.plan.planner import Route
from sglang_rdt.transport import nixl


class RouteSender:
    """Sends everything that this trainer rank owes to one engine rank.

    Args:
        route: what to send.
        actor: handle of the engine rank's actor.
        device: where to stage (the model's device).
        timeout_s: deadline of one pull.
    """

    def __init__(self, route: Route, actor: Any, device: torch.device, timeout_s: float) -> None:
        self.route = route
        self._actor = actor
        self._timeout_s = timeout_s
        self._bucket = torch.zeros(route.bucket_bytes, dtype=torch.uint8, device=device)
        nixl.register([self._bucket])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._refs = [nixl.put([self._target_view(t) for t in r.targets]) for r in route.rounds]
        self._by_source: list[dict[str, list[Piece]]] = []
        for r in route.rounds:
            pieces: dict[str, list[Piece]] = {}
            for piece in r.pieces:
                pieces.setdefault(piece.source, []).append(piece)
            self._by_source.append(pieces)
        self._pending: Any = None
        self._round = 0
        self._missing: set[tuple[str, int]] = set()
        self.nbytes = 0
        self.differences: list[str] = []
        self.sums: dict[str, int] = {}

    @property
    def engine(self) -> str:
        """Name of the engine served."""
        return self.route.target.engine

    @property
    def sources(self) -> list[str]:
        """What must be offered, in this order."""
        return list(dict.fromkeys(p.source for r in self.route.rounds for p in r.pieces))

    @property
    def staging_bytes(self) -> int:
        """Bytes of registered staging memory."""
        return self._bucket.numel()

    def start(
        self, sync_id: str, mode: Literal["pull", "compare"], *, checksum: bool, timer: PhaseTimer
    ) -> None:
        """Begins a pass over the model: every round again, from the first."""
        self._sync_id, self._mode, self._checksum, self._timer = sync_id, mode, checksum, timer
        self._pending, self._round = None, 0
        self._expect(0)
        if mode == "pull":
            self.nbytes, self.sums = 0, {}
        self.differences = []

    def _expect(self, index: int) -> None:
        rounds = self.route.rounds
        self._missing = (
            {(p.source, p.at) for p in rounds[index].pieces} if index < len(rounds) else set()
        )

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """Stages what the engine rank wants of HF tensor ``name``; a full round is sent off.

        Raises:
            TransportError, DeadlineError, EngineStateError: the pull before this one failed.
        """
        while self._round < len(self.route.rounds):
            pieces = self._by_source[self._round].get(name, ())
            # Identity, not a count: a tensor that comes twice completes nothing.
            wanted = [p for p in pieces if (p.source, p.at) in self._missing]
            if not wanted:
                return
            self._wait()  # the bucket is free again
            with self._timer.phase("stage"):
                for piece in wanted:
                    self._stage(piece, tensor)
                    self._missing.discard((piece.source, piece.at))
            if self._missing:
                return
            self._send()
            # A tensor larger than the bucket goes on in the next round.

    def _stage(self, piece: Piece, tensor: torch.Tensor) -> None:
        src = piece.src
        flat = tensor.detach()
        if not flat.is_contiguous():
            flat = flat.contiguous()
        view = torch.as_strided(flat, src.shape, src.stride, flat.storage_offset() + src.offset)
        self._bucket_view(piece.at, src.shape, piece.dtype).copy_(view)

    def _bucket_view(self, at: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        kind = torch_dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        return self._bucket[at : at + nbytes].view(kind).view(shape)

    def _target_view(self, target: Target) -> torch.Tensor:
        return self._bucket_view(target.at, target.dst.shape, target.dtype)

    def _send(self) -> None:
        current: Round = self.route.rounds[self._round]
        if self._checksum and self._mode == "pull":
            with self._timer.phase("verify"):
                for t in current.targets:
                    part = checksums.slice_sum(self._target_view(t), t.dst.offset, t.dst.stride)
                    total = self.sums.get(t.param, 0) + part
                    self.sums[t.param] = total & checksums.MASK
        with self._timer.phase("put"):
            if self._bucket.is_cuda:
                torch.cuda.current_stream(self._bucket.device).synchronize()
            method = (
                self._actor.pull_weights if self._mode == "pull" else self._actor.compare_weights
            )
            self._pending = method.remote(
                [self._refs[self._round]], list(current.targets), self._sync_id
            )
        self._round += 1
        self._expect(self._round)

    def _wait(self) -> None:
        import ray

        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._timer.phase("pull" if self._mode == "pull" else "verify"):
            try:
                # The engine's own deadline comes first and says more.
                result = ray.get(pending, timeout=self._timeout_s + 5.0)
            except ray.exceptions.GetTimeoutError:
                raise DeadlineError(str(self.route.target), "pull", self._timeout_s) from None
            except Exception as error:
                raise calls.unwrap(error) from None
        if self._mode == "pull":
            self.nbytes += result
        else:
            self.differences += result

    def finish(self) -> None:
        """Waits for the last pull.

        Raises:
            ExportError: the export ended before everything was staged; names what is missing.
        """
        self._wait()
        if self._round < len(self.route.rounds):
            names = sorted({source for source, _ in self._missing})
            raise ExportError(
                f"the export ended without {', '.join(names[:10])}, which {self.route.target} waits for"
            )

    def close(self) -> None:
        """Gives references and staging memory back."""
        self._refs.clear()
        nixl.deregister([self._bucket])
