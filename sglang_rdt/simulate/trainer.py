"""Trainer ranks on paper, cut by Megatron-core's rules.

A rank's parameters lie in one buffer per kind and dtype (dense, expert), in reverse order, each
aligned to 64 elements, as Megatron's DDP has them; router biases, which are no parameters, have
memory of their own. Ranks are numbered as Megatron does: tensor, context, data and pipeline
parallel from the inside out, experts the same over tensor, expert and expert-data parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sglang_rdt.plan.slices import Slice, contiguous_stride, whole
from sglang_rdt.plan.specs import ITEMSIZE, Block, Hold, TensorSpec, TrainerRank
from sglang_rdt.simulate.layouts import TRAINER_VOCAB, Placement, TrainerLayout, padded
from sglang_rdt.simulate.shapes import Kind, ModelShape, Unit

_ALIGN = 64


class Part(NamedTuple):
    """Slice ``hf`` of HF tensor number ``tensor`` of a unit is slice ``local`` of the parameter."""

    tensor: int
    hf: Slice
    local: Slice


def make_trainers(
    shape: ModelShape, layout: TrainerLayout, placement: Placement
) -> list[TrainerRank]:
    """All trainer ranks. Equal contents are one object.

    Raises:
        SimulateError: ``shape`` cannot be cut like that.
    """
    layout.check(shape)
    stages = [
        _Stage(shape, layout, layers, first=s == 0, last=s == layout.pp - 1)
        for s, layers in enumerate(layout.layers_of(shape.layers))
    ]
    inner = layout.world // layout.pp
    ranks = []
    for rank in range(layout.world):
        pp, place = divmod(rank, inner)
        tp, etp = place % layout.tp, place % layout.expert_tp
        ep = place // layout.expert_tp % layout.ep
        stage = stages[pp]
        blocks, holds = stage.dense(tp)
        expert_blocks, expert_holds = stage.experts(ep, etp, len(blocks))
        coordinates = {"tp": tp, "pp": pp}
        if shape.experts:
            coordinates |= {"ep": ep, "etp": etp}
        cp, dp = place // layout.tp % layout.cp, place // (layout.tp * layout.cp)
        coordinates |= {"cp": cp, "dp": dp} if layout.cp > 1 else {"dp": dp}
        ranks.append(
            TrainerRank(
                rank,
                placement.trainer_node(rank),
                stage.exports,
                coordinates,
                blocks + expert_blocks,
                holds + expert_holds,
            )
        )
    return ranks


class _Stage:
    """A pipeline stage: what its ranks hold, made once per different content."""

    def __init__(
        self,
        shape: ModelShape,
        layout: TrainerLayout,
        layers: list[int],
        *,
        first: bool,
        last: bool,
    ) -> None:
        self._layout, self._shape = layout, shape
        units: list[Unit] = [shape.embedding] if first else []
        for number in layers:
            units += shape.layer(number)
        # The output layer of a tied model is a second copy of the embedding.
        if last and shape.tied and not first:
            units.append(shape.embedding)
        self._units = units + list(shape.head if last else ())
        # In Megatron's order: gate and up of all experts of a layer, then down of all.
        self._experts = [
            [shape.expert(number, e) for e in range(shape.experts)]
            for number in layers
            if shape.is_moe(number)
        ]
        everything = [*self._units, *(u for each in self._experts for two in each for u in two)]
        self.exports: tuple[TensorSpec, ...] = tuple(
            dict.fromkeys(t for unit in everything for t in unit.tensors)
        )
        self._dense: dict[int, tuple[tuple[Block, ...], tuple[Hold, ...]]] = {}
        self._of_experts: dict[tuple[int, int], tuple[tuple[Block, ...], tuple[Hold, ...]]] = {}

    def dense(self, tp: int) -> tuple[tuple[Block, ...], tuple[Hold, ...]]:
        """Blocks and holds of everything but the experts."""
        if tp not in self._dense:
            self._dense[tp] = self._pack("parameters", self._units, tp, self._layout.tp, 0)
        return self._dense[tp]

    def experts(self, ep: int, etp: int, number: int) -> tuple[tuple[Block, ...], tuple[Hold, ...]]:
        """Block and holds of the local experts; the block has ``number``."""
        if (ep, etp) not in self._of_experts:
            each = self._shape.experts // self._layout.ep
            units = [
                two[kind]
                for layer in self._experts
                for kind in (0, 1)
                for two in layer[ep * each : (ep + 1) * each]
            ]
            self._of_experts[ep, etp] = self._pack(
                "expert parameters", units, etp, self._layout.expert_tp, number
            )
        return self._of_experts[ep, etp]

    def _pack(
        self, what: str, units: Sequence[Unit], rank: int, size: int, number: int
    ) -> tuple[tuple[Block, ...], tuple[Hold, ...]]:
        """Lays the parameters of ``units`` out, one buffer per dtype, the last unit first."""
        ends: dict[str, int] = {}
        numbers: dict[str, int] = {}
        holds: list[Hold] = []
        for unit in reversed(units):
            for tensors, parts, count in reversed(_parameters(unit, self._shape, rank, size)):
                dtype = tensors[0].dtype
                block = numbers.setdefault(dtype, number + len(numbers))
                at = padded(ends.get(dtype, 0), _ALIGN)
                ends[dtype] = at + count
                holds += [
                    Hold(
                        tensors[i].name,
                        hf,
                        block,
                        Slice(at + local.offset, local.shape, local.stride),
                        dtype,
                    )
                    for i, hf, local in parts
                ]
        blocks = tuple(
            Block(f"{what}, {dtype}", end * ITEMSIZE[dtype]) for dtype, end in ends.items()
        )
        return blocks, tuple(holds)


def _parameters(
    unit: Unit, shape: ModelShape, rank: int, size: int
) -> list[tuple[tuple[TensorSpec, ...], tuple[Part, ...], int]]:
    """Megatron's parameters of a unit: HF tensors, where they lie, and how many elements it has.
    What the engine fuses but Megatron does not are several."""
    several = [(t,) for t in unit.tensors] if unit.kind == "whole" else [unit.tensors]
    groups = shape.kv_heads if unit.kind == "qkv" else 0
    return [
        (tensors, *cut(unit.kind, tuple(t.shape for t in tensors), rank, size, groups))
        for tensors in several
    ]


@lru_cache(maxsize=1 << 14)
def cut(
    kind: Kind, shapes: tuple[tuple[int, ...], ...], rank: int, size: int, groups: int = 0
) -> tuple[tuple[Part, ...], int]:
    """What of HF tensors of ``shapes`` the tensor parallel rank ``rank`` of ``size`` has, and the
    number of elements of its parameter.

    Args:
        groups: key-value heads, of "qkv".
    """
    first = shapes[0]
    if kind == "whole":
        return (Part(0, whole(first), whole(first)),), whole(first).numel
    if kind == "row":
        rows, width = first[0], first[1] // size
        hf = Slice(rank * width, (rows, width), (first[1], 1))
        return (Part(0, hf, whole((rows, width))),), rows * width
    if kind == "vocab":
        step = padded(first[0], TRAINER_VOCAB * size) // size
        low, high = min(rank * step, first[0]), min((rank + 1) * step, first[0])
        return ((Part(0, *_rows(first, low, high, 0)),) if low < high else ()), step * first[1]
    if kind == "qkv":
        return _qkv(shapes, rank, size, groups)
    parts, at = [], 0
    for index, one in enumerate(shapes):  # "column", and "gate_up" one below the other
        step = one[0] // size
        parts.append(Part(index, *_rows(one, rank * step, (rank + 1) * step, at)))
        at += parts[-1].hf.numel
    return tuple(parts), at


def _rows(shape: tuple[int, ...], low: int, high: int, at: int) -> tuple[Slice, Slice]:
    mine = (high - low, *shape[1:])
    stride = contiguous_stride(shape)
    return Slice(low * stride[0], mine, stride), Slice(at, mine, stride)


def _qkv(
    shapes: tuple[tuple[int, ...], ...], rank: int, size: int, groups: int
) -> tuple[tuple[Part, ...], int]:
    """Group after group: its query heads, its key head, its value head."""
    mine = groups // size
    lengths = [whole(s).numel // groups for s in shapes]
    step = sum(lengths)
    parts, at = [], 0
    for index, length in enumerate(lengths):
        hf = Slice(rank * mine * length, (mine, length), (length, 1))
        parts.append(Part(index, hf, Slice(at, (mine, length), (step, 1))))
        at += length
    return tuple(parts), mine * step
