"""Weights that both sides can compute for themselves.

The bits of element ``i`` of HF tensor ``name`` under ``key`` are ``hash(name, i) ^ spread(key)``.
The trainer fills its shards with them through its own notion of Megatron's layout; an engine rank
computes what each of its parameters must hold through its own notion of SGLang's. Neither asks a
bridge, a loader or the other side, so nothing has to travel for a comparison, whatever the size.

Any two of 255 keys in a row differ in every byte of every element: a byte that a sync did not
bring cannot pass.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_rdt.demo.models import TinyModel

# Elements computed at a time: the scratch memory stays small, and in the cache of a CPU.
_CPU_CHUNK = 1 << 18
_CUDA_CHUNK = 1 << 26
_MULTIPLIERS = (0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32))  # odd, as signed numbers


def spread(key: int) -> int:
    """The key as 16 bits, signed; both bytes differ between any two keys that are not congruent
    modulo 256."""
    both = (key & 0xFF) * 0x0101
    return both - (1 << 16) if both >= 1 << 15 else both


def fill(out: Tensor, name: str, key: int) -> Tensor:
    """Writes the values of HF tensor ``name`` into ``out`` (contiguous, 2-byte elements)."""
    salt = zlib.crc32(name.encode())
    flat = out.view(-1).view(torch.int16)
    chunk = _CUDA_CHUNK if out.is_cuda else _CPU_CHUNK
    index = torch.arange(min(chunk, flat.numel()), dtype=torch.int32, device=out.device)
    for first in range(0, flat.numel(), chunk):
        part = flat[first : first + chunk]
        x = index[: part.numel()] * _MULTIPLIERS[0]
        x += _signed(salt + first * _MULTIPLIERS[0])
        x ^= x >> 16
        x *= _MULTIPLIERS[1]
        x ^= x >> 15
        part.copy_(x)  # the lower 16 bits
    return rekey(out, 0, key)


def rekey(tensor: Tensor, old: int, new: int) -> Tensor:
    """In place, the values under ``new`` where there were those under ``old``."""
    tensor.view(torch.int16).bitwise_xor_(spread(old ^ new))
    return tensor


def _signed(number: int) -> int:
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


class State(Mapping[str, Tensor]):
    """All HF tensors of ``model`` under ``key``, each made when it is asked for.

    Args:
        layer: None, or the layer that this one-layer model's layer 0 is.
    """

    def __init__(
        self, model: TinyModel, key: int, device: torch.device, layer: int | None = None
    ) -> None:
        self._shapes = model.hf_shapes()
        self._key, self._device, self._layer = key, device, layer

    def __getitem__(self, name: str) -> Tensor:
        real = name
        if self._layer is not None:
            real = name.replace("model.layers.0.", f"model.layers.{self._layer}.")
        out = torch.empty(self._shapes[name], dtype=torch.bfloat16, device=self._device)
        return fill(out, real, self._key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def expected(
    model: TinyModel, key: int, tp_size: int, tp_rank: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What each parameter of an engine rank must hold; a layer at a time, so memory stays small."""
    top = dataclasses.replace(model, num_layers=0)
    yield from top.engine_params(State(top, key, device), tp_size, tp_rank).items()
    # A vocabulary of one row: every layer would compute the embedding again.
    one = dataclasses.replace(model, num_layers=1, vocab=1, padded_vocab=None)
    for layer in range(model.num_layers):
        state = State(one, key, device, layer)
        for name, tensor in one.engine_params(state, tp_size, tp_rank).items():
            if name.startswith("model.layers.0."):
                yield name.replace("model.layers.0.", f"model.layers.{layer}.", 1), tensor


def differences(
    model: TinyModel, key: int, tp_size: int, tp_rank: int, live: Mapping[str, Tensor]
) -> tuple[int, list[str]]:
    """Compares an engine rank's parameters with what they must be, byte for byte, where they lie.

    Args:
        live: the engine's parameters by name.

    Returns:
        How many were compared, and a line for each that differs, is missing or was not expected.
    """
    compared, found, left = 0, [], set(live)
    device = next(iter(live.values())).device
    for name, want in expected(model, key, tp_size, tp_rank, device):
        left.discard(name)
        have = live.get(name)
        if have is None:
            if model.tied and name == "lm_head.weight":
                continue
            found.append(f"{name} is not there")
            continue
        compared += 1
        if have.dtype != want.dtype or have.shape != want.shape:
            found.append(
                f"{name} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
            )
            continue
        wrong = _unequal_bytes(have, want)
        if wrong:
            found.append(f"{name}: {wrong} of {want.numel() * 2} bytes differ")
    return compared, found + [f"{name} was not expected" for name in sorted(left)]


def _unequal_bytes(have: Tensor, want: Tensor) -> int:
    a, b = (t.detach().contiguous().view(-1).view(torch.int16) for t in (have, want))
    # Equal is the usual case, and cheap to find out.
    return 0 if torch.equal(a, b) else int((a.view(torch.uint8) != b.view(torch.uint8)).sum())


def fill_trainer(chunks: Any, model: TinyModel, key: int) -> None:
    """Writes the values into this Megatron rank's shards, in place."""
    from sglang_rdt.demo import trainer

    shapes = model.hf_shapes()
    for local in trainer._local_parameters(chunks, model):
        parameter = local.parameter.detach()
        parts = [
            fill(torch.empty(shapes[n], dtype=torch.bfloat16, device=parameter.device), n, key)
            for n in local.kind.hf_names
        ]
        full = trainer._fuse(local.kind, parts, model)
        parameter.copy_(trainer._cut(local.kind, full, local.tp_rank, local.tp_size))
