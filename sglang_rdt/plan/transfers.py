"""One transfer of direct mode, and what an engine rank checks before it acts on what it was sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sglang_rdt.brief import brief
from sglang_rdt.errors import SlicesError
from sglang_rdt.plan import slices
from sglang_rdt.plan.boxes import first_overlap
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.forms import MAX_BYTES, why_no_slice
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import ITEMSIZE, ParamSpec, Want

How = Literal["direct", "unpack", "pack"]
HOWS: tuple[How, ...] = get_args(How)

# Each costs a descriptor; nobody plans more.
MAX_RUNS = 1 << 24
# A slice that is no rectangle of its parameter is checked element by element up to this size.
MAX_MARKED = 1 << 30


@dataclass(frozen=True, slots=True)
class Transfer:
    """The slice ``src`` of a trainer rank's block becomes the slice ``dst`` of a parameter.

    Args:
        source: the trainer rank's number.
        block: number of its block.
        src: elements of ``src_dtype`` from the block's first byte.
        dst: elements of ``dtype`` from the parameter's first element; same shape as ``src``.
        how: "direct": read run by run into the parameter; "unpack": the source's runs are read
            into scratch memory and copied into place from there; "pack": the source copies the
            slice into a contiguous buffer of ``dtype``, which is read.
    """

    source: int
    block: int
    src: Slice
    src_dtype: str
    param: str
    dst: Slice
    dtype: str
    how: How

    @property
    def nbytes(self) -> int:
        """Bytes that go over the link."""
        return self.dst.numel * ITEMSIZE[self.dtype if self.how == "pack" else self.src_dtype]


def wanted_elements(wants: Iterable[Want]) -> dict[str, int]:
    """How many elements of each parameter the loader writes."""
    count: dict[str, int] = {}
    for want in wants:
        count[want.param] = count.get(want.param, 0) + want.dst.numel
    return count


def check_target_transfers(
    params: Iterable[ParamSpec],
    transfers: Sequence[Transfer],
    wanted: Mapping[str, int] | None = None,
) -> None:
    """What an engine rank runs on the transfers that it was sent, before any byte moves.

    Args:
        params: its own live parameters.
        wanted: parameter -> how many of its elements must be written (:func:`wanted_elements` of
            its own recording); None: whatever number.

    Raises:
        SlicesError: naming the first transfer that is malformed, leaves its parameter, has the
            wrong dtype or writes what another one writes; or the parameter of which too few or
            too many elements would be written.
    """
    by_name = {p.name: p for p in params}
    written: dict[str, list[Slice]] = {}
    runs = 0
    for number, one in enumerate(transfers):
        what = f"transfer {number}"
        if type(one) is not Transfer:
            raise SlicesError(f"{what} is no Transfer but {type(one).__name__}")
        if not isinstance(one.param, str) or one.param not in by_name:
            raise SlicesError(f"{what} writes {brief(one.param, 200)}, which is no parameter")
        param = by_name[one.param]
        what = f"{what} into {param.name}"
        runs += _check_one(one, param, what)
        if runs > MAX_RUNS:
            raise SlicesError(f"{what}: more than {MAX_RUNS} runs of bytes are to be read")
        written.setdefault(param.name, []).append(one.dst)
    for name, parts in written.items():
        _check_disjoint(by_name[name], parts)
    if wanted is None:
        return
    for name in dict.fromkeys([*wanted, *written]):
        count = sum(s.numel for s in written.get(name, []))
        if count != wanted.get(name, 0):
            raise SlicesError(
                f"the transfers into {name} write {count} elements; "
                f"its loader writes {wanted.get(name, 0)}"
            )


def check_targets(
    params: Mapping[str, ParamSpec], items: Sequence[str | Target], who: str
) -> list[tuple[str, Slice]]:
    """What an engine rank runs on the places that one pull is to fill, before any byte moves.

    Returns:
        Parameter and slice of each.

    Raises:
        SlicesError: naming the first that is malformed, no parameter, leaves it, has the wrong
            dtype, repeats elements, or has elements that another one has too.
    """
    if type(items) not in (list, tuple):
        raise SlicesError(f"{who}: {brief(items)} is no list of parameters and slices")
    places: list[tuple[str, Slice]] = []
    for item in items:
        name = item.param if type(item) is Target else item
        param = params.get(name) if isinstance(name, str) else None
        if param is None:
            raise SlicesError(f"{who} has no parameter {brief(name, 200)}")
        if type(item) is not Target:
            places.append((param.name, Slice(0, param.shape, param.stride)))
            continue
        what = f"{who}: {param.name}"
        _check_form(item.dst, what)
        slices.check(item.dst, param.extent, what)
        if item.dtype != param.dtype:
            raise SlicesError(f"{what} is {param.dtype}, not {brief(item.dtype)[1:-1]}")
        if _repeats(item.dst):
            raise SlicesError(f"{what}: {item.dst} repeats elements")
        places.append((param.name, item.dst))
    _check_apart(params, places, who)
    return places


def _repeats(s: Slice) -> bool:
    """Whether elements of ``s`` may share memory: a dimension steps less far than the ones inside
    of it reach."""
    reach = 0
    for step, count in sorted((t, n) for n, t in zip(s.shape, s.stride, strict=True) if n > 1):
        if step <= reach and s.numel:
            return True
        reach += (count - 1) * step
    return False


def _check_apart(
    params: Mapping[str, ParamSpec], places: Iterable[tuple[str, Slice]], who: str
) -> None:
    by_param: dict[str, list[Slice]] = {}
    for name, s in places:
        if s.numel:
            by_param.setdefault(name, []).append(s)
    for name, parts in by_param.items():
        parts.sort(key=lambda s: s.offset)
        # As a rule one ends before the next begins; only where not, a closer look is needed.
        if all(a.last < b.offset for a, b in itertools.pairwise(parts)):
            continue
        param = params[name]
        boxes = [(slices.to_box(s, param.shape, param.stride), s) for s in parts]
        known = [(box, s) for box, s in boxes if box is not None]
        twice = first_overlap([box for box, _ in known])
        if twice is not None:
            raise SlicesError(
                f"{who}: {name}: {known[twice[0]][1]} and {known[twice[1]][1]} have elements in common"
            )


def _check_one(one: Transfer, param: ParamSpec, what: str) -> int:
    """How many runs of bytes it is read in."""
    if one.how not in HOWS:
        raise SlicesError(f"{what}: unknown way to move it: {brief(one.how)}")
    if one.dtype != param.dtype:
        raise SlicesError(f"{what}: it brings {brief(one.dtype)}, the parameter is {param.dtype}")
    if not isinstance(one.src_dtype, str) or one.src_dtype not in ITEMSIZE:
        raise SlicesError(f"{what}: unknown source dtype {brief(one.src_dtype)}")
    if one.how == "direct" and one.src_dtype != one.dtype:
        raise SlicesError(f"{what}: {one.src_dtype} cannot become {one.dtype} without a copy")
    for number, which in ((one.source, "source"), (one.block, "block")):
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise SlicesError(f"{what}: {brief(number)} is no {which} number")
    _check_form(one.src, what)
    _check_form(one.dst, what)
    if one.src.shape != one.dst.shape:
        raise SlicesError(f"{what}: shapes differ: {one.src.shape} and {one.dst.shape}")
    slices.check(one.dst, param.extent, what)
    slices.check(one.src, MAX_BYTES // ITEMSIZE[one.src_dtype], f"{what}, source side")
    if one.how == "pack":
        return 1
    # An unpacked slice is read in the runs that it has on the source.
    sides = (one.src, one.dst) if one.how == "direct" else (one.src,)
    run, fits = 1, True
    while fits:
        fits = False
        for n, *strides in zip(one.src.shape, *(s.stride for s in sides), strict=True):
            if n > 1 and all(t == run for t in strides):
                run, fits = run * n, True
                break
    return one.src.numel // run


def _check_form(s: Slice, what: str) -> None:
    why = why_no_slice(s)
    if why:
        raise SlicesError(f"{what}: {why}")


def _check_disjoint(param: ParamSpec, parts: Sequence[Slice]) -> None:
    parts = [s for s in parts if s.numel]
    count = sum(s.numel for s in parts)
    if count > param.numel:
        raise SlicesError(
            f"the transfers into {param.name} write {count} elements; it has {param.numel}"
        )
    boxes = [slices.to_box(s, param.shape, param.stride) for s in parts]
    known = [b for b in boxes if b is not None]
    if len(known) == len(boxes):
        twice = first_overlap(known)
        if twice is not None:
            raise SlicesError(
                f"two transfers write the same elements of {param.name}: "
                f"{parts[twice[0]]} and {parts[twice[1]]}"
            )
        return
    if param.extent > MAX_MARKED:
        raise SlicesError(
            f"a transfer writes no rectangle of {param.name}; cannot check that none overlaps"
        )
    seen = np.zeros(param.extent, np.bool_)
    for s in parts:
        view = np.lib.stride_tricks.as_strided(seen[s.offset :], s.shape, s.stride)
        if view.any():
            raise SlicesError(f"two transfers write the same elements of {param.name}: {s}")
        view[...] = True
    if int(seen.sum()) != count:
        raise SlicesError(f"a transfer writes an element of {param.name} twice")
    np.lib.stride_tricks.as_strided(seen, param.shape, param.stride)[...] = False
    if seen.any():
        raise SlicesError(f"a transfer writes into gaps of {param.name}, which are not its own")
