"""The whole sync in numpy: every round staged into a byte bucket and copied out of it again.

What the parameters must hold afterwards is cut out of the HF arrays directly, by other code than
the wants.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from sglang_rdt.errors import PlanError, SlicesError
from sglang_rdt.plan.buckets import ALIGN, Round, pack
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.routing import deal, holder_classes, route
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    Constant,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    Recording,
    TensorSpec,
    TrainerRank,
    Want,
)

from .builders import (
    NUMPY,
    copy,
    elements,
    engine_rank,
    layout,
    param,
    rect,
    row_major,
    spec,
    trainer,
)

Array = np.ndarray[Any, Any]


@dataclass
class Model:
    """HF arrays, and what each engine rank makes of them."""

    hf: dict[str, Array] = field(default_factory=dict)
    ranks: list[EngineRankLayout] = field(default_factory=list)
    expected: list[dict[str, Array]] = field(default_factory=list)

    def specs(self) -> dict[str, TensorSpec]:
        return {n: spec(n, a.shape, a.dtype.name) for n, a in self.hf.items()}


class Builder:
    """Collects one engine rank: a parameter, its wants, and its value, one call each."""

    def __init__(self, hf: dict[str, Array]) -> None:
        self.hf = hf
        self.params: list[ParamSpec] = []
        self.wants: list[Want] = []
        self.constants: list[Constant] = []
        self.expected: dict[str, Array] = {}

    def add(self, name: str, value: Array, *, transposed: bool = False) -> None:
        """A parameter that must become ``value``; ``transposed``: stored column by column."""
        stride = row_major(value.shape[::-1])[::-1] if transposed else row_major(value.shape)
        self.params.append(param(name, value.shape, value.dtype.name, stride=stride))
        self.expected[name] = value

    def want(self, at: tuple[tuple[int, int], ...], source: str, of: tuple) -> None:
        """Rectangle ``at`` of the newest parameter is rectangle ``of`` of an HF tensor."""
        live = self.params[-1]
        offset = sum(low * s for (low, _), s in zip(at, live.stride, strict=True))
        dst = Slice(offset, tuple(b - a for a, b in at), live.stride)
        self.wants.append(Want(live.name, dst, source, rect(self.hf[source].shape, *of)))

    def layout(self, rank: EngineRank) -> EngineRankLayout:
        return layout(self.params, self.wants, self.constants, rank=rank)


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    return n // size * rank, n // size * (rank + 1)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A small transformer on one or two engines with tensor parallelism and fused parameters."""
    tp = draw(st.sampled_from([1, 2, 4]))
    hidden, dim = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = 4 * draw(st.integers(1, 2))
    inter = tp * draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 4 * tp))
    rows = -(-vocab // tp)  # per rank, the last ones padded
    experts = 4
    by_expert = draw(st.booleans())  # expert parallel, or each expert cut by tensor parallelism
    turned = draw(st.booleans())
    wide = draw(st.sampled_from(["float32", "int32", "float64"]))
    narrow = draw(st.sampled_from(["float16", "int8"]))
    cast = draw(st.booleans())

    model = Model()
    counter = itertools.count(1)

    def tensor(name: str, *shape: int, dtype: str = wide) -> Array:
        values = np.array([next(counter) for _ in range(math.prod(shape))])
        limit = {"float16": 2000, "int8": 127}.get(dtype, 1 << 24)
        model.hf[name] = a = (values % limit).astype(NUMPY[dtype]).reshape(shape)
        return a

    embed = tensor("embed", vocab, hidden)
    q = tensor("q", heads * dim, hidden)
    k, v = tensor("k", kv_heads * dim, hidden), tensor("v", kv_heads * dim, hidden)
    q_bias = tensor("q.bias", heads * dim)
    o = tensor("o", hidden, heads * dim)
    gate, up = (
        tensor("gate", inter, hidden, dtype=narrow),
        tensor("up", inter, hidden, dtype=narrow),
    )
    down = tensor("down", hidden, inter, dtype=narrow)
    norm = tensor("norm", hidden, dtype="float16" if cast else wide)
    router = tensor("router", experts, hidden)
    scale = tensor("scale", 1)
    for e in range(experts):
        tensor(f"e{e}.gate", inter, hidden, dtype=narrow)
        tensor(f"e{e}.up", inter, hidden, dtype=narrow)
        tensor(f"e{e}.down", hidden, inter, dtype=narrow)

    for engine, rank in itertools.product(range(draw(st.integers(1, 2))), range(tp)):
        b = Builder(model.hf)
        h = (0, hidden)

        value = np.zeros((rows, hidden), embed.dtype)
        mine = embed[rows * rank : rows * (rank + 1)]
        value[: len(mine)] = mine
        b.add("embed_tokens", value)
        if len(mine):
            b.want(((0, len(mine)), h), "embed", ((rows * rank, rows * rank + len(mine)), h))
        if len(mine) < rows:
            padding = rect((rows, hidden), (len(mine), rows))
            b.constants.append(Constant("embed_tokens", padding, 0.0))

        qa, qb = part(heads * dim, rank, tp)
        # Fewer key-value heads than ranks: they are replicated.
        kv = max(kv_heads // tp, 1) * dim
        ka = (rank * kv_heads // tp) * dim if kv_heads < tp else rank * kv
        b.add(
            "qkv", np.concatenate([q[qa:qb], k[ka : ka + kv], v[ka : ka + kv]]), transposed=turned
        )
        n = qb - qa
        b.want(((0, n), h), "q", ((qa, qb), h))
        b.want(((n, n + kv), h), "k", ((ka, ka + kv), h))
        b.want(((n + kv, n + 2 * kv), h), "v", ((ka, ka + kv), h))
        b.add("q_bias", q_bias[qa:qb])
        b.want(((0, n),), "q.bias", ((qa, qb),))
        b.add("o", o[:, qa:qb], transposed=not turned)
        b.want((h, (0, n)), "o", (h, (qa, qb)))

        ia, ib = part(inter, rank, tp)
        m = ib - ia
        b.add("gate_up", np.concatenate([gate[ia:ib], up[ia:ib]]))
        b.want(((0, m), h), "gate", ((ia, ib), h))
        b.want(((m, 2 * m), h), "up", ((ia, ib), h))
        b.add("down", down[:, ia:ib])
        b.want((h, (0, m)), "down", (h, (ia, ib)))

        b.add("norm", norm.astype(np.float32) if cast else norm)
        b.want((h,), "norm", (h,))
        b.add("router", router.T)
        b.wants.append(
            Want(
                "router",
                rect((hidden, experts)),
                "router",
                Slice(0, (hidden, experts), (1, hidden)),
            )
        )
        b.add("scales", np.repeat(scale, experts))
        b.wants.append(Want("scales", rect((experts,)), "scale", Slice(0, (experts,), (0,))))

        here = range(*part(experts, rank, tp)) if by_expert else range(experts)
        if by_expert:
            ia, ib, m = 0, inter, inter
        w13 = [[model.hf[f"e{e}.gate"][ia:ib], model.hf[f"e{e}.up"][ia:ib]] for e in here]
        b.add("w13", np.array([np.concatenate(two) for two in w13]))
        for i, e in enumerate(here):
            b.want(((i, i + 1), (0, m), h), f"e{e}.gate", ((ia, ib), h))
            b.want(((i, i + 1), (m, 2 * m), h), f"e{e}.up", ((ia, ib), h))
        b.add("w2", np.array([model.hf[f"e{e}.down"][:, ia:ib] for e in here]))
        for i, e in enumerate(here):
            b.want(((i, i + 1), h, (0, m)), f"e{e}.down", (h, (ia, ib)))
        # The dimension of length one goes: loaders copy into param[expert].
        b.wants = [squeezed(w) for w in b.wants]

        name = f"10.0.0.{engine}:30000"
        node = f"10.0.0.{draw(st.integers(0, 2))}"
        model.ranks.append(b.layout(engine_rank(rank, engine=name, node=node, tp_size=tp)))
        model.expected.append(b.expected)
    return model


def squeezed(want: Want) -> Want:
    if len(want.dst.shape) != 3:
        return want
    dst = Slice(want.dst.offset, want.dst.shape[1:], want.dst.stride[1:])
    return Want(want.param, dst, want.source, want.src)


@st.composite
def trainers_of(draw: st.DrawFn, specs: dict[str, TensorSpec]) -> list[TrainerRank]:
    """Ranks on up to three nodes; every tensor is held by one of up to three sets of ranks."""
    count = draw(st.integers(1, 6))
    sets = [
        draw(st.sets(st.integers(0, count - 1), min_size=1)) for _ in range(draw(st.integers(1, 3)))
    ]
    held: list[list[TensorSpec]] = [[] for _ in range(count)]
    for one in specs.values():
        for holder in draw(st.sampled_from(sets)):
            held[holder].append(one)
    return [
        trainer(i, draw(st.permutations(h)), f"10.0.0.{draw(st.integers(0, 2))}")
        for i, h in enumerate(held)
    ]


def view(memory: Array, s: Slice) -> Array:
    assert s.offset >= 0
    assert s.offset + sum((n - 1) * t for n, t in zip(s.shape, s.stride, strict=True)) < memory.size
    item = memory.dtype.itemsize
    return as_strided(memory[s.offset :], s.shape, tuple(t * item for t in s.stride))


def stage(one: Round, hf: dict[str, Array], size: int) -> Array:
    """The bucket of one round, garbage where nothing was staged."""
    bucket = np.full(size, 0xA5, np.uint8)
    for piece in one.pieces:
        values = view(hf[piece.source].reshape(-1), piece.src).astype(NUMPY[piece.dtype])
        raw = np.frombuffer(values.tobytes(), np.uint8)
        assert raw.size == piece.nbytes
        bucket[piece.at : piece.at + raw.size] = raw
    return bucket


def land(one: Round, bucket: Array, memory: dict[str, Array], writes: dict[str, Array]) -> int:
    """Copies every target out of the bucket; bytes landed."""
    landed = 0
    for target in one.targets:
        kind = NUMPY[target.dtype]
        assert memory[target.param].dtype == kind
        raw = bucket[target.at : target.at + target.nbytes]
        view(memory[target.param], target.dst)[...] = (
            raw.copy().view(kind).reshape(target.dst.shape)
        )
        for element in elements(target.dst):
            writes[target.param][element] += 1
        landed += raw.size
    return landed


def check_round(one: Round, bucket_bytes: int) -> None:
    """Inside the bucket, aligned, no byte staged twice, targets and pieces the same bytes."""
    assert 0 < one.nbytes <= bucket_bytes
    staged: Counter[int] = Counter()
    for piece in one.pieces:
        assert piece.at % ITEMSIZE[piece.dtype] == 0
        staged.update(range(piece.at, piece.at + piece.nbytes))
    landing: Counter[int] = Counter()
    for target in one.targets:
        assert target.at % ALIGN == 0
        landing.update(range(target.at, target.at + target.nbytes))
    assert max(staged.values()) == 1
    assert staged == landing
    assert max(staged) + 1 == one.nbytes


def simulate(model: Model, plan: Plan, bucket_bytes: int) -> None:
    extents = [{p.name: p for p in one.params} for one in model.ranks]
    memory = [
        {n: np.full(p.extent, 99, NUMPY[p.dtype]) for n, p in params.items()} for params in extents
    ]
    writes = [{n: np.zeros(p.extent, int) for n, p in params.items()} for params in extents]
    index = {one.rank: i for i, one in enumerate(model.ranks)}
    landed = 0
    for way in plan.routes:
        i = index[way.target]
        assert way.bucket_bytes <= bucket_bytes
        for one in way.rounds:
            check_round(one, bucket_bytes)
            landed += land(one, stage(one, model.hf, way.bucket_bytes), memory[i], writes[i])
    assert landed == plan.nbytes
    for i, one in enumerate(model.ranks):
        for constant in one.recording.constants:
            view(memory[i][constant.param], constant.dst)[...] = constant.value
            for element in elements(constant.dst):
                writes[i][constant.param][element] += 1
        for live in one.params:
            assert (writes[i][live.name] == 1).all(), live.name
            got = view(memory[i][live.name], Slice(0, live.shape, live.stride))
            expected = model.expected[i][live.name]
            assert got.tobytes() == expected.tobytes(), live.name


@given(st.data())
def test_a_simulated_sync_fills_every_parameter(data: st.DataObject) -> None:
    model = data.draw(models())
    trainers = data.draw(trainers_of(model.specs()))
    bucket_bytes = data.draw(st.sampled_from([8, 16, 24, 40, 100, 256, 1000, 1 << 20]))
    plan = make_plan(trainers, model.ranks, bucket_bytes)
    simulate(model, plan, bucket_bytes)

    by_rank = {t.rank: t for t in trainers}
    for way in plan.routes:
        exported = [s.name for s in by_rank[way.source].exports]
        order = [exported.index(p.source) for one in way.rounds for p in one.pieces]
        assert order == sorted(order), "a source would have to keep several rounds open"
    assert set(plan.specs) == set(model.hf)
    assert len({(w.source, w.target) for w in plan.routes}) == len(plan.routes)
    for t in trainers:
        assert plan.routes_of(t.rank) == tuple(w for w in plan.routes if w.source == t.rank)


def test_buckets_are_filled_before_a_new_round_begins() -> None:
    p, s = param("p", (100, 8)), spec("hf", (100, 8))
    rounds = pack([copy(p, s)], ["hf"], {"p": p}, 1 << 10)
    assert [one.nbytes for one in rounds] == [1024, 1024, 1024, 128]
    assert all(len(one.targets) == 1 for one in rounds)


def test_neighbours_become_one_target() -> None:
    p = param("qkv", (12, 3), "float16")
    tensors = [spec(n, (4, 3), "float16") for n in "qkv"]
    wants = [
        Want("qkv", rect((12, 3), (4 * i, 4 * i + 4)), s.name, rect(s.shape))
        for i, s in enumerate(tensors)
    ]
    (one,) = pack(wants, ["q", "k", "v"], {"qkv": p}, 1 << 10)
    (target,) = one.targets
    assert (target.at, target.dst) == (0, Slice(0, (36,), (1,)))
    assert [piece.at for piece in one.pieces] == [0, 24, 48]
    # Not side by side in the order in which they come: aligned and separate.
    (one,) = pack(wants, ["v", "q", "k"], {"qkv": p}, 1 << 10)
    assert [(t.at, t.dst.offset) for t in one.targets] == [(0, 24), (32, 0)]


def test_what_follows_a_slice_with_gaps_is_no_neighbour_of_it() -> None:
    # Elements 0 and 3, then element 2, where a contiguous slice of two would have ended.
    p = param("p", (4,))
    gaps, behind, rest = Slice(0, (2,), (3,)), Slice(2, (1,), (1,)), Slice(1, (1,), (1,))
    wants = [Want("p", s, "first", s) for s in (gaps, behind)] + [Want("p", rest, "then", rest)]
    (one,) = pack(wants, ["first", "then"], {"p": p}, 1 << 10)
    assert sorted(e for t in one.targets for e in elements(t.dst)) == [0, 1, 2, 3]
    hf = dict.fromkeys(["first", "then"], np.arange(10, 14, dtype=np.float32))
    memory = {"p": np.zeros(4, np.float32)}
    land(one, stage(one, hf, one.nbytes), memory, {"p": np.zeros(4, int)})
    assert memory["p"].tolist() == [10, 11, 12, 13]


def test_a_bucket_smaller_than_an_element_is_refused() -> None:
    p, s = param("p", (2,), "float64"), spec("hf", (2,), "float64")
    with pytest.raises(SlicesError, match="7 bytes cannot hold one float64"):
        pack([copy(p, s)], ["hf"], {"p": p}, 7)


def test_widening_is_staged_in_the_parameter_dtype() -> None:
    p, s = param("p", (5,), "float32"), spec("hf", (5,), "bfloat16")
    plan = make_plan([trainer(0, [s])], [layout([p], [copy(p, s)])], 1 << 10)
    assert plan.nbytes == 20
    assert plan.casts == ("10.0.0.1:30000 dp0_pp0_tp0: hf is bfloat16, p is float32",)
    with pytest.raises(PlanError, match="ALLOW_CAST"):
        make_plan([trainer(0, [spec("hf", (5,), "float64")])], [layout([p], [copy(p, s)])], 1 << 10)


# Routing.


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[TrainerRank], list[EngineRank], list[set[str]]]:
    names = [f"t{i}" for i in range(draw(st.integers(1, 6)))]
    count = draw(st.integers(1, 8))
    held: list[list[TensorSpec]] = [[] for _ in range(count)]
    for name in names:
        for holder in draw(st.sets(st.integers(0, count - 1), min_size=1)):
            held[holder].append(spec(name, (1,)))
    nodes = st.integers(0, 3).map(lambda n: f"node{n}")
    trainers = [trainer(i, h, draw(nodes)) for i, h in enumerate(held)]
    ranks = [engine_rank(t, node=draw(nodes)) for t in range(draw(st.integers(1, 9)))]
    wanted = [draw(st.sets(st.sampled_from(names))) for _ in ranks]
    return trainers, ranks, wanted


@given(crowds())
def test_every_tensor_comes_from_exactly_one_holder(
    crowd: tuple[list[TrainerRank], list[EngineRank], list[set[str]]],
) -> None:
    trainers, ranks, wanted = crowd
    got: list[Counter[str]] = [Counter() for _ in ranks]
    for (source, target), names in route(trainers, ranks, wanted).items():
        assert names <= {s.name for s in trainers[source].exports}
        got[target].update(names)
    assert got == [Counter(names) for names in wanted]


@given(crowds())
def test_no_source_serves_more_than_its_share_of_a_class(
    crowd: tuple[list[TrainerRank], list[EngineRank], list[set[str]]],
) -> None:
    trainers, ranks, wanted = crowd
    routes = route(trainers, ranks, wanted)
    for holders, names in holder_classes(trainers).items():
        assert all(
            {i for i, t in enumerate(trainers) if n in {s.name for s in t.exports}} == set(holders)
            for n in names
        )
        targets = [t for t, w in enumerate(wanted) if w & set(names)]
        served: dict[int, set[int]] = defaultdict(set)
        for (source, target), moved in routes.items():
            if moved & set(names):
                served[source].add(target)
        assert set(served) <= set(holders)
        if targets:
            # Holders beyond the number of targets have nothing to do.
            assert len(served) <= len(targets)
            share = math.ceil(len(targets) / min(len(holders), len(targets)))
            assert max(map(len, served.values())) <= share
            assert sum(map(len, served.values())) == len(targets)
            # As many neighbours as the share allows are served by neighbours.
            near = sum(trainers[s].node_ip == ranks[t].node_ip for s in served for t in served[s])
            possible = sum(
                min(
                    sum(ranks[t].node_ip == node for t in targets),
                    share * sum(trainers[h].node_ip == node for h in holders),
                )
                for node in {r.node_ip for r in ranks}
            )
            assert near == possible


def test_ranks_beyond_the_number_of_engine_ranks_serve_nobody() -> None:
    s = spec("hf", (4,))
    trainers = [trainer(i, [s]) for i in range(8)]
    p = param("p", (4,))
    layouts = [layout([p], [copy(p, s)], rank=engine_rank(t)) for t in range(3)]
    plan = make_plan(trainers, layouts, 1 << 10)
    assert len({w.source for w in plan.routes}) == 3
    assert [len(plan.routes_of(i)) for i in range(8)].count(0) == 5


def test_classes_share_the_load() -> None:
    # Two classes with common holders: the second class goes to whoever has less to do.
    a, b = spec("a", (1,)), spec("b", (1,))
    trainers = [trainer(0, [a, b]), trainer(1, [a, b]), trainer(2, [b])]
    ranks = [engine_rank(0)]
    routes = route(trainers, ranks, [{"a", "b"}])
    assert len({source for source, _ in routes}) == 2


def test_deal_without_targets() -> None:
    load: Counter[int] = Counter()
    assert deal([0, 1], [], [trainer(0, []), trainer(1, [])], [], load) == {}


def test_a_plan_for_512_trainer_ranks_and_256_engine_ranks_takes_seconds() -> None:
    stages, layers, tp = 8, 6, 8
    names = [[f"l{s}.{i}" for i in range(layers)] for s in range(stages)]
    exports = [[spec(n, (64, 64), "float16") for n in stage_names] for stage_names in names]
    trainers = [trainer(r, exports[r // 64], f"node{r // 8}") for r in range(512)]
    layouts = []
    for engine, rank in itertools.product(range(256 // tp), range(tp)):
        params = [param(n, (8, 64), "float16") for stage_names in names for n in stage_names]
        wants = tuple(
            Want(p.name, rect((8, 64)), p.name, rect((64, 64), (8 * rank, 8 * rank + 8)))
            for p in params
        )
        where = engine_rank(rank, engine=f"e{engine}", node=f"node{engine}", tp_size=tp)
        layouts.append(EngineRankLayout(where, tuple(params), Recording(wants)))
    plan = make_plan(trainers, layouts, 1 << 20)
    assert plan.nbytes == 256 * stages * layers * 8 * 64 * 2
    served = Counter(w.source for w in plan.routes)
    assert set(served.values()) == {256 // 64}
