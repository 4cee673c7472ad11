"""Wants from the engine's own loader: ``load_weights`` run on meta tensors, copies recorded.

The sources are meta tensors, so every ``copy_`` from a view of one says which slice of which HF
tensor goes where; the destination is a view of a live parameter. Copies that a loader makes on the
way (``cat``, ``stack``, an index) are followed as pieces. Nothing is written: constant fills
(padding rows) are recorded. What the loader computes (a cast, arithmetic) is no slice: then it is
recorded which parameters it fills with it, and of which HF tensors, and a sync runs the loader on
these alone (:mod:`sglang_rdt.engine.replay`). Anything else that would write a live parameter is
refused by name. No per-model code, no model replica.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_rdt.dispatch import tensors_in, written_by
from sglang_rdt.dtypes import dtype_name, torch_dtype
from sglang_rdt.errors import RecordError, SlicesError, listed
from sglang_rdt.plan.pieces import Piece, join, simplified
from sglang_rdt.plan.slices import Slice, whole
from sglang_rdt.plan.specs import (
    Computed,
    Constant,
    ParamSpec,
    Recording,
    TensorSpec,
    Want,
    Write,
)
from sglang_rdt.tracing import Tracer, constant_of, filled_with, storage_key

_aten = torch.ops.aten


def describe_tensors(model: Any) -> tuple[list[ParamSpec], dict[str, torch.Tensor]]:
    """Specs and live tensors of all parameters and buffers, tied ones under every name."""
    specs: list[ParamSpec] = []
    tensors: dict[str, torch.Tensor] = {}
    for buffer, named in (
        (False, model.named_parameters(remove_duplicate=False)),
        (True, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            data = tensor.data if not buffer else tensor
            specs.append(
                ParamSpec(
                    name,
                    tuple(data.shape),
                    tuple(data.stride()),
                    dtype_name(data.dtype),
                    data.untyped_storage().data_ptr(),
                    int(data.storage_offset()),
                    buffer,
                )
            )
            tensors[name] = data
    return specs, tensors


class Live:
    """Which parameter a live tensor is a view of."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
        for name, t in tensors.items():
            if not t.numel():
                continue
            last = t.storage_offset() + sum(
                (n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)
            )
            entry = (int(t.storage_offset()), int(last), name, t)
            self._by_storage.setdefault(t.untyped_storage()._cdata, []).append(entry)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.untyped_storage()._cdata in self._by_storage

    def locate(self, view: torch.Tensor) -> tuple[str, Slice] | None:
        """``(parameter, slice)``; the first name wins where parameters are tied."""
        for first, last, name, param in self._by_storage.get(view.untyped_storage()._cdata, ()):
            if first <= view.storage_offset() <= last and view.dtype == param.dtype:
                offset = int(view.storage_offset()) - first
                return name, Slice(offset, tuple(view.shape), tuple(view.stride()))
        return None


# In a set of leaves: what the model itself held went in, too.
_LIVE = -1


@dataclass(frozen=True)
class _Write:
    """A copy into a parameter of something that was computed; ``leaves`` went in."""

    place: Write
    leaves: frozenset[int]
    why: str


class _Recorder(Tracer):
    """Follows HF tensors (the leaves) through the loader; nothing live is written."""

    leaves_stay = False
    must_follow = False

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live
        self.specs: list[TensorSpec] = []
        self.wants: list[Want] = []
        self.constants: list[Constant] = []
        self._writes: dict[Write, _Write] = {}
        self.problems: list[str] = []
        # Parameter -> elements that are constant because the loader made them so, of an HF tensor
        # of the right size.
        self.emptied: Counter[str] = Counter()
        # Places of parameters that were written, and the leaves that went into them.
        self._filled: dict[tuple[str, Slice], frozenset[int]] = {}
        # Storage -> the leaves that went into it, whichever way.
        self._went_in: dict[int, frozenset[int]] = {}

    @property
    def writes(self) -> list[_Write]:
        """What the loader computes."""
        return list(self._writes.values())

    def source(self, spec: TensorSpec) -> torch.Tensor:
        """A meta tensor that stands for an HF tensor."""
        tensor = self.leaf(spec.shape, torch_dtype(spec.dtype))
        self._went_in[storage_key(tensor)] = frozenset({len(self.specs)})
        self.specs.append(spec)
        return tensor

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A loader may allocate what it likes; and what it moves to the device stays here on meta.
        if func is _aten._to_copy.default and args[0].device.type == "meta":
            kwargs.pop("device", None)
            kwargs.pop("pin_memory", None)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.copy_.default and self._copy(args[0], args[1]):
            return args[0]
        written = written_by(func, args, kwargs)
        live = [t for t in written if t in self.live]
        if live:
            for dst in live:
                self._write(func, dst, args, kwargs)
            return _result_of_write(func, args, kwargs)
        out = super()._run(func, args, kwargs)
        self._note_leaves([*tensors_in((*args, *kwargs.values()))], [*tensors_in((out,)), *written])
        return out

    def _note_leaves(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        keys = {storage_key(t) for t in made if t.device.type == "meta"}
        if not keys or keys == {storage_key(t) for t in given}:
            return
        leaves: frozenset[int] = frozenset()
        for tensor in given:
            if tensor.device.type == "meta":
                leaves |= self._went_in.get(storage_key(tensor), frozenset())
            elif tensor in self.live:
                leaves |= {_LIVE}
        for key in keys:
            self._went_in[key] = self._went_in.get(key, frozenset()) | leaves

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Handles a copy into a live parameter, or from an HF tensor; False: let it happen."""
        if dst.device.type == "meta":
            return False  # the tracer follows it
        if src.device.type != "meta":
            if dst not in self.live:
                return False
            if dst.numel() and not self._derived(dst, src):
                self.problems.append(
                    f"{self._name(dst)}: copied from a tensor that is no HF tensor"
                )
            return True
        if dst.numel():
            self._want(dst, src)
        return True

    def _derived(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """A copy of what the loader has just written into another parameter; False: it is none."""
        place, origin = self.live.locate(dst), self.live.locate(src)
        leaves = self._filled.get(origin) if origin is not None else None
        if place is None or origin is None or not leaves:
            return False
        self._compute(place, leaves, f"what it wrote into {origin[0]}")
        return True

    def _compute(self, place: tuple[str, Slice], leaves: frozenset[int], why: str) -> None:
        write = Write(*place)
        known = self._writes.pop(write, None)
        if known is not None:  # written twice; the later value is made of both
            why = f"{known.why}, {why}"
            leaves |= known.leaves
        self._filled[place] = leaves
        self._writes[write] = _Write(write, leaves, why)

    def _want(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        memory = self._memory.get(storage_key(src))
        if memory is None:
            self.problems.append(f"{self._name(dst)}: its value comes out of an unknown operation")
            return
        place = self.live.locate(dst)
        if place is None:
            self.problems.append(
                f"{self._sources(src)}: copied into a {dtype_name(dst.dtype)}{list(dst.shape)} "
                "tensor that is no parameter, or a parameter seen as another dtype"
            )
            return
        if src.shape != dst.shape:
            try:
                src = src.expand(dst.shape)
            except RuntimeError:
                self.problems.append(
                    f"{place[0]}{list(dst.shape)}: copied from {self._sources(src)}{list(src.shape)}"
                )
                return
        if memory.leaf and src.dtype == memory.tensor.dtype:
            (leaf,) = self._went_in[storage_key(src)]
            where = Slice(int(src.storage_offset()), tuple(src.shape), tuple(src.stride()))
            self.wants.append(Want(*place, self.specs[leaf].name, where))
            self._filled[place] = frozenset({leaf})
            return
        self._piecewise(place, src)

    def _piecewise(self, place: tuple[str, Slice], src: torch.Tensor) -> None:
        """A copy of what is no view of one HF tensor: slices, constants, or something computed."""
        name, dst = place
        try:
            pieces = self._simplified(dst, src)
        except SlicesError as error:
            self._computed(Write(name, dst), src, str(error))
            return
        made = [p.origin for p in pieces if isinstance(p.origin, str)]
        computed = [origin for origin in made if constant_of(origin) is None]
        if not computed and sum(p.dst.numel for p in pieces) != dst.numel:
            computed = ["elements that could not be followed"]
        if computed:
            self._computed(Write(name, dst), src, ", ".join(dict.fromkeys(computed)))
            return
        for piece in pieces:
            if isinstance(piece.origin, int):
                self.wants.append(Want(name, piece.dst, self.specs[piece.origin].name, piece.src))
            else:
                value = constant_of(piece.origin)
                assert value is not None
                self.constants.append(Constant(name, piece.dst, value))
                self.emptied[name] += piece.dst.numel

    def _simplified(self, dst: Slice, src: torch.Tensor) -> list[Piece]:
        """What ``src`` consists of, as slices of the parameter that ``dst`` is a slice of."""
        shape = tuple(src.shape)
        where = Piece(dst, whole(shape), "")
        pieces = simplified(tuple(self.read(src)), shape)
        return [found for piece in pieces for found in join(where, piece)]

    def _computed(self, write: Write, src: torch.Tensor, why: str) -> None:
        leaves = self._went_in.get(storage_key(src), frozenset())
        what = f"its value comes out of {why} of {self._sources(src)}"
        if _LIVE in leaves:
            self.problems.append(f"{write.param}: {what}, and of what the model held before")
        elif not leaves:
            self.problems.append(f"{write.param}: {what}, which is no HF tensor")
        else:
            self._compute((write.param, write.dst), leaves, why)

    def _write(
        self, func: Any, dst: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        if not dst.numel():
            return
        place = self.live.locate(dst)
        value = filled_with(func, args)
        if value is not None and place is not None:
            self.constants.append(Constant(*place, value))
        elif place is None or not (
            self._made(func, place, args)
            if dst is kwargs.get("out")
            else self._changed(func, place, dst, [*args, *kwargs.values()])
        ):
            self.problems.append(f"{self._name(dst)}: written in place by {func}")

    def _made(self, func: Any, place: tuple[str, Slice], args: Sequence[Any]) -> bool:
        """Something is computed into a place (``out=``), whatever was there; False: of something
        that is no HF tensor, or that the model itself held."""
        leaves = self._leaves_in(args)
        if not leaves or _LIVE in leaves:
            return False
        self.wants = [w for w in self.wants if (w.param, w.dst) != place]
        self._compute(place, leaves, str(func))
        return True

    def _leaves_in(self, args: Sequence[Any], but: torch.Tensor | None = None) -> frozenset[int]:
        leaves: frozenset[int] = frozenset()
        for tensor in tensors_in(args):
            if tensor is but:
                continue
            if tensor.device.type == "meta":
                leaves |= self._went_in.get(storage_key(tensor), frozenset({_LIVE}))
            elif tensor in self.live:
                where = self.live.locate(tensor)
                leaves |= self._filled.get(where, frozenset({_LIVE})) if where else {_LIVE}
        return leaves

    def _changed(
        self, func: Any, place: tuple[str, Slice], dst: torch.Tensor, args: Sequence[Any]
    ) -> bool:
        """Something is computed in a place that the loader has filled before, from there on by
        itself alone; False: what was there before the load goes in, too."""
        leaves = self._filled.get(place)
        same = any((w.param, w.dst) == place for w in self.wants)
        if not leaves or not (same or Write(*place) in self._writes):
            return False
        leaves |= self._leaves_in(args, but=dst)
        if _LIVE in leaves:
            return False
        # No longer a copy.
        self.wants = [w for w in self.wants if (w.param, w.dst) != place]
        self._compute(place, leaves, str(func))
        return True

    def _sources(self, tensor: torch.Tensor) -> str:
        leaves = self._went_in.get(storage_key(tensor), frozenset())
        return ", ".join(self.specs[n].name for n in sorted(leaves - {_LIVE})) or "an HF tensor"

    def _name(self, dst: torch.Tensor) -> str:
        place = self.live.locate(dst)
        return place[0] if place else f"a {dtype_name(dst.dtype)}{list(dst.shape)} tensor"


def _result_of_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the caller of a write that did not happen gets: the tensors, unwritten."""
    written = written_by(func, args, kwargs)
    returns = len(func._schema.returns)
    return None if returns == 0 else written[0] if returns == 1 else tuple(written)


@contextlib.contextmanager
def without_post_load(model: torch.nn.Module) -> Iterator[None]:
    """Loaders that derive something of the weights at their end do not do so inside: the session
    does it, once, when all weights have landed."""
    name = "post_load_weights"
    # Also where a model has another one inside, whose loader is called by its own.
    tables = [vars(module) for module in model.modules() if hasattr(module, name)]
    before = [{name: table[name]} if name in table else {} for table in tables]
    for table in tables:
        table[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for table, mine in zip(tables, before, strict=True):
            del table[name]
            table.update(mine)


def _run_loader(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> _Recorder:
    """Runs ``load_weights`` on meta tensors; nothing is written.

    Raises:
        RecordError: what the loader raised, or what it did that is none of a loader's business.
    """
    _, tensors = describe_tensors(model)
    recorder = _Recorder(Live(tensors))
    named = [(spec.name, recorder.source(spec)) for spec in specs]
    snapshot = Snapshot(model)
    try:
        with torch.no_grad(), without_post_load(model), recorder:
            model.load_weights(iter(named))  # type: ignore[operator]
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(
            f"{type(model).__name__}.load_weights does not accept the trainer's tensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        recorder.problems += [
            f"{name}: the loader puts another tensor in its place" for name in snapshot.restore()
        ]
    if recorder.problems:
        raise RecordError(
            f"{type(model).__name__}.load_weights does more than copy slices:\n"
            f"{listed(recorder.problems)}"
        )
    return recorder


def record_load(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> Recording:
    """What ``model.load_weights`` would do with HF tensors of these names, shapes and dtypes.

    The model is not changed. Must run where no other thread uses the model.

    Raises:
        RecordError: naming every parameter that is filled neither with plain slices nor with what
            the loader would compute again from the same HF tensors alone; or what the loader itself
            raised.
    """
    recorder = _run_loader(model, specs)
    padding = Counter(vocabulary_padding(model, describe_tensors(model)[1]))
    padding.update(recorder.emptied)
    computed = _groups(recorder)
    if computed:
        _rehearse(model, specs, recorder, computed)
    return Recording(
        tuple(recorder.wants), tuple(recorder.constants), dict(padding), tuple(computed)
    )


def _groups(recorder: _Recorder) -> list[Computed]:
    """Computed writes that have HF tensors in common belong together."""
    groups: list[tuple[set[int], list[_Write]]] = []
    for write in recorder.writes:
        leaves, writes = set(write.leaves), [write]
        apart = []
        for group in groups:
            if group[0] & leaves:
                leaves |= group[0]
                writes = group[1] + writes
            else:
                apart.append(group)
        groups = [*apart, (leaves, writes)]
    return [
        Computed(
            tuple(recorder.specs[n].name for n in sorted(leaves)),
            tuple(write.place for write in writes),
            ", ".join(dict.fromkeys(write.why for write in writes))[:500],
        )
        for leaves, writes in sorted(groups, key=lambda group: min(group[0]))
    ]


def _rehearse(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    first: _Recorder,
    computed: Sequence[Computed],
) -> None:
    """Raises RecordError unless the loader, given the HF tensors of ``computed`` alone, does with
    them what it did when it was given all: that is how they are loaded in a sync."""
    names = {name for one in computed for name in one.sources}
    some = ", ".join(sorted(names)[:4]) + (" and others" if len(names) > 4 else "")
    what = f"{type(model).__name__}.load_weights, given {some} alone,"
    try:
        again = _run_loader(model, [s for s in specs if s.name in names])
    except RecordError as error:
        raise RecordError(f"{what} does not load them: {error}") from error
    differing: set[Write | Want | Constant] = {w.place for w in first.writes}
    differing ^= {w.place for w in again.writes}
    differing |= set(again.wants) - set(first.wants)
    differing |= set(again.constants) - set(first.constants)
    if differing:
        raise RecordError(
            f"{what} loads them in another way than among the others: "
            f"{', '.join(sorted({w.param for w in differing})[:5])}"
        )


class Snapshot:
    """Parameters and buffers as they are, and the way back to them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = [
            (_join(prefix, name), module._modules, name, child)
            for prefix, module in model.named_modules()
            for name, child in module._modules.items()
        ]
        self._held: list[tuple[str, Any, str, Any, Any]] = [
            (_join(prefix, name), table, name, tensor, None if tensor is None else tensor.data)
            for prefix, table in self._tables()
            for name, tensor in table.items()
        ]

    def _tables(self) -> Iterator[tuple[str, Any]]:
        for prefix, module in self._model.named_modules():
            yield prefix, module._parameters
            yield prefix, module._buffers

    def restore(self) -> list[str]:
        """Puts back what was replaced or added; the names of those tensors."""
        changed = []
        for full, modules, name, child in self._modules:
            if modules.get(name) is not child:
                modules[name] = child
                changed.append(full)
        known_modules = {(id(modules), name) for _, modules, name, _ in self._modules}
        for prefix, module in list(self._model.named_modules()):
            for name in [
                n for n in module._modules if (id(module._modules), n) not in known_modules
            ]:
                del module._modules[name]
                changed.append(_join(prefix, name))
        for full, table, name, tensor, data in self._held:
            if table.get(name) is not tensor:
                table[name] = tensor
                changed.append(full)
            if tensor is not None and not _same_memory(tensor.data, data):
                tensor.data = data
                changed.append(full)
        known = {(id(table), name) for _, table, name, _, _ in self._held}
        for prefix, table in self._tables():
            for name in [n for n in table if (id(table), n) not in known]:
                del table[name]
                changed.append(_join(prefix, name))
        return list(dict.fromkeys(changed))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.device == other.device
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def vocabulary_padding(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Parameter -> elements in rows that pad a vocabulary.

    Source: sglang/srt/layers/vocab_parallel_embedding.py, VocabParallelEmbeddingShardIndices.
    """
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        if indices is None:
            continue
        real = indices.num_org_elements + indices.num_added_elements
        for kind in ("weight", "bias"):
            tensor = tensors.get(f"{name}.{kind}" if name else kind)
            if tensor is not None and tensor.shape:
                rows = tensor.shape[0] - real
                padding[f"{name}.{kind}"] = rows * (tensor.numel() // max(tensor.shape[0], 1))
    return padding
