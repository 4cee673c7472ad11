"""Wants from the engine's own loader: ``load_weights`` run on meta tensors, copies recorded.

The sources are meta tensors, so every ``copy_`` from a view of one says which slice of which HF
tensor goes where; the destination is a view of a live parameter. Nothing is written: constant
fills (padding rows) are recorded, anything else that would write a live parameter, or that makes
a new tensor out of an HF tensor, is refused by name. No per-model code, no model replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_rdt.dispatch import tensors_in, written_by
from sglang_rdt.dtypes import dtype_name, torch_dtype
from sglang_rdt.errors import RecordError, listed
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import Constant, ParamSpec, Recording, TensorSpec, Want

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


class _Live:
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


class _Recorder(TorchDispatchMode):
    def __init__(self, live: _Live, sources: dict[int, tuple[TensorSpec, torch.Tensor]]) -> None:
        super().__init__()
        self.live, self.sources = live, sources
        self.wants: list[Want] = []
        self.constants: list[Constant] = []
        self.problems: list[str] = []
        # Meta tensors that operations other than views made: storage -> (what made it, tensor).
        # The tensor is kept so that its storage id is not used again.
        self.derived: dict[int, tuple[str, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and self._copy(args[0], args[1]):
            return args[0]
        written = written_by(func, args, kwargs)
        live = [t for t in written if t in self.live]
        if live:
            for dst in live:
                self._write(func, dst, args)
            return _result_of_write(func, args, kwargs)
        for t in written:
            self._note_changed(func, t, args)
        out = func(*args, **kwargs)
        for t in tensors_in((out,)):
            if t.device.type == "meta":
                self._note_derived(func, t, args)
        return out

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Handles a copy into a live parameter, or from an HF tensor; False: let it happen."""
        if dst.device.type == "meta":
            return False  # noted as a change of dst, if that is an HF tensor
        if src.device.type != "meta":
            if dst not in self.live:
                return False
            if dst.numel():
                self.problems.append(
                    f"{self._name(dst)}: copied from a tensor that is no HF tensor"
                )
            return True
        if dst.numel():
            self._want(dst, src)
        return True

    def _want(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        key = src.untyped_storage()._cdata
        if key in self.derived:
            self.problems.append(
                f"{self._name(dst)}: its value comes out of {self.derived[key][0]}, not straight "
                "from an HF tensor"
            )
            return
        if key not in self.sources:
            self.problems.append(f"{self._name(dst)}: its value comes out of an unknown operation")
            return
        spec = self.sources[key][0]
        place = self.live.locate(dst)
        if place is None:
            self.problems.append(
                f"{spec.name}: copied into a {dtype_name(dst.dtype)}{list(dst.shape)} tensor that "
                "is no parameter, or a parameter seen as another dtype"
            )
            return
        if dtype_name(src.dtype) != spec.dtype:
            self.problems.append(f"{place[0]}: {spec.name} is read as {dtype_name(src.dtype)}")
            return
        if src.shape != dst.shape:
            try:
                src = src.expand(dst.shape)
            except RuntimeError:
                self.problems.append(
                    f"{place[0]}{list(dst.shape)}: copied from {spec.name}{list(src.shape)}"
                )
                return
        where = Slice(int(src.storage_offset()), tuple(src.shape), tuple(src.stride()))
        self.wants.append(Want(*place, spec.name, where))

    def _write(self, func: Any, dst: torch.Tensor, args: Sequence[Any]) -> None:
        if not dst.numel():
            return
        place = self.live.locate(dst)
        value = _constant(func, args)
        if value is not None and place is not None:
            self.constants.append(Constant(*place, value))
        else:
            self.problems.append(f"{self._name(dst)}: written in place by {func}")

    def _note_changed(self, func: Any, tensor: torch.Tensor, args: Sequence[Any]) -> None:
        """An HF tensor (or one derived from it) that is changed in place is one no longer."""
        key = tensor.untyped_storage()._cdata
        if tensor.device.type == "meta" and key in self.sources:
            name = self.sources[key][0].name
            self.derived.setdefault(key, (f"{func} on {name}", tensor))

    def _note_derived(self, func: Any, out: torch.Tensor, args: Sequence[Any]) -> None:
        key = out.untyped_storage()._cdata
        if key in self.sources or key in self.derived:
            return
        names = [self._source_name(a) for a in tensors_in(args)]
        made = f"{func} of {', '.join(n for n in names if n)}" if any(names) else str(func)
        self.derived[key] = (made, out)

    def _source_name(self, tensor: torch.Tensor) -> str | None:
        key = tensor.untyped_storage()._cdata
        if key in self.sources:
            return self.sources[key][0].name
        return self.derived[key][0] if key in self.derived else None

    def _name(self, dst: torch.Tensor) -> str:
        place = self.live.locate(dst)
        return place[0] if place else f"a {dtype_name(dst.dtype)}{list(dst.shape)} tensor"


def _result_of_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the caller of a write that did not happen gets: the tensors, unwritten."""
    written = written_by(func, args, kwargs)
    returns = len(func._schema.returns)
    return None if returns == 0 else written[0] if returns == 1 else tuple(written)


def _constant(func: Any, args: Sequence[Any]) -> float | None:
    """The value that ``func`` fills its first argument with, or None if it does something else."""
    if func is _aten.zero_.default:
        return 0.0
    if func is _aten.fill_.Scalar:
        return float(args[1])
    # param[rows] = 0 and fill_(tensor) come with a tensor of one element.
    if func in (_aten.fill_.Tensor, _aten.copy_.default):
        value = args[1]
        if value.device.type != "meta" and value.dim() == 0:
            return float(value)
    return None


def record_load(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> Recording:
    """What ``model.load_weights`` would do with HF tensors of these names, shapes and dtypes.

    The model is not changed. Must run where no other thread uses the model.

    Raises:
        RecordError: naming every parameter that is not filled with plain slices, or what the
            loader itself raised.
    """
    _, tensors = describe_tensors(model)
    sources: dict[int, tuple[TensorSpec, torch.Tensor]] = {}
    named = []
    for spec in specs:
        t = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        sources[t.untyped_storage()._cdata] = (spec, t)
        named.append((spec.name, t))
    recorder = _Recorder(_Live(tensors), sources)
    snapshot = _Snapshot(model)
    try:
        with torch.no_grad(), recorder:
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
    return Recording(
        tuple(recorder.wants), tuple(recorder.constants), vocabulary_padding(model, tensors)
    )


class _Snapshot:
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
