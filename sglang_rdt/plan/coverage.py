"""Proofs before bytes: every parameter element exactly once, every HF element somewhere.

Each function returns a list of problems, one line each, naming the culprit; the caller raises
them all together.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.forms import MAX_BYTES
from sglang_rdt.plan.slices import Box, Slice
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    LOSSLESS,
    Computed,
    EngineRank,
    EngineRankLayout,
    ParamSpec,
    Recording,
    TensorSpec,
    Want,
    scratch_name,
)

# A slice that is no box of its tensor is checked element by element up to this size.
MAX_BRUTE_FORCE = 1 << 24
# How the engine's recorder calls it, see sglang_rdt/tracing.py.
_CAST = re.compile(r"a cast from (\w+) to (\w+)")


def union_of_specs(
    ranks: Iterable[Sequence[TensorSpec]],
) -> tuple[dict[str, TensorSpec], list[str]]:
    """All HF tensors that the trainer ranks yield together, and where ranks contradict."""
    union: dict[str, TensorSpec] = {}
    problems = []
    for specs in ranks:
        seen: set[str] = set()
        for spec in specs:
            if spec.name in seen:
                problems.append(f"{spec.name}: one trainer rank yields it twice")
            seen.add(spec.name)
            known = union.setdefault(spec.name, spec)
            if known != spec:
                problems.append(
                    f"{spec.name}: trainer ranks disagree: {known.dtype}{list(known.shape)} and "
                    f"{spec.dtype}{list(spec.shape)}"
                )
    return union, problems


def check_sizes(layout: EngineRankLayout, specs: Mapping[str, TensorSpec]) -> list[str]:
    """What the loader writes, and from where, has sizes and dtypes that memory can have."""
    wants = layout.recording.whole().wants
    wanted = {w.param for w in wants}
    sources = {w.source for w in wants}
    written = [p for p in layout.params if p.name in wanted]
    all_of: list[ParamSpec | TensorSpec] = [*written]
    all_of += [spec for name, spec in specs.items() if name in sources]
    problems = [
        f"{layout.rank}: {one.name} {one.dtype}{list(one.shape)} is no tensor of any memory"
        for one in all_of
        if one.dtype not in ITEMSIZE or one.nbytes > MAX_BYTES
    ]
    if not problems and sum(p.nbytes for p in written) > MAX_BYTES:
        problems.append(f"{layout.rank}: its parameters are larger than any memory")
    problems += [
        f"{layout.rank}: {p.name}: elements of it share memory, so it cannot be written"
        for p in written
        if p.numel > p.extent
    ]
    return problems


def _view(marks: NDArray[Any], s: Slice) -> NDArray[Any]:
    """The marks of a slice's elements; expanded dimensions (stride 0) once."""
    shape = tuple(1 if t == 0 else n for n, t in zip(s.shape, s.stride, strict=True))
    if not s.numel:
        return marks[:0]
    if s.offset < 0 or s.last >= marks.size:
        raise SlicesError(f"{s} leaves {marks.size} elements")  # it would be others' memory
    stride = tuple(t * marks.itemsize for t in s.stride)
    return np.lib.stride_tricks.as_strided(marks[s.offset :], shape, stride)


def _exactly_once(param: ParamSpec, parts: Sequence[tuple[Slice, str]], who: str) -> list[str]:
    """Problems unless ``parts`` (slice, label) cover each element of ``param`` exactly once."""
    for s, label in parts:
        try:
            slices.check(s, param.extent, f"{who}: {param.name} from {label}")
        except SlicesError as error:
            return [str(error)]
    if not parts:
        return [
            f"{who}: {param.name} {param.dtype}{list(param.shape)} is covered by no HF tensor "
            "(what the trainer does not have can be left as it is: SGLANG_RDT_KEEP)"
        ]
    boxes: list[Box] = []
    for s, _ in parts:
        box = slices.to_box(s, param.shape, param.stride)
        if box is None:
            return _exactly_once_brute(param, parts, who)
        boxes.append(box)
    twice = slices.first_overlap(boxes)
    if twice is not None:
        one, two = (parts[i][1] for i in twice)
        return [f"{who}: {param.name}: the same elements come from {one} and from {two}"]
    missing = param.numel - sum(b.volume for b in boxes)
    if missing:
        labels = ", ".join(sorted({label for _, label in parts}))
        return [
            f"{who}: {param.name}: {missing} of {param.numel} elements are covered by nothing (it has {labels})"
        ]
    return []


def _exactly_once_brute(
    param: ParamSpec, parts: Sequence[tuple[Slice, str]], who: str
) -> list[str]:
    if param.extent > MAX_BRUTE_FORCE:
        return [
            f"{who}: {param.name}: a loader slice is no rectangle of the parameter; cannot check its coverage"
        ]
    # Which part (from 1) writes each element. A part is never larger than the parameter, so that
    # no view of the marks is.
    marks = np.zeros(param.extent, np.int32)
    own = _view(marks, Slice(0, param.shape, param.stride))
    for number, (s, label) in enumerate(parts, 1):
        view = _view(marks, s)
        if s.numel > param.numel or view.size != s.numel:
            return [
                f"{who}: {param.name}: {label} is written to {s}, in which elements repeat "
                f"(it has {param.numel})"
            ]
        if view.any():
            element = _first_written(s, view)
            earlier = parts[int(marks[element]) - 1][1]
            return [f"{who}: {param.name}: element {element} comes from {earlier} and from {label}"]
        view[...] = number
        if int((marks == number).sum()) != s.numel:
            return [f"{who}: {param.name}: {label} is written to {s}, in which elements repeat"]
    problems = []
    missing = own.size - int(np.count_nonzero(own))
    if missing:
        problems.append(
            f"{who}: {param.name}: {missing} of {param.numel} elements are covered by nothing"
        )
    own[...] = 0
    if marks.any():
        problems.append(f"{who}: {param.name}: elements outside of the parameter are written")
    return problems


def _first_written(s: Slice, view: NDArray[Any]) -> int:
    index = np.unravel_index(int(np.flatnonzero(view)[0]), view.shape)
    return s.offset + sum(int(i) * t for i, t in zip(index, s.stride, strict=True))


def check_rank(
    layout: EngineRankLayout, specs: Mapping[str, TensorSpec], allow_padding: bool = False
) -> list[str]:
    """Every element of every parameter of this rank comes from exactly one place.

    Parameters that share memory (tied weights) count as one. Buffers count only where the loader
    writes them. Constants are no more than the padding that the model's layout asks for, unless
    ``allow_padding``: a loader that fills up a tensor that is too small would hide a mistake.

    With a name filter, what it keeps counts: elements stay as they are where HF tensors that are
    not synced, and nothing else, would fill them. A parameter that is kept by its own name must be
    filled by nothing.
    """
    who = str(layout.rank)
    recording = layout.recording.whole()
    params = {p.name: p for p in layout.params}
    problems: list[str] = []
    # One memory region per distinct view: tied parameters are one target with several names.
    region = {p.name: (p.storage, p.offset, p.shape, p.stride) for p in layout.params}
    parts: dict[tuple, list[tuple[Slice, str]]] = defaultdict(list)
    for want in recording.wants:
        problems += _check_want(want, params, specs, who)
        if want.param in region:
            parts[region[want.param]].append((want.dst, want.source))
    for constant in recording.constants:
        if constant.param not in params:
            problems.append(f"{who}: the loader fills {constant.param}, which is no parameter")
            continue
        parts[region[constant.param]].append((constant.dst, f"the constant {constant.value:g}"))
    for one in recording.computed:
        problems += _check_computed(one, params, layout.recording, who)
        label = f"what the loader computes of {', '.join(one.sources)}"
        for write in one.writes:
            if write.param in region:
                parts[region[write.param]].append((write.dst, label))
    if not allow_padding:
        problems += _check_padding(layout, who)
    names: dict[tuple, list[str]] = defaultdict(list)
    for param in layout.params:
        names[region[param.name]].append(param.name)
    seen = set()
    for param in layout.params:
        key = region[param.name]
        if key in seen or (param.buffer and key not in parts):
            continue
        seen.add(key)
        kept = [name for name in names[key] if name in recording.kept.params]
        if kept and key in parts:
            labels = ", ".join(sorted({label for _, label in parts[key]}))
            problems.append(
                f"{who}: {', '.join(kept)} is to be kept (SGLANG_RDT_KEEP), but comes from {labels}: "
                "what the trainer has is kept by its HF name (SGLANG_RDT_EXCLUDE)"
            )
            continue
        if len(kept) == len(names[key]):  # under every name that it has
            continue
        if param.numel:
            problems += _exactly_once(param, parts.get(key, []), who)
    return problems


def _check_computed(
    one: Computed, params: Mapping[str, ParamSpec], recording: Recording, who: str
) -> list[str]:
    """Everything that goes in is pulled whole (what is pulled there is checked like all wants),
    unless it is kept."""
    pulled = {want.param for want in recording.wants}
    return [
        f"{who}: {', '.join(one.params)}: {name} goes in, and is not pulled"
        for name in one.sources
        if scratch_name(name) not in pulled and one not in recording.kept.computed
    ] + [
        f"{who}: {write.param} is computed of {', '.join(one.sources)}, and is no parameter"
        for write in one.writes
        if write.param not in params
    ]


def _check_padding(layout: EngineRankLayout, who: str) -> list[str]:
    recording = layout.recording.whole()
    filled: dict[str, int] = defaultdict(int)
    for constant in recording.constants:
        filled[constant.param] += constant.dst.numel
    sources: dict[str, set[str]] = defaultdict(set)
    for want in recording.wants:
        sources[want.param].add(want.source)
    return [
        f"{who}: {name}: the loader fills {count} elements with a constant where the model has "
        f"{layout.recording.padding.get(name, 0)} to pad: "
        f"{', '.join(sorted(sources[name])) or 'nothing'} is too small for it "
        "(SGLANG_RDT_ALLOW_PADDING=1 if it is meant to be)"
        for name, count in sorted(filled.items())
        if count > layout.recording.padding.get(name, 0)
    ]


def _check_want(
    want: Want, params: Mapping[str, ParamSpec], specs: Mapping[str, TensorSpec], who: str
) -> list[str]:
    if want.param not in params:
        return [f"{who}: {want.source} goes into {want.param}, which is no parameter"]
    spec = specs.get(want.source)
    if spec is None:
        return [f"{who}: {want.param} comes from {want.source}, which the trainer does not yield"]
    if want.dst.shape != want.src.shape:
        return [
            f"{who}: {want.param}: shapes differ: {list(want.dst.shape)} from "
            f"{list(want.src.shape)} of {want.source}"
        ]
    try:
        slices.check(want.src, spec.numel, f"{who}: {want.param} from {want.source}")
    except SlicesError as error:
        return [str(error)]
    return []


def check_dtypes(
    layout: EngineRankLayout, specs: Mapping[str, TensorSpec], allow_cast: bool
) -> tuple[list[str], list[str]]:
    """``(problems, casts)``: conversions that would lose bits without the user's word, and the
    conversions (one line each) that will happen."""
    params = {p.name: p for p in layout.params}
    problems, casts = [], []
    for want in layout.recording.wants:
        param, spec = params.get(want.param), specs.get(want.source)
        if param is None or spec is None or param.dtype == spec.dtype:
            continue
        line = f"{layout.rank}: {want.source} is {spec.dtype}, {want.param} is {param.dtype}"
        if (spec.dtype, param.dtype) in LOSSLESS or allow_cast:
            casts.append(line)
        else:
            problems.append(f"{line}; set SGLANG_RDT_ALLOW_CAST=1 to round")
    for one in layout.recording.computed:
        # On the way, too: what is rounded first does not come back.
        on_the_way = _CAST.findall(one.why)
        for name, written in itertools.product(one.sources, one.params):
            spec, param = specs.get(name), params.get(written)
            if spec is None or param is None:
                continue
            become = [param.dtype, *(to for of, to in on_the_way if of == spec.dtype)]
            if not any(_rounds(spec.dtype, dtype) for dtype in become):
                continue
            line = (
                f"{layout.rank}: {name} is {spec.dtype}, {written} is {param.dtype}, and the loader "
                "casts"
            )
            if allow_cast:
                casts.append(line)
            else:
                problems.append(f"{line}; set SGLANG_RDT_ALLOW_CAST=1 to round")
    return problems, casts


def _rounds(one: str, other: str) -> bool:
    """Whether numbers of one dtype lose bits in the other one. Not where a loader quantises: that
    is how the engine was started, not for a sync to judge."""
    floats = {"float64", "float32", "float16", "bfloat16"}
    return one in floats and other in floats and one != other and (one, other) not in LOSSLESS


def replica_of(rank: EngineRank) -> int:
    """Which whole copy of the model an engine rank belongs to, by number. Engines with DP attention
    have one, of which all ranks hold a part."""
    return 0 if rank.dp_attention else rank.rank.dp


def check_engine(layouts: Sequence[EngineRankLayout], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Every element of every HF tensor is used by at least one rank of this engine; of each
    replica, if it has several. The ranks of one pipeline stage use a part only, and those of all
    stages together everything. What a name filter keeps need not be used: nothing is made of it."""
    replicas: dict[int, list[EngineRankLayout]] = defaultdict(list)
    for layout in layouts:
        replicas[replica_of(layout.rank)].append(layout)
    problems = []
    for number, here in sorted(replicas.items()):
        one = here[0].rank
        copies = one.dp_size > 1 and not one.dp_attention
        who = f"{one.engine} dp{number}" if copies else one.engine
        problems += _check_replica(here, specs, who)
    return problems if layouts else _check_replica([], specs, "engine")


def _check_replica(
    layouts: Sequence[EngineRankLayout], specs: Mapping[str, TensorSpec], engine: str
) -> list[str]:
    used: dict[str, list[Slice]] = defaultdict(list)
    kept: set[str] = set()
    for layout in layouts:
        kept |= layout.recording.kept.names
        for want in layout.recording.wants:
            used[want.source].append(want.src)
    problems = []
    for name, spec in specs.items():
        if spec.numel == 0 or name in kept:
            continue
        if name not in used:
            problems.append(
                f"{engine}: HF tensor {name} {spec.dtype}{list(spec.shape)} goes nowhere"
            )
            continue
        stride = slices.contiguous_stride(spec.shape)
        # What leaves the tensor is named by :func:`check_rank`; here it is no use of any element.
        here = [s for s in dict.fromkeys(used[name]) if not s.numel or s.last < spec.numel]
        boxes = [slices.to_box(s, spec.shape, stride) for s in here if s.numel]
        if any(b is None for b in boxes):
            if spec.numel > MAX_BRUTE_FORCE:
                problems.append(
                    f"{engine}: a slice of HF tensor {name} is no rectangle; cannot check its use"
                )
                continue
            marks = np.zeros(spec.numel, np.bool_)
            repeating = [s for s in here if _view(marks, s).size > spec.numel]
            if repeating:
                problems.append(
                    f"{engine}: {repeating[0]} of HF tensor {name} repeats elements; cannot check "
                    "its use"
                )
                continue
            for s in here:
                _view(marks, s)[...] = True
            covered = int(np.count_nonzero(marks))
        else:
            covered = slices.union_volume([b for b in boxes if b is not None])
        if covered != spec.numel:
            problems.append(
                f"{engine}: {spec.numel - covered} of {spec.numel} elements of HF tensor {name} "
                f"{list(spec.shape)} go nowhere"
            )
    return problems
