"""Which holder gives each piece to each engine rank.

Entries with the same set of holders are a *class*. Its bytes are spread over the holders so that
none gives more than ``1 + TOLERANCE`` of its fair share. An engine rank gets a whole class from
one holder where that comes out even; the engine ranks that are left over get theirs from all
holders that have room, piece by piece, large pieces cut by rows. Holders on the engine rank's own
node come first, then those that serve it anyway.

Engine ranks whose shares are given keep them; the others are dealt out around these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.plan.strided import Ints

_Int32s = NDArray[np.int32]

TOLERANCE = 0.04
# Pieces are cut until one is at most this part of a fair share.
GRAIN = 0.02


@dataclass(slots=True)
class Pieces:
    """What one template takes: per piece its class, its bytes and its number of rows."""

    cls: _Int32s
    nbytes: Ints
    rows: Ints

    @property
    def row_bytes(self) -> Ints:
        """Bytes of one row."""
        return self.nbytes // np.maximum(self.rows, 1)


@dataclass(slots=True)
class Share:
    """What one engine rank takes from whom, one row per part: rows ``low`` to ``high`` of
    ``piece`` from the holder in place ``slot`` of the piece's class. Sorted by piece and row."""

    piece: _Int32s
    low: _Int32s
    high: _Int32s
    slot: _Int32s


@dataclass(slots=True)
class _Grains:
    """A class of a template in the parts that are not cut any more."""

    piece: Ints
    low: Ints
    high: Ints
    end: Ints  # bytes up to and with each part


def spread(
    classes: Sequence[tuple[int, ...]],
    templates: Sequence[Pieces],
    template_of: Sequence[int],
    trainer_nodes: Sequence[str],
    target_nodes: Sequence[str],
    min_cut: int = 1,
    kept: Sequence[Share | None] = (),
) -> list[Share]:
    """One share per engine rank.

    Args:
        classes: indices of the trainer ranks that hold each class.
        template_of: index into ``templates`` of each engine rank.
        trainer_nodes, target_nodes: where the trainer ranks and the engine ranks run.
        min_cut: bytes; a part of this size or less is not worth a source of its own.
        kept: of each engine rank the share that it keeps, or None; empty: none keeps any.
    """
    return _Spreader(
        classes, templates, template_of, trainer_nodes, target_nodes, max(min_cut, 1), kept
    ).run()


def fair_shares(
    classes: Sequence[tuple[int, ...]],
    templates: Sequence[Pieces],
    template_of: Sequence[int],
    trainers: int,
) -> NDArray[np.float64]:
    """What each trainer rank would give if the holders of each class gave equal parts of it."""
    return _fair(
        [np.array(c, np.int64) for c in classes],
        _totals(_bytes(classes, templates), template_of),
        trainers,
    )


def _bytes(classes: Sequence[tuple[int, ...]], templates: Sequence[Pieces]) -> Ints:
    """By template and class."""
    out = np.zeros((len(templates), len(classes)), np.int64)
    for i, one in enumerate(templates):
        np.add.at(out[i], one.cls, one.nbytes)
    return out


def _totals(nbytes: Ints, template_of: Sequence[int]) -> Ints:
    """By class, over all engine ranks."""
    uses = np.bincount(np.array(template_of, np.int64), minlength=len(nbytes))
    total: Ints = uses @ nbytes
    return total


def _fair(members: Sequence[NDArray[np.int64]], totals: Ints, trainers: int) -> NDArray[np.float64]:
    fair = np.zeros(trainers)
    for mine, total in zip(members, totals, strict=True):
        fair[mine] += total / len(mine)
    return fair


class _Spreader:
    """The state of one :func:`spread`."""

    def __init__(
        self,
        classes: Sequence[tuple[int, ...]],
        templates: Sequence[Pieces],
        template_of: Sequence[int],
        trainer_nodes: Sequence[str],
        target_nodes: Sequence[str],
        min_cut: int,
        kept: Sequence[Share | None],
    ) -> None:
        self.members = [np.array(c, np.int64) for c in classes]
        self.templates = templates
        self.template_of = template_of
        self.min_cut = min_cut
        number: dict[str, int] = {}
        nodes = [number.setdefault(n, len(number)) for n in (*trainer_nodes, *target_nodes)]
        self.node = np.array(nodes[: len(trainer_nodes)], np.int64)
        self.target_node = nodes[len(trainer_nodes) :]
        self.bytes = _bytes(classes, templates)
        self.total = _totals(self.bytes, template_of)
        self.fair = _fair(self.members, self.total, len(trainer_nodes))
        self.kept = list(kept) or [None] * len(target_nodes)
        # Bytes that are given away already, by class and place in it.
        self.used = [np.zeros(len(m)) for m in self.members]
        for t, share in enumerate(self.kept):
            if share is not None:
                self._use(templates[template_of[t]], share)
        # By how much each trainer rank gives less than the fair shares dealt so far.
        self.carry = np.zeros(len(trainer_nodes))
        self.serves = np.zeros((len(target_nodes), len(trainer_nodes)), np.bool_)
        self.slot = np.zeros((len(target_nodes), len(classes)), np.int32)
        self.parts: list[list[tuple[_Grains, int, int, int]]] = [[] for _ in target_nodes]
        self.grains: dict[tuple[int, int], _Grains] = {}
        self.whole = [
            (np.arange(len(p.cls), dtype=np.int32), np.zeros(len(p.cls), np.int32), _int32(p.rows))
            for p in templates
        ]
        self.cuts: dict[bytes, tuple[_Int32s, _Int32s, _Int32s]] = {}

    def run(self) -> list[Share]:
        alone = [len(m) == 1 for m in self.members]
        # Where there is no choice first: it says who serves whom anyway. Then from the large
        # classes down, so that the small ones even out.
        order = sorted(
            range(len(self.members)),
            key=lambda c: (not alone[c], -int(self.total[c]), tuple(self.members[c])),
        )
        for c in order:
            targets = [
                t
                for t in np.flatnonzero(self.bytes[self.template_of, c]).tolist()
                if self.kept[t] is None
            ]
            if alone[c]:
                self.serves[targets, self.members[c][0]] = True
            else:
                self._deal(c, targets)
        return [kept or self._share(t) for t, kept in enumerate(self.kept)]

    def _use(self, pieces: Pieces, share: Share) -> None:
        cls = pieces.cls[share.piece]
        nbytes = (share.high.astype(np.int64) - share.low) * pieces.row_bytes[share.piece]
        first = np.cumsum([0, *(len(used) for used in self.used)])
        flat = np.bincount(first[cls] + share.slot, nbytes, first[-1])
        for used, low, high in zip(self.used, first[:-1], first[1:], strict=True):
            used += flat[low:high]

    def _deal(self, c: int, targets: list[int]) -> None:
        members = self.members[c]
        fair = float(self.total[c]) / len(members)
        self.carry[members] += fair - self.used[c]
        room = fair * (1 + TOLERANCE) - self.used[c]
        size = {t: int(self.bytes[self.template_of[t], c]) for t in targets}
        # Same node first, for all targets, so that a later one does not lose its neighbour.
        todo = sorted(targets, key=lambda t: (-size[t], t))
        for near in (True, False):
            rest = []
            for t in todo:
                fits = room >= size[t]
                if near:
                    fits &= self._near(t, members)
                if not fits.any():
                    rest.append(t)
                    continue
                score = np.where(self.serves[t, members], room + fair * len(members), room)
                slot = int(np.where(fits, score, -np.inf).argmax())
                self._give(c, t, slot, size[t], room)
                self.slot[t, c] = slot
            # Those who find some room near by are the ones to be split.
            nearby = {t: bool((room[self._near(t, members)] > 0).any()) for t in rest}
            todo = sorted(rest, key=lambda t: (-size[t], nearby[t], t))
        for t in todo:
            if size[t] <= self.min_cut:
                slot = self._least_loaded(t, members, size[t])
                self._give(c, t, slot, size[t], room)
                self.slot[t, c] = slot
        self._split(c, [t for t in todo if size[t] > self.min_cut], fair, room)

    def _near(self, t: int, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.node[members] == self.target_node[t]

    def _give(self, c: int, t: int, slot: int, nbytes: int, room: NDArray[np.float64]) -> None:
        source = self.members[c][slot]
        room[slot] -= nbytes
        self.carry[source] -= nbytes
        self.serves[t, source] = True

    def _least_loaded(self, t: int, members: NDArray[np.int64], nbytes: int) -> int:
        """For what is too small to be cut: one that serves ``t`` anyway and can bear it."""
        bears = self.carry[members] + TOLERANCE * self.fair[members] >= nbytes
        near = self._near(t, members)
        serves = self.serves[t, members]
        return int(np.lexsort((-self.carry[members], ~(bears & near), ~(bears & serves)))[0])

    def _split(self, c: int, targets: list[int], fair: float, room: NDArray[np.float64]) -> None:
        members = self.members[c]
        grain = max(self.min_cut, int(GRAIN * fair))
        grains = {t: self._grains_of(self.template_of[t], c, grain) for t in targets}
        done = dict.fromkeys(targets, 0)

        def take(t: int, slot: int, least: int) -> None:
            """From ``slot`` what it has room for, if that is ``least`` bytes at least."""
            end = grains[t].end
            start = int(end[done[t] - 1]) if done[t] else 0
            stop = int(np.searchsorted(end, start + room[slot], "right"))
            if not least:
                stop = max(stop, done[t] + 1)
            if stop > done[t] and int(end[stop - 1]) - start >= min(least, int(end[-1]) - start):
                self.parts[t].append((grains[t], done[t], stop, slot))
                self._give(c, t, slot, int(end[stop - 1]) - start, room)
                done[t] = stop

        for near in (True, False):
            for t in targets:
                self.slot[t, c] = -1
                for slot in np.lexsort((-room, ~self.serves[t, members])).tolist():
                    if done[t] == len(grains[t].end):
                        break
                    if not near or self._near(t, members)[slot]:
                        take(t, slot, self.min_cut)
        for t in targets:
            while done[t] < len(grains[t].end):
                take(t, int(room.argmax()), 0)

    def _grains_of(self, template: int, c: int, grain: int) -> _Grains:
        key = template, c
        if key not in self.grains:
            pieces = self.templates[template]
            mine = np.flatnonzero(pieces.cls == c)
            rows, row_bytes = pieces.rows[mine], pieces.row_bytes[mine]
            each = np.clip(grain // np.maximum(row_bytes, 1), 1, rows)
            count = -(-rows // each)
            index = np.repeat(np.arange(len(mine)), count)
            low = (np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)) * each[index]
            high = np.minimum(low + each[index], rows[index])
            end = np.cumsum((high - low) * row_bytes[index])
            self.grains[key] = _Grains(mine[index], low, high, end)
        return self.grains[key]

    def _share(self, t: int) -> Share:
        cls = self.templates[self.template_of[t]].cls
        slot = self.slot[t][cls]
        if not self.parts[t]:
            return Share(*self.whole[self.template_of[t]], slot)
        whole = np.flatnonzero(slot >= 0)
        rows = self.templates[self.template_of[t]].rows
        columns = [(whole, np.zeros(len(whole), np.int64), rows[whole], slot[whole])]
        for grains, first, stop, holder in self.parts[t]:
            piece = grains.piece[first:stop]
            # Neighbours from the same holder are one part again.
            starts = np.flatnonzero(np.diff(piece, prepend=-1))
            ends = np.append(starts[1:], len(piece)) - 1
            low, high = grains.low[first:stop][starts], grains.high[first:stop][ends]
            columns.append((piece[starts], low, high, np.full(len(starts), holder)))
        pieces, lows, highs, slots = (_int32(np.concatenate(c)) for c in zip(*columns, strict=True))
        order = np.lexsort((lows, pieces))
        cut = (pieces[order], lows[order], highs[order])
        key = b"".join(column.tobytes() for column in cut)
        return Share(*self.cuts.setdefault(key, cut), slots[order])


def _int32(values: NDArray[np.integer]) -> _Int32s:
    return values.astype(np.int32)
