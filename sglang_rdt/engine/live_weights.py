"""The live parameters of one engine rank as pull targets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_rdt.dtypes import torch_dtype
from sglang_rdt.engine.direct_reader import DirectReader
from sglang_rdt.engine.quantised import Loadable
from sglang_rdt.engine.recorder import describe_tensors
from sglang_rdt.engine.replay import replay, sources_in_order
from sglang_rdt.engine.runners import Models, record
from sglang_rdt.errors import EngineStateError, ReconnectError, SlicesError, TransportError
from sglang_rdt.plan import slices
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.selection import keep, leave
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    ITEMSIZE,
    ParamSpec,
    Recording,
    TensorSpec,
    Want,
    is_scratch,
    scratch_name,
)
from sglang_rdt.plan.transfers import (
    Transfer,
    check_target_transfers,
    check_targets,
    wanted_elements,
)
from sglang_rdt.sums import Part, Sums
from sglang_rdt.transport import nixl, unfinished
from sglang_rdt.transport.scratch import OVERWRITTEN, UNREAD, Scratch

logger = logging.getLogger("sglang_rdt")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveWeights:
    """Parameters and buffers of ``model``, by name. Event-loop thread only.

    Args:
        model: the served model, or several as one.
        who: this rank, for messages.
    """

    def __init__(self, model: torch.nn.Module | Models, who: str) -> None:
        self._model = model
        self._who = who
        self.specs: dict[str, ParamSpec] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.recording: Recording | None = None
        # HF name -> memory for an HF tensor that the loader computes something of.
        self._computed: dict[str, torch.Tensor] = {}
        # Trainer rank -> reference to its memory, from the latest connect.
        self.sources: dict[int, Any] = {}
        self._reader: DirectReader | None = None
        self._connection = ""
        # One for each stage of the direct reads, or for all that the loader fills.
        self._sums: list[Sums[str]] | None = None
        self._loadable = Loadable(model)
        self.refresh()
        device = next((t.device for t in self._tensors.values()), torch.device("cpu"))
        self.scratch = Scratch(device)

    def refresh(self) -> None:
        """Describes the parameters anew; registrations of memory that they left are given up."""
        old, self._sums = self._tensors, None
        self.specs, self._tensors = self._describe()
        self._places = places(self._model)
        here = {t.untyped_storage().data_ptr() for t in self._tensors.values()}
        nixl.deregister(t for t in old.values() if t.untyped_storage().data_ptr() not in here)

    def describe(self) -> list[ParamSpec]:
        """What the loader fills, and the scratch memory of what it computes."""
        scratch = [spec for name, spec in self.specs.items() if is_scratch(name)]
        return [*self._describe()[0].values(), *scratch]

    def _describe(self) -> tuple[dict[str, ParamSpec], dict[str, torch.Tensor]]:
        """What the loader fills; quantised weights in their loadable form, once it has memory."""
        with self._loadable.loadable():
            specs, tensors = describe_tensors(self._model)
        scales = self._loadable.without_source() | kv_cache_scales(self._model)
        # Like a buffer's, their values are not the loader's business unless it writes them.
        return {s.name: replace(s, buffer=True) if s.name in scales else s for s in specs}, tensors

    @contextlib.contextmanager
    def quantising(self) -> Iterator[None]:
        """Around the end of a session: what landed is quantised into the served weights."""
        with self._loadable.loadable(self._loadable.without(self.recording)):
            yield
            self._loadable.quantise()

    @property
    def derivable(self) -> bool:
        """Whether what is derived of the served weights can be derived anew of them."""
        return not self._loadable.derived_from

    def check_addresses(self) -> None:
        """Raises ReconnectError if a tensor that the loader fills moved since it was described.

        Memory that was released and resumed, offloaded, or replaced would otherwise take bytes
        that nobody serves.
        """
        if self._places == places(self._model):
            return
        now, _ = self._describe()
        filled = {w.param for w in self.recording.wants} if self.recording else set()
        moved = [
            name
            for name, spec in self.specs.items()
            if (not spec.buffer or name in filled) and not is_scratch(name)
            if now.get(name) != spec
        ]
        moved += [s.name for s in now.values() if not s.buffer and s.name not in self.specs]
        if moved:
            raise ReconnectError(
                f"{self._who}: {len(moved)} parameters moved since the trainer connected "
                f"({', '.join(moved[:5])}); connect again"
            )

    def record(
        self,
        specs: Sequence[TensorSpec],
        kept: Iterable[str] = (),
        left: Sequence[str] = (),
    ) -> Recording:
        """See :func:`sglang_rdt.engine.recorder.record_load`; remembered for checksums.

        What was prepared for the trainer before is given up.

        Args:
            kept: names of HF tensors that are not synced: what only they fill is neither read,
                overwritten nor summed up.
            left: patterns of parameters that ``specs`` have nothing for, and that stay as well.
        """
        self._forget_sources()
        self._computed = {}
        if self._loadable.layers:
            self._loadable.allocate()
            logger.info(
                "%s: %d layers are quantised by SGLang after each sync; what they are loaded into "
                "takes another %.3f GB",
                self._who,
                len(self._loadable.layers),
                self._loadable.nbytes / 1e9,
            )
        self.refresh()
        with self._loadable.loadable():
            recording = keep(record(self._model, specs), kept)
        recording = leave(recording, self.specs.values(), left)
        self._loadable.without(recording)  # refuses what is kept in part
        by_name = {s.name: s for s in specs}
        self._allocate([by_name[n] for n in sources_in_order(recording, list(by_name))])
        wants = [
            Want(spec.name, whole, name, whole)
            for name in self._computed
            for spec in [self.specs[scratch_name(name)]]
            for whole in [Slice(0, spec.shape, spec.stride)]
        ]
        self.recording = replace(recording, wants=(*recording.wants, *wants))
        self._log_computed()
        return self.recording

    def _allocate(self, sources: Sequence[TensorSpec]) -> None:
        """Scratch memory for HF tensors that the loader computes something of."""
        for source in sources:
            tensor = torch.zeros(source.shape, dtype=torch_dtype(source.dtype), device=self.device)
            name = scratch_name(source.name)
            self._computed[source.name] = self._tensors[name] = tensor
            storage = tensor.untyped_storage().data_ptr()
            self.specs[name] = ParamSpec(
                name, source.shape, tuple(tensor.stride()), source.dtype, storage, 0
            )

    def _log_computed(self) -> None:
        assert self.recording is not None
        for one in self.recording.computed:
            written = sum(w.dst.numel * ITEMSIZE[self.specs[w.param].dtype] for w in one.writes)
            pulled = sum(self.specs[scratch_name(name)].nbytes for name in one.sources)
            logger.info(
                "%s: %s (%d bytes): computed by the engine's loader at each sync, of %s (%d bytes, "
                "pulled into scratch memory): %s",
                self._who,
                ", ".join(one.params),
                written,
                ", ".join(one.sources),
                pulled,
                one.why,
            )

    def compute(self) -> None:
        """Has the loader compute what is no copy of slices, once all of it was pulled; inside of
        :meth:`quantising`.

        Raises:
            RecordError: see :func:`sglang_rdt.engine.replay.replay`.
        """
        if self.recording is not None and self.recording.computed:
            assert isinstance(self._model, torch.nn.Module)  # several at once compute nothing
            replay(self._model, self.recording, self._computed)

    def unfinished(self) -> list[str]:
        """Where transfers come from that were given up, and may still write into the parameters."""
        return [*(self._reader.under_way() if self._reader else ()), *unfinished.unfinished()]

    def forget(self, *, closed: bool = False) -> None:
        """Gives up what was prepared, what was recorded, and every registration.

        Args:
            closed: the trainer is gone for good.
        """
        self._forget_sources(closed=closed)
        self.recording = None  # it is about memory that goes away here
        self._sums = None
        nixl.deregister(self._tensors.values())
        beside = [*self._computed.values(), *self._loadable.free()]
        unfinished.close(unfinished.Tensors(beside))
        self._computed = {}
        self.refresh()
        unfinished.close(self.scratch)
        self.scratch = Scratch(self.device)

    def doubt(self) -> None:
        """A sync was torn: its connection to the trainer may be what is wrong."""
        nixl.doubt()

    def _forget_sources(self, *, closed: bool = False) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.sources.clear()
        nixl.forget(closed=closed)

    def prepare_direct(
        self,
        connection: str,
        transfers: Sequence[Transfer],
        scratch_bytes: int,
        timeout_s: float,
        *,
        verify: bool = False,
    ) -> int:
        """Prepares reading ``transfers`` out of :attr:`sources`; bytes per sync.

        Args:
            connection: name of the connect session, for :meth:`prepared`.
            verify: whether checksums will be asked for: what they need is prepared, too.

        Raises:
            SlicesError: a transfer does not fit this rank's parameters or its source's memory.
            TransportError: a source cannot be reached.
        """
        wanted = wanted_elements(self.recording.wants) if self.recording else {}
        check_target_transfers(list(self.specs.values()), transfers, wanted)
        missing = {t.source for t in transfers if t.how != "pack"} - self.sources.keys()
        if missing:
            raise TransportError(
                f"{self._who}: no memory was offered by trainer ranks {sorted(missing)}"
            )
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._reader = DirectReader(
            self,
            transfers,
            self.sources,
            scratch_bytes=scratch_bytes,
            timeout_s=timeout_s,
            staged=verify,
        )
        # Where the bytes lie is known now; a reference held here would keep the trainer's
        # parameters in memory after it has closed.
        self.sources.clear()
        self._connection = connection
        if verify and self._reader.stages > 1:
            self._stage_sums(self._reader)
        elif verify:
            self._sums = self._make_sums([None])
        return self._reader.nbytes

    def prepared(self, connection: str) -> DirectReader:
        """What was prepared in ``connection``.

        Raises:
            EngineStateError: nothing was, or another trainer has connected since: its memory must
                not be taken for the caller's.
        """
        if self._reader is None or self._connection != connection:
            raise ReconnectError(
                f"{self._who}: no direct reads are prepared for {connection}"
                + (f", but for {self._connection}" if self._reader else "")
                + "; connect again"
            )
        return self._reader

    def address(self, param: str) -> int:
        """Where the first element of ``param`` lies."""
        return self._tensors[param].data_ptr()

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.scratch.device

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return self._who

    def register(self) -> int:
        """Registers every parameter's storage with NIXL; how many were new."""
        return nixl.register(self._tensors[n] for n in self.specs)

    def view(self, param: str, s: Slice) -> torch.Tensor:
        """The live elements of ``s`` in ``param``.

        Raises:
            SlicesError: no such parameter, or the slice leaves it.
        """
        tensor = self._tensors.get(param)
        if tensor is None:
            raise SlicesError(f"{self._who} has no parameter {param!r}")
        slices.check(s, self.specs[param].extent, f"{self._who}: {param}")
        return torch.as_strided(tensor, s.shape, s.stride, tensor.storage_offset() + s.offset)

    def resolve(self, names_or_slices: Sequence[str | Target]) -> list[torch.Tensor]:
        """Live views for whole parameters (names) and slices of them.

        Raises:
            SlicesError: see :func:`sglang_rdt.plan.transfers.check_targets`.
        """
        places = check_targets(self.specs, names_or_slices, self._who)
        return [self.view(name, s) for name, s in places]

    def pull(self, ref: Any, names_or_slices: Sequence[str | Target], timeout_s: float) -> int:
        """Pulls into the live parameters; returns bytes.

        Contiguous slices are written by NIXL in place. Strided ones go through scratch memory.
        """
        views = self.resolve(names_or_slices)
        detours = iter(self.scratch.like([v for v in views if not v.is_contiguous()]))
        targets = [v if v.is_contiguous() else next(detours) for v in views]
        nixl.pull(ref, targets, timeout_s)
        for view, target in zip(views, targets, strict=True):
            if target.data_ptr() != view.data_ptr():
                view.copy_(target)
        return sum(t.numel() * t.element_size() for t in targets)

    def compare(
        self, ref: Any, names_or_slices: Sequence[str | Target], timeout_s: float
    ) -> list[str]:
        """Pulls into scratch memory and compares with the live bytes; one line per difference."""
        views = self.resolve(names_or_slices)
        # Never equal by accident: scratch that the pull did not reach must not match.
        scratch = self.scratch.like(views)
        for s in scratch:
            _bytes(s).fill_(UNREAD)
        nixl.pull(ref, scratch, timeout_s)
        differences = []
        for item, view, expected in zip(names_or_slices, views, scratch, strict=True):
            wrong = int((_bytes(view.contiguous()) != _bytes(expected)).sum())
            if wrong:
                name = (
                    item if isinstance(item, str) else f"{item.param} at element {item.dst.offset}"
                )
                differences.append(
                    f"{self._who}: {name}: {wrong} of {view.numel() * view.element_size()} bytes differ"
                )
        return differences

    def apply_constants(self) -> None:
        """Sets what the loader sets to constants (padding rows)."""
        if self.recording is not None:
            for c in self.recording.constants:
                self.view(c.param, c.dst).fill_(c.value)

    def overwrite(self) -> int:
        """Fills everything that the loader fills with a pattern; bytes."""
        count = 0
        if self.recording is None:
            return count
        places = [(want.param, want.dst) for want in self.recording.wants]
        places += [(w.param, w.dst) for one in self.recording.computed for w in one.writes]
        for param, dst in places:
            view = self.view(param, dst)
            size = view.element_size()
            view.view(_INTEGERS[size]).fill_(
                int.from_bytes([OVERWRITTEN] * size, "big", signed=True)
            )
            count += view.numel() * size
        return count

    def read(self, reader: DirectReader, timeout_s: float, *, sums: bool) -> int:
        """Reads all that was prepared; bytes.

        Args:
            sums: on a GPU, sum up what has landed while the rest is on its way, for
                :meth:`checksums`.
        """
        if not sums or reader.stages == 1:
            return reader.read(timeout_s)
        staged = self._stage_sums(reader)
        return reader.read(timeout_s, lambda stage: staged[stage].start())

    def checksums(self) -> dict[str, int]:
        """Additive checksum of every recorded parameter, over the slices its loader fills."""
        if self._sums is None:
            self._sums = self._make_sums([None])
        totals: dict[str, int] = {}
        for part in self._sums:
            totals.update(part.result())
        return totals

    def _stage_sums(self, reader: DirectReader) -> list[Sums[str]]:
        if self._sums is None or len(self._sums) != reader.stages:
            self._sums = self._make_sums(
                [{p for p in self.specs if reader.stage_of(p) == i} for i in range(reader.stages)]
            )
        return self._sums

    def _make_sums(self, groups: Sequence[set[str] | None]) -> list[Sums[str]]:
        if self.recording is None:
            raise EngineStateError(f"{self._who}: no load was recorded; call record_load first")
        parts = [
            (want.param, Part(view, want.dst.offset, want.dst.stride, view.dtype))
            for want in self.recording.wants
            for view in [self.view(want.param, want.dst)]
        ]
        return [Sums([(k, p) for k, p in parts if g is None or k in g]) for g in groups]


def kv_cache_scales(model: torch.nn.Module | Models) -> set[str]:
    """Scales that only checkpoints with a quantised KV cache have (SGLang sets others to 1).

    Source: sglang/srt/layers/quantization/kv_cache.py, BaseKVCacheMethod.create_weights.
    """
    return {
        f"{name}.{scale}"
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__.endswith("KVCacheMethod")
        for scale in ("k_scale", "v_scale")
    }


def places(model: torch.nn.Module | Models) -> list[tuple[int, int]]:
    """Identity and address of every parameter and buffer: cheap enough to ask before each sync."""
    return [
        (id(tensor), tensor.data_ptr())
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for tensor in table.values()
        if tensor is not None
    ]


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    # reshape: a tensor without dimensions cannot be viewed as another dtype
    return contiguous.reshape(-1).view(torch.uint8)
