"""The live parameters of one engine rank as pull targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_rdt import checksum
from sglang_rdt.engine.recorder import describe_tensors, record_load
from sglang_rdt.errors import EngineStateError, SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import ParamSpec, Recording, TensorSpec
from sglang_rdt.transport import nixl


class LiveWeights:
    """Parameters and buffers of ``model``, by name. Event-loop thread only.

    Args:
        model: the served model.
        who: this rank, for messages.
    """

    def __init__(self, model: torch.nn.Module, who: str) -> None:
        self._model = model
        self._who = who
        self.specs: dict[str, ParamSpec] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.recording: Recording | None = None
        self.refresh()

    def refresh(self) -> None:
        """Describes the parameters anew; registrations of memory that they left are given up."""
        old = self._tensors
        specs, self._tensors = describe_tensors(self._model)
        self.specs = {s.name: s for s in specs}
        here = {t.untyped_storage().data_ptr() for t in self._tensors.values()}
        nixl.deregister(t for t in old.values() if t.untyped_storage().data_ptr() not in here)

    def check_addresses(self) -> None:
        """Raises EngineStateError if a tensor that the loader fills moved since it was described.

        Memory that was released and resumed, offloaded, or replaced would otherwise take bytes
        that nobody serves.
        """
        specs, _ = describe_tensors(self._model)
        filled = {w.param for w in self.recording.wants} if self.recording else set()
        now = {s.name: s for s in specs}
        moved = [
            name
            for name, spec in self.specs.items()
            if (not spec.buffer or name in filled) and now.get(name) != spec
        ]
        moved += [s.name for s in specs if not s.buffer and s.name not in self.specs]
        if moved:
            raise EngineStateError(
                f"{self._who}: {len(moved)} parameters moved since the trainer connected "
                f"({', '.join(moved[:5])}); connect again"
            )

    def record(self, specs: Sequence[TensorSpec]) -> Recording:
        """See :func:`sglang_rdt.engine.recorder.record_load`; remembered for checksums."""
        self.refresh()
        self.recording = record_load(self._model, specs)
        return self.recording

    def register(self) -> int:
        """Registers every parameter's storage with NIXL; how many were new."""
        return nixl.register(self._tensors[n] for n in self.specs)

    def view(self, param: str, s: Slice) -> torch.Tensor:
        """The live elements of ``s`` in ``param``.

        Raises:
            SlicesError: no such parameter, or the slice leaves it.
        """
        tensor = self._tensors.get(param)
        if tensor is None:
            raise SlicesError(f"{self._who} has no parameter {param!r}")
        slices.check(s, self.specs[param].extent, f"{self._who}: {param}")
        return torch.as_strided(tensor, s.shape, s.stride, tensor.storage_offset() + s.offset)

    def resolve(self, names_or_slices: Sequence[str | Target]) -> list[torch.Tensor]:
        """Live views for whole parameters (names) and slices of them."""
        views = []
        for item in names_or_slices:
            if isinstance(item, str):
                spec = self.specs.get(item)
                if spec is None:
                    raise SlicesError(f"{self._who} has no parameter {item!r}")
                views.append(self.view(item, Slice(0, spec.shape, spec.stride)))
            else:
                view = self.view(item.param, item.dst)
                if item.dtype != self.specs[item.param].dtype:
                    raise SlicesError(
                        f"{self._who}: {item.param} is {self.specs[item.param].dtype}, not {item.dtype}"
                    )
                views.append(view)
        return views

    def pull(self, ref: Any, names_or_slices: Sequence[str | Target], timeout_s: float) -> int:
        """Pulls into the live parameters; returns bytes.

        Contiguous slices are written by NIXL in place. A strided slice goes through a scratch
        tensor of its own size.
        """
        views = self.resolve(names_or_slices)
        targets = [
            v if v.is_contiguous() else torch.empty_like(v, memory_format=torch.contiguous_format)
            for v in views
        ]
        nixl.pull(ref, targets, timeout_s)
        for view, target in zip(views, targets, strict=True):
            if target.data_ptr() != view.data_ptr():
                view.copy_(target)
        return sum(t.numel() * t.element_size() for t in targets)

    def compare(
        self, ref: Any, names_or_slices: Sequence[str | Target], timeout_s: float
    ) -> list[str]:
        """Pulls into scratch memory and compares with the live bytes; one line per difference."""
        views = self.resolve(names_or_slices)
        # Never equal by accident: scratch that the pull did not reach must not match.
        scratch = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in views]
        for s in scratch:
            _bytes(s).fill_(0xA5)
        nixl.pull(ref, scratch, timeout_s)
        differences = []
        for item, view, expected in zip(names_or_slices, views, scratch, strict=True):
            wrong = int((_bytes(view.contiguous()) != _bytes(expected)).sum())
            if wrong:
                name = (
                    item if isinstance(item, str) else f"{item.param} at element {item.dst.offset}"
                )
                differences.append(
                    f"{self._who}: {name}: {wrong} of {view.numel() * view.element_size()} bytes differ"
                )
        return differences

    def apply_constants(self) -> None:
        """Sets what the loader sets to constants (padding rows)."""
        if self.recording is not None:
            for c in self.recording.constants:
                self.view(c.param, c.dst).fill_(c.value)

    def checksums(self) -> dict[str, int]:
        """Additive checksum of every recorded parameter, over the slices its loader fills."""
        if self.recording is None:
            raise EngineStateError(f"{self._who}: no load was recorded; call record_load first")
        sums: dict[str, int] = {}
        for want in self.recording.wants:
            part = checksum.slice_sum(self.view(want.param, want.dst), want.dst.offset)
            sums[want.param] = (sums.get(want.param, 0) + part) & checksum.MASK
        return sums


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    # reshape: a tensor without dimensions cannot be viewed as another dtype
    return contiguous.reshape(-1).view(torch.uint8)
