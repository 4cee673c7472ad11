"""Stand-ins for what SGLang expects of a GPU machine and a CPU machine lacks.

Used by :mod:`sglang_rdt.cpu.boot`, which says when. Like that module, this one imports nothing
of the package it lies in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_MARK = "_sglang_rdt_standin"
# torch drops a library's operators when the Library object goes away.
_libraries: list[Any] = []


class KernelModule(ModuleType):
    """A module that has every public name, each a function that refuses to run.

    SGLang's CPU platform imports a handful of ``sgl_kernel`` functions at the top of its modules
    but calls none of them for the models and settings used here. It is not a package on purpose:
    SGLang takes a missing ``sgl_kernel.<submodule>`` as "no CUDA kernels" and falls back.
    """

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        # Dunder names are questions of the import system and of inspect: not there.
        if name.startswith("__"):
            raise AttributeError(name)
        stand_in = _refusing(f"{self.__name__}.{name}")
        setattr(self, name, stand_in)
        return stand_in


class KernelLoader:
    """Makes a :class:`KernelModule`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in, named as the spec says."""
        return KernelModule(spec.name, "Stand-in for the CUDA kernels (sglang_rdt.cpu).")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def stand_in(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} is a CUDA kernel; this is its stand-in for machines without a GPU"
        )

    stand_in.__name__ = stand_in.__qualname__ = name.rpartition(".")[2]
    return stand_in


def define_torchvision_ops() -> None:
    """Define the operator schemas that torchvision refers to, where its library did not load.

    The released wheel is a CUDA build: beside a CPU-only torch its library cannot be loaded, and
    ``import torchvision`` then fails on registering a meta kernel for an operator that does not
    exist. SGLang needs the import (image transforms), not the operators.
    """
    import torch

    for name in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, name):
            continue
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


def forgive_set_device() -> None:
    """Make ``torch.cuda.set_device`` do nothing.

    ``SchedulerActor.run_event_loop`` calls it whatever the device is.
    """
    import torch

    if getattr(torch.cuda.set_device, _MARK, False):
        return

    def set_device(device: object) -> None:
        """Select no device: there is none."""

    setattr(set_device, _MARK, True)
    torch.cuda.set_device = set_device


def hide_nccl() -> None:
    """Let SGLang find no NCCL library, as beside a CPU-only torch.

    A CUDA build of torch brings the library along, GPU or not. SGLang then makes a communicator
    for every group of more than one rank, and that fails on a CPU device.
    """
    wrapper = sys.modules["sglang.srt.distributed.device_communicators.pynccl_wrapper"]

    def find_nccl_library() -> NoReturn:
        """Find nothing; SGLang takes the error for "no GPU"."""
        raise ValueError("NCCL needs a GPU")

    wrapper.__dict__["find_nccl_library"] = find_nccl_library


def fill_padded_lengths() -> None:
    """Give PyTorch's attention the length that rows of padding have, as Intel's has it.

    SGLang pads the batches of DP attention, and asks the attention for that length. On a CPU it asks
    by a name that only Intel's has.
    """
    module = sys.modules["sglang.srt.layers.attention.torch_native_backend"]
    backend = module.__dict__["TorchNativeAttnBackend"]
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):

        def get_cpu_graph_seq_len_fill_value(self: object) -> int:
            """One token: the row's own."""
            return 1

        backend.get_cpu_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value
