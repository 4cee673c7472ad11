"""Engine ranks that want the same are looked at and planned once.

An engine of a hundred ranks has as many layouts as its parallel sizes make; its replicas, and the
other engines like it, add none.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from sglang_rdt.plan import coverage
from sglang_rdt.plan.specs import EngineRank, EngineRankLayout, RankId, TensorSpec


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Specs of a large model are millions of objects, none of them in a cycle; looking through
    all of them again and again would take as long as planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_FLAT = attrgetter(
    "param",
    "dst.offset",
    "dst.shape",
    "dst.stride",
    "source",
    "src.offset",
    "src.shape",
    "src.stride",
)

_PARAM = attrgetter("name", "shape", "stride", "dtype")


def distinct_layouts(
    layouts: Sequence[EngineRankLayout],
) -> tuple[list[EngineRankLayout], list[int]]:
    """The layouts that differ in parameters or recording, and of each layout which it is.

    Those of a malformed layout are like no other."""
    distinct: list[EngineRankLayout] = []
    seen: dict[Any, list[tuple[list[Any], int]]] = defaultdict(list)
    numbers = []
    for layout in layouts:
        try:
            wants = tuple(map(_FLAT, layout.recording.wants))
            # Addresses differ from process to process; what counts is who shares memory with whom.
            order: dict[int, int] = {}
            params = [
                (order.setdefault(p.storage, len(order)), p.offset, p.buffer, *_PARAM(p))
                for p in layout.params
            ]
            one = layout.recording
            flat = [wants, one.constants, one.padding, one.computed, one.kept, params]
            bucket = seen[hash(wants)]
            number = next((n for known, n in bucket if known == flat), None)
        except (AttributeError, TypeError, ValueError):
            # No recording at all: like no other, and refused when it is looked at.
            flat, bucket, number = [], [], None
        if number is None:
            number = len(distinct)
            distinct.append(layout)
            bucket.append((flat, number))
        numbers.append(number)
    return distinct, numbers


def target_key(rank: EngineRank) -> tuple[str, str, RankId]:
    """What makes an engine rank the same as in another plan: a restarted engine is a new one."""
    return rank.engine, rank.instance, rank.rank


def and_others(count: int) -> str:
    """The end of a line about one of ``count`` engine ranks that are alike."""
    return f" (so do {count - 1} engine ranks with the same layout)" if count > 1 else ""


def check_engines(
    layouts: Sequence[EngineRankLayout],
    template_of: Sequence[int],
    distinct: Sequence[EngineRankLayout],
    specs: dict[str, TensorSpec],
) -> list[str]:
    """:func:`~sglang_rdt.plan.coverage.check_engine` of every engine, those with the same layouts
    once.

    Args:
        template_of: index into ``distinct`` of each layout.
    """
    engines: dict[tuple[str, int], list[tuple[EngineRank, int]]] = {}
    for layout, number in zip(layouts, template_of, strict=True):
        key = layout.rank.engine, coverage.replica_of(layout.rank)
        engines.setdefault(key, []).append((layout.rank, number))
    alike: dict[tuple[int, ...], list[dict[int, EngineRank]]] = {}
    for members in engines.values():
        ranks = {number: rank for rank, number in members}
        alike.setdefault(tuple(sorted(ranks)), []).append(ranks)
    problems: list[str] = []
    for numbers, same in alike.items():
        here = [replace(distinct[n], rank=same[0][n]) for n in numbers]
        rest = len(same) - 1
        also = f" (and in {rest} other engines or replicas with the same layouts)" if rest else ""
        problems += [line + also for line in coverage.check_engine(here, specs)]
    return problems
