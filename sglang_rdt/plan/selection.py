"""Syncing only what trains: which HF tensors are synced, and what stays as it is.

The engine records its loader with all HF tensors, so that the proof is about the whole model: every
element of every parameter comes from exactly one place. Then what comes from tensors that are not
synced is taken out of what a sync does, and kept aside for that proof. An element that only kept
tensors fill stays as it is; nothing else may.

What the trainer has no tensor for at all, such as the vision tower beside a language model, can be
kept by the names of the engine's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from sglang_rdt.errors import PlanError, RecordError, listed
from sglang_rdt.plan.specs import EngineRankLayout, Kept, ParamSpec, Recording, TensorSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """What a filter makes of the trainer's HF tensors.

    Args:
        kept: names of those that are not synced.
        tensors: how many there are.
        nbytes: of all of them.
        kept_bytes: of those in ``kept``.
    """

    kept: frozenset[str] = frozenset()
    tensors: int = 0
    nbytes: int = 0
    kept_bytes: int = 0


def select(
    specs: Iterable[TensorSpec], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Selection:
    """Which of ``specs`` a sync leaves alone.

    Args:
        include: patterns of names (``*``, ``?``, ``[...]``, as in a shell; the whole name, in its
            own case) of which a synced tensor matches one; none: every tensor is synced.
        exclude: patterns of which it matches none.

    Raises:
        PlanError: a pattern that no tensor matches, by name; nothing is left to sync.
    """
    all_of = {spec.name: spec.nbytes for spec in specs}
    problems = [
        f"{what} pattern {pattern!r} matches none of the trainer's {len(all_of)} HF tensors"
        for what, patterns in (("include", include), ("exclude", exclude))
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in all_of)
    ]
    kept = frozenset(
        name
        for name in all_of
        if (include and not _matches(name, include)) or _matches(name, exclude)
    )
    if not problems and len(kept) == len(all_of):
        problems = [
            f"include {list(include)} and exclude {list(exclude)} leave none of "
            f"{len(all_of)} HF tensors to sync"
        ]
    if problems:
        raise PlanError("the name filter (SGLANG_RDT_INCLUDE, SGLANG_RDT_EXCLUDE)", problems)
    return Selection(kept, len(all_of), sum(all_of.values()), sum(all_of[name] for name in kept))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def keep(recording: Recording, names: Iterable[str]) -> Recording:
    """``recording`` without what comes from the HF tensors ``names``, which are kept.

    Constants go with the tensors that fill the rest of their parameter: they are kept where all of
    these are.

    Raises:
        RecordError: something that is computed from several HF tensors needs some that are synced
            and some that are kept; by name.
    """
    kept = frozenset(names)
    if not kept:
        return recording
    _refuse_cuts(recording, kept)
    wants = tuple(w for w in recording.wants if w.source not in kept)
    left = tuple(w for w in recording.wants if w.source in kept)
    only_kept = {w.param for w in left} - {w.param for w in wants}
    computed = recording.computed
    done = tuple(one for one in computed if not kept & set(one.sources))
    changes: dict[str, Any] = {"computed": done} if computed else {}
    return replace(
        recording,
        wants=wants,
        constants=tuple(c for c in recording.constants if c.param not in only_kept),
        kept=Kept(
            recording.kept.names | kept,
            recording.kept.wants + left,
            recording.kept.constants
            + tuple(c for c in recording.constants if c.param in only_kept),
            recording.kept.computed + tuple(one for one in computed if one not in done),
            recording.kept.params,
        ),
        **changes,
    )


def leave(recording: Recording, params: Iterable[ParamSpec], patterns: Sequence[str]) -> Recording:
    """``recording``, in which parameters that match one of ``patterns`` are kept.

    Buffers need no word: they stay unless the loader writes them.
    """
    names = frozenset(p.name for p in params if not p.buffer and _matches(p.name, patterns))
    if not names:
        return recording
    kept = replace(recording.kept, params=recording.kept.params | names)
    return replace(recording, kept=kept)


def unmatched(layouts: Iterable[EngineRankLayout], patterns: Sequence[str]) -> list[str]:
    """One line per pattern for :func:`leave` that no parameter of these engine ranks matches."""
    names = {p.name for one in layouts for p in one.params if not p.buffer}
    return [
        f"keep pattern {pattern!r} (SGLANG_RDT_KEEP) matches none of the engine's {len(names)} "
        "parameters"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _refuse_cuts(recording: Recording, kept: frozenset[str]) -> None:
    """What the engine's loader computes from several tensors is not made of some of them."""
    problems = []
    for one in recording.computed:
        missing = sorted(kept & set(one.sources))
        if missing and len(missing) < len(set(one.sources)):
            problems.append(
                f"{', '.join(one.params)}: computed from {', '.join(one.sources)}, of which the name "
                f"filter keeps {', '.join(missing)}: sync all of them or none"
            )
    if problems:
        raise RecordError(
            f"the name filter cuts through what belongs together:\n{listed(problems)}"
        )
