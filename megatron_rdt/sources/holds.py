"""Which memory of this rank is which part of which HF tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError
from sglang_rdt.plan.slices import Slice, contiguous_stride, whole
from sglang_rdt.plan.specs import Block, Hold
from sglang_rdt.tracing import Tracer


@dataclass(frozen=True)
class Holdings:
    """What a rank holds, as of now.

    Args:
        blocks: the memory that the parameters lie in.
        holds: what is where in it.
        tensors: block number -> uint8 [nbytes], the block itself (no copy).
        addresses: which tensors there were, and where each began. As long as
            ``source.addresses()`` equals this, the blocks are where they were; otherwise ask for
            new holds.
    """

    blocks: tuple[Block, ...]
    holds: tuple[Hold, ...]
    tensors: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]


class HoldingsBuilder:
    """Collects parameter after parameter."""

    def __init__(self) -> None:
        self._names: list[list[str]] = []
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[torch.device, int], int] = {}
        self._holds: list[Hold] = []
        self._addresses: list[int] = []

    def add(
        self,
        name: str,
        own: Mapping[int, torch.Tensor],
        tracer: Tracer,
        converted: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """One parameter of this rank, or those that one conversion takes together.

        Args:
            name: for messages.
            own: which of the tracer's leaves is which live tensor.
            converted: (HF name, meta tensor) that the conversion made under ``tracer``.

        Raises:
            ExportError: a parameter is no plain tensor in memory, or an HF tensor is not made
                of slices of it; names both.
        """
        places: dict[int | str, tuple[int, int, str]] = {}
        for shard, parameter in own.items():
            check_plain(name, parameter)
            self._addresses.append(parameter.data_ptr())
            dtype = dtype_name(parameter.dtype)
            block = self._block(name, parameter)
            places[shard] = (block, int(parameter.storage_offset()), dtype)
        for hf_name, tensor in converted:
            try:
                pieces = tracer.pieces(tensor)
            except ExportError as error:
                raise ExportError(f"{hf_name} is no slice of {name}: {error}") from None
            for piece in pieces:
                if piece.origin in places:
                    block, offset, dtype = places[piece.origin]
                    local = Slice(offset + piece.src.offset, piece.src.shape, piece.src.stride)
                    self._holds.append(Hold(hf_name, piece.dst, block, local, dtype))

    def add_copy(self, name: str, hf_name: str, tensor: torch.Tensor) -> None:
        """An HF tensor that lies in memory of its own, as it is.

        Args:
            name: for messages.
        """
        check_plain(name, tensor)
        self._addresses.append(tensor.data_ptr())
        place = Slice(
            int(tensor.storage_offset()), tuple(tensor.shape), contiguous_stride(tensor.shape)
        )
        block = self._block(name, tensor)
        dtype = dtype_name(tensor.dtype)
        self._holds.append(Hold(hf_name, whole(tuple(tensor.shape)), block, place, dtype))

    def _block(self, name: str, parameter: torch.Tensor) -> int:
        storage = parameter.untyped_storage()
        key = (parameter.device, storage.data_ptr())
        number = self._numbers.setdefault(key, len(self._tensors))
        if number == len(self._tensors):
            self._names.append([])
            self._tensors.append(_bytes_of(storage, parameter.device))
        elif storage.nbytes() > self._tensors[number].numel():
            self._tensors[number] = _bytes_of(storage, parameter.device)
        self._names[number].append(name)
        return number

    def build(self) -> Holdings:
        """Everything added so far."""
        blocks = [
            Block(
                names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
                tensor.numel(),
            )
            for names, tensor in zip(self._names, self._tensors, strict=True)
        ]
        return Holdings(
            tuple(blocks), tuple(self._holds), tuple(self._tensors), tuple(self._addresses)
        )


def check_plain(name: str, parameter: torch.Tensor) -> None:
    """Raises ExportError, by name, unless ``parameter`` is a dense tensor in its own memory."""
    why = _not_plain(parameter)
    if why:
        raise ExportError(f"{name} cannot be read from where it lies: {why}")


def _not_plain(parameter: torch.Tensor) -> str | None:
    kind = type(parameter)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {kind.__module__}.{kind.__qualname__}, not a plain tensor"
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return f"its layout is {parameter.layout}, {parameter.dtype}"
    if parameter.device.type == "meta":
        return "it is on the meta device"
    if not parameter.is_contiguous() or parameter.is_conj() or parameter.is_neg():
        return f"it is not contiguous: shape {list(parameter.shape)}, stride {parameter.stride()}"
    storage = parameter.untyped_storage()
    first = int(parameter.storage_offset()) * parameter.element_size()
    if first + parameter.numel() * parameter.element_size() > storage.nbytes():
        return f"its memory has {storage.nbytes()} bytes only (is it offloaded?)"
    if parameter.data_ptr() != storage.data_ptr() + first and parameter.numel():
        return "it does not lie where its storage says"
    return None


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
