"""Which parameter of which engine rank goes which way, and how many bytes each way moves.

Ways, of what a sync does to an element of a parameter:

- ``direct``: read where the trainer has it, written where the engine serves it
- ``staged``: the same, through a staging buffer on either side
- ``bucketed``: gathered, converted and staged by the trainer
- ``computed``: made by the engine's own loader, of HF tensors that are pulled into scratch memory
  (these are lines of their own)
- ``constant``: set by the engine, as its loader does
- ``kept``: left as it is by the name filter, or because it belongs to another model
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_rdt.plan.direct import DirectPlan
from sglang_rdt.plan.planner import Plan
from sglang_rdt.plan.specs import ITEMSIZE, EngineRankLayout, ParamSpec, TensorSpec

WAYS = ("direct", "staged", "bucketed", "computed", "constant", "kept")
# Over a link; the others are done by the engine alone, or not at all.
MOVING = ("direct", "staged", "bucketed")


@dataclass(frozen=True)
class Line:
    """What goes one way into one parameter of one engine rank.

    ``sources``: names of HF tensors. ``nbytes``: over the link for what moves, in the parameter for
    what does not. ``cast``: ``float32 to bfloat16`` where bytes change. ``why``: of what is computed.
    """

    rank: str
    param: str
    way: str
    sources: tuple[str, ...]
    nbytes: int
    dtype: str
    cast: str = ""
    why: str = ""


@dataclass(frozen=True)
class Report:
    """A live plan, for a person or a program.

    ``models``: engine rank -> which models it has. ``unused``: HF tensors that are kept and that no
    engine has a place for.
    """

    mode: str
    lines: tuple[Line, ...]
    models: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def totals(self) -> dict[str, tuple[int, int]]:
        """Way -> lines and bytes, of all engine ranks."""
        out = {}
        for way in WAYS:
            here = [line.nbytes for line in self.lines if line.way == way]
            if here:
                out[way] = len(here), sum(here)
        return out

    @property
    def moved(self) -> int:
        """Bytes over all links."""
        return sum(line.nbytes for line in self.lines if line.way in MOVING)


def report(layouts: Sequence[EngineRankLayout], plan: Plan | DirectPlan) -> Report:
    """What ``plan`` does to the engine ranks in ``layouts``."""
    direct = isinstance(plan, DirectPlan)
    lines: list[Line] = []
    used: set[str] = set()
    kept: set[str] = set()
    index = {str(rank): i for i, rank in enumerate(plan.targets)} if direct else {}  # type: ignore[union-attr]
    for layout in layouts:
        params = {p.name: p for p in layout.params}
        moved = (
            _directly(plan, index[str(layout.rank)])  # type: ignore[arg-type]
            if direct
            else _in_buckets(layout, params)
        )
        lines += _lines(layout, params, plan.specs, moved)
        kept |= layout.recording.kept.names
        used |= {w.source for w in layout.recording.kept.wants}
    return Report(
        "direct" if direct else "bucketed",
        tuple(lines),
        {str(one.rank): one.rank.runners for one in layouts},
        tuple(sorted(kept - used)),
    )


def _directly(plan: DirectPlan, target: int) -> Iterator[tuple[str, str, int]]:
    for one in plan.transfers(target):
        yield one.param, "direct" if one.how == "direct" else "staged", one.nbytes


def _in_buckets(
    layout: EngineRankLayout, params: Mapping[str, ParamSpec]
) -> Iterator[tuple[str, str, int]]:
    for want in layout.recording.wants:
        yield want.param, "bucketed", want.dst.numel * ITEMSIZE[params[want.param].dtype]


def _lines(
    layout: EngineRankLayout,
    params: Mapping[str, ParamSpec],
    specs: Mapping[str, TensorSpec],
    moved: Iterable[tuple[str, str, int]],
) -> Iterator[Line]:
    recording, rank = layout.recording, str(layout.rank)
    sources: dict[str, dict[str, None]] = {}
    for want in recording.wants:
        sources.setdefault(want.param, {})[want.source] = None

    def line(param: str, way: str, names: Iterable[str], nbytes: int, why: str = "") -> Line:
        dtype = params[param].dtype
        names = tuple(names)
        others = {specs[n].dtype for n in names if n in specs and way in MOVING} - {dtype}
        cast = f"{' and '.join(sorted(others))} to {dtype}" if others else ""
        return Line(rank, param, way, names, nbytes, dtype, cast, why)

    sizes: dict[tuple[str, str], int] = {}
    for param, way, nbytes in moved:
        sizes[param, way] = sizes.get((param, way), 0) + nbytes
    for (param, way), nbytes in sizes.items():
        yield line(param, way, sources.get(param, ()), nbytes)
    for one in recording.computed:
        written: dict[str, int] = dict.fromkeys(one.params, 0)
        for place in one.writes:
            written[place.param] = written.get(place.param, 0) + place.dst.numel
        for param, count in written.items():
            nbytes = count * ITEMSIZE[params[param].dtype]
            yield line(param, "computed", one.sources, nbytes, one.why)
    filled: dict[str, int] = {}
    for constant in recording.constants:
        filled[constant.param] = filled.get(constant.param, 0) + constant.dst.numel
    for param, count in filled.items():
        yield line(param, "constant", (), count * ITEMSIZE[params[param].dtype])
    left: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    for want in recording.kept.wants:
        left[want.param] = left.get(want.param, 0) + want.dst.numel
        names.setdefault(want.param, {})[want.source] = None
    for constant in recording.kept.constants:
        left[constant.param] = left.get(constant.param, 0) + constant.dst.numel
    for param, count in left.items():
        yield line(param, "kept", names.get(param, ()), count * ITEMSIZE[params[param].dtype])
    for param in sorted(recording.kept.params & params.keys()):
        yield line(param, "kept", (), params[param].nbytes, "the trainer has no tensor for it")


def save(one: Report, path: Path) -> None:
    """Writes a JSON file; its folder is made.

    Raises:
        OSError: as open() does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(one), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Report:
    """What :func:`save` wrote.

    Raises:
        OSError: as open() does.
        ValueError: it is no such file.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        lines = tuple(Line(**{**x, "sources": tuple(x["sources"])}) for x in found["lines"])
        return Report(found["mode"], lines, dict(found["models"]), tuple(found["unused"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no report of SGLANG_RDT_PLAN_REPORT ({type(error).__name__}: {error})"
        ) from None
