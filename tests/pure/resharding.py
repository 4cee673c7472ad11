"""Random models cut by Megatron's rules on one side and by SGLang's on the other, and a direct sync
between them in numpy, byte for byte.

Neither side is written down as wants and holds by hand: both cut numpy arrays of element numbers
the way the real code cuts weights, and a slice is read off the numbers afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from sglang_rdt.plan.buckets import ALIGN
from sglang_rdt.plan.direct import DirectPlan, Transfer
from sglang_rdt.plan.runs import direct_runs, unpack_rounds
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    Block,
    Constant,
    EngineRankLayout,
    Hold,
    ParamSpec,
    TensorSpec,
    TrainerRank,
    Want,
)

from .builders import NUMPY, engine_rank, layout, param, row_major

Array = np.ndarray[Any, Any]


@dataclass
class Shape:
    """Sizes of a model; all of them multiples of every parallel size."""

    hidden: int = 4
    dim: int = 2
    groups: int = 4  # key-value heads
    per_group: int = 2  # query heads per key-value head
    inter: int = 8
    vocab: int = 10
    experts: int = 4
    layers: int = 2
    dtype: str = "float32"
    norm_dtype: str = "float32"
    param_dtype: str = "float32"  # of the engine
    turned: bool = False  # the engine stores its row-parallel weights transposed

    def hf(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """HF tensors: shape and dtype."""
        h, q, kv = self.hidden, self.groups * self.per_group * self.dim, self.groups * self.dim
        d = self.dtype
        out = {"embed": ((self.vocab, h), d), "final_norm": ((h,), self.norm_dtype)}
        for i in range(self.layers):
            out |= {
                f"{i}.q": ((q, h), d),
                f"{i}.k": ((kv, h), d),
                f"{i}.v": ((kv, h), d),
                f"{i}.q.bias": ((q,), d),
                f"{i}.k.bias": ((kv,), d),
                f"{i}.v.bias": ((kv,), d),
                f"{i}.o": ((h, q), d),
                f"{i}.norm": ((h,), self.norm_dtype),
                f"{i}.gate": ((self.inter, h), d),
                f"{i}.up": ((self.inter, h), d),
                f"{i}.down": ((h, self.inter), d),
                f"{i}.router": ((self.experts, h), d),
                f"{i}.scale": ((), "float32"),
            }
            for e in range(self.experts):
                out[f"{i}.e{e}.gate"] = ((self.inter, h), d)
                out[f"{i}.e{e}.up"] = ((self.inter, h), d)
                out[f"{i}.e{e}.down"] = ((h, self.inter), d)
        return out

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, s, d) for n, (s, d) in self.hf().items())


def values(shape: Shape, seed: int = 0) -> dict[str, Array]:
    """HF arrays of small random numbers that every dtype here holds exactly."""
    rng = np.random.default_rng(seed)
    return {n: rng.integers(-100, 100, s).astype(NUMPY[d]) for n, (s, d) in shape.hf().items()}


@dataclass(frozen=True)
class Cut:
    """Trainer parallelism. ``etp`` divides the experts' matrices; ranks beyond are replicas."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


def part(a: Array, axis: int, rank: int, size: int) -> Array:
    return np.split(a, size, axis)[rank]


def trainer_params(shape: Shape, cut: Cut, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """One rank's Megatron parameters as numpy arrays, made of ``hf``."""
    per_stage = cut.tp * cut.dp
    stage, inner = divmod(rank, per_stage)
    tp, et, ep = inner % cut.tp, inner % cut.etp, inner // cut.etp % cut.ep
    layers = range(stage, shape.layers, cut.pp)
    out: dict[str, Array] = {}
    if stage == 0:
        rows = -(-shape.vocab // cut.tp)
        padded = np.full((rows * cut.tp, shape.hidden), -1, hf["embed"].dtype)
        padded[: shape.vocab] = hf["embed"]
        out["embed"] = part(padded, 0, tp, cut.tp)
    if stage == cut.pp - 1:
        out["final_norm"] = hf["final_norm"]
    for i in layers:
        for suffix in ("", ".bias"):
            rest = hf[f"{i}.q{suffix}"].shape[1:]
            three = [
                hf[f"{i}.{n}{suffix}"].reshape(shape.groups, -1, *rest) for n in ("q", "k", "v")
            ]
            mixed = np.concatenate(three, 1)
            out[f"{i}.qkv{suffix}"] = part(mixed, 0, tp, cut.tp).reshape(-1, *rest)
        out[f"{i}.o"] = part(hf[f"{i}.o"], 1, tp, cut.tp)
        out[f"{i}.norm"] = hf[f"{i}.norm"]
        gate, up = (part(hf[f"{i}.{n}"], 0, tp, cut.tp) for n in ("gate", "up"))
        out[f"{i}.fc1"] = np.concatenate([gate, up])
        out[f"{i}.fc2"] = part(hf[f"{i}.down"], 1, tp, cut.tp)
        out[f"{i}.router"] = hf[f"{i}.router"]
        out[f"{i}.scale"] = hf[f"{i}.scale"]
        for e in range(ep, shape.experts, cut.ep):
            gate, up = (part(hf[f"{i}.e{e}.{n}"], 0, et, cut.etp) for n in ("gate", "up"))
            out[f"{i}.e{e}.fc1"] = np.concatenate([gate, up])
            out[f"{i}.e{e}.fc2"] = part(hf[f"{i}.e{e}.down"], 1, et, cut.etp)
    return out


def engine_params(
    shape: Shape, tp: int, ep: int, hf: dict[str, Array], rank: int
) -> dict[str, Array]:
    """One rank's SGLang parameters as numpy arrays, made of ``hf``; -1 where the loader pads."""
    out: dict[str, Array] = {}
    rows = -(-shape.vocab // tp)
    padded = np.full((rows * tp, shape.hidden), -1, hf["embed"].dtype)
    padded[: shape.vocab] = hf["embed"]
    out["embed"] = part(padded, 0, rank, tp)
    out["final_norm"] = hf["final_norm"]
    copies = max(tp // shape.groups, 1)  # ranks that share a key-value head
    for i in range(shape.layers):
        for suffix in ("", ".bias"):
            three = [part(hf[f"{i}.q{suffix}"], 0, rank, tp)]
            three += [part(hf[f"{i}.{n}{suffix}"], 0, rank // copies, tp // copies) for n in "kv"]
            out[f"{i}.qkv_proj{suffix}"] = np.concatenate(three)
        turn = np.transpose if shape.turned else np.asarray
        out[f"{i}.o_proj"] = turn(part(hf[f"{i}.o"], 1, rank, tp))
        out[f"{i}.norm"] = hf[f"{i}.norm"]
        out[f"{i}.gate_up"] = np.concatenate(
            [part(hf[f"{i}.{n}"], 0, rank, tp) for n in ("gate", "up")]
        )
        out[f"{i}.down"] = turn(part(hf[f"{i}.down"], 1, rank, tp))
        out[f"{i}.router"] = hf[f"{i}.router"]
        out[f"{i}.scale"] = hf[f"{i}.scale"]
        # Expert parallel, and each expert cut by what is left of tp.
        etp = tp // ep
        mine = np.array_split(np.arange(shape.experts), ep)[rank // etp]
        et = rank % etp
        out[f"{i}.w13"] = np.array(
            [
                np.concatenate([part(hf[f"{i}.e{e}.{n}"], 0, et, etp) for n in ("gate", "up")])
                for e in mine
            ]
        )
        out[f"{i}.w2"] = np.array([part(hf[f"{i}.e{e}.down"], 1, et, etp) for e in mine])
    return out


# Reading slices off element numbers.


def slices_of(numbers: Array, offset: int, stride: Sequence[int]) -> Iterator[tuple[Slice, Slice]]:
    """``(slice of the array, slice of the numbers' tensor)`` for an array of element numbers that
    lies at ``offset`` with ``stride``: the largest rectangles over which the numbers are affine."""
    if numbers.size == 0:
        return
    steps = []
    for axis, n in enumerate(numbers.shape):
        difference = np.diff(numbers, axis=axis)
        if n > 1 and (difference != difference.flat[0]).any():
            line = difference.reshape(-1) if numbers.ndim == 1 else difference
            others = tuple(a for a in range(numbers.ndim) if a != axis)
            odd = (line != line.flat[0]).any(axis=others) if others else line != line[0]
            at = int(np.flatnonzero(odd)[0]) + 1 if odd.any() else 1
            first, second = np.split(numbers, [at], axis)
            yield from slices_of(first, offset, stride)
            yield from slices_of(second, offset + at * stride[axis], stride)
            return
        steps.append(int(difference.flat[0]) if n > 1 else 0)
    if any(t < 0 for t in steps):  # pragma: no cover - no layout here counts backwards
        raise AssertionError(numbers)
    yield (
        Slice(offset, numbers.shape, tuple(stride)),
        Slice(int(numbers.flat[0]), numbers.shape, tuple(steps)),
    )


def numbered(shape: Shape) -> tuple[dict[str, Array], dict[int, str]]:
    """HF arrays whose values are unique numbers; which tensor starts where."""
    out, starts, first = {}, {}, 0
    for name, (size, _) in shape.hf().items():
        count = math.prod(size)
        out[name] = np.arange(first, first + count, dtype=np.int64).reshape(size)
        starts[first] = name
        first += count
    return out, starts


def pairs_of(
    array: Array, offset: int, stride: Sequence[int], starts: dict[int, str]
) -> Iterator[tuple[str | None, Slice, Slice]]:
    """``(HF name or None for padding, slice of the array, slice of the HF tensor)``."""
    bounds = np.array(sorted(starts))
    owner = np.searchsorted(bounds, array, "right")  # 0: padding
    if len(np.unique(owner)) > 1:
        axis = next(a for a in range(array.ndim) if (np.diff(owner, axis=a) != 0).any())
        at = 1
        while (owner.take(at, axis) == owner.take(0, axis)).all():
            at += 1
        one, two = np.split(array, [at], axis)
        yield from pairs_of(one, offset, stride, starts)
        yield from pairs_of(two, offset + at * stride[axis], stride, starts)
        return
    if int(owner.flat[0]) == 0:
        yield None, Slice(offset, array.shape, tuple(stride)), Slice(0, array.shape, ())
        return
    start = int(bounds[owner.flat[0] - 1])
    for here, there in slices_of(array - start, offset, stride):
        yield starts[start], here, there


def trainers(
    shape: Shape,
    cut: Cut,
    *,
    nodes: int = 1,
    one_block: bool = False,
    hold_dtype: str | None = None,
) -> list[TrainerRank]:
    """The trainer ranks of a model, with what they hold.

    ``one_block``: all parameters of a rank in one buffer, in reverse order and with gaps, as
    Megatron's DDP buffers are.
    """
    hf, starts = numbered(shape)
    ranks = []
    for rank in range(cut.world):
        blocks: list[Block] = []
        holds: list[Hold] = []
        at = 16
        params = trainer_params(shape, cut, hf, rank)
        for name, array in reversed(params.items()) if one_block else params.items():
            kind = _dtype_of(shape, name)
            first = at // ITEMSIZE[kind] if one_block else 0
            number = 0 if one_block else len(blocks)
            for source, here, there in pairs_of(array, first, row_major(array.shape), starts):
                if source is not None:
                    holds.append(Hold(source, there, number, here, kind))
            if one_block:
                at += -(-array.size * ITEMSIZE[kind] // 8) * 8 + 8
            else:
                blocks.append(Block(name, array.size * ITEMSIZE[kind]))
        if one_block:
            blocks.append(Block("buffer", at))
        ranks.append(
            TrainerRank(
                rank,
                f"node{rank * nodes // cut.world}",
                shape.specs(),
                {},
                tuple(blocks),
                tuple(holds),
            )
        )
    return ranks


def _dtype_of(shape: Shape, name: str) -> str:
    if name.endswith("scale"):
        return "float32"
    return shape.norm_dtype if name.endswith("norm") else shape.dtype


def memory_of(shape: Shape, cut: Cut, one: TrainerRank, hf: dict[str, Array]) -> list[Array]:
    """The bytes of a rank's blocks."""
    memory = [np.full(b.nbytes, 0x5A, np.uint8) for b in one.blocks]
    # By other code than the holds: the parameters themselves, where the blocks put them.
    params = trainer_params(shape, cut, hf, one.rank)
    at = 16
    if len(one.blocks) == 1 and one.blocks[0].name == "buffer":
        for array in reversed(params.values()):
            raw = np.frombuffer(array.tobytes(), np.uint8)
            first = at // array.itemsize * array.itemsize
            memory[0][first : first + raw.size] = raw
            at += -(-array.nbytes // 8) * 8 + 8
    else:
        for block, array in zip(memory, params.values(), strict=True):
            block[:] = np.frombuffer(array.tobytes(), np.uint8)
    return memory


def engines(
    shape: Shape, tp: int, ep: int, count: int = 1, nodes: Sequence[str] = ("node0",)
) -> list[EngineRankLayout]:
    """The engine ranks of ``count`` engines, with what they want."""
    hf, starts = numbered(shape)
    out = []
    for engine, rank in itertools.product(range(count), range(tp)):
        params: list[ParamSpec] = []
        wants: list[Want] = []
        constants: list[Constant] = []
        for name, array in engine_params(shape, tp, ep, hf, rank).items():
            # Numpy's own strides: of a transposed array those of the untransposed one.
            base = np.ascontiguousarray(array.T).T if _is_turned(shape, name) else array
            stride = (
                row_major(base.T.shape)[::-1] if _is_turned(shape, name) else row_major(base.shape)
            )
            kind = "float32" if "scale" in name else shape.param_dtype
            params.append(param(name, array.shape, kind, stride=stride))
            for source, here, there in pairs_of(array, 0, stride, starts):
                if source is None:
                    constants.append(Constant(name, here, 0.0))
                else:
                    wants.append(Want(name, here, source, there))
        where = engine_rank(
            rank,
            engine=f"engine{engine}",
            node=nodes[(engine * tp + rank) % len(nodes)],
            tp_size=tp,
        )
        out.append(layout(params, wants, constants, rank=where))
    return out


def _is_turned(shape: Shape, name: str) -> bool:
    return shape.turned and name.endswith(("o_proj", "down"))


# Moving bytes.


def typed(memory: Array, s: Slice, dtype: str) -> Array:
    """A view of raw bytes; fails where the slice leaves them."""
    kind = np.dtype(NUMPY[dtype])
    assert s.offset >= 0
    assert not s.numel or (s.last + 1) * kind.itemsize <= memory.nbytes
    flat = memory[: memory.nbytes // kind.itemsize * kind.itemsize].view(kind)
    return as_strided(flat[s.offset :], s.shape, tuple(t * kind.itemsize for t in s.stride))


@dataclass
class Moved:
    """An engine rank's memory during a sync, and how often each of its bytes was written."""

    memory: dict[str, Array]
    writes: dict[str, Array]
    link: dict[int, int] = field(default_factory=dict)  # bytes by source


def run(
    plan: DirectPlan,
    layouts: Sequence[EngineRankLayout],
    blocks: dict[int, list[Array]],
    scratch_bytes: int,
    bucket_bytes: int,
) -> list[Moved]:
    """A whole sync: direct by runs, unpack by rounds, pack by routes."""
    out = []
    for target, one in enumerate(layouts):
        moved = Moved(
            {p.name: np.full(p.extent * ITEMSIZE[p.dtype], 0xA5, np.uint8) for p in one.params},
            {p.name: np.zeros(p.extent * ITEMSIZE[p.dtype], np.int64) for p in one.params},
        )
        out.append(moved)
        transfers = plan.transfers(target)
        for source in plan.sources_of(target):
            mine = [t for t in transfers if t.source == source and t.how == "direct"]
            _direct(mine, blocks[source], moved)
        _unpack([t for t in transfers if t.how == "unpack"], blocks, scratch_bytes, moved)
    index = {str(rank): i for i, rank in enumerate(plan.targets)}
    for source in plan.sources:
        for route in plan.packed_routes(source, bucket_bytes):
            for one_round in route.rounds:
                _pack(one_round, blocks[source], out[index[str(route.target)]], source)
    return out


def _direct(transfers: list[Transfer], blocks: list[Array], moved: Moved) -> None:
    runs = direct_runs(transfers)
    assert (np.diff(runs.nbytes) >= 0).all()
    for k in range(len(runs)):
        name, at, n = runs.names[runs.param[k]], int(runs.param_at[k]), int(runs.nbytes[k])
        of = int(runs.block_at[k])
        data = blocks[runs.block[k]][of : of + n]
        assert data.size == n
        assert at + n <= moved.memory[name].size
        moved.memory[name][at : at + n] = data
        moved.writes[name][at : at + n] += 1
        source = transfers[0].source
        moved.link[source] = moved.link.get(source, 0) + n


def _unpack(
    transfers: list[Transfer], blocks: dict[int, list[Array]], scratch_bytes: int, moved: Moved
) -> None:
    for one in unpack_rounds(transfers, scratch_bytes):
        assert 0 < one.nbytes <= scratch_bytes
        scratch = np.full(one.nbytes, 0xC3, np.uint8)
        filled = np.zeros(one.nbytes, np.int64)
        assert (np.diff(one.source) >= 0).all()
        for source, block, of, at, n in zip(
            one.source, one.block, one.block_at, one.at, one.run_bytes, strict=True
        ):
            scratch[at : at + n] = blocks[int(source)][block][of : of + n]
            filled[at : at + n] += 1
            moved.link[int(source)] = moved.link.get(int(source), 0) + int(n)
        for copy in one.copies:
            assert copy.at % ALIGN == 0
            kind = np.dtype(NUMPY[copy.src_dtype])
            size = copy.dst.numel * kind.itemsize
            assert (filled[copy.at : copy.at + size] == 1).all()
            filled[copy.at : copy.at + size] = -1
            data = scratch[copy.at : copy.at + size].copy().view(kind).reshape(copy.dst.shape)
            typed(moved.memory[copy.param], copy.dst, copy.dtype)[...] = data
            _count(moved, copy.param, copy.dst, copy.dtype)
        assert (filled <= 0).all()


def _pack(one: Any, blocks: list[Array], moved: Moved, source: int) -> None:
    bucket = np.full(one.nbytes, 0xC3, np.uint8)
    for piece in one.pieces:
        block, src_dtype = piece.source.split("/")
        data = typed(blocks[int(block)], piece.src, src_dtype).astype(NUMPY[piece.dtype])
        bucket[piece.at : piece.at + piece.nbytes] = np.frombuffer(data.tobytes(), np.uint8)
    for target in one.targets:
        data = bucket[target.at : target.at + target.nbytes].copy().view(NUMPY[target.dtype])
        typed(moved.memory[target.param], target.dst, target.dtype)[...] = data.reshape(
            target.dst.shape
        )
        _count(moved, target.param, target.dst, target.dtype)
        moved.link[source] = moved.link.get(source, 0) + target.nbytes


def _count(moved: Moved, name: str, dst: Slice, dtype: str) -> None:
    item = ITEMSIZE[dtype]
    every = Slice(dst.offset * item, (*dst.shape, item), (*(t * item for t in dst.stride), 1))
    view = as_strided(
        moved.writes[name][every.offset :], every.shape, tuple(t * 8 for t in every.stride)
    )
    view[...] += 1


def check(
    shape: Shape,
    layouts: Sequence[EngineRankLayout],
    moved: Sequence[Moved],
    tp: int,
    ep: int,
    hf: dict[str, Array],
) -> None:
    """Every byte of every parameter equals the brute force; each was written once."""
    for one, got in zip(layouts, moved, strict=True):
        expected = engine_params(shape, tp, ep, hf, one.rank.rank.tp)
        padding: dict[str, list[Slice]] = {}
        for constant in one.recording.constants:
            padding.setdefault(constant.param, []).append(constant.dst)
        for p in one.params:
            for dst in padding.get(p.name, []):
                typed(got.memory[p.name], dst, p.dtype)[...] = -1
                _count(got, p.name, dst, p.dtype)
            assert (got.writes[p.name] == 1).all(), p.name
            values = typed(got.memory[p.name], Slice(0, p.shape, p.stride), p.dtype)
            want = expected[p.name].astype(NUMPY[p.dtype])
            assert values.tobytes() == np.ascontiguousarray(want).tobytes(), p.name


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Sizes that every parallel size here divides."""
    wide = draw(st.sampled_from(["float32", "int32", "float16"]))
    return Shape(
        hidden=draw(st.sampled_from([1, 3, 4])),
        dim=draw(st.integers(1, 2)),
        groups=draw(st.sampled_from([4, 4, 8])),
        per_group=draw(st.integers(1, 3)),
        inter=4 * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 20)),
        experts=4,
        layers=draw(st.integers(1, 2)),
        dtype=wide,
        norm_dtype=draw(st.sampled_from([wide, "float32"])),
        param_dtype=draw(st.sampled_from([wide, "float32", "float64", "float16"])),
        turned=draw(st.booleans()),
    )


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Trainer parallelism that Megatron would take."""
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    pairs = [(a, b) for a in (1, 2, 4) for b in (1, 2, 4) if tp * dp % (a * b) == 0]
    ep, etp = draw(st.sampled_from(pairs))
    return Cut(tp=tp, pp=draw(st.sampled_from([1, 2])), ep=ep, etp=etp, dp=dp)
