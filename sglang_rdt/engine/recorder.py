"""Wants from the engine's own loader: ``load_weights`` run on meta tensors, copies recorded.

The sources are meta tensors, so every ``copy_`` from a view of one says which slice of which HF
tensor goes where; the destination is a view of a live parameter. Nothing is written: constant
fills (padding rows) are recorded, anything else that would write a live parameter, or that makes
a new tensor out of an HF tensor, is refused by name. No per-model code, no model replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_rdt.errors import RecordError, listed
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import Constant, ParamSpec, Recording, TensorSpec, Want

_aten = torch.ops.aten


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def describe_tensors(model: torch.nn.Module) -> tuple[list[ParamSpec], dict[str, torch.Tensor]]:
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
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if (
            func._schema.is_mutable
            and args
            and isinstance(args[0], torch.Tensor)
            and args[0] in self.live
        ):
            return self._write(func, args)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.device.type == "meta":
            self._note_derived(func, out, args)
        return out

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        if not dst.numel():
            return dst
        if src.device.type != "meta":
            if dst in self.live:
                self.problems.append(
                    f"{self._name(dst)}: copied from a tensor that is no HF tensor"
                )
                return dst
            return _aten.copy_.default(dst, src)
        if dst.device.type == "meta":
            self._note_derived(_aten.copy_.default, dst, (src,))
            return dst
        source = self.sources.get(src.untyped_storage()._cdata)
        if source is None:
            made, _ = self.derived.get(src.untyped_storage()._cdata, ("an unknown operation", None))
            self.problems.append(
                f"{self._name(dst)}: its value comes out of {made}, not straight from an HF tensor"
            )
            return dst
        spec = source[0]
        place = self.live.locate(dst)
        if place is None:
            self.problems.append(
                f"{spec.name}: copied into a {dtype_name(dst.dtype)}{list(dst.shape)} tensor that is no "
                "parameter, or a parameter seen as another dtype"
            )
            return dst
        if dtype_name(src.dtype) != spec.dtype:
            self.problems.append(f"{place[0]}: {spec.name} is read as {dtype_name(src.dtype)}")
            return dst
        if src.shape != dst.shape:
            try:
                src = src.expand(dst.shape)
            except RuntimeError:
                self.problems.append(
                    f"{place[0]}{list(dst.shape)}: copied from {spec.name}{list(src.shape)}"
                )
                return dst
        self.wants.append(
            Want(
                *place,
                spec.name,
                Slice(int(src.storage_offset()), tuple(src.shape), tuple(src.stride())),
            )
        )
        return dst

    def _write(self, func: Any, args: Sequence[Any]) -> Any:
        dst = args[0]
        if not dst.numel():
            return dst
        place = self.live.locate(dst)
        if func in (_aten.fill_.Scalar, _aten.zero_.default) and place is not None:
            self.constants.append(Constant(*place, float(args[1]) if len(args) > 1 else 0.0))
        else:
            self.problems.append(f"{self._name(dst)}: written in place by {func}")
        return dst

    def _note_derived(self, func: Any, out: torch.Tensor, args: Sequence[Any]) -> None:
        key = out.untyped_storage()._cdata
        if key in self.sources or key in self.derived:
            return
        names = [self._source_name(a) for a in _tensors(args)]
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


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for a in args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from _tensors(a)


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
    if recorder.problems:
        raise RecordError(
            f"{type(model).__name__}.load_weights does more than copy slices:\n"
            f"{listed(recorder.problems)}"
        )
    return Recording(
        tuple(recorder.wants), tuple(recorder.constants), vocabulary_padding(model, tensors)
    )


def vocabulary_padding(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Parameter -> elements in rows that pad a vocabulary.

    Source: sglang/srt/layers/vocab_parallel_embedding.py, VocabParallelEmbeddingShardIndices.
    """
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        weight = tensors.get(f"{name}.weight")
        if indices is None or weight is None:
            continue
        rows = weight.shape[0] - indices.num_org_elements - indices.num_added_elements
        padding[f"{name}.weight"] = rows * (weight.numel() // max(weight.shape[0], 1))
    return padding
