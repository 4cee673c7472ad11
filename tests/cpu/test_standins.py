"""The CPU stand-ins, each in an interpreter of its own and without starting an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_rdt import cpu
from sglang_rdt.cpu import pth
from sglang_rdt.cpu.__main__ import main

ROOT = Path(__file__).parents[2]
BOOT = ROOT / "sglang_rdt" / "cpu" / "boot.py"
# What the .pth file does at interpreter start.
BOOTED = pth.line(BOOT)
# A torch of a few lines: the finder asks it one question, and importing the real one takes 2 s.
FAKE_TORCH = {
    "torch/__init__.py": "from torch import cuda\n",
    "torch/cuda.py": """
        import os

        def is_available():
            return os.environ.get("FAKE_CUDA") == "1"

        def set_device(device):
            raise AttributeError("module 'torch._C' has no attribute '_cuda_setDevice'")
    """,
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def python(code: str, *folders: Path, booted: bool = True, **env: str) -> str:
    """Run ``code`` without site-packages, with ``folders`` first on the path."""
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", (BOOTED if booted else "") + textwrap.dedent(code)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, FAKE_TORCH)
    return tmp_path


KERNEL = """
    try:
        from sgl_kernel import some_kernel
        import sgl_kernel
        some_kernel(1, two=2)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_kernels_import_and_refuse_to_run_by_name(folder: Path) -> None:
    out = python(KERNEL, folder)
    assert out.startswith("NotImplementedError sgl_kernel.some_kernel ")


def test_kernels_have_no_submodules(folder: Path) -> None:
    code = """
        import importlib
        for name in ("sgl_kernel.allreduce", "sgl_kernel.kvcacheio"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                print(error.name)
    """
    assert python(code, folder).split() == ["sgl_kernel.allreduce", "sgl_kernel.kvcacheio"]


def test_kernels_are_the_same_object_every_time(folder: Path) -> None:
    code = """
        import sgl_kernel
        from sgl_kernel import a
        print(a is sgl_kernel.a, a.__name__, hasattr(sgl_kernel, "__path__"))
    """
    assert python(code, folder) == "True a False"


def test_kernels_step_aside_for_real_ones(folder: Path) -> None:
    write(folder, {"sgl_kernel/__init__.py": "def some_kernel(x, two):\n    print('real')\n"})
    assert python(KERNEL, folder) == "real"


def test_kernels_step_aside_where_there_is_cuda(folder: Path) -> None:
    assert python(KERNEL, folder, FAKE_CUDA="1").startswith("ModuleNotFoundError")


@pytest.mark.parametrize("value", ["0", "false", " OFF "])
def test_switch_turns_everything_off(folder: Path, value: str) -> None:
    assert python(KERNEL, folder, SGLANG_RDT_CPU_STANDINS=value).startswith("ModuleNotFoundError")


def test_boot_imports_nothing_heavy_and_not_the_package() -> None:
    code = """
        import sys
        heavy = {"torch", "ray", "sglang", "sglang_rdt", "megatron_rdt", "wrapt", "typing"}
        print(sorted(heavy & set(sys.modules)), type(sys.meta_path[0]).__name__)
    """
    assert python(code) == "[] StandInFinder"


def test_boot_that_ran_alone_is_what_an_import_gives() -> None:
    code = """
        import sys
        finder = type(sys.meta_path[0])
        import sglang_rdt.cpu.boot
        from sglang_rdt.cpu import boot
        print(sglang_rdt.cpu.boot is boot, boot.StandInFinder is finder)
        print(sglang_rdt.cpu.boot.__spec__.origin)
        print(boot.activate(), sum(isinstance(f, finder) for f in sys.meta_path))
        boot.deactivate()
        print(sum(isinstance(f, finder) for f in sys.meta_path))
    """
    wrapt = importlib.util.find_spec("wrapt")
    assert wrapt is not None
    assert wrapt.origin is not None
    out = python(code, Path(wrapt.origin).parents[1]).splitlines()
    assert out == ["True True", str(BOOT), "True 1", "0"]


def test_set_device_is_forgiven_once_sglang_schedules(folder: Path) -> None:
    write(
        folder,
        {
            "sglang/__init__.py": "",
            "sglang/srt/__init__.py": "",
            "sglang/srt/ray/__init__.py": "",
            "sglang/srt/ray/scheduler_actor.py": "",
            "sglang/srt/managers/__init__.py": "",
            "sglang/srt/managers/scheduler.py": "",
        },
    )
    code = """
        import sys, torch
        try:
            torch.cuda.set_device(0)
        except AttributeError:
            print("as before")
        import {module}
        print(torch.cuda.set_device(0))
    """
    for module in ("sglang.srt.ray.scheduler_actor", "sglang.srt.managers.scheduler"):
        assert python(code.format(module=module), folder).split("\n") == ["as before", "None"]


def test_sglang_finds_no_nccl_without_a_gpu(folder: Path) -> None:
    package = "sglang/srt/distributed/device_communicators"
    write(
        folder, {f"{package}/pynccl_wrapper.py": "def find_nccl_library():\n    return 'found'\n"}
    )
    code = """
        from sglang.srt.distributed.device_communicators.pynccl_wrapper import find_nccl_library
        try:
            print(find_nccl_library())
        except ValueError as error:
            print(error)
    """
    assert python(code, folder) == "NCCL needs a GPU"
    assert python(code, folder, FAKE_CUDA="1") == "found"


def test_torchvision_gets_only_the_schemas_it_lacks(folder: Path) -> None:
    write(
        folder,
        {
            "torch/__init__.py": """
                from torch import cuda

                class library:
                    class Library:
                        def __init__(self, namespace, kind):
                            self.kind = kind

                        def define(self, schema):
                            print(self.kind, schema)

                class ops:
                    class torchvision:
                        qnms = "there"
            """,
            "torchvision/__init__.py": "from torchvision import extension\nprint('after')\n",
            "torchvision/extension.py": "print('library')\n",
        },
    )
    code = """
        import torchvision
        print(type(torchvision.extension.__loader__).__name__)
        print(type(torchvision.extension.__spec__.loader).__name__)
    """
    assert python(code, folder).splitlines() == [
        "library",
        "FRAGMENT nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "after",
        "SourceFileLoader",
        "SourceFileLoader",
    ]


MEGATRON = {
    "megatron/core/__init__.py": "print('core')\n",
    "megatron_rdt/__init__.py": "print('package')\n",
    "megatron_rdt/cpu.py": """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class State:
            installed: int = 0

        state = State()

        def install():
            state.installed += 1
            print('shim')
    """,
}


def test_megatron_shim_comes_before_megatron(folder: Path) -> None:
    write(folder, MEGATRON)
    code = """
        import megatron.core
        import megatron_rdt.cpu
        print(megatron_rdt.cpu.state.installed)
    """
    # The shim does not import its package (and so switch patches on); the one import does.
    assert python(code, folder).split() == ["shim", "core", "package", "1"]


def test_megatron_shim_steps_aside(folder: Path) -> None:
    write(folder, MEGATRON)
    assert python("import megatron.core", folder, FAKE_CUDA="1") == "core"
    (folder / "megatron_rdt" / "cpu.py").unlink()
    assert python("import megatron.core", folder) == "core"


def test_a_probe_for_megatron_installs_nothing(folder: Path) -> None:
    write(folder, MEGATRON)
    assert python("import importlib.util as u; u.find_spec('megatron.core')", folder) == ""


def test_sglangs_dumper_gets_no_megatron(folder: Path) -> None:
    write(
        folder,
        MEGATRON
        | {
            "sglang/__init__.py": "",
            "sglang/srt/__init__.py": "",
            "sglang/srt/debug_utils/__init__.py": "",
            "sglang/srt/debug_utils/dumper.py": """
                try:
                    from megatron.core import parallel_state
                except ImportError:
                    print("none")
            """,
        },
    )
    code = """
        import sglang.srt.debug_utils.dumper
        import megatron.core
    """
    assert python(code, folder).split() == ["none", "shim", "core"]


def test_late_activation_catches_up(folder: Path) -> None:
    code = """
        import sys, torch, types
        sys.modules["sglang.srt.managers.scheduler"] = types.ModuleType("scheduler")
        exec(open("{line}").read())
        print(torch.cuda.set_device(0))
    """
    line = folder / "line.txt"
    line.write_text(BOOTED)
    assert python(code.format(line=line), folder, booted=False) == "None"


def test_other_finders_keep_working(folder: Path) -> None:
    # Like wrapt's: asks the import system again, and wraps the loader that it gets.
    code = """
        import importlib.util, sys

        class Chained:
            def __init__(self, loader):
                self.loader = loader
            def create_module(self, spec):
                return self.loader.create_module(spec)
            def exec_module(self, module):
                self.loader.exec_module(module)
                print("theirs")

        class Finder:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if self.busy or name != "megatron.core":
                    return None
                self.busy = True
                try:
                    spec = importlib.util.find_spec(name)
                finally:
                    self.busy = False
                if not isinstance(spec.loader, Chained):
                    spec.loader = Chained(spec.loader)
                return spec

        sys.meta_path.insert({place}, Finder())
        import megatron.core
    """
    write(folder, MEGATRON)
    for place in (0, 1):
        assert python(code.format(place=place), folder).split() == ["shim", "core", "theirs"]


def test_install_and_uninstall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / pth.NAME
    monkeypatch.setattr(pth, "location", lambda: target)
    # A new interpreter does not look into this folder: the check must notice, unless another
    # .pth file of this environment does the same already.
    booted = [sys.executable, "-c", "import sys; print([type(f).__name__ for f in sys.meta_path])"]
    if "StandInFinder" in subprocess.run(booted, capture_output=True, text=True).stdout:
        assert main(["install"]) == 0
        assert target.read_text() == BOOTED
        assert main(["status"]) == 0
        assert main(["uninstall"]) == 0
    else:
        with pytest.raises(RuntimeError, match="does not work in a new interpreter"):
            main(["install"])
    assert not target.exists()
    assert main(["uninstall"]) == 0
    assert main(["status"]) == 1
    assert "not installed" in capsys.readouterr().out


def test_environment_has_a_core_for_every_gpu_ordinal() -> None:
    for ranks in (1, 2, 40):
        entries = cpu.environment(ranks)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
        assert len(entries) >= ranks
        assert {int(core) for core in entries} <= os.sched_getaffinity(0)


def test_environment_is_made_of_strings() -> None:
    variables = cpu.environment()
    assert all(isinstance(word, str) for pair in variables.items() for word in pair)
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "RAY_OVERRIDE_RESOURCES" not in variables
    assert json.loads(cpu.environment(fake_gpus=3)["RAY_OVERRIDE_RESOURCES"]) == {"GPU": 3}


def test_environment_refuses_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cpu.environment(0)


def test_engine_kwargs_can_be_overridden() -> None:
    kwargs = cpu.engine_kwargs("model", tp_size=2, dtype="float32")
    assert (kwargs["model_path"], kwargs["tp_size"], kwargs["dtype"]) == ("model", 2, "float32")
    assert kwargs["device"] == "cpu"


def test_launch_args_are_the_kwargs_as_flags() -> None:
    words = cpu.launch_args("model", tp_size=2, skip_tokenizer_init=False, dtype=None)
    assert words[words.index("--tp-size") + 1] == "2"
    assert "--use-ray" in words
    assert "True" not in words
    assert not {"--skip-tokenizer-init", "--dtype"} & set(words)
