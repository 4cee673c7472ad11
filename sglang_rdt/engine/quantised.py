"""Weights that SGLang quantises after loading (``quantization="fp8"`` on a 16-bit model).

Processing puts a quantised parameter, without a loader, in the place of the one that the checkpoint
was loaded into, and a second pass over it would quantise what is quantised. So the first pass notes
what each layer looked like before (its Parameters are kept, their memory is not). For a sync those
come back, in memory of their own, and are filled; SGLang's own pass makes the new values of them,
which are copied to where the served ones lie: captured CUDA graphs know those addresses.

Source: sglang/srt/layers/quantization/fp8.py, ``process_weights_after_loading`` of
``Fp8LinearMethod`` and ``Fp8MoEMethod``, 0.5.16 to 0.5.23.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sglang_rdt import settings as settings_module
from sglang_rdt.checksum import slice_sum
from sglang_rdt.errors import EngineStateError, RecordError
from sglang_rdt.plan.specs import Recording

METHODS = ("Fp8LinearMethod", "Fp8MoEMethod")
_NOTES = "_sglang_rdt_notes"
_INSTRUMENTED = "_sglang_rdt_instrumented"


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass
class Notes:
    """What processing did to the parameters of one layer.

    Args:
        before: all entries of the layer's parameter table before it.
        after: the same afterwards; those are served.
        forms: of the entries of ``before`` that were replaced. Empty: nothing was.
        problem: why the layer cannot be loaded again, or None.
    """

    before: dict[str, torch.nn.Parameter | None]
    after: dict[str, torch.nn.Parameter | None]
    forms: dict[str, _Form]
    problem: str | None
    # Where the layer is in its model, for messages; known once the model is whole.
    name: str = field(default="", init=False)
    # Between open and land the layer has the parameters of `before`.
    is_open: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """Memory that the replaced parameters take while they are there."""
        return sum(math.prod(f.shape) * f.dtype.itemsize for f in self.forms.values())

    def allocate(self) -> None:
        """Gives the replaced parameters memory, with undefined values."""
        for name, form in self.forms.items():
            parameter = self.before[name]
            assert parameter is not None
            if not parameter.data.numel():
                parameter.data = torch.empty_strided(
                    form.shape, form.stride, dtype=form.dtype, device=form.device
                )

    def free(self) -> list[torch.Tensor]:
        """Takes it back; the memory itself."""
        memory = []
        for name in self.forms:
            parameter = self.before[name]
            assert parameter is not None
            memory.append(parameter.data)
            parameter.data = parameter.data.new_empty(0)
        return memory

    def open(self, layer: torch.nn.Module) -> None:
        """Puts the replaced parameters in their old places."""
        _set(layer, self.before)
        self.is_open = True

    def close(self, layer: torch.nn.Module) -> None:
        """Puts the served parameters back, whatever they hold."""
        _set(layer, self.after)
        self.is_open = False

    def land(self, layer: torch.nn.Module) -> None:
        """After a pass over the open layer: its results go into the served parameters.

        Raises:
            EngineStateError: they are not of the served ones' shapes and dtypes.
        """
        made = dict(layer._parameters)
        self.close(layer)
        for name, served in self.after.items():
            new = made.get(name)
            if served is None or new is None:
                if served is not new:
                    raise EngineStateError(
                        f"{self.name}.{name} was there after only one of two passes of quantising"
                    )
                continue
            if new is served:
                continue
            if _Form.of(new.data) != _Form.of(served.data):
                raise EngineStateError(
                    f"{self.name}.{name} was quantised to {_Form.of(new.data)} and is served as "
                    f"{_Form.of(served.data)}"
                )
            served.data.copy_(new.data)


def instrument(module: dict[str, Any]) -> None:
    """Wraps the passes of ``module``, the namespace of sglang.srt.layers.quantization.fp8."""
    import wrapt

    settings = settings_module.load()
    if not settings.enabled or not settings.patch_quantised_weights:
        return
    for name in METHODS:
        method = module[name]
        if vars(method).get(_INSTRUMENTED):
            continue
        method.process_weights_after_loading = wrapt.FunctionWrapper(
            method.process_weights_after_loading, _process
        )
        setattr(method, _INSTRUMENTED, True)


def _process(wrapped: Callable[..., Any], _method: Any, args: Any, kwargs: Any) -> Any:
    layer = args[0] if args else kwargs["layer"]
    notes = notes_of(layer)
    if notes is None:
        before = dict(layer._parameters)
        states = {n: (p.data, _content(p)) for n, p in before.items() if p is not None}
        result = wrapped(*args, **kwargs)
        vars(layer)[_NOTES] = _noted(before, states, dict(layer._parameters))
        return result
    if not notes.forms:
        return wrapped(*args, **kwargs)
    if not notes.is_open:
        return None  # nothing was loaded, and what is there is quantised already
    result = wrapped(*args, **kwargs)
    notes.land(layer)
    return result


def _noted(
    before: dict[str, torch.nn.Parameter | None],
    states: dict[str, tuple[torch.Tensor, int | None]],
    after: dict[str, torch.nn.Parameter | None],
) -> Notes:
    forms, repacked = {}, []
    for name, (data, content) in states.items():
        parameter = before[name]
        assert parameter is not None
        if after.get(name) is not parameter:
            forms[name] = _Form.of(data)
            parameter.data = data.new_empty(0)
        elif hasattr(parameter, "weight_loader") and (
            _Form.of(parameter.data) != _Form.of(data)
            or parameter.data.data_ptr() != data.data_ptr()
            or _content(parameter) != content
        ):
            # Its loadable form is lost, and a second pass would work on the first one's result.
            repacked.append(name)
    problem = f"repacks {', '.join(repacked)} in place" if repacked else None
    return Notes(before, after, forms, problem)


def _content(parameter: torch.nn.Parameter) -> int | None:
    """Tells whether a loaded parameter was written. Its version does not: most of SGLang writes to
    ``parameter.data``, which has a version of its own."""
    if not hasattr(parameter, "weight_loader") or parameter.device.type == "meta":
        return None
    return slice_sum(parameter.data, 0)


def notes_of(layer: torch.nn.Module) -> Notes | None:
    """What was noted of ``layer``; None: no pass was seen."""
    return vars(layer).get(_NOTES)


class Modules(Protocol):
    """A model, or several as one."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """As a module's."""


class Loadable:
    """The layers of ``model`` whose weights were replaced by quantised ones."""

    def __init__(self, model: Modules) -> None:
        modules = dict(model.named_modules())
        noted = [(name, layer, notes_of(layer)) for name, layer in modules.items()]
        self.layers = [(name, layer, n) for name, layer, n in noted if n is not None and n.forms]
        for name, _, notes in self.layers:
            notes.name = name
        # Of these SGLang derives the absorbed projections of latent attention, at the end of each
        # session, from the form in which they are loaded.
        self.derived_from = {
            name
            for name, _, _ in self.layers
            for attention, _, own in [name.rpartition(".")]
            if own == "kv_b_proj" and hasattr(modules.get(attention), "w_kc")
        }
        self._allocated = False

    @property
    def nbytes(self) -> int:
        """Memory that the weights take in the form in which they are loaded."""
        return sum(notes.nbytes for _, _, notes in self.layers)

    def allocate(self) -> None:
        """Memory for the loadable form, with undefined values; kept until :meth:`free`."""
        try:
            for _, _, notes in self.layers:
                notes.allocate()
        except Exception:  # not enough memory: what the engine needs to run must not stay taken
            self.free()
            raise
        self._allocated = True

    def free(self) -> list[torch.Tensor]:
        """Takes the memory back; the memory itself."""
        self._allocated = False
        return [tensor for _, _, notes in self.layers for tensor in notes.free()]

    def without_source(self) -> set[str]:
        """Parameters that no checkpoint of this kind has: scales that the quantisation makes."""
        return {
            f"{name}.{parameter}" if name else parameter
            for name, _, notes in self.layers
            for parameter, tensor in notes.before.items()
            if tensor is not None and not hasattr(tensor, "weight_loader")
        }

    def without(self, recording: Recording | None) -> set[str]:
        """Layers that a sync leaves as they are, by name: nothing is loaded into them.

        Raises:
            RecordError: a name filter keeps a part of a layer; what it was quantised of is gone.
        """
        synced = {want.param for want in recording.wants} if recording else set()
        synced |= {p for one in recording.computed for p in one.params} if recording else set()
        kept = {want.param for want in recording.kept.wants} if recording else set()
        kept |= {p for one in recording.kept.computed for p in one.params} if recording else set()
        kept |= recording.kept.params if recording else set()
        left, problems = set(), []
        for name, _, notes in self.layers:
            replaced = {f"{name}.{p}" if name else p for p in notes.forms}
            if not replaced & synced:
                left.add(name)
            elif replaced & kept:
                problems.append(name)
        if problems:
            raise RecordError(
                "the name filter keeps a part of what SGLang quantises as a whole: "
                f"{', '.join(problems[:5])}: sync all of each layer or nothing of it"
            )
        derived = sorted(left & self.derived_from)
        if derived:
            raise RecordError(
                f"{', '.join(derived[:5])}: what SGLang derives of it (w_kc, w_vc) is derived again at "
                "the end of each sync, and what it was quantised of is gone: it cannot be left out"
            )
        return left

    @contextlib.contextmanager
    def loadable(self, without: Collection[str] = ()) -> Iterator[None]:
        """Inside, the model has its loadable parameters; nothing if they have no memory.

        Args:
            without: layers that stay as they are.
        """
        if not self._allocated:
            yield
            return
        try:
            for name, layer, notes in self.layers:
                if name not in without:
                    notes.open(layer)
            yield
        finally:
            for _, layer, notes in self.layers:
                if notes.is_open:
                    notes.close(layer)

    def quantise(self) -> None:
        """Inside of :meth:`loadable`: what SGLang's session has not quantised yet.

        Up to 0.5.20 there is no session that would.
        """
        for _, layer, notes in self.layers:
            if notes.is_open:
                layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


def problems(model: torch.nn.Module) -> list[str]:
    """Why the weights of ``model`` cannot be loaded again, one line per kind of layer."""
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        why = None if method is None else _problem(layer, method)
        if why is not None:
            found.setdefault(f"{type(method).__name__} {why}", name)
    return [f"{name}: {why}" for why, name in found.items()]


def _problem(layer: torch.nn.Module, method: Any) -> str | None:
    kind = type(method)
    if getattr(layer, "use_intel_amx_backend", False):
        return "packs weights for AMX, and no session brings them back"
    # What else SGLang packs of unquantised weights, its sessions bring back. The scales of a KV
    # cache are made again of themselves.
    if kind.__name__.startswith("Unquantized") or kind.__name__.endswith("KVCacheMethod"):
        return None
    # Others leave a part of their work to these methods, and repack what they have made.
    notes = notes_of(layer) if kind.__name__ in METHODS else None
    if notes is not None:
        return notes.problem
    if kind.__name__ in METHODS:
        return (
            "was loaded without the patch quantised_weights: start the engine with "
            "SGLANG_RDT_PATCH_QUANTISED_WEIGHTS=1"
        )
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase as Base

    same = (
        getattr(kind, "process_weights_after_loading", None) is Base.process_weights_after_loading
    )
    return None if same else "changes weights after loading, in a way that cannot be repeated"


def _set(layer: torch.nn.Module, table: dict[str, torch.nn.Parameter | None]) -> None:
    layer._parameters.clear()
    layer._parameters.update(table)
