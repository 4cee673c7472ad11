"""What a conversion does with tensors, learned by running it on meta tensors.

Both sides use it: what a bridge makes of a parameter's shards, and what a loader makes of HF
tensors. Both are leaves here.

torch itself follows views: they share a meta storage. Operations that copy are followed as
pieces, "this slice of the new memory is that slice of a leaf", which always lead back to the
leaves, however many copies lie between. What an operation computes is no slice of anything; what
made it is remembered, and a result that has such elements is refused. No data is read, and none
is allocated but indices.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_rdt.dispatch import tensors_in, written_by
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError, SlicesError
from sglang_rdt.plan.pieces import Piece, join, simplified, without
from sglang_rdt.plan.slices import Slice, contiguous_stride, whole

_aten = torch.ops.aten

# The most elements of a tensor that has data (an index).
MAX_REAL_ELEMENTS = 1 << 22
# The most runs of equal steps that an index may consist of.
MAX_RUNS = 1 << 12

_FOREIGN = "a tensor that is not made of the parameter"
# The origin of elements that were filled with a number, which follows.
_FILLED = "the constant "


class _View(NamedTuple):
    """The slice ``place`` of the memory behind ``base``."""

    base: torch.Tensor
    place: Slice


@dataclass(slots=True)
class _Memory:
    """What the elements of one storage are. ``tensor`` keeps the storage's id in use."""

    tensor: torch.Tensor
    nbytes: int
    pieces: list[Piece]
    leaf: bool


class Tracer(TorchDispatchMode):
    """Runs a conversion on meta tensors; then :meth:`pieces` says what a result consists of.

    ::

        tracer = Tracer()
        shards = [tracer.leaf(shape, dtype) for _ in range(tp_size)]
        with tracer:
            result = convert(shards)
        tracer.pieces(result)

    The conversion itself may raise what it likes (it runs on tensors without data), and
    ExportError where it would allocate or fill memory that is not meta.
    """

    # Whether a leaf that is written in place is a mistake. HF tensors are the loader's own; of a
    # parameter it would change the value.
    leaves_stay = True
    # Whether what cannot be followed, because it is too scattered, is an error, or only remembered
    # as no slice of anything.
    must_follow = True

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, _Memory] = {}
        self._leaves = 0

    def leaf(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous meta tensor. The n-th one has the origin n in :meth:`pieces`."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        everything = _everything(tensor)
        self._remember(tensor, [Piece(everything, everything, self._leaves)], leaf=True)
        self._leaves += 1
        return tensor

    def pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """The slices of leaves that ``tensor`` consists of, each of its elements once.

        ``dst`` is a slice of a contiguous tensor of that shape, ``src`` one of the leaf.

        Raises:
            ExportError: an element is no element of a leaf; says what made it.
        """
        try:
            pieces = simplified(tuple(self._read(_view(tensor))), tuple(tensor.shape))
        except SlicesError as error:
            raise ExportError(f"too scattered to follow: {error}") from None
        made = sorted({p.origin for p in pieces if isinstance(p.origin, str)})
        if made:
            raise ExportError(f"it comes out of {', '.join(made)}")
        # The pieces of a memory never overlap, so to count is to prove.
        covered = sum(p.dst.numel for p in pieces)
        if covered != tensor.numel():
            raise ExportError(f"only {covered} of its {tensor.numel()} elements could be followed")
        return pieces

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return self._run(func, args, dict(kwargs or {}))
        except SlicesError as error:
            raise ExportError(f"{func} is too scattered to follow: {error}") from None

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before ``func`` runs; may change ``kwargs``."""
        if func in _ARANGES:
            kwargs["device"] = "cpu"  # an index: on meta its numbers would be lost
        _refuse_large(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._prepare(func, args, kwargs)
        if func is _aten.copy_.default and args[0].device.type == "meta":
            self._copy_into(args[0], args[1])
            return func(*args, **kwargs)
        if func is _aten.copy_.default and args[1].device.type == "meta":
            raise ExportError(f"it is copied into a tensor on {args[0].device.type}")
        out = func(*args, **kwargs)
        if not any(t.device.type == "meta" for t in tensors_in((out, *args, *kwargs.values()))):
            return out  # an index
        try:
            pieces = self._followed(func, args, kwargs, out)
        except (SlicesError, ExportError):
            if self.must_follow:
                raise
            pieces = None
        if pieces is None:
            self._note(func, args, kwargs, out)
        else:
            self._remember(out, pieces)
        return out

    def _followed(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> list[Piece] | None:
        """What ``func`` made ``out`` of, if it copies; None if it is not known to."""
        follow = _COPIES.get(func)
        copies = None if follow is None else follow(out, *args, **kwargs)
        if copies is None:
            return None
        pieces: list[Piece] = []
        for dst, src in copies:
            if func in _SCATTERS:
                pieces = [left for piece in pieces for left in without(piece, dst)]
            pieces += self._moved(dst, src, out.dtype)
        return pieces

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """An operation that is not followed: a view, or one that computes or makes something."""
        for tensor in tensors_in((*args, *kwargs.values())):
            if storage_key(tensor) not in self._memory:
                self._remember(tensor, [_opaque(_everything(tensor), _FOREIGN)])
        if torch.Tag.inplace_view not in func.tags:
            for tensor in written_by(func, args, kwargs):
                value = filled_with(func, args)
                made = str(func) if value is None else f"{_FILLED}{value!r}"
                self._overwrite(tensor, [_opaque(_place(tensor), made)])
        for tensor in tensors_in((out,)):
            known = self._memory.get(storage_key(tensor))
            # A storage that changed its size was resized in place.
            if known is None or known.nbytes != tensor.untyped_storage().nbytes():
                self._remember(tensor, [_opaque(_everything(tensor), _made_by(func, args, out))])

    def _copy_into(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        try:
            pieces = list(self._moved(_place(dst), _view(src.expand(dst.shape)), dst.dtype))
        except SlicesError:
            if self.must_follow:
                raise
            pieces = [_opaque(_place(dst), "a copy that is too scattered to follow")]
        if storage_key(dst) not in self._memory:
            self._remember(dst, [_opaque(_everything(dst), _FOREIGN)])
        self._overwrite(dst, pieces)

    def _moved(self, dst: Slice, src: _View, dtype: torch.dtype) -> Iterator[Piece]:
        """Pieces of the memory that ``dst`` is a slice of, once ``src`` is copied there."""
        if src.base.dtype != dtype:
            yield _opaque(dst, _cast(src.base.dtype, dtype))
            return
        where = Piece(dst, whole(dst.shape), "")
        for piece in self._read(src):
            yield from join(where, piece)

    def read(self, tensor: torch.Tensor) -> list[Piece]:
        """What ``tensor`` consists of, whatever made it: as :meth:`pieces`, not yet put together.

        Raises:
            SlicesError: it is too scattered.
        """
        return self._read(_view(tensor))

    def _read(self, view: _View) -> list[Piece]:
        """What a view consists of; ``dst`` are slices of its own contiguous index space."""
        own = whole(view.place.shape)
        memory = self._memory.get(storage_key(view.base))
        if memory is None:
            return [_opaque(own, _FOREIGN)]
        if view.base.dtype != memory.tensor.dtype:
            return [_opaque(own, _cast(memory.tensor.dtype, view.base.dtype))]
        if view.base.is_conj() or view.base.is_neg():
            return [_opaque(own, "a negation")]
        where = Piece(own, view.place, "")
        return [found for piece in memory.pieces for found in join(where, piece)]

    def _overwrite(self, tensor: torch.Tensor, pieces: list[Piece]) -> None:
        memory = self._memory[storage_key(tensor)]
        if memory.leaf and self.leaves_stay:
            # With real tensors that would have changed the parameter.
            raise ExportError("the conversion writes into the parameter itself")
        memory.leaf = False
        if tensor.dtype != memory.tensor.dtype:
            made = _cast(tensor.dtype, memory.tensor.dtype)
            memory.pieces = [_opaque(_everything(memory.tensor), made)]
            return
        place = _place(tensor)
        try:
            rest = [left for old in memory.pieces for left in without(old, place)]
        except SlicesError:
            if self.must_follow:
                raise
            made = "a copy that is too scattered to follow"
            memory.pieces = [_opaque(_everything(memory.tensor), made)]
            return
        memory.pieces = rest + pieces

    def _remember(self, tensor: torch.Tensor, pieces: list[Piece], leaf: bool = False) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        self._memory[storage_key(tensor)] = _Memory(tensor.detach(), nbytes, pieces, leaf)


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> Slice:
    return Slice(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _view(tensor: torch.Tensor) -> _View:
    return _View(tensor, _place(tensor))


def _everything(tensor: torch.Tensor) -> Slice:
    return whole((tensor.untyped_storage().nbytes() // tensor.element_size(),))


def _opaque(dst: Slice, made: str) -> Piece:
    return Piece(dst, dst, made)


def _cast(one: torch.dtype, other: torch.dtype) -> str:
    return f"a cast from {dtype_name(one)} to {dtype_name(other)}"


def constant_of(origin: str) -> float | None:
    """The number that elements of this origin were filled with; None: they were not."""
    return float(origin.removeprefix(_FILLED)) if origin.startswith(_FILLED) else None


def filled_with(func: Any, args: Sequence[Any]) -> float | None:
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


def _made_by(func: Any, args: Sequence[Any], out: Any) -> str:
    if func is _aten._to_copy.default and args[0].dtype != out.dtype:
        return _cast(args[0].dtype, out.dtype)
    if func.overloadpacket in (_aten.zeros, _aten.zeros_like, _aten.new_zeros):
        return f"{_FILLED}0.0"
    return f"{func}, never written" if "empty" in str(func) else str(func)


_ARANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_SIZED = {
    *(_aten.empty, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn),
    *(_aten.empty_strided, _aten.new_empty_strided),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full),
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
}


def _refuse_large(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises ExportError before memory is allocated for a large tensor that has data."""
    size: float
    if func in _ARANGES:
        size = max((abs(x) for x in args), default=0)
    elif func.overloadpacket in _SIZED:
        like = next(tensors_in(args), None)
        device = kwargs.get("device") or (like.device if like is not None else "cpu")
        if torch.device(device).type == "meta":
            return
        sizes = next((a for a in args if isinstance(a, list | tuple)), None)
        size = math.prod(sizes) if sizes is not None else like.numel() if like is not None else 0
    else:
        return
    if size > MAX_REAL_ELEMENTS:
        raise ExportError(f"the conversion allocates {size} elements with {func}")


# What is followed: functions of (result, arguments) that return what is copied from where to
# where in the result's memory, or None for what cannot be followed.
_Copies = list[tuple[Slice, _View]]
# Start in the result, start in the source, how many, step in the source.
_Run = tuple[int, int, int, int]


def _narrow(s: Slice, dim: int, start: int, count: int, step: int = 1) -> Slice:
    return Slice(
        s.offset + start * s.stride[dim],
        (*s.shape[:dim], count, *s.shape[dim + 1 :]),
        (*s.stride[:dim], s.stride[dim] * step, *s.stride[dim + 1 :]),
    )


def _clone(out: torch.Tensor, src: torch.Tensor, *_: Any, **__: Any) -> _Copies | None:
    return [(_place(out), _view(src))] if src.dtype == out.dtype else None


def _cat(out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> _Copies:
    copies, at, place = [], 0, _place(out)
    for tensor in tensors:
        if tensor.shape == (0,) and out.dim() > 1:
            continue  # torch takes these for nothing, whatever the other shapes
        count = tensor.shape[dim]
        copies.append((_narrow(place, dim % out.dim(), at, count), _view(tensor)))
        at += count
    return copies


def _stack(out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> _Copies:
    return [(_place(out.select(dim, i)), _view(t)) for i, t in enumerate(tensors)]


def _narrow_copy(
    out: torch.Tensor, src: torch.Tensor, dim: int, start: int, length: int
) -> _Copies:
    return [(_place(out), _view(src.narrow(dim, start, length)))]


def _slice_scatter(
    out: torch.Tensor,
    base: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Copies:
    part = _aten.slice.Tensor(out, dim, start, end, step)
    return [(_place(out), _view(base)), (_place(part), _view(src))]


def _select_scatter(
    out: torch.Tensor, base: torch.Tensor, src: torch.Tensor, dim: int, index: int
) -> _Copies:
    return [(_place(out), _view(base)), (_place(out.select(dim, index)), _view(src))]


def _repeat(out: torch.Tensor, src: torch.Tensor, repeats: Sequence[int]) -> _Copies:
    sizes = (*[1] * (len(repeats) - src.dim()), *src.shape)
    split = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    strides = (*[0] * (len(repeats) - src.dim()), *src.stride())
    repeated = [t for stride in strides for t in (0, stride)]
    dst = Slice(int(out.storage_offset()), tuple(split), contiguous_stride(split))
    src_place = Slice(int(src.storage_offset()), tuple(split), tuple(repeated))
    return [(dst, _View(src, src_place))]


def _index_select(
    out: torch.Tensor, src: torch.Tensor, dim: int, index: torch.Tensor
) -> _Copies | None:
    return _index(out, src, [*[None] * (dim % src.dim()), index])


def _index(
    out: torch.Tensor, src: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> _Copies | None:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].device.type == "meta":
        return None
    dim, index = given[0]
    if index.dim() != 1 and not out.is_contiguous():
        return None
    if index.dtype in (torch.bool, torch.uint8):
        if index.dim() != 1:
            return None
        index = index.nonzero().flatten()
    size = src.shape[dim]
    index = index.flatten().to(device="cpu", dtype=torch.int64)
    index = torch.where(index < 0, index + size, index)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(f"an index is out of the range of {size}")
    place = _place(out)
    if len(place.shape) != src.dim():
        # As if the index had one dimension.
        shape = (*src.shape[:dim], index.numel(), *src.shape[dim + 1 :])
        place = Slice(place.offset, shape, contiguous_stride(shape))
    return _take(place, src, {dim: _runs(index)})


def _flip(out: torch.Tensor, src: torch.Tensor, dims: Sequence[int]) -> _Copies:
    # A slice never goes backwards, so each row is one.
    sizes = {dim % src.dim(): src.shape[dim] for dim in dims}
    if math.prod(sizes.values()) > MAX_RUNS:
        raise ExportError(f"too scattered to follow: {math.prod(sizes.values())} rows flipped")
    runs = {dim: [(i, n - 1 - i, 1, 1) for i in range(n)] for dim, n in sizes.items()}
    return _take(_place(out), src, runs)


def _roll(
    out: torch.Tensor, src: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> _Copies | None:
    if len(set(dims)) != len(shifts) or not src.numel():
        return None
    runs = {}
    for shift, dim in zip(shifts, dims, strict=True):
        n = src.shape[dim]
        first = shift % n
        parts = [(0, n - first, first, 1), (first, 0, n - first, 1)]
        runs[dim % src.dim()] = [run for run in parts if run[2]]
    return _take(_place(out), src, runs)


def _take(place: Slice, src: torch.Tensor, runs: dict[int, list[_Run]]) -> _Copies:
    copies = []
    for combination in itertools.product(*runs.values()):
        dst, taken = place, _place(src)
        for dim, (to, start, count, step) in zip(runs, combination, strict=True):
            dst, taken = _narrow(dst, dim, to, count), _narrow(taken, dim, start, count, step)
        copies.append((dst, _View(src, taken)))
    return copies


def _runs(index: torch.Tensor) -> list[_Run]:
    """An index [n] >= 0 as runs of equal steps."""
    steps = index.diff()
    # Where the step differs from the one before, only there a run can end.
    changes = [*(steps.diff().nonzero().flatten() + 1).tolist(), len(steps)]
    runs: list[_Run] = []
    at = 0
    while at < len(index):
        step, stop = 1, at
        if at < len(steps) and steps[at] >= 0:
            step, stop = int(steps[at]), changes[bisect.bisect_right(changes, at)]
        runs.append((at, int(index[at]), stop - at + 1, step))
        if len(runs) > MAX_RUNS:
            raise ExportError(f"too scattered to follow: an index of more than {MAX_RUNS} runs")
        at = stop + 1
    return runs


_COPIES: dict[Any, Callable[..., _Copies | None]] = {
    _aten.clone.default: _clone,
    _aten._to_copy.default: _clone,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.narrow_copy.default: _narrow_copy,
    _aten.slice_scatter.default: _slice_scatter,
    _aten.select_scatter.default: _select_scatter,
    _aten.repeat.default: _repeat,
    _aten.index_select.default: _index_select,
    _aten.index.Tensor: _index,
    _aten.flip.default: _flip,
    _aten.roll.default: _roll,
}
# The second copy goes over the first.
_SCATTERS = (_aten.slice_scatter.default, _aten.select_scatter.default)
