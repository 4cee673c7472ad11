"""Both sides' layouts, against numpy arrays that are cut as Megatron-core and SGLang cut them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sglang_rdt.plan.direct import make_direct_plan
from sglang_rdt.plan.specs import TrainerRank
from sglang_rdt.simulate.engine import make_engines
from sglang_rdt.simulate.errors import SimulateError
from sglang_rdt.simulate.layouts import (
    EngineLayout,
    Placement,
    TrainerLayout,
    parse_engine,
    parse_trainer,
)
from sglang_rdt.simulate.run import held_bytes
from sglang_rdt.simulate.shapes import Mla, ModelShape, Unit
from sglang_rdt.simulate.trainer import make_trainers

from . import resharding
from .builders import NUMPY

Array = np.ndarray[Any, Any]

DENSE = ModelShape(
    "dense", 3, 8, 8, 4, 2, 16, 70, qkv_bias=True, qk_norm=True, tied=True, dtype="float16"
)
GROUPED = ModelShape("grouped", 2, 8, 8, 2, 2, 16, 64, dtype="float16")
MOE = ModelShape(
    "moe",
    5,
    8,
    8,
    8,
    2,
    16,
    130,
    experts=8,
    moe_intermediate=4,
    shared_intermediate=8,
    dense_layers=1,
    router_bias=True,
    mla=Mla(6, 4, 2, 1, 3),
    dtype="float16",
)
PLAIN_MOE = ModelShape(
    "plain-moe", 4, 4, 4, 4, 2, 8, 64, experts=4, moe_intermediate=4, dtype="float16"
)


def hf_arrays(shape: ModelShape) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        t.name: rng.integers(-100, 100, t.shape).astype(NUMPY[t.dtype]) for t in shape.tensors()
    }


def part(a: Array, axis: int, rank: int, size: int) -> Array:
    return np.split(a, size, axis)[rank]


def megatron(unit: Unit, shape: ModelShape, hf: dict[str, Array], rank: int, size: int) -> Any:
    """The parameters that Megatron makes of a unit."""
    arrays = [hf[t.name] for t in unit.tensors]
    if unit.kind == "whole":
        return arrays
    if unit.kind == "qkv":
        groups = [a.reshape(shape.kv_heads, -1, *a.shape[1:]) for a in arrays]
        mixed = np.concatenate(groups, 1)
        return [part(mixed, 0, rank, size)]
    if unit.kind == "vocab":
        rows = -(-len(arrays[0]) // (128 * size)) * 128 * size
        full = np.full((rows, *arrays[0].shape[1:]), 99, arrays[0].dtype)
        full[: len(arrays[0])] = arrays[0]
        return [part(full, 0, rank, size)]
    axis = 1 if unit.kind == "row" else 0
    return [np.concatenate([part(a, axis, rank, size) for a in arrays])]


def memory_of(
    shape: ModelShape, layout: TrainerLayout, one: TrainerRank, hf: dict[str, Array]
) -> list[Array]:
    """The bytes of a rank's blocks, made of whole arrays."""
    inner = layout.world // layout.pp
    pp, place = divmod(one.rank, inner)
    tp, etp = place % layout.tp, place % layout.expert_tp
    ep = place // layout.expert_tp % layout.ep
    dense, experts = [], []
    layers = layout.layers_of(shape.layers)[pp]
    if pp == 0:
        dense += megatron(shape.embedding, shape, hf, tp, layout.tp)
    for number in layers:
        for unit in shape.layer(number):
            dense += megatron(unit, shape, hf, tp, layout.tp)
        for kind in (0, 1) if shape.is_moe(number) else ():
            for e in np.split(np.arange(shape.experts), layout.ep)[ep].tolist():
                unit = shape.expert(number, e)[kind]
                experts += megatron(unit, shape, hf, etp, layout.expert_tp)
    if pp == layout.pp - 1:
        if shape.tied and pp > 0:
            dense += megatron(shape.embedding, shape, hf, tp, layout.tp)
        for unit in shape.head:
            dense += megatron(unit, shape, hf, tp, layout.tp)
    memory = []
    for arrays in (dense, experts):
        for dtype in dict.fromkeys(a.dtype for a in reversed(arrays)):
            flat = np.zeros(0, dtype)
            for a in reversed([a for a in arrays if a.dtype == dtype]):
                gap = np.full(-len(flat) % 64, 77, dtype)
                flat = np.concatenate([flat, gap, a.reshape(-1)])
            memory.append(np.frombuffer(flat.tobytes(), np.uint8))
    return memory


def sglang(
    unit: Unit, shape: ModelShape, hf: dict[str, Array], rank: int, size: int, rows: int
) -> Array:
    """The parameter that SGLang makes of a unit."""
    arrays = [hf[t.name] for t in unit.tensors]
    if unit.kind == "whole":
        return np.concatenate(arrays)
    if unit.kind == "row":
        return part(arrays[0], 1, rank, size)
    if unit.kind == "vocab":
        full = np.zeros((rows, *arrays[0].shape[1:]), arrays[0].dtype)
        full[: len(arrays[0])] = arrays[0]
        return part(full, 0, rank, size)
    if unit.kind == "qkv" and size > shape.kv_heads:
        copies = size // shape.kv_heads
        heads = [a.reshape(shape.kv_heads, -1, *a.shape[1:]) for a in arrays[1:]]
        arrays[1:] = [np.repeat(h, copies, 0).reshape(-1, *h.shape[2:]) for h in heads]
    return np.concatenate([part(a, 0, rank, size) for a in arrays])


def engine_params(
    shape: ModelShape, layout: EngineLayout, hf: dict[str, Array], pp: int, tp: int
) -> dict[str, Array]:
    rows = layout.padded_vocab(shape.vocab)
    layers = layout.layers_of(shape.layers)[pp]
    units = [shape.embedding] if pp == 0 or (shape.tied and pp == layout.pp - 1) else []
    for number in layers:
        units += shape.layer(number)
    units += shape.head if pp == layout.pp - 1 else ()
    out = {u.param: sglang(u, shape, hf, tp, layout.tp, rows) for u in units}
    ep, etp = divmod(tp, layout.tp // layout.ep)
    for number in layers:
        for kind in (0, 1) if shape.is_moe(number) else ():
            mine = [
                shape.expert(number, e)[kind]
                for e in np.split(np.arange(shape.experts), layout.ep)[ep].tolist()
            ]
            out[mine[0].param] = np.stack(
                [sglang(u, shape, hf, etp, layout.tp // layout.ep, rows) for u in mine]
            )
    return out


@pytest.mark.parametrize(
    ("shape", "trainer", "engine"),
    [
        (DENSE, "tp=1", "tp=1"),
        (DENSE, "tp=4,pp=2,dp=2", "tp=8,pp=2"),
        (DENSE, "tp=2,pp=3,cp=2", "tp=2,dp=2"),
        (GROUPED, "tp=2", "tp=8"),
        (GROUPED, "tp=2,pp=2", "tp=4,pp=2"),
        (PLAIN_MOE, "tp=2,ep=2,dp=2,pp=2,vpp=2", "tp=4,ep=2"),
        (MOE, "tp=2,ep=4,etp=1,dp=2", "tp=4,ep=4"),
        (MOE, "tp=4,pp=3,ep=2,etp=2,dp=2", "tp=4,ep=2,pp=2"),
        (MOE, "ep=8,dp=8,pp=2", "tp=2"),
        (MOE, "tp=2,ep=2,cp=2,dp=2", "tp=1,dp=2"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_sync_on_paper_moves_every_byte_to_its_place(
    shape: ModelShape, trainer: str, engine: str
) -> None:
    cut, to = parse_trainer(trainer), parse_engine(engine)
    placement = Placement(4, 4)
    trainers = make_trainers(shape, cut, placement)
    layouts = make_engines(shape, to, 2, placement, len(trainers))
    assert len(layouts) == 2 * to.world
    plan = make_direct_plan(trainers, layouts)
    assert plan.nbytes == held_bytes(layouts)[0]
    hf = hf_arrays(shape)
    blocks = {t.rank: memory_of(shape, cut, t, hf) for t in trainers}
    for one in trainers:
        assert [b.nbytes for b in one.blocks] == [b.nbytes for b in blocks[one.rank]]
    moved = resharding.run(plan, layouts, blocks, 1 << 16, 1 << 16)
    for one, got in zip(layouts, moved, strict=True):
        expected = engine_params(shape, to, hf, one.rank.rank.pp, one.rank.rank.tp)
        assert {p.name: p.shape for p in one.params} == {n: a.shape for n, a in expected.items()}
        for name, array in expected.items():
            # Rows that only pad are written by nothing and lie at the end.
            filled = array.nbytes - one.recording.padding.get(name, 0) * array.itemsize
            assert got.memory[name][:filled].tobytes() == array.tobytes()[:filled], name
            assert (got.writes[name][:filled] == 1).all()
            assert not got.writes[name][filled:].any()


def test_ranks_share_what_is_equal() -> None:
    placement = Placement()
    trainers = make_trainers(MOE, parse_trainer("tp=2,ep=2,etp=1,dp=4,pp=2"), placement)
    assert trainers[0].exports is trainers[7].exports
    assert trainers[0].exports is not trainers[8].exports
    assert trainers[0].holds[0] is trainers[4].holds[0]
    layouts = make_engines(MOE, EngineLayout(tp=2), 3, placement, 16)
    assert layouts[0].recording is layouts[2].recording
    assert layouts[0].params is layouts[4].params


def test_megatrons_coordinates() -> None:
    layout = parse_trainer("tp=2,ep=4,etp=1,dp=4,cp=1,pp=2")
    ranks = make_trainers(MOE, layout, Placement(8))
    assert str(ranks[11]) == "trainer rank 11 (tp1 pp1 ep3 etp0 dp1)"
    assert ranks[11].node_ip == "trainer-node1"
    # The layers: 3 and 2.
    assert layout.layers_of(5) == [[0, 1, 2], [3, 4]]
    assert parse_trainer("pp=2", "2,3").layers_of(5) == [[0, 1], [2, 3, 4]]
    assert parse_trainer("pp=2,vpp=2").layers_of(4) == [[0, 2], [1, 3]]


def test_placement() -> None:
    apart, packed = Placement(4, 2), Placement(4, 2, "packed")
    assert [apart.engine_node(n, 6) for n in (0, 1, 2)] == [
        "engine-node0",
        "engine-node0",
        "engine-node1",
    ]
    assert [packed.trainer_node(n) for n in (3, 4)] == ["node0", "node1"]
    assert [packed.engine_node(n, 6) for n in (0, 1, 2)] == ["node1", "node1", "node2"]


def test_the_vocabulary_is_padded_as_sglang_does() -> None:
    assert [EngineLayout(tp=t).padded_vocab(130) for t in (1, 3, 8)] == [192, 192, 192]
    assert EngineLayout(tp=3).padded_vocab(193) == math.lcm(64, 3) * 2


@pytest.mark.parametrize(
    ("shape", "trainer", "stages", "message"),
    [
        (DENSE, "tp=3", None, "tp=3 does not divide 8 attention heads"),
        (DENSE, "tp=8", None, "tp=8 does not divide 4 key-value heads"),
        (DENSE, "ep=2,dp=2", None, "ep=2, but dense has no experts"),
        (DENSE, "pp=4", None, "pp=4 stages for 3 layers"),
        (DENSE, "pp=2,vpp=2", None, r"3 layers are no multiple of pp\*vpp = 4"),
        (DENSE, "tp=2,dp=3,ep=2", None, r"tp\*cp\*dp = 6 is no multiple of ep\*etp = 4"),
        (DENSE, "pp=2", "1,1", "2 layers in all, the model has 3"),
        (DENSE, "pp=2", "1,1,1", "3 stages for pp=2"),
        (DENSE, "pp=2", "0,3", "each needs a layer"),
        (DENSE, "pp=2", "a,3", "expected numbers of layers"),
        (DENSE, "pp=2,vpp=2", "1,2", "not together with vpp"),
        (DENSE, "tp=0", None, "tp must be a number, 1 or more"),
        (DENSE, "tp=1,tp=2", None, "tp is there twice"),
        (DENSE, "zp=2", None, "not 'zp=2'"),
        (MOE, "ep=16,dp=16", None, "ep=16 is more than 8 experts"),
        (MOE, "ep=3,dp=3", None, "ep=3 does not divide 8 experts"),
        (MOE, "tp=8,etp=8", None, "etp=8 does not divide 4 columns of an expert"),
    ],
)
def test_trainer_layouts_that_cannot_be(
    shape: ModelShape, trainer: str, stages: str | None, message: str
) -> None:
    with pytest.raises(SimulateError, match=message) as caught:
        make_trainers(shape, parse_trainer(trainer, stages), Placement())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "engine", "message"),
    [
        (DENSE, "tp=3", "tp=3 does not divide 8 attention heads"),
        (DENSE, "tp=2,ep=2", "has no experts"),
        (DENSE, "pp=4", "pp=4 stages for 3 layers"),
        (MOE, "tp=2,ep=4", "ep=4 does not divide tp=2"),
        (MOE, "tp=8,ep=1", "tp/ep=8 does not divide 4 columns of an expert"),
        (MOE, "tp=16,ep=16", "tp=16 does not divide 8 attention heads"),
        (MOE, "ep=x", "ep must be a number"),
    ],
)
def test_engine_layouts_that_cannot_be(shape: ModelShape, engine: str, message: str) -> None:
    with pytest.raises(SimulateError, match=message) as caught:
        make_engines(shape, parse_engine(engine), 1, Placement(), 1)
    assert "\n" not in str(caught.value)


def test_key_value_heads_that_neither_divide_nor_are_divided() -> None:
    odd = ModelShape("odd", 1, 4, 12, 3, 2, 12, 64)
    with pytest.raises(SimulateError, match="neither divides the other"):
        make_engines(odd, EngineLayout(tp=2), 1, Placement(), 1)
