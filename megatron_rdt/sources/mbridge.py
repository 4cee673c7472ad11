"""mbridge as a source: its names, its TP merge, its conversion; our gathers.

mbridge's own ``export_weights`` broadcasts every parameter over the pipeline stages and gathers
over the expert ranks, so that every rank gets everything. Here each pipeline stage and each
expert rank converts only what it has; a parameter is gathered over its TP (or ETP) group and
nothing else. The three conversion methods used are mbridge's per-parameter ones
(mbridge/core/bridge.py: ``_weight_name_mapping_mcore_to_hf``, ``_weight_merge_across_tp``,
``_weight_to_hf_format``), checked to exist when the source is made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rdt.sources.holds import Holdings, HoldingsBuilder
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError
from sglang_rdt.plan.specs import TensorSpec
from sglang_rdt.tracing import Tracer

if TYPE_CHECKING:
    from sglang_rdt.coordinator.phases import PhaseTimer

_METHODS = ("_weight_name_mapping_mcore_to_hf", "_weight_merge_across_tp", "_weight_to_hf_format")
_LAYER = re.compile(r"(?<=layers\.)(\d+)(?=\.)")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(weight|bias)(\d+)$")


@dataclass(frozen=True)
class _Local:
    """One parameter of this rank: its global name in TransformerEngine spelling, which is what
    mbridge knows, the group it is split over, and which part of it this rank has."""

    name: str
    tensor: torch.Tensor
    group: Any
    group_size: int
    group_rank: int
    expert: bool


def unwrap(module: Any) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    return module


class MBridgeSource:
    """HF tensors of a Megatron model through mbridge.

    Args:
        model_chunks: the model's (virtual pipeline) chunks on this rank, wrapped or not.
        hf_config: the transformers config of the HF model.
        bridge: an ``mbridge`` bridge; default: made for ``hf_config``.
        gather_bytes: how many gathered bytes are held at a time (one larger tensor excepted).

    Raises:
        ExportError: mbridge does not know the model type, or a parameter of it.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        hf_config: Any,
        *,
        bridge: Any | None = None,
        gather_bytes: int = 512 << 20,
    ) -> None:
        self._gather_bytes = gather_bytes
        self._hf_config = hf_config
        models = [unwrap(chunk) for chunk in model_chunks]
        dtype = next((p.dtype for m in models for p in m.parameters()), torch.bfloat16)
        self._bridge = bridge if bridge is not None else make_bridge(hf_config, dtype)
        missing = [m for m in _METHODS if not hasattr(self._bridge, m)]
        if missing:
            raise ExportError(f"this mbridge has no {', '.join(missing)}; 0.15.1 is known to work")
        # Experts are split over ETP, and mbridge's merge looks at tp_size alone.
        mpu = self._bridge.mpu
        self._expert_bridge = copy.copy(self._bridge)
        self._expert_bridge.mpu = replace(mpu, tp_size=mpu.etp_size)
        self._models = models
        self._params: list[_Local] = []
        self._seen: tuple[int, ...] = ()
        self._follow()
        self._set_vocabulary(models)

    def _locals(self, model: Any) -> Iterator[_Local]:
        layers = {
            str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)
        }
        moe_layers = {
            layers[str(i)]
            for i, layer in enumerate(model.decoder.layers)
            if hasattr(layer.mlp, "experts")
        }
        mpu = self._bridge.mpu
        config = model.config
        experts_here = (config.num_moe_experts or 0) // max(mpu.ep_size, 1)
        tied = bool(getattr(self._hf_config, "tie_word_embeddings", False))
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        # Router correction biases are weights, but buffers; they exist only where a model uses them.
        named += [(n, b) for n, b in model.named_buffers() if n.endswith("router.expert_bias")]
        for raw, tensor in named:
            if tied and raw == "output_layer.weight":
                continue  # the last stage's copy of the embedding
            name = _LAYER.sub(lambda m: layers[m[1]], raw, count=1)
            name = te_name(name, moe_layers)
            match = _GROUPED_EXPERT.search(name)
            if match:
                index = int(match[2]) + experts_here * mpu.ep_rank
                name = f"{name[: match.start(2)]}{index}"
                yield _Local(name, tensor, mpu.etp_group, mpu.etp_size, mpu.etp_rank, True)
                continue
            size, rank = mpu.tp_size, mpu.tp_rank
            if not getattr(tensor, "tensor_model_parallel", False):
                size, rank = 1, 0
            yield _Local(name, tensor, mpu.tp_group, size, rank, False)

    def _set_vocabulary(self, models: Sequence[Any]) -> None:
        # Megatron pads the vocabulary; mbridge cuts it if it is told the two sizes.
        for model in models:
            for part in ("embedding", "output_layer"):
                module = getattr(model, part, None)
                weight = getattr(getattr(module, "word_embeddings", module), "weight", None)
                if weight is None:
                    continue
                padded = weight.shape[0] * self._bridge.mpu.tp_size
                real = self._hf_config.vocab_size
                if padded < real:
                    raise ExportError(
                        f"{part} has {padded} rows, fewer than the vocabulary of {real} in the HF config"
                    )
                for bridge in (self._bridge, self._expert_bridge):
                    bridge.make_vocab_size_divisible_by = padded
                    bridge.vocab_size, bridge.padded_vocab_size = real, padded

    def _follow(self) -> None:
        """Finds the parameters anew if the model got other ones since."""
        now = _places(self._models)
        if now != self._seen:
            self._params = [local for model in self._models for local in self._locals(model)]
            self._seen = now

    def specs(self) -> Sequence[TensorSpec]:
        """Learned by converting meta tensors: no memory, no communication."""
        self._follow()
        specs = []
        for local in self._params:
            meta = torch.empty(local.tensor.shape, dtype=local.tensor.dtype, device="meta")
            for name, tensor in self._convert(local, [meta] * local.group_size):
                specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)))
        return specs

    def holds(self) -> Holdings:
        """Where the HF tensors lie in this rank's live parameters, without gathering anything.

        Learned by tracing the conversion on meta tensors: no memory, no communication. Valid
        until memory moves (see :meth:`addresses`).

        Raises:
            ExportError: a parameter is no plain tensor in memory, or the bridge computes an HF
                tensor instead of cutting it out; names the parameter and the operation.
        """
        self._follow()
        builder = HoldingsBuilder()
        for local in self._params:
            tracer = Tracer()
            shape, dtype = local.tensor.shape, local.tensor.dtype
            shards = [tracer.leaf(shape, dtype) for _ in range(local.group_size)]
            try:
                with torch.no_grad(), tracer:
                    converted = self._convert(local, shards)
            except ExportError as error:
                raise ExportError(f"{local.name} cannot be traced: {error}") from error
            except Exception as error:
                raise ExportError(
                    f"{local.name} cannot be traced: the conversion of mbridge "
                    f"({type(self._bridge).__name__}) does not run on tensors without data: "
                    f"{type(error).__name__}: {error}"
                ) from error
            builder.add(local.name, local.tensor, local.group_rank, tracer, converted)
        return replace(builder.build(), addresses=self.addresses())

    def addresses(self) -> tuple[int, ...]:
        """Which tensors the model has now, and where each begins; compare with
        :attr:`Holdings.addresses`. Cheap enough for every sync."""
        return _places(self._models)

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathers up to ``gather_bytes`` at a time, all of it in flight at once, then converts."""
        self._follow()
        for batch in self._batches():
            with timer.phase("gather"):
                gathered = self._gather(batch)
            while batch:
                local, shards = batch.pop(0), gathered.pop(0)
                with timer.phase("convert"):
                    converted = self._convert(local, shards)
                del shards
                yield from converted

    def _batches(self) -> Iterator[list[_Local]]:
        batch: list[_Local] = []
        held = 0
        for local in self._params:
            size = local.tensor.numel() * local.tensor.element_size() * local.group_size
            if batch and held + size > self._gather_bytes:
                yield batch
                batch, held = [], 0
            batch.append(local)
            held += size
        if batch:
            yield batch

    def _gather(self, batch: Sequence[_Local]) -> list[list[torch.Tensor]]:
        out, pending = [], []
        for local in batch:
            tensor = local.tensor.detach()
            if local.group_size == 1:
                out.append([tensor])
                continue
            shards = list(tensor.new_empty((local.group_size, *tensor.shape)).unbind(0))
            pending.append(
                dist.all_gather(shards, tensor.contiguous(), group=local.group, async_op=True)
            )
            out.append(shards)
        for work in pending:
            work.wait()
        return out

    def _convert(self, local: _Local, shards: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        bridge = self._expert_bridge if local.expert else self._bridge
        try:
            merged = (
                bridge._weight_merge_across_tp(local.name, shards, local.tensor)
                if local.group_size > 1
                else shards[0]
            )
            names, tensors = bridge._weight_to_hf_format(local.name, merged)
        except (NotImplementedError, KeyError, AssertionError) as error:
            raise ExportError(
                f"mbridge ({type(self._bridge).__name__}) cannot convert {local.name} "
                f"{list(local.tensor.shape)}: {type(error).__name__}: {error}"
            ) from error
        return list(zip(names, tensors, strict=True))


def _places(models: Sequence[Any]) -> tuple[int, ...]:
    """Identity and address of every parameter, and of the buffers that are exported."""
    tensors = (
        tensor
        for model in models
        for module in model.modules()
        for tensor in (*module._parameters.values(), module._buffers.get("expert_bias"))
        if tensor is not None
    )
    return tuple(number for t in tensors for number in (id(t), t.data_ptr()))


def te_name(name: str, moe_layers: set[str]) -> str:
    """A local-spec parameter name in the TransformerEngine spelling that mbridge maps.

    TE fuses norms into the linear layer behind them, except before an MoE layer.

    Args:
        moe_layers: global layer numbers (text) whose MLP is a mixture of experts.
    """
    match = _LAYER.search(name)
    if match:
        head, tail = name[: match.end() + 1], name[match.end() + 1 :]
        if tail == "input_layernorm.weight":
            tail = "self_attention.linear_qkv.layer_norm_weight"
        elif tail == "pre_mlp_layernorm.weight" and match[1] not in moe_layers:
            tail = "mlp.linear_fc1.layer_norm_weight"
        name = head + tail
    return _LOCAL_EXPERT.sub(r"experts.\2.\3\1", name)


def make_bridge(hf_config: Any, dtype: torch.dtype) -> Any:
    """An mbridge bridge for ``hf_config``.

    Raises:
        ExportError: mbridge is not installed, or does not know the model type.
    """
    try:
        import mbridge  # noqa: F401  (registers the models)
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise ExportError(f"mbridge is needed to export {hf_config.model_type}: {error}") from None
    known = _MODEL_REGISTRY.get(hf_config.model_type)
    if known is None:
        raise ExportError(
            f"mbridge does not know model type {hf_config.model_type!r} (it knows "
            f"{', '.join(sorted(_MODEL_REGISTRY))}); pass source=GeneratorSource(...) instead"
        )
    # mbridge writes tied names into a table of the *class*; give each bridge a table of its own.
    cls = type(known.__name__, (known,), {"_DIRECT_MAPPING": dict(known._DIRECT_MAPPING)})
    return cls(hf_config, dtype=dtype)
