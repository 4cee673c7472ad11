"""mbridge as a source: its names, its TP merge, its conversion; our gathers.

What mbridge lacks, or cannot make any more, is in :mod:`megatron_rdt.sources.families`, as bridges
of mbridge's kind.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rdt.sources import families
from megatron_rdt.sources.holds import Holdings, HoldingsBuilder
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError
from sglang_rdt.plan.specs import TensorSpec
from sglang_rdt.tracing import Tracer

if TYPE_CHECKING:
    from sglang_rdt.coordinator.phases import PhaseTimer

_METHODS = ("_weight_name_mapping_mcore_to_hf", "_weight_merge_across_tp", "_weight_to_hf_format")
# Of what bridges compute for direct mode.
_ALIGNED = 64
_MOST_COMPUTED = 64 << 20
# Router correction biases are weights, but buffers; they exist only where a model uses them.
_BUFFER = "router.expert_bias"
_DECODER_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# megatron-core 0.19 calls it mtp_model_layer.
_MTP_LAYER = re.compile(r"^(mtp\.layers\.\d+)\.(?:transformer_layer|mtp_model_layer)\.")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(weight|bias)(\d+)$")
# All experts of a rank in one parameter: megatron-core 0.19 with moe_single_grouped_weight, and
# the GroupedMLP of 0.16 and before, which keeps them transposed.
_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(weight|bias)$")
_TRANSPOSED_EXPERTS = re.compile(r"\.mlp\.experts\.weight([12])$")


@dataclass(frozen=True)
class _Local:
    """One parameter of this rank: its global name in TransformerEngine spelling, which is what
    mbridge knows, the group it is split over, and which part of it this rank has.

    Args:
        transposed: kept the other way round than mbridge expects it.
        more: of a block of experts that is one HF tensor, those after the first (``tensor``).
    """

    name: str
    tensor: torch.Tensor
    group: Any
    group_size: int
    group_rank: int
    expert: bool
    transposed: bool = False
    more: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor, *self.more)


class _Copy(NamedTuple):
    """An HF tensor that is computed of a parameter, in memory of its own."""

    local: _Local
    hf_name: str
    tensor: torch.Tensor


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
        # Models with a vision part keep what describes the language model a level deeper.
        text = getattr(hf_config, "get_text_config", None)
        self._hf_config = text() if text is not None else hf_config
        models = [unwrap(chunk) for chunk in model_chunks]
        dtype = next((p.dtype for m in models for p in m.parameters()), torch.bfloat16)
        if bridge is None:
            bridge = make_bridge(self._hf_config, dtype, models[0].config if models else None)
        self._bridge = bridge
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
        self._copies: list[_Copy] = []
        self._follow()
        self._set_vocabulary(models)

    def _locals(self, model: Any) -> Iterator[_Local]:
        mpu = self._bridge.mpu
        experts_here = (model.config.num_moe_experts or 0) // max(mpu.ep_size, 1)
        is_split = getattr(self._bridge, "is_split", lambda name: None)
        is_block = getattr(self._bridge, "is_block", lambda name: False)
        blocks: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in self._named(model):
            expert = _expert_of(name)
            if expert is None:
                split = is_split(name)
                if split is None:
                    split = getattr(tensor, "tensor_model_parallel", False)
                size, rank = (mpu.tp_size, mpu.tp_rank) if split else (1, 0)
                yield _Local(name, tensor, mpu.tp_group, size, rank, False)
                continue
            whole, number, transposed = expert
            size, rank = mpu.etp_size, mpu.etp_rank
            if is_split(whole) is False:
                size, rank = 1, 0
            if transposed:
                tensor = _as_used(tensor, whole, model.config.hidden_size, experts_here)
            experts = enumerate(tensor.unbind(0)) if number is None else [(number, tensor)]
            for index, one in experts:
                if is_block(whole):
                    if transposed:
                        raise ExportError(f"{whole}: transposed, and to be one HF tensor")
                    blocks.setdefault(whole, {})[index] = one
                    continue
                at = index + experts_here * mpu.ep_rank
                yield _Local(f"{whole}{at}", one, mpu.etp_group, size, rank, True, transposed)
        for name, found in blocks.items():
            tensors = [found[index] for index in sorted(found)]
            if mpu.ep_size * mpu.etp_size == 1:
                group = None
            else:
                from megatron.core import parallel_state as ps

                group = ps.get_expert_tensor_and_model_parallel_group(check_initialized=False)
            rank = mpu.ep_rank * mpu.etp_size + mpu.etp_rank
            size = mpu.ep_size * mpu.etp_size
            yield _Local(name, tensors[0], group, size, rank, True, False, tuple(tensors[1:]))

    def _named(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor to export, by its global name in TransformerEngine spelling."""
        numbers = {
            str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)
        }
        moe_layers = {
            numbers[str(i)]
            for i, layer in enumerate(model.decoder.layers)
            if hasattr(layer.mlp, "experts")
        }
        for i, layer in enumerate(getattr(getattr(model, "mtp", None), "layers", ())):
            inner = getattr(layer, "transformer_layer", None) or layer.mtp_model_layer
            if hasattr(inner.mlp, "experts"):
                moe_layers.add(f"mtp.layers.{i}")
        latent = bool(getattr(model.config, "multi_latent_attention", False))
        tied = bool(getattr(self._hf_config, "tie_word_embeddings", False))
        if tied != getattr(model, "share_embeddings_and_output_weights", tied):
            raise ExportError(
                f"tie_word_embeddings is {tied} in the HF config, and "
                f"share_embeddings_and_output_weights {not tied} in the trainer: the engine's "
                "lm_head would not be the trainer's output_layer.weight"
            )
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        named += [(n, b) for n, b in model.named_buffers() if n.endswith(_BUFFER)]
        for raw, tensor in named:
            if tied and raw == "output_layer.weight":
                continue  # the last stage's copy of the embedding
            if raw.startswith("embedding.") and not getattr(model, "pre_process", True):
                continue  # the copy of the stage with the multi-token-prediction layers
            name = _DECODER_LAYER.sub(lambda m: f"decoder.layers.{numbers[m[1]]}.", raw)
            yield te_name(name, moe_layers, latent=latent), tensor

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
        for model in self._models:
            for module in model.modules():
                # Wrapping a model in Float16Module casts the routers' correction biases, too.
                # Megatron casts them back, into other memory, in the first forward pass.
                keep = getattr(module, "_maintain_float32_expert_bias", None)
                if keep is not None:
                    keep()
        now = _places(self._models)
        if now != self._seen:
            self._params = [local for model in self._models for local in self._locals(model)]
            self._seen = now

    def specs(self) -> Sequence[TensorSpec]:
        """Learned by converting meta tensors: no memory, no communication."""
        self._follow()
        specs = []
        for local in self._params:
            shards = [
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for tensor in local.tensors
                for _ in range(local.group_size)
            ]
            for name, tensor in self._convert(local, shards):
                specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)))
        return specs

    def holds(self) -> Holdings:
        """Where the HF tensors lie in this rank's live parameters, without gathering anything.

        Small tensors that a bridge says it computes (norms that scale by 1 + weight), and router
        correction biases, lie in a buffer beside them, which :meth:`refresh` brings up to date.

        Learned by tracing the conversion on meta tensors: no memory, no communication. Valid
        until memory moves (see :meth:`addresses`).

        Raises:
            ExportError: a parameter is no plain tensor in memory, or the bridge computes an HF
                tensor instead of cutting it out; names the parameter and the operation.
        """
        self._follow()
        builder = HoldingsBuilder()
        may_compute = getattr(self._bridge, "may_compute", lambda name: False)
        copies: list[tuple[_Local, list[str]]] = []
        for local in self._params:
            tracer = Tracer()
            shards = [
                tracer.leaf(tensor.shape, tensor.dtype)
                for tensor in local.tensors
                for _ in range(local.group_size)
            ]
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
            own = {
                i * local.group_size + local.group_rank: tensor
                for i, tensor in enumerate(local.tensors)
            }
            if local.name.endswith(_BUFFER):
                # Megatron changes it at the end of the backward pass, before the step: with
                # overlap, under the engines' reads.
                copies.append((local, [name for name, _ in converted]))
                continue
            if may_compute(local.name):
                computed = [one for one in converted if not _is_cut_out(tracer, one[1])]
                converted = [one for one in converted if one not in computed]
                if computed:
                    copies.append((local, [name for name, _ in computed]))
            builder.add(local.name, own, tracer, converted)
        self._copies = self._make_copies(copies)
        for one in self._copies:
            builder.add_copy(f"made of {one.local.name}", one.hf_name, one.tensor)
        return replace(builder.build(), addresses=self.addresses())

    def _make_copies(self, wanted: Sequence[tuple[_Local, list[str]]]) -> list[_Copy]:
        """One buffer, so that it is registered once, with a place for each computed tensor."""
        found = []
        for local, names in wanted:
            if local.group_size > 1:
                raise ExportError(f"{local.name} is cut over ranks, and {names[0]} computed of it")
            values = dict(self._convert(local, [local.tensor.detach()]))
            found += [(local, name, values[name]) for name in names]
        sizes = [-(-v.numel() * v.element_size() // _ALIGNED) * _ALIGNED for _, _, v in found]
        if not found:
            return []
        if sum(sizes) > _MOST_COMPUTED:
            raise ExportError(f"{sum(sizes)} bytes are computed, such as {found[0][1]}")
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=found[0][2].device)
        copies = []
        for (local, name, value), part in zip(found, buffer.split(sizes), strict=True):
            nbytes = value.numel() * value.element_size()
            place = part[:nbytes].view(value.dtype).view(value.shape)
            copies.append(_Copy(local, name, place.copy_(value)))
        return copies

    def addresses(self) -> tuple[int, ...]:
        """Which tensors the model has now, and where each begins; compare with
        :attr:`Holdings.addresses`. Cheap enough for every sync."""
        return _places(self._models)

    def refresh(self) -> None:
        """Computes anew what :meth:`holds` says is computed; once parameters are final."""
        for one in self._copies:
            values = dict(self._convert(one.local, [one.local.tensor.detach()]))
            one.tensor.copy_(values[one.hf_name])

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
            size = sum(t.numel() * t.element_size() for t in local.tensors) * local.group_size
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
            shards: list[torch.Tensor] = []
            for tensor in (t.detach() for t in local.tensors):
                if local.group_size == 1:
                    shards.append(tensor)
                    continue
                parts = list(tensor.new_empty((local.group_size, *tensor.shape)).unbind(0))
                pending.append(
                    dist.all_gather(parts, tensor.contiguous(), group=local.group, async_op=True)
                )
                shards += parts
            out.append(shards)
        for work in pending:
            work.wait()
        return out

    def _convert(self, local: _Local, shards: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        bridge = self._expert_bridge if local.expert else self._bridge
        try:
            if local.more or getattr(bridge, "is_block", lambda name: False)(local.name):
                names, tensors = bridge.block_to_hf(local.name, self._experts(local, shards))
                return list(zip(names, tensors, strict=True))
            if local.transposed:
                shards = [shard.t() for shard in shards]
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

    def _experts(self, local: _Local, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The experts of a block, in their order, out of what all its ranks have."""
        mpu, out = self._bridge.mpu, []
        for ep_rank in range(mpu.ep_size):
            for index in range(len(local.tensors)):
                at = index * local.group_size + ep_rank * mpu.etp_size
                parts = list(shards[at : at + mpu.etp_size])
                if mpu.etp_size > 1 and self._bridge.is_split(local.name):
                    merge = self._expert_bridge._weight_merge_across_tp
                    out.append(merge(local.name, parts, local.tensor))
                else:
                    out.append(parts[0])
        return out


def _expert_of(name: str) -> tuple[str, int | None, bool] | None:
    """Of an expert's parameter: the name without the number, the number on this rank (None: all
    of them are in it), and whether it is transposed."""
    match = _GROUPED_EXPERT.search(name)
    if match:
        return name[: match.start(2)], int(match[2]), False
    if _ALL_EXPERTS.search(name):
        return name, None, False
    match = _TRANSPOSED_EXPERTS.search(name)
    if match:
        return f"{name[: match.start()]}.mlp.experts.linear_fc{match[1]}.weight", None, True
    return None


def _as_used(tensor: torch.Tensor, name: str, hidden: int, experts: int) -> torch.Tensor:
    """The GroupedMLP of megatron-core 0.16 keeps [hidden, experts x width] and
    [experts x width, hidden], whose memory it uses as [experts, hidden, width] and [experts, width,
    hidden]."""
    fc1 = name.endswith("linear_fc1.weight")
    return tensor.view((experts, hidden, -1) if fc1 else (experts, -1, hidden))


def _is_cut_out(tracer: Tracer, tensor: torch.Tensor) -> bool:
    try:
        tracer.pieces(tensor)
    except ExportError:
        return False
    return True


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


def te_name(name: str, moe_layers: set[str], *, latent: bool = False) -> str:
    """A local-spec parameter name in the TransformerEngine spelling that mbridge maps.

    TE fuses norms into the linear layer behind them, except before an MoE layer and before
    multi-head latent attention, whose own norms it fuses instead.

    Args:
        moe_layers: global layer numbers (text) whose MLP is a mixture of experts, and
            ``mtp.layers.0`` and so on for the layers of multi-token prediction.
        latent: whether the attention is multi-head latent attention.
    """
    match = _DECODER_LAYER.match(name) or _MTP_LAYER.match(name)
    if match:
        head, tail = match[0].replace("mtp_model_layer", "transformer_layer"), name[match.end() :]
        if latent:
            for letter in ("q", "kv"):
                if tail == f"self_attention.{letter}_layernorm.weight":
                    tail = f"self_attention.linear_{letter}_up_proj.layer_norm_weight"
        elif tail == "input_layernorm.weight":
            tail = "self_attention.linear_qkv.layer_norm_weight"
        if tail == "pre_mlp_layernorm.weight" and match[1] not in moe_layers:
            tail = "mlp.linear_fc1.layer_norm_weight"
        name = head + tail
    return _LOCAL_EXPERT.sub(r"experts.\2.\3\1", name)


def make_bridge(hf_config: Any, dtype: torch.dtype, config: Any = None) -> Any:
    """An mbridge bridge for ``hf_config``.

    Args:
        config: Megatron's config of the model that is there; None: made by the bridge. mbridge
            0.15.1 makes it in order to build a model, for DeepSeek-V3 from fields that
            transformers 5 no longer has (``rope_theta``). To export, the one of the model is
            needed, whatever it was made of.

    Raises:
        ExportError: mbridge is not installed, or does not know the model type.
    """
    try:
        import mbridge  # noqa: F401  (registers the models)
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise ExportError(f"mbridge is needed to export {hf_config.model_type}: {error}") from None
    known = families.find(hf_config.model_type) or _MODEL_REGISTRY.get(hf_config.model_type)
    if known is None:
        every = sorted({*_MODEL_REGISTRY, *families.MODEL_TYPES})
        raise ExportError(
            f"no bridge for model type {hf_config.model_type!r} (there are "
            f"{', '.join(every)}); pass source=GeneratorSource(...) instead"
        )
    # mbridge writes tied names into a table of the *class*; give each bridge a table of its own.
    own: dict[str, Any] = {"_DIRECT_MAPPING": dict(known._DIRECT_MAPPING)}
    if config is not None:
        own["_build_config"] = lambda _: config
    cls = type(known.__name__, (known,), own)
    return cls(hf_config, dtype=dtype)
