"""Import hooks that put the CPU stand-ins in place, in every process of an environment.

A ``.pth`` file in site-packages (see :mod:`sglang_rdt.cpu.pth`) runs this file at interpreter
start, so the driver, multiprocessing children, Ray workers and torchrun ranks all get it. It
only puts a finder on ``sys.meta_path``: nothing heavy is imported, and nothing happens until one
of the modules named below is imported. ``SGLANG_RDT_CPU_STANDINS=0`` switches it off for a
process and its children. The stand-ins step aside wherever CUDA is available.

This file and what it loads must not import the packages they belong to: importing
``sglang_rdt`` switches its patches on, and a CPU environment that does so in every process would
hide a missing activation, which then shows on the GPU machine only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec

# Every interpreter start pays for what is imported here: not even typing, nor the abstract
# classes of importlib.abc (30 ms in Python 3.11).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from types import ModuleType
    from typing import Any

    Action = Callable[[], None]
else:
    Loader = MetaPathFinder = object

SWITCH = "SGLANG_RDT_CPU_STANDINS"


# Modules that load_alone() ran, until (and after) somebody imports them in the ordinary way.
_alone: dict[str, ModuleType] = {}


def load_alone(name: str) -> ModuleType | None:
    """Load the module ``name`` without running the ``__init__`` of the packages around it.

    Args:
        name: A dotted name whose first part is an ordinary package with a folder of its own.

    Returns:
        The module, the same one that a later ``import`` of that name gives; None where there is
        no such file.
    """
    module = sys.modules.get(name) or _alone.get(name)
    if module is not None:
        return module
    top, *rest = name.split(".")
    package = importlib.util.find_spec(top)
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = os.path.join(folder, *rest) + ".py"
        spec = importlib.util.spec_from_file_location(name, path)
        if not os.path.isfile(path) or spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        # Dataclasses, for one, look their module up while it runs. Afterwards it must go: with
        # it there, "import a.b.c" would skip importing a and a.b.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules.pop(name, None)
        _alone[name] = module
        return module
    return None


class AloneLoader(Loader):
    """Gives an ordinary import the module that :func:`load_alone` made earlier."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module's code ran already."""
        module.__spec__ = self._spec


def cuda_available() -> bool:
    """Say whether this process can use a CUDA device (imports torch)."""
    import torch

    return bool(torch.cuda.is_available())


def _standins() -> Any:
    return load_alone("sglang_rdt.cpu.sglang_standins")


def _install_megatron_shim() -> None:
    module = load_alone("megatron_rdt.cpu")
    if module is not None and not cuda_available():
        module.install()


def _define_torchvision_ops() -> None:
    _standins().define_torchvision_ops()


def _forgive_set_device() -> None:
    if not cuda_available():
        _standins().forgive_set_device()


def _hide_nccl() -> None:
    if not cuda_available():
        _standins().hide_nccl()


def _fill_padded_lengths() -> None:
    if not cuda_available():
        _standins().fill_padded_lengths()


# What to do right before, or right after, the named module's own code runs.
BEFORE: dict[str, Action] = {"megatron.core": _install_megatron_shim}
AFTER: dict[str, Action] = {
    # The first of torchvision's modules: it loads the compiled operators, or fails to.
    "torchvision.extension": _define_torchvision_ops,
    # Ray ships the actor class by value, so a worker imports the scheduler but not the module
    # that defines the actor.
    "sglang.srt.managers.scheduler": _forgive_set_device,
    "sglang.srt.ray.scheduler_actor": _forgive_set_device,
    "sglang.srt.distributed.device_communicators.pynccl_wrapper": _hide_nccl,
    "sglang.srt.layers.attention.torch_native_backend": _fill_padded_lengths,
}


# SGLang's tensor dumper imports megatron.core wherever it is installed, only to ask it for ranks.
_DUMPER = "sglang.srt.debug_utils.dumper"


def _dumper_asks() -> bool:
    """Say whether the module that is being imported right now is SGLang's tensor dumper."""
    spec = getattr(sys.modules.get(_DUMPER), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class HookedLoader(Loader):
    """The real loader of a module, with an action before or after the module's own code."""

    def __init__(self, inner: Any, before: Action | None, after: Action | None) -> None:
        self._inner = inner
        self._before = before
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader would."""
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Run the action before, the module's code, and the action after."""
        # Nobody who looks at the module sees us: its loader is the real one.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        if self._before is not None:
            self._before()
        self._inner.exec_module(module)
        if self._after is not None:
            self._after()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StandInFinder(MetaPathFinder):
    """Finds ``sgl_kernel`` where there is none, and hooks the modules of BEFORE and AFTER."""

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of our own for the few modules that matter, None for all others."""
        if fullname == "megatron.core" and _dumper_asks():
            # It takes a failure for a no. Else every engine process would spend seconds on the
            # import, and run on Megatron's CPU shim, which patches torch itself.
            raise ModuleNotFoundError(f"{fullname} is kept out of {_DUMPER}", name=fullname)
        if fullname in _alone:
            return ModuleSpec(fullname, AloneLoader(_alone[fullname]))
        hooked = fullname in BEFORE or fullname in AFTER
        if not hooked and fullname != "sgl_kernel":
            return None
        # Other finders may ask the whole import system for the real spec, as we do.
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if fullname in busy:
            return None
        busy.add(fullname)
        try:
            spec = self._real_spec(fullname, path, target)
            if hooked:
                if spec is not None and spec.loader is not None:
                    spec.loader = HookedLoader(
                        spec.loader, BEFORE.get(fullname), AFTER.get(fullname)
                    )
                return spec
            if spec is not None or cuda_available():
                return spec
            return ModuleSpec(fullname, _standins().KernelLoader(), origin="sglang_rdt.cpu")
        finally:
            busy.discard(fullname)

    def _real_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _active() -> StandInFinder | None:
    return next((f for f in sys.meta_path if isinstance(f, StandInFinder)), None)


def activate() -> bool:
    """Put the finder in place, once; catch up on modules that are imported already.

    Returns:
        Whether the finder is in place now: not where ``SGLANG_RDT_CPU_STANDINS=0``.
    """
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "no", "off"):
        return False
    if _active() is None:
        sys.meta_path.insert(0, StandInFinder())
        for name, action in (*BEFORE.items(), *AFTER.items()):
            if name in sys.modules:
                action()
    return True


def deactivate() -> None:
    """Take the finder out again; what it did to imported modules stays."""
    finder = _active()
    if finder is not None:
        sys.meta_path.remove(finder)


if __name__.rpartition(".")[0] not in sys.modules:
    # The .pth file ran this, not an import of the package.
    _alone[__name__] = sys.modules[__name__]
activate()
