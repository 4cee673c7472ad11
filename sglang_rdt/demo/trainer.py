"""A tiny but real Megatron-core trainer: GPTModel, DDP, Megatron's optimizer and schedules.

Every layout of the same model and seed starts from the same weights, those of
``TinyModel.random_hf_state(seed)``. Runs on the CPU (gloo; :mod:`megatron_rdt.cpu` stands in for
CUDA) and on GPUs, under torchrun and inside Ray actors.

Megatron is imported when a trainer is built, not with this module: a driver process can name
layouts without paying for it.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_rdt.demo.models import (
    EXPERTS_PER_TOKEN,
    MAX_POSITIONS,
    NORM_EPS,
    ROPE_THETA,
    TinyModel,
)

SEQUENCE_LENGTH = 16
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 4


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ``world`` = tp * pp * cp * dp processes.

    Args:
        tp: tensor parallel ranks.
        pp: pipeline stages.
        ep: expert parallel ranks; they lie within tp * dp, so ``Layout(ep=2, dp=2)``.
        etp: tensor parallel ranks of the experts; None: ``tp``.
        dp: data parallel ranks (of everything but the experts).
        cp: context parallel ranks, which hold the same weights. Megatron's own attention cannot
            train with more than one; Transformer Engine's can.
        vpp: model chunks per pipeline stage; None: one, without interleaving.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    cp: int = 1
    vpp: int | None = None

    def __post_init__(self) -> None:
        if self.tp * self.cp * self.dp % (self.ep * (self.etp or self.tp)):
            raise ValueError(f"{self}: tp * cp * dp must be a multiple of ep * etp (etp None: tp)")

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.cp * self.dp


def init_distributed(
    rank: int | None = None,
    world: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str = "gloo",
    timeout_s: float = 120.0,
) -> None:
    """Makes the default process group.

    Args:
        rank, world, master_addr, master_port: None, all of them: from the environment, as
            torchrun sets it. Given, all of them: the environment is not looked at (Ray actors).
        backend: "gloo", or for GPUs "cpu:gloo,cuda:nccl".
        timeout_s: how long a collective may wait for the others.
    """
    given = (rank, world, master_addr, master_port)
    where: dict[str, Any] = {}
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise ValueError("give rank, world, master_addr and master_port, or none of them")
        where = {
            "rank": rank,
            "world_size": world,
            "init_method": f"tcp://{master_addr}:{master_port}",
        }
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)


class TinyTrainer:
    """Trains a :class:`TinyModel` on random tokens with stock Megatron-core.

    Needs the default process group (:func:`init_distributed`) of exactly ``layout.world`` ranks.
    All methods are collective: every rank must call them, in the same order.

    Args:
        model: what to train.
        layout: over how many processes, and how.
        dtype: of the parameters: bfloat16 (float32 main copies in the optimizer) or float32.
        distributed_optimizer: shard the optimizer state over data parallel ranks.
        overlap_param_gather: leave the gather of updated parameters to the next forward, so that
            they are stale and differ between ranks after :meth:`step`.
        overlap_grad_reduce: reduce gradients during the backward; implied by the above.
        lr: learning rate (Adam, no weight decay).
        device: "cpu", or "cuda": the current CUDA device.
        seed: of the initial weights and of the data.
        bucket_size: parameters per DDP bucket; None: Megatron's default, one bucket here.

    Attributes:
        model_chunks: DDP-wrapped model chunks as given to ``get_megatron_optimizer``; one, or
            ``layout.vpp`` of them.
        optimizer: what ``get_megatron_optimizer`` returned.
        config: the TransformerConfig.
        rank: the global rank.
        steps: optimizer steps done.
    """

    def __init__(
        self,
        model: TinyModel,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.bfloat16,
        distributed_optimizer: bool = False,
        overlap_param_gather: bool = False,
        overlap_grad_reduce: bool = False,
        lr: float = 1e-2,
        device: Literal["cpu", "cuda"] = "cpu",
        seed: int = 0,
        bucket_size: int | None = None,
    ) -> None:
        if dist.get_world_size() != layout.world:
            raise ValueError(f"{layout} is for {layout.world} ranks, not {dist.get_world_size()}")
        if overlap_param_gather and not distributed_optimizer:
            raise ValueError("overlap_param_gather needs distributed_optimizer")
        if device == "cpu":
            if torch.cuda.is_available():
                raise ValueError('Megatron insists on a CUDA device that it sees: device="cuda"')
            from megatron_rdt import cpu

            cpu.install()  # before megatron.core is imported
        self.model = model
        self.layout = layout
        self.rank = dist.get_rank()
        self.steps = 0
        self._dtype = dtype
        self._seed = seed
        self._device = torch.device(device)
        self._stale_after_step = overlap_param_gather
        _init_model_parallel(layout, seed)
        self.config = _transformer_config(model, layout, dtype)
        self.model_chunks = self._build_chunks(
            use_distributed_optimizer=distributed_optimizer,
            overlap_param_gather=overlap_param_gather,
            overlap_grad_reduce=overlap_grad_reduce or overlap_param_gather,
            bucket_size=bucket_size,
        )
        self.optimizer = self._build_optimizer(lr, distributed_optimizer, overlap_param_gather)

    # --- building -----------------------------------------------------------------------------

    def _build_chunks(self, **ddp_options: Any) -> list[Any]:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.module import Float16Module

        chunks = [self._build_chunk(vpp_rank) for vpp_rank in self._vpp_ranks()]
        self._load_initial_weights(chunks)
        if self.config.bf16:
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            average_in_collective=False,  # gloo cannot average
            **ddp_options,
        )
        chunks = [
            DistributedDataParallel(config=self.config, ddp_config=ddp_config, module=chunk)
            for chunk in chunks
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in chunks]
            self.config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        return chunks

    def _vpp_ranks(self) -> list[int | None]:
        return [None] if self.layout.vpp is None else list(range(self.layout.vpp))

    def _build_chunk(self, vpp_rank: int | None) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        model = self.model
        stage: dict[str, Any] = {} if vpp_rank is None else {"vp_stage": vpp_rank}
        is_part = {"ignore_virtual": vpp_rank is None, **stage}
        chunk = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=model.experts if model.moe else None,
                qk_layernorm=not model.qkv_bias,
                normalization="RMSNorm",
            ),
            vocab_size=model.padded_vocab or model.vocab,
            max_sequence_length=MAX_POSITIONS,
            pre_process=parallel_state.is_pipeline_first_stage(**is_part),
            post_process=parallel_state.is_pipeline_last_stage(**is_part),
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            rotary_base=int(ROPE_THETA),
            **stage,
        )
        return chunk.to(self._device)

    def _load_initial_weights(self, chunks: list[Any]) -> None:
        hf = self.model.random_hf_state(self._seed, self._dtype)
        for local in _local_parameters(chunks, self.model):
            parts = [hf[name] for name in local.kind.hf_names]
            full = _fuse(local.kind, parts, self.model)
            with torch.no_grad():
                local.parameter.copy_(_cut(local.kind, full, local.tp_rank, local.tp_size))

    def _build_optimizer(self, lr: float, distributed: bool, overlap_param_gather: bool) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=0.0,
            weight_decay=0.0,
            bf16=self.config.bf16,
            params_dtype=self._dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap_param_gather,
            clip_grad=1.0,
        )
        return get_megatron_optimizer(config, self.model_chunks)

    # --- running ------------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        """One forward, backward and optimizer step on new random tokens.

        Returns:
            The same on every rank: "loss" (float, mean over micro batches and data parallel
            ranks), "grad_norm" (float), "updated" (bool: not skipped for infinite gradients).
        """
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Interleaving wants a multiple of the number of stages.
        micro_batches = math.lcm(MICRO_BATCHES, self.layout.pp)
        losses = self._forward_backward(
            lambda: (self._batch(index) for index in range(micro_batches)),
            lambda output: (output.float().mean(), {"loss": output.detach().float().mean()}),
            num_microbatches=micro_batches,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        updated, grad_norm, *_ = self.optimizer.step()
        self.steps += 1
        # Only last stages have losses.
        everyone = _all_gather_object([float(loss["loss"]) for loss in losses])
        flat = [loss for one in everyone for loss in one]
        return {
            "loss": sum(flat) / len(flat),
            "grad_norm": float(grad_norm),
            "updated": bool(updated),
        }

    def logits(self, ids: Tensor) -> Tensor:
        """Logits of the current weights.

        Args:
            ids: token ids [batch, length], the same on every rank.

        Returns:
            [batch, length, vocab], float32, on the CPU, the same on every rank; the rows that
            pad the vocabulary are gone.
        """
        from megatron.core import parallel_state

        # Sequence parallelism cuts the sequence; what is added at the end changes nothing before.
        batch, length = ids.shape
        padded = torch.nn.functional.pad(ids, (0, -length % self.layout.tp)).to(self._device)
        micro_batches = self.layout.pp
        for chunk in self.model_chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = self._forward_backward(
                lambda: iter([(padded, None)] * micro_batches),
                lambda output, non_loss_data=False: output.detach(),
                num_microbatches=micro_batches,
                seq_length=padded.shape[1],
                micro_batch_size=batch,
                forward_only=True,
                collect_non_loss_data=True,
            )
        for chunk in self.model_chunks:
            chunk.train()
        mine = None
        if outputs:
            mine = (parallel_state.get_tensor_model_parallel_rank(), outputs[0].float().cpu())
        # The TP shards of the vocabulary, whichever data parallel rank they are from.
        shards = dict(one for one in _all_gather_object(mine) if one is not None)
        full = torch.cat([shards[rank] for rank in range(self.layout.tp)], dim=-1)
        return full[:, :length, : self.model.vocab].contiguous()

    def _forward_backward(
        self,
        batches: Callable[[], Iterator[tuple[Tensor, Tensor | None]]],
        finish: Callable[..., Any],
        **options: Any,
    ) -> list[Any]:
        """Megatron's schedule; ``finish`` makes of an output what is returned and trained on."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
            ids, labels = next(iterator)
            positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous().to(self._device)
            return chunk(ids, positions, None, labels=labels), finish

        chunks = self.model_chunks
        iterators = [batches() for _ in chunks]
        interleaved = len(chunks) > 1
        result: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=chunks if interleaved else chunks[0],
            **options,
        )
        return result

    def _batch(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        from megatron.core import parallel_state

        dp_rank = parallel_state.get_data_parallel_rank()
        key = ((self._seed * 1000 + self.steps) * 1000 + dp_rank) * 100 + micro_batch
        generator = torch.Generator().manual_seed(key)
        shape = (MICRO_BATCH_SIZE, SEQUENCE_LENGTH + 1)
        ids = torch.randint(0, self.model.vocab, shape, generator=generator).to(self._device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    # --- reading ------------------------------------------------------------------------------

    def sync_params(self) -> None:
        """Makes this rank's parameters final where the last step left them stale.

        Does nothing without overlap_param_gather. The training that follows is the same with
        and without it.
        """
        if not self._stale_after_step:
            return
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)

    def reference_hf_state(self) -> dict[str, Tensor]:
        """The current weights under their checkpoint names, whole, on every rank.

        Simple and slow, and of no use to a real sync: what one is checked against. Uses neither
        a bridge nor the attributes that Megatron puts on parameters.

        Returns:
            All tensors of ``TinyModel.hf_shapes()``, in its order, on the CPU, in the
            parameters' dtype; the rows that pad the vocabulary are gone.

        Raises:
            AssertionError: two replicas (of TP, DP, tied stages) differ in a bit.
        """
        self.sync_params()
        mine = [
            (local.name, local.kind, local.tp_rank, local.parameter.detach().cpu().clone())
            for local in _local_parameters(self.model_chunks, self.model)
        ]
        kinds: dict[str, _Kind] = {}
        shards: dict[str, dict[int, Tensor]] = {}
        for rank, theirs in enumerate(_all_gather_object(mine)):
            for name, kind, tp_rank, tensor in theirs:
                kinds[name] = kind
                # A parameter that is not cut has one shard, which every TP rank must agree on.
                index = 0 if kind.tp_dim is None else tp_rank
                first = shards.setdefault(name, {}).setdefault(index, tensor)
                if not _same_bits(first, tensor):
                    raise AssertionError(f"{name}: shard {index} on rank {rank} differs")
        found: dict[str, Tensor] = {}
        for name, kind in kinds.items():
            full = _join(kind, [shards[name][i] for i in range(len(shards[name]))])
            parts = _split(kind, full, self.model)
            found.update(zip(kind.hf_names, parts, strict=True))
        shapes = self.model.hf_shapes()
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != shapes:
            raise AssertionError(f"not the tensors of a checkpoint: {sorted(found)}")
        return {name: found[name].contiguous() for name in shapes}

    def close(self) -> None:
        """Takes Megatron's groups down; another trainer can be built in this process then."""
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from torch.distributed import distributed_c10d as c10d

        for chunk in self.model_chunks:
            _let_go(chunk)
        self.model_chunks, self.optimizer = [], None
        RotaryEmbedding.forward.cache_clear()  # it caches its embeddings, too
        parallel_state.destroy_model_parallel()
        # Megatron forgets its groups without destroying them.
        for group in list(c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()  # a model is full of cycles; three threads of gloo's poll for each group


def _let_go(chunk: Any) -> None:
    """Takes apart what would keep a chunk, and its groups with three threads of gloo's each: hooks
    that hold the chunk are held by autograd's graph, and the graph by the chunk, where Python's
    garbage collector cannot see."""
    chunk.grad_accs = []
    for module in chunk.modules():
        # The dispatcher of a mixture of experts keeps the probabilities of the last micro batch.
        for holder in (module, getattr(module, "token_dispatcher", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(holder, name, None)


def _init_model_parallel(layout: Layout, seed: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _transformer_config(model: TinyModel, layout: Layout, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if model.moe:
        moe = {
            "num_moe_experts": model.experts,
            "moe_router_topk": EXPERTS_PER_TOKEN,
            "moe_ffn_hidden_size": model.moe_intermediate,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "moe_router_dtype": "fp32",
            "moe_permute_fusion": False,
        }
    # Stages of unequal size: Megatron wants to be told.
    uneven = {"num_layers_in_last_pipeline_stage": 1} if model.num_layers % layout.pp else {}
    return TransformerConfig(
        **uneven,
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.intermediate,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPS,
        qk_layernorm=not model.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Interleaving sends both ways at once. Batched, two stages would mix up the two, and train
        # on garbage without an error.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        # Megatron demands it of MoE with TP.
        sequence_parallel=model.moe and layout.tp > 1,
        use_cpu_initialization=True,
        # The fused kernels are CUDA, apex or TransformerEngine.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **moe,
    )


# --- Megatron's parameters and the checkpoint's -------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """How a Megatron parameter relates to checkpoint tensors.

    Args:
        hf_names: the checkpoint tensors that it holds, in its order.
        tp_dim: dimension that tensor parallelism cuts; None: whole on every rank.
        fused: "qkv": per kv head its queries, the key, the value; "gate_up": each TP rank holds
            a piece of the gate and the same piece of up; "vocab": rows of padding at the end;
            "": one tensor as it is.
    """

    hf_names: tuple[str, ...]
    tp_dim: int | None = None
    fused: Literal["", "qkv", "gate_up", "vocab"] = ""


_TOP_KINDS = {
    "embedding.word_embeddings.weight": _Kind(("model.embed_tokens.weight",), 0, "vocab"),
    "decoder.final_layernorm.weight": _Kind(("model.norm.weight",)),
    "output_layer.weight": _Kind(("lm_head.weight",), 0, "vocab"),
}
# Without the "decoder.layers.N." and "model.layers.N." in front.
_LAYER_KINDS = {
    "input_layernorm.weight": _Kind(("input_layernorm.weight",)),
    "self_attention.q_layernorm.weight": _Kind(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": _Kind(("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": _Kind(
        tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv"), 0, "qkv"
    ),
    "self_attention.linear_qkv.bias": _Kind(
        tuple(f"self_attn.{letter}_proj.bias" for letter in "qkv"), 0, "qkv"
    ),
    "self_attention.linear_proj.weight": _Kind(("self_attn.o_proj.weight",), 1),
    "pre_mlp_layernorm.weight": _Kind(("post_attention_layernorm.weight",)),
    "mlp.router.weight": _Kind(("mlp.gate.weight",)),
}
# Of a dense MLP and of one expert.
_MLP_KINDS = {
    "linear_fc1.weight": _Kind(("gate_proj.weight", "up_proj.weight"), 0, "gate_up"),
    "linear_fc2.weight": _Kind(("down_proj.weight",), 1),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MLP_NAME = re.compile(r"mlp\.(experts\.)?(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)")


class _Local(NamedTuple):
    """A parameter of this rank, with layers and experts numbered over the whole model."""

    name: str
    kind: _Kind
    parameter: torch.nn.Parameter
    tp_rank: int
    tp_size: int


def _local_parameters(chunks: list[Any], model: TinyModel) -> Iterator[_Local]:
    from megatron.core import parallel_state as ps

    tp = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    etp = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    ep_rank, ep_size = (
        ps.get_expert_model_parallel_rank(),
        ps.get_expert_model_parallel_world_size(),
    )
    first_expert = ep_rank * (model.experts // ep_size)
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module  # DDP, Float16Module
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and model.tied:
                # The last stage's own copy of the embedding.
                name = "embedding.word_embeddings.weight"
            found = _LAYER_NAME.fullmatch(name)
            if found is None:
                yield _Local(name, _TOP_KINDS[name], parameter, *tp)
                continue
            layer, rest = chunk.decoder.layers[int(found[1])].layer_number - 1, found[2]
            mlp = _MLP_NAME.fullmatch(rest)
            if mlp is None:
                kind, prefix = _LAYER_KINDS[rest], f"model.layers.{layer}."
            else:
                kind, prefix = _MLP_KINDS[mlp[3]], f"model.layers.{layer}.mlp."
                if mlp[1]:
                    expert = first_expert + int(mlp[2])
                    prefix += f"experts.{expert}."
                    rest = f"mlp.experts.{expert}.{mlp[3]}"
            kind = _Kind(tuple(prefix + name for name in kind.hf_names), kind.tp_dim, kind.fused)
            is_expert = mlp is not None and bool(mlp[1])
            yield _Local(
                f"decoder.layers.{layer}.{rest}", kind, parameter, *(etp if is_expert else tp)
            )


def _fuse(kind: _Kind, parts: list[Tensor], model: TinyModel) -> Tensor:
    """Checkpoint tensors to the whole Megatron tensor."""
    if kind.fused == "qkv":
        return torch.cat(
            [part.unflatten(0, (model.kv_heads, -1)) for part in parts], dim=1
        ).flatten(0, 1)
    if kind.fused == "vocab":
        # Not zero: who forgets to cut the padding off shall notice.
        padding = parts[0].new_ones((model.padded_vocab or model.vocab) - model.vocab, model.hidden)
        return torch.cat([parts[0], padding])
    return torch.cat(parts)


def _split(kind: _Kind, full: Tensor, model: TinyModel) -> list[Tensor]:
    """The whole Megatron tensor to checkpoint tensors: undoes :func:`_fuse`."""
    if kind.fused == "qkv":
        queries = model.heads // model.kv_heads * model.head_dim
        sizes = [queries, model.head_dim, model.head_dim]
        grouped = full.unflatten(0, (model.kv_heads, -1))
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
    if kind.fused == "vocab":
        return [full[: model.vocab]]
    return list(full.chunk(len(kind.hf_names)))


def _cut(kind: _Kind, full: Tensor, rank: int, size: int) -> Tensor:
    """What TP rank ``rank`` of ``size`` holds of the whole Megatron tensor."""
    if kind.tp_dim is None:
        return full
    if kind.fused == "gate_up":
        return torch.cat([part.chunk(size)[rank] for part in full.chunk(2)])
    return full.chunk(size, kind.tp_dim)[rank]


def _join(kind: _Kind, shards: list[Tensor]) -> Tensor:
    """The whole Megatron tensor of all TP ranks' shards: undoes :func:`_cut`."""
    if kind.tp_dim is None:
        return shards[0]
    if kind.fused == "gate_up":
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([part for half in halves for part in half])
    return torch.cat(shards, kind.tp_dim)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _all_gather_object(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
