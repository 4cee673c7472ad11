"""Which trainer rank serves which engine rank with which HF tensor.

Trainer ranks that hold the same tensors (TP peers after the gather, DP replicas) form a class.
Within a class the engine ranks are dealt out evenly, same node first: no source serves more
engine ranks than its fair share, rounded up, and ranks beyond the number of engine ranks serve
nobody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from sglang_rdt.plan.specs import EngineRank, TrainerRank


def holder_classes(trainers: Sequence[TrainerRank]) -> dict[tuple[int, ...], list[str]]:
    """HF tensor names by the exact set of trainer ranks that yield them (indices into
    ``trainers``), in the order in which they are first seen."""
    holders: dict[str, list[int]] = defaultdict(list)
    for i, trainer in enumerate(trainers):
        for spec in trainer.exports:
            holders[spec.name].append(i)
    classes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, who in holders.items():
        classes[tuple(who)].append(name)
    return dict(classes)


def deal(
    holders: Sequence[int],
    targets: Sequence[int],
    trainers: Sequence[TrainerRank],
    ranks: Sequence[EngineRank],
    load: Counter[int],
) -> dict[int, int]:
    """Target -> source for one class. ``load`` counts the targets that each source serves so far
    over all classes and is updated."""
    share = -(-len(targets) // min(len(holders), len(targets))) if targets else 0
    served: Counter[int] = Counter()
    chosen: dict[int, int] = {}

    def pick(target: int, candidates: Sequence[int]) -> bool:
        free = [h for h in candidates if served[h] < share]
        if not free:
            return False
        source = min(free, key=lambda h: (served[h], load[h], h))
        served[source] += 1
        load[source] += 1
        chosen[target] = source
        return True

    # Same node first, for all targets, so that a later target does not lose its neighbour.
    for target in targets:
        pick(target, [h for h in holders if trainers[h].node_ip == ranks[target].node_ip])
    for target in targets:
        if target not in chosen:
            pick(target, holders)
    return chosen


def route(
    trainers: Sequence[TrainerRank], ranks: Sequence[EngineRank], wanted: Sequence[set[str]]
) -> dict[tuple[int, int], set[str]]:
    """``(source, target) -> HF names``, indices into ``trainers`` and ``ranks``.

    ``wanted[t]``: the HF tensors that engine rank ``t`` wants anything of.
    """
    load: Counter[int] = Counter()
    routes: dict[tuple[int, int], set[str]] = defaultdict(set)
    for holders, names in sorted(holder_classes(trainers).items()):
        name_set = set(names)
        targets = [t for t in range(len(ranks)) if wanted[t] & name_set]
        for target, source in deal(holders, targets, trainers, ranks, load).items():
            routes[source, target] |= wanted[target] & name_set
    return dict(routes)
