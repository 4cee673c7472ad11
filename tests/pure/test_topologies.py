"""Random clusters: any parallelism on both sides, several engines of different sizes, any nodes.

Megatron's and SGLang's cuts are those of :mod:`sglang_rdt.simulate`; what every engine rank must
hold in the end, and what every trainer rank's memory holds, is cut out of whole arrays by the other
code of :mod:`tests.pure.test_simulate_layouts`. Who could have given what is counted element by
element.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rdt.errors import PlanError
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, _Pieces, make_direct_plan
from sglang_rdt.plan.planner import make_plan
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import ITEMSIZE, EngineRankLayout, TrainerRank
from sglang_rdt.plan.spread import TOLERANCE
from sglang_rdt.simulate.engine import make_engines
from sglang_rdt.simulate.layouts import EngineLayout, Placement, TrainerLayout
from sglang_rdt.simulate.shapes import Mla, ModelShape
from sglang_rdt.simulate.trainer import make_trainers

from . import resharding
from .test_planner import Model, simulate
from .test_simulate_layouts import engine_params, hf_arrays, memory_of

Array = np.ndarray[Any, Any]

# Descriptors that cost nothing (everything may be cut), as much as they do, and too much.
COSTS = [LinkCosts(descriptor_s=1e-15), LinkCosts(), LinkCosts(descriptor_s=1.0, round_s=1e-6)]


@dataclass
class Cluster:
    """A model, a trainer, and engines of several sizes."""

    shape: ModelShape
    trainer: TrainerLayout
    engines: list[EngineLayout]
    trainers: list[TrainerRank]
    layouts: list[EngineRankLayout] = field(default_factory=list)
    sizes: list[EngineLayout] = field(default_factory=list)  # of each engine rank's engine

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        trainer: TrainerLayout,
        engines: Sequence[EngineLayout],
        node: Any,
    ) -> Cluster:
        """``node``: from a rank's number, trainer ranks first, to its node."""
        out = cls(shape, trainer, list(engines), [])
        out.trainers = [
            replace(t, node_ip=node(t.rank)) for t in make_trainers(shape, trainer, Placement())
        ]
        for number, size in enumerate(engines):
            for one in make_engines(shape, size, 1, Placement(), 0):
                place = len(out.trainers) + len(out.layouts)
                rank = replace(one.rank, engine=f"engine{number}", node_ip=node(place))
                out.layouts.append(replace(one, rank=rank))
                out.sizes.append(size)
        return out

    @cached_property
    def hf(self) -> dict[str, Array]:
        return hf_arrays(self.shape)

    @cached_property
    def memory(self) -> dict[int, list[Array]]:
        """Of each trainer rank; equal ranks share it."""
        known: dict[Any, list[Array]] = {}
        out = {}
        for one in self.trainers:
            where = {k: v for k, v in one.coordinates.items() if k not in ("cp", "dp")}
            key = tuple(where.items())
            if key not in known:
                known[key] = memory_of(self.shape, self.trainer, one, self.hf)
            out[one.rank] = known[key]
        return out

    @cached_property
    def expected(self) -> list[dict[str, Array]]:
        """What each engine rank must hold."""
        known: dict[Any, dict[str, Array]] = {}
        out = []
        for one, size in zip(self.layouts, self.sizes, strict=True):
            key = size, one.rank.rank.pp, one.rank.rank.tp
            if key not in known:
                known[key] = engine_params(self.shape, size, self.hf, *key[1:])
            out.append(known[key])
        return out


def check_bytes(cluster: Cluster, plan: DirectPlan) -> None:
    """A sync in numpy: every byte of every engine rank is the right one, and is written once."""
    moved = resharding.run(plan, cluster.layouts, cluster.memory, 1 << 14, 1 << 14)
    for one, got, expected in zip(cluster.layouts, moved, cluster.expected, strict=True):
        assert {p.name: p.shape for p in one.params} == {n: a.shape for n, a in expected.items()}
        for name, array in expected.items():
            filled = array.nbytes - one.recording.padding.get(name, 0) * array.itemsize
            assert got.memory[name][:filled].tobytes() == array.tobytes()[:filled], name
            assert (got.writes[name][:filled] == 1).all()
            assert not got.writes[name][filled:].any()


# Element by element.


def places(s: Slice, numel: int) -> Array:
    """The numbers of a slice's elements."""
    numbers = np.arange(numel)
    return np.lib.stride_tricks.as_strided(
        numbers[s.offset :], s.shape, tuple(8 * t for t in s.stride)
    )


@dataclass
class Given:
    """Who gives what, counted: bytes by class (the trainer ranks that hold an element), engine rank
    and trainer rank."""

    nbytes: dict[tuple[tuple[int, ...], int, int], int]
    wanted: dict[tuple[tuple[int, ...], int], int]  # by class and engine rank

    @classmethod
    def of(cls, cluster: Cluster, plan: DirectPlan) -> Given:
        held = {
            n: np.zeros((len(cluster.trainers), a.size), np.bool_) for n, a in cluster.hf.items()
        }
        for i, t in enumerate(cluster.trainers):
            for hold in t.holds:
                held[hold.source][i, places(hold.hf, cluster.hf[hold.source].size)] = True
        classes: dict[tuple[int, ...], int] = {}
        class_of = {}
        for name, marks in held.items():
            columns, inverse = np.unique(marks, axis=1, return_inverse=True)
            numbers = [
                classes.setdefault(tuple(np.flatnonzero(c).tolist()), len(classes))
                for c in columns.T
            ]
            class_of[name] = np.array(numbers)[inverse.reshape(-1)]
        names = list(classes)
        out = cls(defaultdict(int), defaultdict(int))
        for target, one in enumerate(cluster.layouts):
            which = {p.name: np.full(p.extent, -1) for p in one.params}
            for want in one.recording.wants:
                dst = places(want.dst, which[want.param].size)
                src = places(want.src, class_of[want.source].size)
                which[want.param][dst] = class_of[want.source][src]
            params = {p.name: p for p in one.params}
            for name, found in which.items():
                for c, count in zip(*np.unique(found[found >= 0], return_counts=True), strict=True):
                    out.wanted[names[c], target] += int(count) * ITEMSIZE[params[name].dtype]
            for t in plan.transfers(target):
                here = which[t.param][places(t.dst, which[t.param].size)]
                for c, count in zip(*np.unique(here, return_counts=True), strict=True):
                    out.nbytes[names[c], target, t.source] += int(count) * ITEMSIZE[t.dtype]
        return out

    def by_source(self, holders: tuple[int, ...]) -> dict[int, int]:
        """Bytes of one class by trainer rank."""
        out = dict.fromkeys(holders, 0)
        for (c, _, source), n in self.nbytes.items():
            if c == holders:
                out[source] += n
        return out


def check_spread(cluster: Cluster, plan: DirectPlan, min_cut: int) -> None:
    """Each source gives what it holds and no more than its share; neighbours come first."""
    found = Given.of(cluster, plan)
    pieces = _Pieces.of(plan._parts.holders, plan._parts.templates)
    row: dict[tuple[int, ...], int] = {}
    for c, holders in enumerate(pieces.classes):
        row[holders] = max(
            (int(one.row_bytes[one.cls == c].max(initial=0)) for one in pieces.each), default=0
        )
    fair, slack = np.zeros(len(cluster.trainers)), np.zeros(len(cluster.trainers))
    load: dict[tuple[int, ...], dict[int, int]] = {}
    total: dict[tuple[int, ...], int] = defaultdict(int)
    for (holders, _), n in found.wanted.items():
        total[holders] += n
    for holders, n in total.items():
        fair[list(holders)] += n / len(holders)
        if len(holders) > 1:
            slack[list(holders)] += max(row[holders], min_cut)
        load[holders] = found.by_source(holders)
        assert set(load[holders]) == set(holders)  # nobody gives what it does not hold
        assert sum(load[holders].values()) == n
    assert np.allclose(fair, plan.fair)
    assert (plan.egress <= (1 + TOLERANCE) * fair + slack + 1e-6).all()
    far: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
    for (holders, target, source), n in found.nbytes.items():
        if cluster.trainers[source].node_ip != cluster.layouts[target].rank.node_ip:
            far[holders, target] += n
    for (holders, target), n in far.items():
        node = cluster.layouts[target].rank.node_ip
        room = (1 + TOLERANCE) * total[holders] / len(holders)
        for h in holders:
            if n and cluster.trainers[h].node_ip == node:
                # It would have been too much for this neighbour.
                assert load[holders][h] + found.wanted[holders, target] > room - 1e-6


def check_idle(cluster: Cluster, plan: DirectPlan) -> None:
    """Ranks with nothing to send appear nowhere."""
    used = {s for t in range(len(plan.targets)) for s in plan.sources_of(t)}
    for one, nbytes in zip(cluster.trainers, plan.egress.tolist(), strict=True):
        assert (one.rank in used) == bool(nbytes)
        share = plan.share(one.rank)
        assert bool(share.targets) == bool(share.transfers_from(one.rank)) == bool(nbytes)
        if not nbytes:
            assert plan.packed_routes(one.rank, 1 << 10) == ()


# Random clusters.


def divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, most + 1) if n % d == 0]


@st.composite
def clusters(draw: st.DrawFn, most: int = 4) -> Cluster:
    """Anything that both sides would take."""
    few = st.integers(1, 2)
    tp = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    mla = draw(st.booleans()) and draw(st.booleans())
    kv = tp * draw(st.sampled_from([1, 1, 2, 3]))
    tps = [t for t in (1, 2, 3, 4, 6, 8) if t <= 2 * most and (mla or kv % t == 0 or t % kv == 0)]
    moe = draw(st.booleans())
    cp, ep = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2, 4])) if moe else 1
    etp = draw(st.sampled_from([None, 1, 2])) if moe else None
    each = ep * (tp if etp is None else etp)
    dp = each // math.gcd(tp * cp, each) * draw(few)
    layers = draw(st.integers(1, 5))
    pp = draw(st.integers(1, min(layers, 3)))
    vpp, stages = 1, ()
    if layers % pp == 0 and draw(st.booleans()):
        vpp = draw(st.sampled_from(divisors(layers // pp, 3)))
    elif draw(st.booleans()):
        cuts = sorted(draw(st.permutations(range(1, layers)))[: pp - 1])
        edges = [0, *cuts, layers]
        stages = tuple(b - a for a, b in itertools.pairwise(edges))
    trainer = TrainerLayout(tp, pp, ep, etp, dp, cp, vpp, stages)
    engines = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from(tps))
        engine_ep = draw(st.sampled_from(divisors(size, 4))) if moe else 1
        engine_pp = draw(st.integers(1, min(layers, 2)))
        engines.append(EngineLayout(size, engine_ep, engine_pp, draw(st.sampled_from([1, 1, 2]))))
    # Sizes that all of them divide.
    every = math.lcm(tp, *(e.tp for e in engines))
    experts = math.lcm(ep, *(e.ep for e in engines))
    cut = math.lcm(trainer.expert_tp, *(e.expert_tp for e in engines))
    shape = ModelShape(
        "random",
        layers,
        draw(st.integers(1, 4)),
        math.lcm(every, kv),
        kv,
        draw(few),
        every * draw(few),
        draw(st.integers(1, 40)),
        experts=experts if moe else 0,
        moe_intermediate=cut * draw(few) if moe else 0,
        shared_intermediate=every if moe and draw(st.booleans()) else 0,
        dense_layers=draw(st.integers(0, 1)) if moe else 0,
        router_bias=moe and draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        mla=Mla(draw(st.sampled_from([None, 2])), 2, 1, 1, 1) if mla else None,
        dtype="float16",
    )
    count = draw(st.integers(1, 4))
    per_node = draw(st.integers(1, 8))
    if draw(st.booleans()):  # in order, or any rank anywhere
        return Cluster.of(shape, trainer, engines, lambda n: f"node{n // per_node}")
    step = draw(st.integers(1, 7))
    return Cluster.of(shape, trainer, engines, lambda n: f"node{n * step // 3 % count}")


@settings(max_examples=100)
@given(clusters(), st.sampled_from(COSTS))
def test_every_byte_comes_from_its_place_and_the_load_is_spread(
    cluster: Cluster, costs: LinkCosts
) -> None:
    plan = make_direct_plan(cluster.trainers, cluster.layouts, costs=costs)
    check_bytes(cluster, plan)
    check_spread(cluster, plan, costs.descriptor_bytes)
    check_idle(cluster, plan)


@settings(max_examples=30)
@given(clusters(most=2), st.sampled_from([64, 1000, 1 << 20]))
def test_so_it_is_in_buckets(cluster: Cluster, bucket_bytes: int) -> None:
    plan = make_plan(cluster.trainers, cluster.layouts, bucket_bytes)
    simulate(Model(cluster.hf, cluster.layouts, cluster.expected), plan, bucket_bytes)
    for one in cluster.trainers:
        assert plan.share(one.rank).routes == plan.routes_of(one.rank)
        assert all(route.nbytes for route in plan.routes_of(one.rank))


def test_every_combination_of_uneven_sizes_is_drawn() -> None:
    """What the issue names, by name: not left to chance."""
    for tp, size in ((4, 2), (2, 4), (1, 3), (3, 1), (2, 6)):
        shape = ModelShape("uneven", 5, 4, 12, 6 if tp == 3 or size in (3, 6) else 4, 2, 24, 50)
        cluster = Cluster.of(
            replace(shape, dtype="float16"),
            TrainerLayout(tp=tp, pp=2, dp=2, stages=(1, 4)),
            [EngineLayout(tp=size), EngineLayout(tp=size, pp=2), EngineLayout(tp=size, dp=2)],
            lambda n: f"node{n // 3}",
        )
        plan = make_direct_plan(cluster.trainers, cluster.layouts, costs=COSTS[0])
        check_bytes(cluster, plan)
        check_spread(cluster, plan, 1)
        check_idle(cluster, plan)


def test_512_trainer_ranks_and_256_engine_ranks_of_four_sizes() -> None:
    shape = ModelShape(
        "many", 8, 16, 16, 8, 4, 32, 256, experts=16, moe_intermediate=8, dtype="float16"
    )
    engines = [EngineLayout(tp=8, ep=8)] * 12
    engines += [EngineLayout(tp=4, ep=2, pp=2)] * 8
    engines += [EngineLayout(tp=4, ep=4, dp=2)] * 6
    engines += [EngineLayout(tp=2, pp=4)] * 6
    cluster = Cluster.of(
        shape,
        TrainerLayout(tp=4, pp=4, ep=8, etp=1, dp=32, stages=(1, 2, 2, 3)),
        engines,
        lambda n: f"node{n // 8}",
    )
    assert (len(cluster.trainers), len(cluster.layouts)) == (512, 256)
    begin = time.process_time()
    plan = make_direct_plan(cluster.trainers, cluster.layouts, costs=COSTS[0])
    shares = [plan.share(t.rank) for t in cluster.trainers]
    buckets = make_plan(cluster.trainers, cluster.layouts, 1 << 20)
    assert time.process_time() - begin < 30  # 3 s on a machine of its own
    check_bytes(cluster, plan)
    check_idle(cluster, plan)
    assert plan.unevenness < 1.1
    assert sum(len(s.transfers_from(s.rank)) for s in shares) == sum(
        len(plan.transfers(t)) for t in range(256)
    )
    served = Counter(r.source for r in buckets.routes)
    # 128 ranks of a stage for the engine ranks that want anything of it.
    assert max(served.values()) <= 2
    assert buckets.nbytes == plan.nbytes


# Engines of which each rank holds a part.


def test_ranks_of_pipeline_stages_are_an_engine_together() -> None:
    shape = ModelShape("stages", 4, 4, 4, 4, 2, 8, 64, dtype="float16")
    cluster = Cluster.of(
        shape, TrainerLayout(), [EngineLayout(tp=2, pp=2, dp=2)] * 2, lambda n: "node"
    )

    def refused(layouts: list[EngineRankLayout]) -> list[str]:
        direct, bucketed = [], []
        for make, problems in (
            (lambda: make_direct_plan(cluster.trainers, layouts), direct),
            (lambda: make_plan(cluster.trainers, layouts, 1 << 20), bucketed),
        ):
            try:
                make()
            except PlanError as error:
                problems += error.problems
        assert direct == bucketed
        return direct

    assert refused(cluster.layouts) == []

    def without(engine: str, name: str, dp: int | None = None) -> list[EngineRankLayout]:
        """An engine that has no such parameter."""
        return [
            replace(
                one,
                params=tuple(p for p in one.params if p.name != name),
                recording=replace(
                    one.recording, wants=tuple(w for w in one.recording.wants if w.param != name)
                ),
            )
            if one.rank.engine == engine and dp in (None, one.rank.rank.dp)
            else one
            for one in cluster.layouts
        ]

    norm = "model.layers.3.input_layernorm.weight"
    assert refused(without("engine1", norm)) == [
        f"engine1 dp0: HF tensor {norm} float16[4] goes nowhere "
        "(and in 1 other engines or replicas with the same layouts)"
    ]
    # A replica is a whole copy: what the other one has is of no use to it.
    (line,) = refused(without("engine0", norm, dp=1))
    assert line == f"engine0 dp1: HF tensor {norm} float16[4] goes nowhere"
    # A stage that is not there at all.
    lines = refused(
        [x for x in cluster.layouts if (x.rank.engine, x.rank.rank.pp) != ("engine1", 0)]
    )
    assert f"engine1 dp0: HF tensor {norm} float16[4] goes nowhere" not in str(lines)
    assert any(line.startswith("engine1 dp0: HF tensor model.embed_tokens") for line in lines)
    assert not any("engine0" in line for line in lines)
    # What a stage has but its loader does not fill is named with its rank.
    broken = [
        replace(
            one,
            recording=replace(
                one.recording, wants=tuple(w for w in one.recording.wants if norm not in w.param)
            ),
        )
        if str(one.rank) == "engine0 dp1_pp1_tp0"
        else one
        for one in cluster.layouts
    ]
    (line,) = refused(broken)
    assert line.startswith("engine0 dp1_pp1_tp0: ")
    assert "is covered by no HF tensor" in line


def test_with_dp_attention_all_ranks_are_one_copy() -> None:
    shape = ModelShape("one", 2, 4, 4, 4, 2, 8, 64, dtype="float16")
    cluster = Cluster.of(shape, TrainerLayout(), [EngineLayout(tp=2)], lambda n: "node")
    # Two ranks, each with an attention group of its own; the MLP is cut over both.
    layouts = [
        replace(
            one,
            rank=replace(
                one.rank, rank=replace(one.rank.rank, dp=number), dp_size=2, dp_attention=True
            ),
        )
        for number, one in enumerate(cluster.layouts)
    ]
    plan = make_direct_plan(cluster.trainers, layouts)
    assert len(plan.targets) == 2
    with pytest.raises(PlanError) as caught:
        make_direct_plan(cluster.trainers, layouts[:1])
    assert all(line.startswith("engine0: ") for line in caught.value.problems)
    assert "of HF tensor model.layers.0.mlp.down_proj.weight" in str(caught.value.problems)
