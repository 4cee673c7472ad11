"""Activation in processes of its own, on synthetic modules under the real modules' names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

ACTOR = """
class Released:
    def get_info(self): pass
    def run_event_loop(self): pass

class ActorClass:  # what ray.remote makes of it
    class __ray_metadata__:
        class modified_class:
            __ray_actor_class__ = Released
    @classmethod
    def options(cls, **options): return "released launch"

SchedulerActor = ActorClass()
"""
ENGINE = """
from sglang.srt.ray.scheduler_actor import SchedulerActor

def _create_scheduler_actor(pg, bundle_idx, server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank):
    return SchedulerActor.options(strategy=PlacementGroupSchedulingStrategy).remote

def _compute_world_size(): pass

def _find_engine_bundle(placement_group, nnodes): pass

class RayEngine:
    def __init__(self, **kwargs): pass

    def shutdown(self): self.scheduler_actors

    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):
        is_custom_pg = envs.SGLANG_RAY_BUNDLE_INDICES, get_current_placement_group, _find_engine_bundle
        return RaySchedulerInitResult, _compute_world_size

    @classmethod
    def _launch_dp_scheduler_processes(cls, server_args, port_args, pg, bundle_for_node, rank0_node_ip):
        dp_server_args = server_args
        return RayDataParallelController(dp_server_args)
"""
RECEIVER = """
class SchedulerRequestReceiver:
    def _pull_raw_reqs(self):
        return ["request"]

    def recv_requests(self):
        return self._broadcast_reqs_across_ranks(self._pull_raw_reqs())

    def _broadcast_reqs_across_ranks(self, reqs):
        return reqs
"""
MANAGER = """
from sglang.utils import TypeBasedDispatcher

class TokenizerManager:
    def __init__(self):
        self.seen = []
        self.init_request_dispatcher()

    def init_request_dispatcher(self):
        self._result_dispatcher = TypeBasedDispatcher([])

    def _update_weight_version_if_provided(self, version):
        self.seen.append(version)
"""
UTILS = """
class TypeBasedDispatcher:
    def __init__(self, pairs):
        self.pairs = list(pairs)

    def __iadd__(self, other):
        self.pairs += other.pairs
        return self
"""
IO_STRUCT = """
class UpdateWeightVersionReqInput:
    def __init__(self, new_version):
        self.new_version = new_version
"""
QUANTISATION = """
class Fp8LinearMethod:
    is_checkpoint_fp8_serialized = False

    def process_weights_after_loading(self, layer):
        if not self.is_checkpoint_fp8_serialized:
            layer.weight, layer.weight_scale = layer.weight, 1.0

class Fp8MoEMethod(Fp8LinearMethod):
    def process_weights_after_loading(self, layer):
        if not self.is_checkpoint_fp8_serialized:
            layer.w13_weight, layer.w2_weight = layer.w13_weight, layer.w2_weight
"""
OPTIMIZER = """
class Base:
    def step(self):
        return True, 0.5, None

class MixedPrecisionOptimizer(Base):
    def step(self):
        return True, 1.5, None

class FP32Optimizer(Base):
    def step(self):
        return False, None, None

class ChainedOptimizer(Base):
    def __init__(self, *children):
        self.children = children

    def step(self):
        return [c.step() for c in self.children][-1]
"""
MODULES = {
    "sglang.srt.ray.scheduler_actor": ACTOR,
    "sglang.srt.ray.engine": ENGINE,
    "sglang.srt.managers.scheduler_components.request_receiver": RECEIVER,
    "sglang.srt.managers.tokenizer_manager": MANAGER,
    "sglang.srt.managers.io_struct": IO_STRUCT,
    "sglang.utils": UTILS,
    "sglang.srt.layers.quantization.fp8": QUANTISATION,
    "megatron.core.optimizer.optimizer": OPTIMIZER,
}
RAY_ENGINE = "sglang.srt.ray.engine"
EVENT_LOOP = "sglang.srt.managers.scheduler_components.request_receiver"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
FP8 = "sglang.srt.layers.quantization.fp8"
MEGATRON = "megatron.core.optimizer.optimizer"
PATCHED = {
    "scheduler_actor": RAY_ENGINE,
    "dp_controller": RAY_ENGINE,
    "placement": RAY_ENGINE,
    "event_loop": EVENT_LOOP,
    "weight_version": TOKENIZER,
    "quantised_weights": FP8,
    "optimizer_step": MEGATRON,
}
IMPORT_ALL = "".join(f"import {module}\n" for module in PATCHED.values())
SHOW = """
import json, sys
from sglang_rdt.activation import state
print(json.dumps(state()))
"""


@dataclass
class Site:
    """A folder ahead of everything else on sys.path."""

    folder: Path
    sources: dict[str, str] = field(default_factory=lambda: dict(MODULES))
    versions: dict[str, str] = field(
        default_factory=lambda: {"sglang": "0.5.20", "megatron_core": "0.16.1"}
    )

    def write(self) -> None:
        for name, source in self.sources.items():
            path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(self.folder).parents:
                if parent != Path("."):
                    (self.folder / parent / "__init__.py").touch()
            path.write_text(source)
        for package, version in self.versions.items():
            info = self.folder / f"{package}-{version}.dist-info"
            info.mkdir()
            name = package.replace("_", "-")
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        if not any(self.folder.iterdir()):
            self.write()
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_RDT", "MEGATRON_RDT"))
        }
        clean["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(REPOSITORY)])
        clean["SGLANG_RDT_CPU_STANDINS"] = "0"
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.folder,
        )

    def json(self, code: str, **env: str) -> Any:
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="module")
def good_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


ORDERS: dict[str, Callable[[str], str]] = {
    "ours first": lambda imports: "import sglang_rdt\n" + imports,
    "ours last": lambda imports: imports + "import sglang_rdt\n",
    "by way of megatron_rdt": lambda imports: "import megatron_rdt\n" + imports,
}
USE = f"""
import {RAY_ENGINE} as engine, {EVENT_LOOP} as receiver, {TOKENIZER} as tokenizer
import {MEGATRON} as optimizer
from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput as Update
from sglang_rdt.engine import loop_inbox
from sglang_rdt.activation import state
from megatron_rdt import hooks
loop_inbox.post(loop_inbox.LoopCall("c"))
got = receiver.SchedulerRequestReceiver().recv_requests()
manager = tokenizer.TokenizerManager()
for kind, follow in manager._result_dispatcher.pairs:
    assert kind is Update
    follow(Update("v7"))
steps = []
hooks.add_listener(lambda o: steps.append(type(o).__name__))
children = optimizer.MixedPrecisionOptimizer(), optimizer.MixedPrecisionOptimizer()
optimizer.ChainedOptimizer(*children).step()
optimizer.FP32Optimizer().step()  # not successful
optimizer.MixedPrecisionOptimizer().step()
import json
print(json.dumps([state(), type(engine.SchedulerActor).__name__, [str(r) for r in got],
                  manager.seen, steps]))
"""
EVERYTHING = [
    dict.fromkeys(PATCHED, "applied"),
    "NamedActorClass",
    ["request", "LoopCall(call_id='c')"],
    ["v7"],
    ["ChainedOptimizer", "MixedPrecisionOptimizer"],
]


@pytest.mark.parametrize("order", ORDERS)
def test_patches_work_in_either_order_of_imports(good_site: Site, order: str) -> None:
    assert good_site.json(ORDERS[order](IMPORT_ALL) + USE) == EVERYTHING


def test_activating_again_changes_nothing(good_site: Site) -> None:
    again = """
import sglang_rdt, megatron_rdt, importlib
for _ in range(3):
    sglang_rdt.activate(); megatron_rdt.activate()
importlib.reload(sglang_rdt)
"""
    assert good_site.json("import sglang_rdt\n" + again + IMPORT_ALL + again + USE) == EVERYTHING


def test_nothing_is_patched_or_imported_before_its_time(good_site: Site) -> None:
    code = "import sglang_rdt, megatron_rdt\n" + SHOW
    assert good_site.json(code) == dict.fromkeys(PATCHED, "waiting")
    loaded = good_site.json(
        "import sglang_rdt, megatron_rdt, sys, json; print(json.dumps(sorted(sys.modules)))"
    )
    heavy = {"torch", "ray", "sglang", "megatron", "numpy", "transformers", "mbridge", "pydantic"}
    assert not heavy & set(loaded)


def test_one_switch_for_everything(good_site: Site) -> None:
    for switch in ("SGLANG_RDT", "SGLANG_RDT_MONKEYPATCH"):
        code = "import sglang_rdt\n" + IMPORT_ALL
        code += (
            f"import {RAY_ENGINE} as e; assert type(e.SchedulerActor).__name__ == 'ActorClass'\n"
        )
        assert good_site.json(code + SHOW, **{switch: "0"}) == dict.fromkeys(PATCHED, "off")


@pytest.mark.parametrize(
    ("name", "toggle"),
    [
        ("scheduler_actor", "SGLANG_RDT_PATCH_SCHEDULER_ACTOR"),
        ("dp_controller", "SGLANG_RDT_PATCH_DP_CONTROLLER"),
        ("event_loop", "SGLANG_RDT_PATCH_EVENT_LOOP"),
        ("weight_version", "SGLANG_RDT_PATCH_WEIGHT_VERSION"),
        ("quantised_weights", "SGLANG_RDT_PATCH_QUANTISED_WEIGHTS"),
        ("placement", "SGLANG_RDT_PATCH_PLACEMENT"),
        ("optimizer_step", "MEGATRON_RDT_PATCH_OPTIMIZER_STEP"),
    ],
)
def test_each_patch_has_its_own_switch(good_site: Site, name: str, toggle: str) -> None:
    state = good_site.json("import sglang_rdt\n" + IMPORT_ALL + SHOW, **{toggle: "off"})
    assert state == {p: "off" if p == name else "applied" for p in PATCHED}


def test_patched_sources_are_left_alone(site: Site) -> None:
    for name in PATCHED.values():
        site.sources[name] += "\n_SGLANG_RDT_PATCHED = True\n"
    site.sources[RAY_ENGINE] += "_SGLANG_RDT_PATCHED_DP = True\n"
    site.sources[RAY_ENGINE] += "_SGLANG_RDT_PATCHED_PLACEMENT = True\n"
    code = "import sglang_rdt\n" + IMPORT_ALL
    code += f"import {RAY_ENGINE} as e; assert type(e.SchedulerActor).__name__ == 'ActorClass'\n"
    assert site.json(code + SHOW) == dict.fromkeys(PATCHED, "source")


def test_a_second_hook_further_down_is_seen_while_the_first_is_imported(site: Site) -> None:
    source = site.sources[RAY_ENGINE]
    site.sources[RAY_ENGINE] = (
        f"_SGLANG_RDT_PATCHED = True\nimport sglang_rdt\n{source}\n_SGLANG_RDT_PATCHED_DP = True\n_SGLANG_RDT_PATCHED_PLACEMENT = True\n"
    )
    state = site.json(f"import {RAY_ENGINE}\n" + SHOW)
    assert state["scheduler_actor"] == state["dp_controller"] == "source"


SENTENCE = (
    "sglang_rdt.errors.UnsupportedVersionError: sglang-rdt supports sglang 0.5.16 to 0.5.23; {} is "
    "installed. Install a supported sglang, or set SGLANG_RDT=0 to run without weight sync."
)


@pytest.mark.parametrize("order", ["ours first", "ours last"])
@pytest.mark.parametrize("version", ["0.5.15", "0.5.24"])
def test_an_unsupported_version_is_one_sentence(site: Site, order: str, version: str) -> None:
    site.versions["sglang"] = version
    done = site.run(ORDERS[order](f"import {RAY_ENGINE}\n"))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == SENTENCE.format(version)
    done = site.run(ORDERS[order](f"import {RAY_ENGINE}\n"), SGLANG_RDT="0")
    assert done.returncode == 0


def test_modules_that_others_use_too_are_imported_unpatched(site: Site) -> None:
    site.versions["sglang"] = "0.5.24"
    code = "import logging; logging.basicConfig(); import sglang_rdt\n"
    code += f"import {EVENT_LOOP} as r, {TOKENIZER}\n"
    code += "assert r.SchedulerRequestReceiver().recv_requests() == ['request']\n"
    done = site.run(code + SHOW)
    assert done.returncode == 0
    state = json.loads(done.stdout)
    assert state["event_loop"].startswith("refused: sglang-rdt supports sglang 0.5.16 to 0.5.23")
    assert state["weight_version"] == state["event_loop"]
    assert done.stderr.count("0.5.24 is installed") == 2


@pytest.mark.parametrize(
    ("module", "old", "new", "patch", "words"),
    [
        (
            RAY_ENGINE,
            "bundle_idx, server_args",
            "server_args, bundle_idx",
            "scheduler_actor",
            [
                "engine._create_scheduler_actor",
                "another order",
                "SGLANG_RDT_PATCH_SCHEDULER_ACTOR=0",
            ],
        ),
        (
            EVENT_LOOP,
            "self._pull_raw_reqs()",
            "['request']",
            "event_loop",
            [
                "SchedulerRequestReceiver.recv_requests",
                "does not use _pull_raw_reqs",
                "EVENT_LOOP=0",
            ],
        ),
        (
            TOKENIZER,
            "def init_request_dispatcher",
            "def init_dispatcher",
            "weight_version",
            ["TokenizerManager.init_request_dispatcher does not exist", "WEIGHT_VERSION=0"],
        ),
        (
            MEGATRON,
            "class FP32Optimizer",
            "class Float32Optimizer",
            "optimizer_step",
            ["FP32Optimizer.step does not exist", "MEGATRON_RDT_PATCH_OPTIMIZER_STEP=0"],
        ),
    ],
)
def test_unexpected_sources_are_refused_by_name(
    site: Site, module: str, old: str, new: str, patch: str, words: list[str]
) -> None:
    assert old in site.sources[module]
    site.sources[module] = site.sources[module].replace(old, new)
    code = "import logging; logging.basicConfig(); import sglang_rdt\n"
    code += (
        f"try:\n    import {module}\nexcept Exception as e:\n    logging.error('raised %s', e)\n"
    )
    done = site.run(code + SHOW)
    state = json.loads(done.stdout)
    assert state[patch].startswith("refused: ")
    for word in [f"patch {patch!r} refused", "Nothing was changed", *words]:
        assert word in state[patch]
        assert word in done.stderr
    raised = "raised" in done.stderr
    assert raised == (module in (RAY_ENGINE, MEGATRON))
    assert all(s == "waiting" for name, s in state.items() if name != patch)


def test_an_unknown_actor_class_is_refused(site: Site) -> None:
    site.sources["sglang.srt.ray.scheduler_actor"] = ACTOR.replace(
        "def get_info(self): pass", "def get_info(self): pass\n    def surprise(self): pass"
    )
    done = site.run(f"import sglang_rdt\nimport {RAY_ENGINE}")
    assert done.returncode != 0
    assert "has the public methods ['get_info', 'run_event_loop', 'surprise']" in done.stderr


def test_a_bad_setting_is_named_at_import(good_site: Site) -> None:
    done = good_site.run("import sglang_rdt", SGLANG_RDT_VERIFY="crc")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "sglang_rdt.errors.SettingError: SGLANG_RDT_VERIFY='crc': expected one of off, checksum, equal"
    )
    done = good_site.run("import megatron_rdt", SGLANG_RDT_VERFIY="off")
    assert "SGLANG_RDT_VERFIY='...': no such setting" in done.stderr


def test_the_log_level_is_set(good_site: Site) -> None:
    code = "import sglang_rdt, logging, json\n"
    code += "names = 'sglang_rdt', 'megatron_rdt'\n"
    code += "print(json.dumps([logging.getLogger(n).level for n in names]))"
    assert good_site.json(code, SGLANG_RDT_LOG_LEVEL="warning") == [30, 30]


def test_the_lazy_attribute_of_megatron_rdt() -> None:
    import megatron_rdt

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        megatron_rdt.Nothing  # noqa: B018


# Faults that there were.

RETRY = """
for _ in range(2):
    try:
        import {module}
        print("true")
        break
    except RuntimeError:
        pass
else:
    print("false")
"""


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_a_refused_import_is_refused_again(site: Site, order: str) -> None:
    site.versions["sglang"] = "0.5.24"
    if order == "ours first":
        code = "import sglang_rdt\n" + RETRY.format(module=RAY_ENGINE)
    else:
        code = f"import {RAY_ENGINE}\n" + RETRY.format(module="sglang_rdt")
    assert site.json(code) is False


def test_one_refused_patch_does_not_stop_the_others(site: Site) -> None:
    site.versions["sglang"] = "0.5.24"
    code = f"import {RAY_ENGINE}\ntry:\n    import sglang_rdt\nexcept RuntimeError:\n    pass\n"
    state = site.json(code + f"import {MEGATRON}\n" + SHOW)
    assert state["optimizer_step"] == "applied"


def test_lines_are_seen_where_the_program_sets_up_no_logging() -> None:
    program = (
        "import logging, sys\n"
        "if len(sys.argv) > 1: logging.basicConfig(level='INFO', format='own %(message)s')\n"
        "import sglang_rdt\n"
        "logging.getLogger('sglang_rdt').info('one line')\n"
    )
    for argument, expected in ((), "sglang_rdt INFO: one line\n"), (("own",), "own one line\n"):
        done = subprocess.run(
            [sys.executable, "-c", program, *argument], capture_output=True, text=True, timeout=120
        )
        assert done.stderr.count("one line") == 1
        assert done.stderr.endswith(expected)
