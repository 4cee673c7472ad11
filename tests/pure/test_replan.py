"""Plans that follow others: who stays keeps what it had, and nobody carries more than is documented."""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rdt.plan import spread as spreading
from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.distinct import target_key
from sglang_rdt.plan.planner import Plan, make_plan
from sglang_rdt.plan.routing import assign, holder_classes
from sglang_rdt.plan.specs import EngineRankLayout, TrainerRank
from sglang_rdt.plan.spread import Pieces, Share, spread

from . import resharding, scale
from .resharding import Cut, Shape
from .test_planner import Model, crowds, models, simulate, trainers_of
from .test_spread import pieces, rows

# Spreading.


@dataclass
class Town:
    """Trainer ranks, what they hold, and who has moved in so far."""

    classes: list[tuple[int, ...]]
    templates: list[Pieces]
    trainer_nodes: list[str]
    min_cut: int = 1
    # Who is there: template, node, share.
    people: list[tuple[int, str, Share]] = field(default_factory=list)
    most: np.ndarray[Any, Any] = field(init=False)  # of all fair shares so far, by class and rank

    def __post_init__(self) -> None:
        self.most = np.zeros((len(self.classes), len(self.trainer_nodes)))

    def change(self, leave: set[int], join: list[tuple[int, str]]) -> np.ndarray[Any, Any]:
        """Some leave, some join; what those who stayed took, by class and rank."""
        stay = [p for i, p in enumerate(self.people) if i not in leave]
        everybody = [(k, node) for k, node, _ in stay] + join
        template_of = [k for k, _ in everybody]
        kept: list[Share | None] = [s for _, _, s in stay]
        shares = spread(
            self.classes,
            self.templates,
            template_of,
            self.trainer_nodes,
            [node for _, node in everybody],
            self.min_cut,
            kept + [None] * len(join),
        )
        assert all(a is b for a, b in zip(shares, kept, strict=False))
        self.people = [(k, n, s) for (k, n), s in zip(everybody, shares, strict=True)]
        self.most = np.maximum(self.most, self.fair())
        return self.load(stay)

    def load(self, people: list[tuple[int, str, Share]]) -> np.ndarray[Any, Any]:
        """Bytes by class and rank."""
        out = np.zeros((len(self.classes), len(self.trainer_nodes)))
        for k, _, share in people:
            one = self.templates[k]
            for piece, low, high, slot in rows(share):
                c = int(one.cls[piece])
                out[c, self.classes[c][slot]] += (high - low) * int(one.row_bytes[piece])
        return out

    def fair(self) -> np.ndarray[Any, Any]:
        """By class and rank."""
        out = np.zeros((len(self.classes), len(self.trainer_nodes)))
        for c, members in enumerate(self.classes):
            total = sum(
                int(self.templates[k].nbytes[self.templates[k].cls == c].sum())
                for k, _, _ in self.people
            )
            out[c, list(members)] = total / len(members)
        return out

    def slack(self) -> np.ndarray[Any, Any]:
        """What cannot be cut and comes on top, by rank: a row, or what is not worth a source."""
        out = np.zeros(len(self.trainer_nodes))
        for c, members in enumerate(self.classes):
            widest = max(
                (int(n) for one in self.templates for n in one.row_bytes[one.cls == c]), default=0
            )
            if len(members) > 1:
                out[list(members)] += max(widest, self.min_cut)
        return out


@st.composite
def towns(draw: st.DrawFn) -> Town:
    count = draw(st.integers(1, 6))
    sets = st.sets(st.integers(0, count - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    classes = draw(st.lists(sets, min_size=1, max_size=4, unique=True))
    row = st.tuples(st.integers(0, len(classes) - 1), st.integers(1, 200), st.integers(1, 40))
    templates = [pieces(*draw(st.lists(row, max_size=6))) for _ in range(draw(st.integers(1, 3)))]
    nodes = [f"node{draw(st.integers(0, 2))}" for _ in range(count)]
    return Town(classes, templates, nodes, draw(st.sampled_from([1, 1, 50, 1000])))


def draw_change(data: st.DataObject, town: Town) -> tuple[set[int], list[tuple[int, str]]]:
    here = len(town.people)
    leave = data.draw(st.sets(st.integers(0, here - 1))) if here else set()
    one = st.tuples(
        st.integers(0, len(town.templates) - 1), st.integers(0, 2).map(lambda n: f"node{n}")
    )
    return leave, data.draw(st.lists(one, max_size=5))


@given(towns(), st.data())
def test_who_joins_is_spread_around_who_stays(town: Town, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        stayed = town.change(*draw_change(data, town))
        load = town.load(town.people).sum(axis=0)
        bound = np.maximum(stayed, (1 + spreading.TOLERANCE) * town.fair()).sum(axis=0)
        assert (load <= bound + town.slack() + 1e-6).all(), (load, bound, town.slack())
        # And so by and by: the fullest there ever was.
        ever = (1 + spreading.TOLERANCE) * town.most.sum(axis=0)
        assert (load <= ever + town.slack() + 1e-6).all()
        for k, _, share in town.people:
            _complete(town.templates[k], share)


def _complete(one: Pieces, share: Share) -> None:
    """Every row of every piece once, in order."""
    at: dict[int, int] = defaultdict(int)
    for piece, low, high, _ in rows(share):
        assert at[piece] == low < high
        at[piece] = high
    assert [at[p] for p in range(len(one.rows))] == one.rows.tolist()


# Plans.

SHAPE = Shape(hidden=3, inter=4, vocab=7, experts=4, layers=1)
COSTS = [LinkCosts(descriptor_s=1e-15), LinkCosts(), LinkCosts(descriptor_s=1.0, round_s=1e-6)]


@dataclass
class Fleet:
    """Engines that come and go, and the plan that follows."""

    trainers: list[TrainerRank]
    costs: LinkCosts
    engines: dict[str, tuple[int, int, list[EngineRankLayout]]] = field(default_factory=dict)
    plan: DirectPlan | None = None
    started: int = 0

    def start(self, name: str, tp: int, ep: int, node: str) -> None:
        """A new engine, or a restarted one."""
        self.started += 1
        self.engines[name] = (
            tp,
            ep,
            [
                replace(
                    one,
                    rank=replace(one.rank, engine=name, instance=str(self.started), node_ip=node),
                )
                for one in resharding.engines(SHAPE, tp, ep)
            ],
        )

    @property
    def layouts(self) -> list[EngineRankLayout]:
        return [one for _, _, each in self.engines.values() for one in each]

    def replan(self) -> tuple[DirectPlan | None, DirectPlan]:
        before = self.plan
        self.plan = make_direct_plan(self.trainers, self.layouts, costs=self.costs, previous=before)
        return before, self.plan


def kept_by_key(before: DirectPlan, after: DirectPlan) -> list[tuple[int, int]]:
    """Numbers in both plans of the targets that are in both."""
    old = {target_key(rank): i for i, rank in enumerate(before.targets)}
    return [
        (old[target_key(rank)], i)
        for i, rank in enumerate(after.targets)
        if target_key(rank) in old
    ]


def check_bytes(fleet: Fleet, plan: DirectPlan, cut: Cut) -> None:
    """A whole sync in numpy: every byte of every engine rank from its right place, once."""
    hf = resharding.values(SHAPE)
    blocks = {t.rank: resharding.memory_of(SHAPE, cut, t, hf) for t in fleet.trainers}
    moved = resharding.run(plan, fleet.layouts, blocks, 1 << 12, 1 << 12)
    at = 0
    for tp, ep, each in fleet.engines.values():
        resharding.check(SHAPE, each, moved[at : at + len(each)], tp, ep, hf)
        at += len(each)


@settings(max_examples=25)
@given(resharding.cuts(), st.sampled_from(COSTS), st.data())
def test_engines_come_and_go(cut: Cut, costs: LinkCosts, data: st.DataObject) -> None:
    if cut.pp > SHAPE.layers:
        cut = replace(cut, pp=1)
    fleet = Fleet(resharding.trainers(SHAPE, cut, nodes=2, one_block=True), costs)
    sizes = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)])
    nodes = st.sampled_from(["node0", "node1", "node2"])
    for _ in range(data.draw(st.integers(2, 4))):
        for name in data.draw(st.sets(st.sampled_from("abcd"), max_size=3)):
            if name in fleet.engines and data.draw(st.booleans()):
                del fleet.engines[name]
            else:  # also a restart under the same name, in whatever size
                fleet.start(name, *data.draw(sizes), data.draw(nodes))
        before, plan = fleet.replan()
        check_bytes(fleet, plan, cut)
        stayed = kept_by_key(before, plan) if before else []
        assert plan.kept == {after for _, after in stayed}
        for old, new in stayed:
            assert before is not None
            assert before.transfers(old) == plan.transfers(new)
        assert plan.nbytes == plan.egress.sum() == plan.ingress.sum()


def fleet_of(cut: Cut, *names: str) -> Fleet:
    fleet = Fleet(resharding.trainers(SHAPE, cut), LinkCosts())
    for name in names:
        fleet.start(name, 2, 1, "node0")
    fleet.replan()
    return fleet


def same(one: DirectPlan, two: DirectPlan) -> bool:
    return [one.transfers(t) for t in range(len(one.targets))] == [
        two.transfers(t) for t in range(len(two.targets))
    ]


def shifted(one: TrainerRank) -> TrainerRank:
    """The same, a few elements further on in each block."""
    return replace(
        one,
        blocks=tuple(replace(b, nbytes=b.nbytes + 64) for b in one.blocks),
        holds=tuple(
            replace(h, local=replace(h.local, offset=h.local.offset + 4)) for h in one.holds
        ),
    )


def test_nothing_is_kept_where_the_trainer_holds_something_else() -> None:
    fleet = fleet_of(Cut(tp=2, dp=2), "a", "b")
    for trainers in (
        resharding.trainers(SHAPE, Cut(tp=2, dp=4)),
        resharding.trainers(SHAPE, Cut(tp=4)),
        resharding.trainers(SHAPE, Cut(tp=2, dp=2), one_block=True),
        [replace(t, rank=t.rank + 1) for t in fleet.trainers],
        [shifted(t) for t in fleet.trainers],
    ):
        plan = make_direct_plan(trainers, fleet.layouts, previous=fleet.plan)
        assert plan.kept == frozenset()
        assert same(plan, make_direct_plan(trainers, fleet.layouts))


def test_who_wants_something_else_or_has_restarted_is_planned_afresh() -> None:
    fleet = fleet_of(Cut(tp=2, dp=2), "a", "b")
    fleet.start("b", 2, 1, "node0")
    assert fleet.replan()[1].kept == {0, 1}
    # Not restarted, but with other parameters than it had.
    tp, ep, each = fleet.engines["a"]
    turned = resharding.engines(replace(SHAPE, turned=True), 2, 1)
    fleet.engines["a"] = (
        tp,
        ep,
        [replace(new, rank=old.rank) for new, old in zip(turned, each, strict=True)],
    )
    assert fleet.replan()[1].kept == {2, 3}


def test_where_parameters_lie_is_nothing_that_counts() -> None:
    fleet = fleet_of(Cut(tp=2, dp=2), "a")
    again = [
        replace(new, rank=old.rank)
        for new, old in zip(resharding.engines(SHAPE, 2, 1), fleet.layouts, strict=True)
    ]
    assert make_direct_plan(fleet.trainers, again, previous=fleet.plan).kept == {0, 1}


def test_a_plan_that_follows_says_how_uneven_it_has_become() -> None:
    size = scale.Size(layers=2, experts=8, trainers=8, pp=1, tp=1, ep=8, engines=8, engine_tp=1)
    trainers, layouts = scale.trainers(size), scale.engines(size)
    plan = make_direct_plan(trainers, layouts)
    most = int(plan.egress.max())
    assert plan.unevenness < 1.05
    # One after the other leaves; nobody has ever more to send than at first.
    for count in range(7, 0, -1):
        plan = make_direct_plan(trainers, layouts[:count], previous=plan)
        assert plan.egress.max() <= most
    assert plan.unevenness > 1.2
    assert make_direct_plan(trainers, layouts[:1]).unevenness < 1.05
    # The others again, new ones all of them: where there is room.
    back = [replace(x, rank=replace(x.rank, instance="two")) for x in layouts[1:]]
    plan = make_direct_plan(trainers, [*layouts[:1], *back], previous=plan)
    assert plan.kept == {0}
    assert plan.unevenness < 1.05


# What is sent to each trainer rank.


@given(resharding.shapes(), resharding.cuts(), st.sampled_from(COSTS))
def test_a_share_is_what_the_plan_says_of_that_rank(
    shape: Shape, cut: Cut, costs: LinkCosts
) -> None:
    trainers = resharding.trainers(shape, cut, nodes=2)
    layouts = resharding.engines(shape, 2, 2, 2, ["node0", "node1"])
    plan = make_direct_plan(trainers, layouts, costs=costs, allow_cast=True)
    for source in plan.sources:
        share = pickle.loads(pickle.dumps(plan.share(source)))
        reads = [i for i in range(len(plan.targets)) if source in plan.sources_of(i)]
        assert share.targets == tuple(plan.targets[i] for i in reads)
        assert [(reads[i], t) for i, t in share.transfers_from(source)] == plan.transfers_from(
            source
        )
        assert share.packed_routes(source, 100) == plan.packed_routes(source, 100)
        assert all(share.sources_of(i) == (source,) for i in range(len(share.targets)))
        assert (share.engines, share.nbytes) == (plan.engines, plan.nbytes)
        assert (share.staged_bytes, share.sources) == (plan.staged_bytes, (source,))


def test_a_share_of_nothing_and_of_nobody() -> None:
    fleet = fleet_of(Cut(dp=8), "a")
    assert fleet.plan is not None
    idle = [r for r, n in zip(fleet.plan.sources, fleet.plan.egress, strict=True) if not n]
    share = pickle.loads(pickle.dumps(fleet.plan.share(idle[0])))
    assert (share.targets, share.transfers_from(idle[0])) == ((), [])
    assert share.packed_routes(idle[0], 100) == ()
    assert share.engines == ("a",)
    with pytest.raises(KeyError, match="share of trainer rank"):
        share.transfers_from(0)
    with pytest.raises(KeyError, match="no trainer rank 99"):
        fleet.plan.share(99)


def test_shares_are_small() -> None:
    size = scale.Size(layers=4, experts=64, trainers=64, pp=1, ep=64, engines=8)
    plan = make_direct_plan(scale.trainers(size), scale.engines(size))
    whole = len(pickle.dumps(plan))
    assert max(len(pickle.dumps(plan.share(s))) for s in plan.sources) < whole / 8


# Plans in buckets.


@settings(max_examples=25)
@given(st.data())
def test_routes_stay_where_nothing_changed(data: st.DataObject) -> None:
    model = data.draw(models())
    trainers = data.draw(trainers_of(model.specs()))
    bucket_bytes = data.draw(st.sampled_from([16, 100, 1 << 20]))
    # Whole engines, each as often as it has been restarted.
    engines: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(model.ranks):
        engines[one.rank.engine].append(i)
    plan: Plan | None = None
    started = 0
    here: dict[str, tuple[str, str]] = {}  # name -> which of the model's engines, instance
    for _ in range(data.draw(st.integers(2, 4))):
        for name in data.draw(st.sets(st.sampled_from("abcd"), max_size=3)):
            started += 1
            if name in here and data.draw(st.booleans()):
                del here[name]
            else:
                here[name] = data.draw(st.sampled_from(sorted(engines))), str(started)
        now = Model(model.hf)
        for name, (which, instance) in here.items():
            for i in engines[which]:
                one = model.ranks[i]
                rank = replace(one.rank, engine=name, instance=instance)
                now.ranks.append(replace(one, rank=rank))
                now.expected.append(model.expected[i])
        before, plan = plan, make_plan(trainers, now.ranks, bucket_bytes, previous=plan)
        simulate(now, plan, bucket_bytes)
        stayed = {target_key(one.rank) for one in now.ranks}
        stayed &= {target_key(r.target) for r in before.routes} if before else set()
        for key in stayed:
            assert before is not None
            assert [r for r in before.routes if target_key(r.target) == key] == [
                r for r in plan.routes if target_key(r.target) == key
            ]
        check_shares(plan, trainers)


def check_shares(plan: Plan, trainers: list[TrainerRank]) -> None:
    for one in trainers:
        share = pickle.loads(pickle.dumps(plan.share(one.rank)))
        assert share.routes == share.routes_of(one.rank) == plan.routes_of(one.rank)
        assert (share.engines, share.nbytes) == (plan.engines, plan.nbytes)


@given(crowds(), st.data())
def test_no_source_serves_more_than_it_did_or_its_share(crowd: Any, data: st.DataObject) -> None:
    trainers, ranks, wanted = crowd
    classes = holder_classes(trainers)
    kept: dict[int, dict[tuple[int, ...], int]] = {}
    here: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        now = sorted(data.draw(st.sets(st.integers(0, len(ranks) - 1))))
        given_ = {i: kept[t] for i, t in enumerate(now) if t in here and t in kept}
        dealt = assign(classes, trainers, [ranks[t] for t in now], [wanted[t] for t in now], given_)
        served: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for (source, i), mine in dealt.items():
            for holders in mine:
                assert source in holders
                served[holders].append((source, i))
                if i in given_:
                    assert given_[i][holders] == source
        for holders, pairs in served.items():
            assert len({i for _, i in pairs}) == len(pairs)
            share = -(-len(pairs) // min(len(holders), len(pairs)))
            for h in holders:
                before = sum(by.get(holders) == h for by in given_.values())
                assert sum(s == h for s, _ in pairs) <= max(before, share)
        here = now
        kept = {t: {} for t in now}
        for (source, i), mine in dealt.items():
            kept[now[i]] |= dict.fromkeys(mine, source)


def test_nothing_is_kept_of_other_buckets_tensors_or_layouts() -> None:
    model = scale.Size(layers=1, experts=4, trainers=4, pp=1, tp=1, ep=4, engines=2, engine_tp=1)
    trainers, layouts = scale.trainers(model), scale.engines(model)
    plan = make_plan(trainers, layouts[:1], 1 << 30)

    # All rounds are the same objects where they are kept, and equal where they are not.
    def kept(previous: Plan, size: int = 1 << 30) -> bool:
        new = make_plan(trainers, layouts, size, previous=previous)
        old = {id(r.rounds) for r in previous.routes}
        (mine,) = {id(r.rounds) in old for r in new.routes if r.target == layouts[0].rank}
        return mine

    assert kept(plan)
    assert not kept(plan, 1 << 29)
    assert not kept(pickle.loads(pickle.dumps(plan)))
    assert make_plan(trainers, layouts[:1], 1 << 30) == pickle.loads(pickle.dumps(plan))
    trainers = [replace(t, exports=t.exports[::-1]) for t in trainers]
    assert not kept(plan)


def test_equal_engine_ranks_share_their_rounds() -> None:
    size = scale.Size(layers=1, experts=8, trainers=8, pp=1, tp=8, ep=8, engines=8, engine_tp=2)
    plan = make_plan(scale.trainers(size), scale.engines(size), 1 << 28)
    assert len(plan.routes) == 16
    assert len({id(r.rounds) for r in plan.routes}) == 2
    assert plan.nbytes == sum(r.nbytes for r in plan.routes)
    (share,) = {len(plan.share(t).routes) for t in range(8)}
    assert share == 2
    with pytest.raises(KeyError, match="share of trainer rank 0, not of 1"):
        plan.share(0).routes_of(1)
