"""Engine ranks on paper, cut by SGLang's rules.

Fused parameters (``qkv_proj``, ``gate_up_proj``, the experts' ``w13_weight`` and ``w2_weight``, and
MLA's first projections), key-value heads that are on several ranks where there are fewer of them
than ranks, and rows that pad the vocabulary. Shared experts are parameters of their own: fused into
the routed ones, as SGLang can have them, is left out. So is DP attention.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sglang_rdt.plan.slices import Slice, contiguous_stride, whole
from sglang_rdt.plan.specs import (
    Constant,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    RankId,
    Recording,
    Want,
)
from sglang_rdt.simulate.layouts import EngineLayout, Placement
from sglang_rdt.simulate.shapes import Kind, ModelShape, Unit


class Part(NamedTuple):
    """Slice ``hf`` of HF tensor number ``tensor`` of a unit goes to slice ``local`` of the parameter."""

    tensor: int
    hf: Slice
    local: Slice


def make_engines(
    shape: ModelShape, layout: EngineLayout, engines: int, placement: Placement, trainers: int
) -> list[EngineRankLayout]:
    """The ranks of all engines. Those with equal content share it.

    Args:
        engines: how many there are.
        trainers: how many trainer ranks there are (for "packed" placement).

    Raises:
        SimulateError: ``shape`` cannot be cut like that.
    """
    layout.check(shape)
    stages = layout.layers_of(shape.layers)
    contents = {
        (pp, tp): _content(shape, layout, stages[pp], pp, tp)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    }
    out = []
    for number in range(engines):
        for place in range(layout.world):
            dp, rest = divmod(place, layout.pp * layout.tp)
            pp, tp = divmod(rest, layout.tp)
            name = f"engine{number}"
            rank = EngineRank(
                engine=name,
                rank=RankId(dp, pp, tp),
                actor_name=f"{name}_dp{dp}_pp{pp}_tp{tp}",
                namespace="simulated",
                node_ip=placement.engine_node(number * layout.world + place, trainers),
                instance=name,
                dp_size=layout.dp,
                pp_size=layout.pp,
                tp_size=layout.tp,
                ep_size=layout.ep,
            )
            out.append(EngineRankLayout(rank, *contents[pp, tp]))
    return out


class _Collector:
    """Parameters and wants of one rank."""

    def __init__(self) -> None:
        self.params: list[ParamSpec] = []
        self.wants: list[Want] = []
        self.constants: list[Constant] = []
        self.padding: dict[str, int] = {}

    def param(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """A parameter in memory of its own."""
        number = len(self.params)
        self.params.append(ParamSpec(name, shape, contiguous_stride(shape), dtype, number, 0))

    def unit(self, unit: Unit, rank: int, size: int, kv_heads: int, rows: int = 0) -> None:
        """A parameter and where it comes from."""
        shapes = tuple(t.shape for t in unit.tensors)
        parts, shape = cut(unit.kind, shapes, rank, size, kv_heads, rows)
        self.param(unit.param, shape, unit.tensors[0].dtype)
        for index, hf, local in parts:
            self.wants.append(Want(unit.param, local, unit.tensors[index].name, hf))
        filled = sum(p.hf.numel for p in parts)
        missing = whole(shape).numel - filled
        if missing:  # rows at the end
            width = contiguous_stride(shape)[0]
            rest = Slice(filled, (missing // width, *shape[1:]), contiguous_stride(shape))
            self.constants.append(Constant(unit.param, rest, 0.0))
            self.padding[unit.param] = missing


def _content(
    shape: ModelShape, layout: EngineLayout, layers: list[int], pp: int, tp: int
) -> tuple[tuple[ParamSpec, ...], Recording]:
    found = _Collector()
    rows = layout.padded_vocab(shape.vocab)
    last = pp == layout.pp - 1
    # Where it is tied, the last stage's output layer is a copy of the embedding.
    if pp == 0 or (last and shape.tied):
        found.unit(shape.embedding, tp, layout.tp, shape.kv_heads, rows)
    for number in layers:
        for unit in shape.layer(number):
            found.unit(unit, tp, layout.tp, shape.kv_heads)
        if shape.is_moe(number):
            _experts(found, shape, layout, number, tp)
    for unit in shape.head if last else ():
        found.unit(unit, tp, layout.tp, shape.kv_heads, rows)
    recording = Recording(tuple(found.wants), tuple(found.constants), found.padding)
    return tuple(found.params), recording


def _experts(
    found: _Collector, shape: ModelShape, layout: EngineLayout, layer: int, tp: int
) -> None:
    """All local experts of a layer, stacked."""
    ep, etp = divmod(tp, layout.expert_tp)
    each = shape.experts // layout.ep
    for kind in (0, 1):
        for place in range(each):
            unit = shape.expert(layer, ep * each + place)[kind]
            shapes = tuple(t.shape for t in unit.tensors)
            parts, one = cut(unit.kind, shapes, etp, layout.expert_tp)
            if place == 0:
                found.param(unit.param, (each, *one), unit.tensors[0].dtype)
            first = place * whole(one).numel
            for index, hf, local in parts:
                dst = _slice(first + local.offset, local.shape, local.stride)
                found.wants.append(Want(unit.param, dst, unit.tensors[index].name, hf))


@lru_cache(maxsize=1 << 14)
def cut(
    kind: Kind,
    shapes: tuple[tuple[int, ...], ...],
    rank: int,
    size: int,
    kv_heads: int = 0,
    rows: int = 0,
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """What of HF tensors of ``shapes`` the tensor parallel rank ``rank`` of ``size`` has, and the
    shape of its parameter.

    Args:
        kv_heads: of "qkv"; with fewer of them than ranks, several ranks have the same.
        rows: of "vocab", with padding, over all ranks.
    """
    if kind == "row":
        height, width = shapes[0][0], shapes[0][1] // size
        hf = _slice(rank * width, (height, width), (shapes[0][1], 1))
        return (Part(0, hf, whole((height, width))),), (height, width)
    if kind == "vocab":
        step, vocab = rows // size, shapes[0][0]
        bounds = [(min(rank * step, vocab), min((rank + 1) * step, vocab))]
    elif kind == "whole":
        bounds = [(0, s[0]) for s in shapes]
    else:
        bounds = []
        for index, one in enumerate(shapes):
            place, over = rank, size
            if kind == "qkv" and index > 0 and size > kv_heads:
                place, over = rank * kv_heads // size, kv_heads
            bounds.append((place * one[0] // over, (place + 1) * one[0] // over))
    parts, at = [], 0
    for index, (one, (low, high)) in enumerate(zip(shapes, bounds, strict=True)):
        stride = contiguous_stride(one)
        mine = (high - low, *one[1:])
        if high > low:
            hf = _slice(low * stride[0], mine, stride)
            parts.append(Part(index, hf, _slice(at * stride[0], mine, stride)))
        at += high - low
    height = rows // size if kind == "vocab" else at
    return tuple(parts), (height, *shapes[0][1:])


@lru_cache(maxsize=1 << 16)
def _slice(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Slice:
    """Equal slices are one object."""
    return Slice(offset, shape, stride)
