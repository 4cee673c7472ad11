"""What both sides report, looked at before anything is computed with it.

Wants, parameters, holds and identities come from other processes. Whether they fit together is for
:mod:`sglang_rdt.plan.coverage` to prove; here it is only asked whether they are what they are said
to be: whole numbers that memory can have, names that a message can carry, nothing twice. Each
function returns problems, one line each, naming the culprit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from sglang_rdt.brief import brief
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Block,
    Computed,
    Constant,
    EngineRank,
    EngineRankLayout,
    Hold,
    Kept,
    ParamSpec,
    RankId,
    Recording,
    TensorSpec,
    TrainerRank,
    Want,
    Write,
)

# No memory is larger, and products of two such numbers still are numbers that numpy can hold.
MAX_BYTES = 1 << 48
MAX_DIMS = 16
# Of one dimension of a tensor: plans count rows in 32 bits.
MAX_SIZE = (1 << 31) - 1
MAX_NAME = 1024
# Ranks of one engine, in each direction.
MAX_RANKS = 1 << 16
# Once so many things of one side are bad, the rest says nothing new.
_ENOUGH = 200


def why_no_slice(s: Any) -> str | None:
    """What is wrong with ``s`` as a slice of any memory, or None."""
    if type(s) is not Slice or type(s.shape) is not tuple or type(s.stride) is not tuple:
        return "a slice is malformed"
    if len(s.shape) != len(s.stride) or len(s.shape) > MAX_DIMS:
        return f"a slice has {len(s.shape)} sizes and {len(s.stride)} strides"
    for number in (s.offset, *s.shape, *s.stride):
        if type(number) is not int or not 0 <= number <= MAX_BYTES:
            negative = type(number) is int and number < 0
            return f"{brief(number)} is no size, stride or offset" + (
                " (negative)" if negative else ""
            )
    # Without the zeros: an empty slice of a hostile shape must not overflow anything either.
    if math.prod(n or 1 for n in s.shape) > MAX_BYTES:
        return f"a slice of {brief(s.shape)} is larger than any memory"
    return None


def _why_no_name(name: Any) -> str | None:
    if type(name) is str and 0 < len(name) <= MAX_NAME and name.isprintable():
        return None
    return f"{brief(name)} is no name"


def _why_no_text(text: Any) -> str | None:
    if type(text) is str and len(text) <= MAX_NAME and (text.isprintable() or not text):
        return None
    return f"{brief(text)} is no text of one line"


def _why_no_shape(shape: Any) -> str | None:
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        return f"{brief(shape)} is no shape"
    if any(type(n) is not int or not 0 <= n <= MAX_SIZE for n in shape):
        return f"{brief(shape)} is no shape"
    if math.prod(n or 1 for n in shape) > MAX_BYTES:
        return f"{brief(shape)} is larger than any memory"
    return None


def _number(value: Any, high: int, low: int = 0) -> bool:
    return type(value) is int and low <= value <= high


def _listed(items: Any, kind: type, what: str) -> str | None:
    if type(items) not in (tuple, list):
        return f"{what}: {brief(items)} is no list"
    if set(map(type, items)) <= {kind}:
        return None
    odd = next(item for item in items if type(item) is not kind)
    return f"{what}: {brief(odd)} is no {kind.__name__}"


# The trainer.


def check_trainers(trainers: Sequence[Any]) -> list[str]:
    """Problems of what the trainer ranks report about themselves and yield. What they hold is
    looked at where it is put together (:class:`sglang_rdt.plan.compose.Composer`)."""
    problems: list[str] = []
    seen: dict[int, TrainerRank] = {}
    for place, one in enumerate(trainers):
        found = _check_trainer(one, place)
        if not found and one.rank in seen:
            found.append(f"{one} and {seen[one.rank]} have the same number")
        elif not found:
            seen[one.rank] = one
        problems += found
    if not problems:
        problems = [
            p for who, each in distinct_exports(trainers) for p in _check_exports(each, who)
        ]
    return problems[:_ENOUGH]


def distinct_exports(
    trainers: Sequence[TrainerRank],
) -> list[tuple[TrainerRank, Sequence[TensorSpec]]]:
    """What the trainer ranks yield, each different list once: the ranks of a pipeline stage yield
    the same."""
    distinct: list[tuple[TrainerRank, Sequence[TensorSpec]]] = []
    known: set[int] = set()
    for trainer in trainers:
        exports = trainer.exports
        if id(exports) not in known and all(exports != other for _, other in distinct):
            distinct.append((trainer, exports))
        known.add(id(exports))
    return distinct


def _check_trainer(one: Any, place: int) -> list[str]:
    if type(one) is not TrainerRank:
        return [f"trainer {place}: {brief(one)} is no TrainerRank"]
    if not _number(one.rank, MAX_SIZE) or type(one.coordinates) is not dict:
        return [f"trainer {place}: {brief(one.rank)}, {brief(one.coordinates)} is no rank"]
    for key, value in one.coordinates.items():
        if _why_no_name(key) or not _number(value, MAX_SIZE):
            return [f"trainer rank {one.rank}: {brief(key)} {brief(value)} is no coordinate"]
    why = _why_no_text(one.node_ip)
    if why:
        return [f"{one}: its node: {why}"]
    # What is in it is looked at once for all ranks that yield the same.
    if type(one.exports) not in (tuple, list):
        return [f"{one}: {brief(one.exports)} is no list"]
    for items, kind in ((one.blocks, Block), (one.holds, Hold)):
        why = _listed(items, kind, str(one))
        if why:
            return [why]
    return [
        f"{one}: block {number}: {why or brief(block.nbytes)}"
        for number, block in enumerate(one.blocks)
        for why in [_why_no_text(block.name)]
        if why or type(block.nbytes) is not int
    ]


_SPEC = attrgetter("name", "shape", "dtype")


def _check_exports(exports: Sequence[TensorSpec], who: TrainerRank) -> list[str]:
    why = _listed(exports, TensorSpec, str(who))
    problems = [why] if why else []
    if why or not exports:
        return problems
    names, shapes, dtypes = zip(*map(_SPEC, exports), strict=True)
    if (
        _all_names(names)
        and set(map(type, shapes)) == {tuple}
        and set(map(type, chain(*shapes))) <= {int}  # 1, 1.0 and True are equal
        and not any(map(_why_no_shape, set(shapes)))
        and set(map(type, dtypes)) == {str}
        and not any(map(_why_no_text, set(dtypes)))
    ):
        return problems
    for spec in exports:
        why = _why_no_name(spec.name) or _why_no_text(spec.dtype) or _why_no_shape(spec.shape)
        if why:
            problems.append(f"{who}: HF tensor {brief(spec.name)}: {why}")
            if len(problems) > _ENOUGH:
                break
    return problems


# The engines.


def check_identity(rank: Any) -> str | None:
    """What is wrong with an engine rank's identity, or None."""
    if type(rank) is not EngineRank or type(rank.rank) is not RankId:
        return f"{brief(rank)} is no engine rank"
    for field in ("engine", "actor_name", "instance"):
        why = _why_no_name(getattr(rank, field))
        if why:
            return f"{field}: {why}"
    for field in ("namespace", "node_ip", "released_name", "sglang_version", "package_version"):
        why = _why_no_text(getattr(rank, field))
        if why:
            return f"{field}: {why}"
    place = rank.rank
    for name, size, at in (
        ("dp", rank.dp_size, place.dp),
        ("pp", rank.pp_size, place.pp),
        ("tp", rank.tp_size, place.tp),
    ):
        if not _number(size, MAX_RANKS, 1):
            return f"{rank.engine}: {brief(size)} is no {name} size"
        if not _number(at, MAX_RANKS):
            return f"{rank.engine}: {brief(at)} is no {name} rank"
    return None


def check_layouts(layouts: Iterable[Any]) -> list[str]:
    """Problems of the engine ranks' identities; their contents: :func:`check_layout`."""
    problems: list[str] = []
    seen: set[str] = set()
    for place, one in enumerate(layouts):
        if type(one) is not EngineRankLayout:
            problems.append(f"engine rank {place}: {brief(one)} is no EngineRankLayout")
            continue
        why = check_identity(one.rank)
        if why:
            problems.append(f"engine rank {place}: {why}")
        elif str(one.rank) in seen:
            problems.append(f"{one.rank} is there twice")
        else:
            seen.add(str(one.rank))
    return problems


def check_layout(layout: EngineRankLayout) -> list[str]:
    """Problems of what an engine rank reports: its parameters and its recording."""
    who, recording = str(layout.rank), layout.recording
    if type(recording) is not Recording or type(recording.padding) is not dict:
        return [f"{who}: {brief(recording)} is no Recording"]
    kept = recording.kept
    if (
        type(kept) is not Kept
        or type(kept.names) is not frozenset
        or type(kept.params) is not frozenset
        or not all(type(name) is str for name in (*kept.names, *kept.params))
    ):
        return [f"{who}: {brief(kept)} is nothing that a filter keeps"]
    problems: list[str] = []
    for items, kind in (
        (layout.params, ParamSpec),
        (recording.wants, Want),
        (recording.constants, Constant),
        (recording.computed, Computed),
        (kept.wants, Want),
        (kept.constants, Constant),
        (kept.computed, Computed),
    ):
        why = _listed(items, kind, who)
        if why:
            problems.append(why)
    if problems:
        return problems
    recording = recording.whole()
    names: set[str] = set()
    for param in layout.params:
        why = _why_no_param(param)
        if why is None and param.name in names:
            why = "there are two of this name"
        if why:
            problems.append(f"{who}: parameter {brief(param.name)}: {why}")
        else:
            names.add(param.name)
    for number, want in enumerate(() if _all_wants(recording.wants) else recording.wants):
        why = (
            _why_no_name(want.param)
            or _why_no_name(want.source)
            or why_no_slice(want.dst)
            or why_no_slice(want.src)
        )
        if why:
            problems.append(
                f"{who}: want {number}, {brief(want.param)} from {brief(want.source)}: {why}"
            )
    for constant in recording.constants:
        why = _why_no_name(constant.param) or why_no_slice(constant.dst)
        if why is None and type(constant.value) not in (int, float, bool):
            why = f"{brief(constant.value)} is no number"
        if why is None and isinstance(constant.value, int) and abs(constant.value) > MAX_BYTES:
            why = f"{brief(constant.value)} is no value of a weight"
        if why:
            problems.append(f"{who}: a constant in {brief(constant.param)}: {why}")
    for one in recording.computed:
        why = _why_not_computed(one)
        if why:
            problems.append(f"{who}: a computation of {brief(one.sources)}: {why}")
    for name, count in recording.padding.items():
        if _why_no_name(name) or not _number(count, MAX_BYTES):
            problems.append(f"{who}: padding of {brief(name)}: {brief(count)} elements")
    return problems[:_ENOUGH]


def _why_not_computed(one: Computed) -> str | None:
    why = _listed(one.writes, Write, "its writes") or _why_no_text(one.why)
    if why is None and (type(one.sources) is not tuple or not one.sources):
        why = f"{brief(one.sources)} are no HF tensors"
    if why is None:
        why = next(filter(None, map(_why_no_name, one.sources)), None)
    for write in one.writes if why is None else ():
        why = why or _why_no_name(write.param) or why_no_slice(write.dst)
    return why


_WANT = attrgetter("param", "source", "dst", "src")
_SLICE = attrgetter("offset", "shape", "stride")


def _all_wants(wants: Sequence[Want]) -> bool:
    """Whether nothing is wrong with any; faster than one by one, of which there are many."""
    if not wants:
        return True
    params, sources, one, two = zip(*map(_WANT, wants), strict=True)
    return _all_names(params) and _all_names(sources) and _all_slices(one) and _all_slices(two)


def _all_names(names: Sequence[Any]) -> bool:
    if set(map(type, names)) != {str}:
        return False
    different = set(names)
    return (
        "" not in different
        and max(map(len, different)) <= MAX_NAME
        and "".join(different).isprintable()
    )


def _all_slices(all_of: Sequence[Any]) -> bool:
    if set(map(type, all_of)) != {Slice}:
        return False
    offsets, shapes, strides = zip(*map(_SLICE, all_of), strict=True)
    if set(map(type, shapes)) | set(map(type, strides)) != {tuple}:
        return False
    # By their types too: 1, 1.0 and True are equal.
    if set(map(type, chain(offsets, *shapes, *strides))) != {int}:
        return False
    if min(offsets) < 0 or max(offsets) > MAX_BYTES:
        return False
    return not any(why_no_slice(Slice(0, a, b)) for a, b in set(zip(shapes, strides, strict=True)))


def _why_no_param(param: ParamSpec) -> str | None:
    why = _why_no_name(param.name) or _why_no_text(param.dtype) or _why_no_shape(param.shape)
    if why:
        return why
    if type(param.stride) is not tuple or len(param.stride) != len(param.shape):
        return f"shape {brief(param.shape)} with stride {brief(param.stride)}"
    if not all(_number(t, MAX_BYTES) for t in param.stride):
        return f"{brief(param.stride)} is no stride"
    if not _number(param.offset, MAX_BYTES) or not _number(param.storage, 1 << 64, -(1 << 64)):
        return f"it lies at {brief(param.offset)} of storage {brief(param.storage)}"
    if param.offset + param.extent > MAX_BYTES:
        return f"it ends at element {param.offset + param.extent}, behind any memory"
    if type(param.buffer) is not bool:
        return f"{brief(param.buffer)} is neither a buffer nor a parameter"
    return None
