"""Stand-ins that let stock Megatron-core train on gloo on a machine without CUDA.

For tests and demos. Call :func:`install` before ``megatron.core`` is imported; with CUDA it does
nothing. Each stand-in is one function below, saying what it replaces, why, and where upstream
needs it (paths inside ``megatron/core``; the same in 0.16.1 and 0.19.2 unless noted).

Models must be built for it: local (not TransformerEngine) layer spec,
``use_cpu_initialization=True``, every ``*_fusion`` option off, no context parallelism.
megatron-core 0.18 needs ``triton`` installed also on a CPU (``transformer/moe/paged_stash.py``).

:mod:`sglang_rdt.cpu.boot` loads this file alone: it must not import the packages it lies in.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device as torch_device
import wrapt

logger = logging.getLogger("megatron_rdt")

_CPU = torch.device("cpu")
# On torch itself, so that it holds also when this module is loaded twice.
_INSTALLED = "_megatron_rdt_cpu_installed"


def install() -> None:
    """Puts the stand-ins in place, once per process; does nothing where CUDA is available.

    Those for torch apply at once, those for Megatron when their module is imported.
    """
    if torch.cuda.is_available() or getattr(torch, _INSTALLED, False):
        return
    setattr(torch, _INSTALLED, True)
    # Not "megatron.core" itself: that one is there already when its import calls us.
    if "megatron.core.parallel_state" in sys.modules:
        logger.warning("megatron.core was imported before the CPU stand-ins were installed")
    for patch in (
        _current_device,
        _factories,
        _tensor_cuda,
        _tensor_type,
        _synchronize,
        _streams,
        _rng,
    ):
        patch()
    for module, hook in _MEGATRON_HOOKS.items():
        wrapt.register_post_import_hook(hook, module)


# --- torch ------------------------------------------------------------------------------------


def _current_device() -> None:
    """``torch.cuda.current_device()`` is the CPU.

    It is passed as ``device=`` all over: ``distributed/param_and_grad_buffer.py`` (buffers),
    ``tensor_parallel/{layers,mappings,utils}.py``, ``pipeline_parallel/p2p_communication.py``,
    ``transformer/moe/router.py``.
    """
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]


def _factories() -> None:
    """``torch.zeros(..., device="cuda")`` and the like make CPU tensors.

    ``optimizer/optimizer.py`` (found_inf, scales), ``optimizer/clip_grads.py``,
    ``optimizer/grad_scaler.py``, ``pipeline_parallel/schedules.py`` (total_num_tokens),
    ``transformer/utils.py`` (causal mask), ``transformer/moe/moe_utils.py`` (loss tracker).
    """
    # torch keeps a set of the factories that `with torch.device(...)` redirects, by identity, made
    # at first use. Make it before replacing any, or transformers' `from_pretrained`, which
    # builds models under the meta device, would quietly keep garbage in rotary buffers.
    torch_device._device_constructors()

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return wrapper

    for name in ("ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _tensor_cuda() -> None:
    """``Tensor.cuda()`` is the tensor itself.

    ``models/common/language_module/language_module.py`` (tied embeddings with pipeline stages).
    """
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _tensor_type() -> None:
    """``Tensor.type()``, when Megatron asks, says ``torch.cuda.FloatTensor`` for a FloatTensor.

    Optimizers and clipping take only these names: ``optimizer/optimizer.py``,
    ``optimizer/distrib_optimizer.py``, ``optimizer/clip_grads.py``. Other callers see the truth.
    """
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron."):
                return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = tensor_type  # type: ignore[method-assign, assignment]


def _synchronize() -> None:
    """``torch.cuda.synchronize()`` does nothing: work on a CPU is done when it returns.

    ``pipeline_parallel/p2p_communication.py`` (after batched sends and receives).
    """
    torch.cuda.synchronize = lambda device=None: None


class _Stream:
    """Stands for a CUDA stream and a CUDA event: a CPU runs everything in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing


def _streams() -> None:
    """Streams and events that order nothing.

    ``transformer/moe/token_dispatcher.py``, ``transformer/moe/shared_experts.py``,
    ``distributed/param_and_grad_buffer.py`` (overlapped reduction).
    """
    the_stream = _Stream()
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.Event = _Stream  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda device=None: the_stream  # type: ignore[assignment, return-value]
    torch.cuda.default_stream = lambda device=None: the_stream  # type: ignore[assignment, return-value]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def _rng() -> None:
    """The CUDA generator is the CPU's.

    ``tensor_parallel/random.py``: ``CudaRNGStatesTracker.add`` and
    ``model_parallel_cuda_manual_seed`` seed it and read its state.
    """

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    torch.cuda.manual_seed = manual_seed
    # torch.manual_seed calls this one after it has seeded the CPU generator.
    torch.cuda.manual_seed_all = lambda seed: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state


# --- Megatron-core ----------------------------------------------------------------------------


def _random(module: types.ModuleType) -> None:
    """The RNG tracker forks between states of the CPU generator.

    ``tensor_parallel/random.py``: the originals want ``torch.cuda.default_generators``, and
    queue up forever where CUDA never initialises: dropout would not be the forked one.
    """

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


def _mappings(module: types.ModuleType) -> None:
    """Gathers and reduce-scatters chunks of unequal length, which gloo refuses.

    ``tensor_parallel/mappings.py``, used by MoE with expert tensor parallelism.
    """
    gather = module._gather_along_first_dim
    reduce_scatter = module._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        chunks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(chunks, padded, group=group)
        return torch.cat([chunk[:size] for chunk, size in zip(chunks, sizes, strict=True)])

    @functools.wraps(reduce_scatter)
    def reduce_scatter_uneven(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        chunks = torch.split(total, [int(size) for size in input_split_sizes])
        return chunks[group.rank()].clone()

    module._gather_along_first_dim = gather_uneven  # type: ignore[attr-defined]
    module._reduce_scatter_along_first_dim = reduce_scatter_uneven  # type: ignore[attr-defined]


def _moe_utils(module: types.ModuleType) -> None:
    """Defines the name that the router compares with None.

    ``transformer/moe/moe_utils.py``, 0.16 only: without TransformerEngine ``te_general_gemm`` is
    never defined, a NameError in the router's forward.
    """
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _token_dispatcher(module: types.ModuleType) -> None:
    """Split sizes become numpy arrays also when they are on the CPU already.

    ``transformer/moe/token_dispatcher.py``: ``maybe_move_tensor_to_cpu`` converts CUDA tensors
    only, and gloo's all-to-all takes no tensors as split sizes.
    """
    original = module.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


def _torch_norm(module: types.ModuleType) -> None:
    """Builds torch norms under sequence parallelism, which MoE with TP requires.

    ``transformer/torch_norm.py`` asserts that it is off, though all that is missing is the mark
    on the weight that makes ``finalize_model_grads`` reduce its gradient over TP.
    """
    cls = module.WrappedTorchNorm
    original = cls.__new__

    def new(cls: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, hidden_size, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    cls.__new__ = staticmethod(new)


def _dot_product_attention(module: types.ModuleType) -> None:
    """Takes the two sizes that latent attention names.

    ``transformer/dot_product_attention.py`` knows ``kv_channels`` only, and
    ``transformer/multi_latent_attention.py`` passes ``k_channels`` and ``v_channels`` to it. Models
    must have ``kv_channels`` set to the size of a value head.
    """
    cls = module.DotProductAttention
    original = cls.__init__
    if "k_channels" in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def init(
        self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)

    cls.__init__ = init


def _latent_attention(module: types.ModuleType) -> None:
    """Knows that TransformerEngine is not there.

    ``transformer/multi_latent_attention.py``, 0.16: ``HAVE_TE`` is true without it, and
    ``isinstance(layer, TELinear)``, with None, raises.
    """
    if module.HAVE_TE and not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # type: ignore[attr-defined]


def _moe_ops(package: types.ModuleType) -> None:
    """An empty ``paged_stash`` kernel module where there is no triton.

    ``transformer/moe/ops/paged_stash.py``, 0.19 on: imported always, imports triton always. A
    stub named ``triton`` would break ``torch._inductor``, which looks for it.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType(f"{package.__name__}.paged_stash")
    stub.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    stub.paged_stash_copy_kernel = None  # type: ignore[attr-defined]
    stub.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub


_MEGATRON_HOOKS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.tensor_parallel.mappings": _mappings,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.transformer.dot_product_attention": _dot_product_attention,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.transformer.moe.ops": _moe_ops,
    "megatron.core.transformer.moe.token_dispatcher": _token_dispatcher,
    "megatron.core.transformer.multi_latent_attention": _latent_attention,
    "megatron.core.transformer.torch_norm": _torch_norm,
}
