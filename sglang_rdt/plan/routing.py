"""Which trainer rank serves which engine rank with which HF tensor.

Trainer ranks that hold the same tensors (TP peers after the gather, DP replicas) form a class.
Within a class the engine ranks are dealt out evenly, same node first: no source serves more
engine ranks than its fair share, rounded up, and ranks beyond the number of engine ranks serve
nobody. Engine ranks that are served already stay with who serves them; then a source may serve as
many as it did, if that is more than its fair share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from sglang_rdt.plan.specs import EngineRank, TrainerRank

# The trainer ranks (indices) that hold the same tensors, ascending.
Holders = tuple[int, ...]


def same_names(trainers: Sequence[TrainerRank]) -> tuple[list[int], list[tuple[str, ...]]]:
    """The different lists of HF names that trainer ranks yield, and which of them each yields."""
    lists: dict[tuple[str, ...], int] = {}
    known: dict[int, int] = {}
    out = []
    for trainer in trainers:
        number = known.get(id(trainer.exports))
        if number is None:
            names = tuple([s.name for s in trainer.exports])
            number = known[id(trainer.exports)] = lists.setdefault(names, len(lists))
        out.append(number)
    return out, list(lists)


def holder_classes(trainers: Sequence[TrainerRank]) -> dict[Holders, list[str]]:
    """HF tensor names by the exact set of trainer ranks that yield them (indices into
    ``trainers``), in the order in which they are first seen."""
    return classes_of(*same_names(trainers))


def classes_of(
    number_of: Sequence[int], lists: Sequence[Sequence[str]]
) -> dict[Holders, list[str]]:
    """:func:`holder_classes` out of :func:`same_names`."""
    ranks: list[list[int]] = [[] for _ in lists]
    for i, number in enumerate(number_of):
        ranks[number].append(i)
    holders: dict[str, list[int]] = defaultdict(list)
    for number, names in enumerate(lists):
        for name in names:
            holders[name].append(number)
    classes: dict[Holders, list[str]] = {}
    by_lists: dict[tuple[int, ...], list[str]] = {}
    for name, numbers in holders.items():
        key = tuple(numbers)
        if key not in by_lists:
            who = tuple(sorted(i for n in dict.fromkeys(key) for i in ranks[n]))
            by_lists[key] = classes.setdefault(who, [])
        by_lists[key].append(name)
    return classes


def deal(
    holders: Sequence[int],
    targets: Sequence[int],
    trainers: Sequence[TrainerRank],
    ranks: Sequence[EngineRank],
    load: Counter[int],
    given: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Target -> source for one class. ``load`` counts the targets that each source serves so far
    over all classes and is updated.

    Args:
        given: target -> source, for those that are served already; in ``load`` already.
    """
    share = -(-len(targets) // min(len(holders), len(targets))) if targets else 0
    chosen: dict[int, int] = dict(given or {})
    served = Counter(chosen.values())

    def pick(target: int, candidates: Sequence[int]) -> bool:
        free = [h for h in candidates if served[h] < share]
        if not free:
            return False
        source = min(free, key=lambda h: (served[h], load[h], h))
        served[source] += 1
        load[source] += 1
        chosen[target] = source
        return True

    at: dict[str, list[int]] = defaultdict(list)
    for h in holders:
        at[trainers[h].node_ip].append(h)
    # Same node first, for all targets, so that a later target does not lose its neighbour.
    for target in targets:
        if target not in chosen:
            pick(target, at.get(ranks[target].node_ip, ()))
    for target in targets:
        if target not in chosen:
            pick(target, holders)
    return chosen


def assign(
    classes: Mapping[Holders, Sequence[str]],
    trainers: Sequence[TrainerRank],
    ranks: Sequence[EngineRank],
    wanted: Sequence[set[str]],
    kept: Mapping[int, Mapping[Holders, int]] | None = None,
) -> dict[tuple[int, int], list[Holders]]:
    """``(source, target) -> the classes that it serves it with``, indices into ``trainers`` and
    ``ranks``.

    Args:
        wanted: the HF tensors that each engine rank wants anything of. Engine ranks that want the
            same may share a set.
        kept: target -> class -> source, of engine ranks that stay with who serves them.
    """
    kept = kept or {}
    load = Counter(source for by_class in kept.values() for source in by_class.values())
    different = {id(w): w for w in wanted}
    routes: dict[tuple[int, int], list[Holders]] = defaultdict(list)
    for holders, names in sorted(classes.items()):
        some = {key: not w.isdisjoint(names) for key, w in different.items()}
        targets = [t for t in range(len(ranks)) if some[id(wanted[t])]]
        given = {t: kept[t][holders] for t in targets if t in kept}
        for target, source in deal(holders, targets, trainers, ranks, load, given).items():
            routes[source, target].append(holders)
    return dict(routes)


def route(
    trainers: Sequence[TrainerRank], ranks: Sequence[EngineRank], wanted: Sequence[set[str]]
) -> dict[tuple[int, int], set[str]]:
    """``(source, target) -> HF names``, indices into ``trainers`` and ``ranks``.

    ``wanted[t]``: the HF tensors that engine rank ``t`` wants anything of.
    """
    classes = holder_classes(trainers)
    return {
        (source, target): {n for c in mine for n in classes[c] if n in wanted[target]}
        for (source, target), mine in assign(classes, trainers, ranks, wanted).items()
    }
