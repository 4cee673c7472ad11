"""Short ways to make specs, and the brute-force references that the tests compare with."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Constant,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    RankId,
    Recording,
    TensorSpec,
    TrainerRank,
    Want,
)

NUMPY = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
}


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Contiguous strides, the slow way."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def elements(s: Slice) -> list[int]:
    """Offsets of the slice's elements in row-major order of the slice, by enumeration."""
    return [
        s.offset + sum(i * t for i, t in zip(index, s.stride, strict=True))
        for index in itertools.product(*(range(n) for n in s.shape))
    ]


def rect(shape: Sequence[int], *bounds: tuple[int, int]) -> Slice:
    """The rectangle ``bounds`` (low, high per dimension) of a contiguous tensor of ``shape``."""
    stride = row_major(shape)
    full = [*bounds, *((0, n) for n in shape[len(bounds) :])]
    offset = sum(low * t for (low, _), t in zip(full, stride, strict=True))
    return Slice(offset, tuple(high - low for low, high in full), stride)


def engine_rank(
    tp: int = 0,
    *,
    pp: int = 0,
    dp: int = 0,
    engine: str = "10.0.0.1:30000",
    node: str = "10.0.0.1",
    tp_size: int = 1,
) -> EngineRank:
    """An engine rank; only what planning looks at differs."""
    return EngineRank(
        engine=engine,
        rank=RankId(dp, pp, tp),
        actor_name=f"{engine}-{dp}-{pp}-{tp}",
        namespace="test",
        node_ip=node,
        instance="one",
        dp_size=1,
        pp_size=1,
        tp_size=tp_size,
    )


_storages = itertools.count(1 << 40, 1 << 20)


def param(
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    *,
    stride: Sequence[int] | None = None,
    storage: int | None = None,
    offset: int = 0,
    buffer: bool = False,
) -> ParamSpec:
    """A parameter in a storage of its own unless ``storage`` says otherwise."""
    return ParamSpec(
        name,
        tuple(shape),
        tuple(stride) if stride is not None else row_major(shape),
        dtype,
        next(_storages) if storage is None else storage,
        offset,
        buffer,
    )


def spec(name: str, shape: Sequence[int], dtype: str = "float32") -> TensorSpec:
    """An HF tensor."""
    return TensorSpec(name, tuple(shape), dtype)


def copy(to: ParamSpec, source: TensorSpec) -> Want:
    """The want of a plain ``param.copy_(hf)``."""
    return Want(
        to.name,
        Slice(0, to.shape, to.stride),
        source.name,
        Slice(0, source.shape, row_major(source.shape)),
    )


def layout(
    params: Iterable[ParamSpec],
    wants: Iterable[Want],
    constants: Iterable[Constant] = (),
    *,
    rank: EngineRank | None = None,
    padding: dict[str, int] | None = None,
) -> EngineRankLayout:
    """One engine rank's layout; by default all ``constants`` are padding that the model asks for."""
    constants = tuple(constants)
    if padding is None:
        padding = Counter()
        for constant in constants:
            padding[constant.param] += constant.dst.numel
    recording = Recording(tuple(wants), constants, dict(padding))
    return EngineRankLayout(rank or engine_rank(), tuple(params), recording)


def trainer(rank: int, exports: Iterable[TensorSpec], node: str = "10.0.0.9") -> TrainerRank:
    """A trainer rank."""
    return TrainerRank(rank, node, tuple(exports))
