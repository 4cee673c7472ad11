"""Proofs before bytes: every parameter element exactly once, every HF element somewhere.

Each function returns a list of problems, one line each, naming the culprit; the caller raises
them all together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.slices import Box, Slice
from sglang_rdt.plan.specs import (
    LOSSLESS,
    EngineRankLayout,
    ParamSpec,
    TensorSpec,
    Want,
)

# A slice that is no box of its tensor is checked element by element up to this size.
MAX_BRUTE_FORCE = 1 << 24


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


def _elements(s: Slice) -> list[int]:
    offsets = [s.offset]
    for size, stride in zip(s.shape, s.stride, strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    return offsets


def _exactly_once(param: ParamSpec, parts: Sequence[tuple[Slice, str]], who: str) -> list[str]:
    """Problems unless ``parts`` (slice, label) cover each element of ``param`` exactly once."""
    for s, label in parts:
        try:
            slices.check(s, param.extent, f"{who}: {param.name} from {label}")
        except SlicesError as error:
            return [str(error)]
    if not parts:
        return [f"{who}: {param.name} {param.dtype}{list(param.shape)} is covered by no HF tensor"]
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
    if param.numel > MAX_BRUTE_FORCE:
        return [
            f"{who}: {param.name}: a loader slice is no rectangle of the parameter; cannot check its coverage"
        ]
    seen: dict[int, str] = {}
    for s, label in parts:
        for element in _elements(s):
            if element in seen:
                return [
                    f"{who}: {param.name}: element {element} comes from {seen[element]} and from {label}"
                ]
            seen[element] = label
    own = set(_elements(Slice(0, param.shape, param.stride)))
    problems = []
    if own - seen.keys():
        problems.append(
            f"{who}: {param.name}: {len(own - seen.keys())} of {param.numel} elements are covered by nothing"
        )
    if seen.keys() - own:
        problems.append(f"{who}: {param.name}: elements outside of the parameter are written")
    return problems


def check_rank(
    layout: EngineRankLayout, specs: Mapping[str, TensorSpec], allow_padding: bool = False
) -> list[str]:
    """Every element of every parameter of this rank comes from exactly one place.

    Parameters that share memory (tied weights) count as one. Buffers count only where the loader
    writes them. Constants are no more than the padding that the model's layout asks for, unless
    ``allow_padding``: a loader that fills up a tensor that is too small would hide a mistake.
    """
    who = str(layout.rank)
    params = {p.name: p for p in layout.params}
    problems: list[str] = []
    # One memory region per distinct view: tied parameters are one target with several names.
    region = {p.name: (p.storage, p.offset, p.shape, p.stride) for p in layout.params}
    parts: dict[tuple, list[tuple[Slice, str]]] = defaultdict(list)
    for want in layout.recording.wants:
        problems += _check_want(want, params, specs, who)
        if want.param in region:
            parts[region[want.param]].append((want.dst, want.source))
    for constant in layout.recording.constants:
        if constant.param not in params:
            problems.append(f"{who}: the loader fills {constant.param}, which is no parameter")
            continue
        parts[region[constant.param]].append((constant.dst, f"the constant {constant.value:g}"))
    if not allow_padding:
        problems += _check_padding(layout, who)
    seen = set()
    for param in layout.params:
        key = region[param.name]
        if key in seen or (param.buffer and key not in parts):
            continue
        seen.add(key)
        if param.numel:
            problems += _exactly_once(param, parts.get(key, []), who)
    return problems


def _check_padding(layout: EngineRankLayout, who: str) -> list[str]:
    filled: dict[str, int] = defaultdict(int)
    for constant in layout.recording.constants:
        filled[constant.param] += constant.dst.numel
    sources: dict[str, set[str]] = defaultdict(set)
    for want in layout.recording.wants:
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
    return problems, casts


def check_engine(layouts: Sequence[EngineRankLayout], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Every element of every HF tensor is used by at least one rank of this engine."""
    used: dict[str, list[Slice]] = defaultdict(list)
    for layout in layouts:
        for want in layout.recording.wants:
            used[want.source].append(want.src)
    engine = layouts[0].rank.engine if layouts else "engine"
    problems = []
    for name, spec in specs.items():
        if spec.numel == 0:
            continue
        if name not in used:
            problems.append(
                f"{engine}: HF tensor {name} {spec.dtype}{list(spec.shape)} goes nowhere"
            )
            continue
        stride = slices.contiguous_stride(spec.shape)
        boxes = [slices.to_box(s, spec.shape, stride) for s in dict.fromkeys(used[name])]
        if any(b is None for b in boxes):
            if spec.numel > MAX_BRUTE_FORCE:
                problems.append(
                    f"{engine}: a slice of HF tensor {name} is no rectangle; cannot check its use"
                )
                continue
            covered = len({e for s in used[name] for e in _elements(s)})
        else:
            covered = slices.union_volume([b for b in boxes if b is not None])
        if covered != spec.numel:
            problems.append(
                f"{engine}: {spec.numel - covered} of {spec.numel} elements of HF tensor {name} "
                f"{list(spec.shape)} go nowhere"
            )
    return problems
