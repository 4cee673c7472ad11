from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt.plan.spread import GRAIN, TOLERANCE, Pieces, Share, spread


def pieces(*rows: tuple[int, int, int]) -> Pieces:
    """``(class, rows, bytes per row)`` of each piece."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Pieces(table[:, 0].astype(np.int32), table[:, 1] * table[:, 2], table[:, 1])


class Crowd:
    """Arguments of one spread, and what it made of them."""

    def __init__(
        self,
        classes: list[tuple[int, ...]],
        templates: list[Pieces],
        template_of: list[int],
        trainer_nodes: list[str],
        target_nodes: list[str],
        min_cut: int = 1,
    ) -> None:
        self.classes, self.templates, self.template_of = classes, templates, template_of
        self.trainer_nodes, self.target_nodes = trainer_nodes, target_nodes
        self.args = (classes, templates, template_of, trainer_nodes, target_nodes, min_cut)
        self.shares = spread(*self.args)

    def given(self) -> dict[tuple[int, int, int], int]:
        """Bytes by class, target and trainer rank."""
        out: dict[tuple[int, int, int], int] = defaultdict(int)
        for t, share in enumerate(self.shares):
            one = self.templates[self.template_of[t]]
            for piece, low, high, slot in rows(share):
                c = int(one.cls[piece])
                source = self.classes[c][slot]
                out[c, t, source] += (high - low) * int(one.row_bytes[piece])
        return out

    def egress(self) -> list[int]:
        load = [0] * len(self.trainer_nodes)
        for (_, _, source), nbytes in self.given().items():
            load[source] += nbytes
        return load

    def totals(self) -> list[int]:
        return [
            sum(
                int(self.templates[k].nbytes[self.templates[k].cls == c].sum())
                for k in self.template_of
            )
            for c in range(len(self.classes))
        ]

    def fair(self) -> list[float]:
        load = [0.0] * len(self.trainer_nodes)
        for members, total in zip(self.classes, self.totals(), strict=True):
            for source in members:
                load[source] += total / len(members)
        return load

    def sources(self, target: int) -> set[int]:
        return {source for (_, t, source), n in self.given().items() if t == target and n}


def rows(share: Share) -> list[tuple[int, int, int, int]]:
    columns = (share.piece, share.low, share.high, share.slot)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@st.composite
def crowds(draw: st.DrawFn) -> Crowd:
    count = draw(st.integers(1, 7))
    sets = st.sets(st.integers(0, count - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    classes = draw(st.lists(sets, min_size=1, max_size=4, unique=True))
    row = st.tuples(st.integers(0, len(classes) - 1), st.integers(1, 200), st.integers(1, 40))
    templates = [pieces(*draw(st.lists(row, max_size=6))) for _ in range(draw(st.integers(1, 3)))]
    targets = draw(st.integers(1, 9))
    node = st.integers(0, 2).map(lambda n: f"node{n}")
    return Crowd(
        classes,
        templates,
        [draw(st.integers(0, len(templates) - 1)) for _ in range(targets)],
        [draw(node) for _ in range(count)],
        [draw(node) for _ in range(targets)],
        draw(st.sampled_from([1, 1, 50, 1000])),
    )


@given(crowds())
def test_every_row_of_every_piece_comes_from_exactly_one_holder(crowd: Crowd) -> None:
    for t, share in enumerate(crowd.shares):
        one = crowd.templates[crowd.template_of[t]]
        got = rows(share)
        assert got == sorted(got)
        seen: list[list[tuple[int, int]]] = [[] for _ in one.cls]
        for piece, low, high, slot in got:
            assert low < high
            assert 0 <= slot < len(crowd.classes[one.cls[piece]])
            seen[piece].append((low, high))
        for n, parts in zip(one.rows.tolist(), seen, strict=True):
            edges = [0, *(high for _, high in parts)]
            assert [low for low, _ in parts] == edges[:-1]
            assert edges[-1] == n


@given(crowds())
def test_no_trainer_rank_carries_more_than_its_fair_share(crowd: Crowd) -> None:
    min_cut = crowd.args[-1]
    # What cannot be cut may come on top: a row, or what is not worth a source of its own.
    grain = [0] * len(crowd.trainer_nodes)
    for c, members in enumerate(crowd.classes):
        widest = max(
            (int(n) for one in crowd.templates for n in one.row_bytes[one.cls == c]), default=0
        )
        for source in members if len(members) > 1 else ():
            grain[source] += max(widest, min_cut)
    for load, fair, extra in zip(crowd.egress(), crowd.fair(), grain, strict=True):
        assert load <= 1.05 * fair + extra


@given(crowds())
def test_the_same_crowd_is_spread_the_same_way(crowd: Crowd) -> None:
    again = spread(*crowd.args)
    assert [rows(s) for s in again] == [rows(s) for s in crowd.shares]


def model(layers: int, cls: int = 0) -> Pieces:
    return pieces(*((cls, 1024, 1 << 14) for _ in range(layers)))


@pytest.mark.parametrize("holders", [1, 2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_multiple_of_the_holders_takes_the_class_from_one_source_each(
    holders: int, times: int
) -> None:
    targets = holders * times
    crowd = Crowd(
        [tuple(range(holders))], [model(5)], [0] * targets, ["n"] * holders, ["n"] * targets
    )
    assert all(len(crowd.sources(t)) == 1 for t in range(targets))
    assert len(set(crowd.egress())) == 1
    # Nothing is cut: all engine ranks share the same arrays.
    assert len({id(s.piece) for s in crowd.shares}) == 1


@pytest.mark.parametrize(
    ("holders", "targets"), [(2, 1), (4, 1), (3, 2), (2, 3), (4, 5), (4, 6), (8, 11), (5, 3)]
)
@pytest.mark.parametrize("layers", [1, 30])
def test_the_remainder_is_spread_over_all_holders(holders: int, targets: int, layers: int) -> None:
    crowd = Crowd(
        [tuple(range(holders))], [model(layers)], [0] * targets, ["n"] * holders, ["n"] * targets
    )
    fair = crowd.totals()[0] / holders
    assert max(crowd.egress()) <= (1 + TOLERANCE + GRAIN) * fair
    alone = [t for t in range(targets) if len(crowd.sources(t)) == 1]
    assert len(alone) == targets // holders * holders
    # Each holder's room is used up before the next one begins.
    assert sum(len(crowd.sources(t)) for t in range(targets)) <= targets + holders


def test_large_pieces_are_cut_by_rows_and_small_ones_left_whole() -> None:
    crowd = Crowd(
        [(0, 1)], [pieces((0, 1000, 1000), (0, 10, 1))], [0], ["n"] * 2, ["n"], min_cut=1000
    )
    assert [r[:3] for r in rows(crowd.shares[0]) if r[0] == 1] == [(1, 0, 10)]
    assert len([r for r in rows(crowd.shares[0]) if r[0] == 0]) == 2


def test_what_is_too_small_to_cut_comes_from_who_serves_anyway() -> None:
    # Class 0: the experts of each source, nobody else has them. Class 4: a norm that all have.
    classes = [(0,), (1,), (2,), (3,), (0, 1, 2, 3)]
    one = [pieces((k, 64, 1 << 20), (4, 1, 4096)) for k in range(4)]
    crowd = Crowd(classes, one, [0, 1, 2, 3], ["n"] * 4, ["n"] * 4, min_cut=1 << 20)
    assert [crowd.sources(t) for t in range(4)] == [{0}, {1}, {2}, {3}]
    # Also where fewer want it than have it.
    alone = Crowd(classes, [one[2]], [0], ["n"] * 4, ["n"], min_cut=1 << 20)
    assert alone.sources(0) == {2}


def test_small_ones_even_out_over_their_holders() -> None:
    classes = [(0, 1, 2, 3)]
    crowd = Crowd(classes, [pieces((0, 1, 100))], [0] * 9, ["n"] * 4, ["n"] * 9, min_cut=1 << 20)
    assert sorted(crowd.egress()) == [200, 200, 200, 300]


def near_bytes(crowd: Crowd) -> int:
    return sum(
        nbytes
        for (_, t, source), nbytes in crowd.given().items()
        if crowd.trainer_nodes[source] == crowd.target_nodes[t]
    )


def test_the_same_node_comes_first() -> None:
    crowd = Crowd(
        [(0, 1, 2, 3)],
        [model(3)],
        [0] * 4,
        ["a", "a", "b", "b"],
        ["b", "b", "a", "a"],
    )
    assert near_bytes(crowd) == sum(crowd.totals())
    assert len(set(crowd.egress())) == 1


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
def test_as_much_as_the_balance_allows_comes_from_the_same_node(
    trainer_nodes: list[int], target_nodes: list[int]
) -> None:
    crowd = Crowd(
        [tuple(range(len(trainer_nodes)))],
        [model(40)],
        [0] * len(target_nodes),
        [f"node{n}" for n in trainer_nodes],
        [f"node{n}" for n in target_nodes],
    )
    each = int(crowd.templates[0].nbytes.sum())
    fair = crowd.totals()[0] / len(trainer_nodes)
    # Whole engine ranks at least; where these leave room, parts of others on top.
    whole = int(fair * (1 + TOLERANCE) // each)
    possible = sum(
        each * min(target_nodes.count(n), whole * trainer_nodes.count(n)) for n in range(3)
    )
    assert near_bytes(crowd) >= possible
    assert max(crowd.egress()) <= (1 + TOLERANCE + GRAIN) * fair


def test_who_is_left_over_takes_what_room_there_is_on_its_node() -> None:
    # One and a half engine ranks for each trainer rank: the second one at home, the third half.
    crowd = Crowd([(0, 1)], [model(40)], [0] * 3, ["a", "b"], ["a", "a", "c"])
    each = int(crowd.templates[0].nbytes.sum())
    assert near_bytes(crowd) >= 1.5 * each * (1 - GRAIN)
    # And does not take it from another's neighbour.
    crowd = Crowd([(0, 1, 2)], [model(40)], [0] * 2, ["a", "a", "b"], ["c", "a"])
    assert near_bytes(crowd) >= each * (1 - GRAIN)


def test_nobody_wants_anything() -> None:
    assert spread([(0, 1)], [pieces()], [0, 0], ["n", "n"], ["n", "n"])[0].piece.size == 0
    assert spread([], [], [], ["n"], []) == []
    crowd = Crowd([(0, 1), (1,)], [pieces((1, 3, 5))], [0], ["n", "n"], ["n"])
    assert crowd.egress() == [0, 15]


def test_small_classes_make_up_for_one_another() -> None:
    classes = [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3)]
    one = pieces(*((c, 1, 100) for c in range(4)))
    crowd = Crowd(classes, [one], [0], ["n"] * 4, ["n"], min_cut=1 << 20)
    assert max(crowd.egress()) <= 200


def test_who_serves_an_engine_rank_already_comes_before_others() -> None:
    both = pieces((0, 64, 1 << 20), (1, 64, 1 << 18))
    crowd = Crowd(
        [(1, 2), (0, 1, 2)], [both, pieces((1, 64, 1 << 18))], [0, 0, 1], ["n"] * 3, ["n"] * 3
    )
    assert [crowd.sources(t) for t in range(3)] == [{1}, {2}, {0}]
