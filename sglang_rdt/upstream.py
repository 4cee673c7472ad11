"""Every upstream symbol that this package patches, in one place.

Each :class:`Patch` says what it changes, why, for which versions, where upstream discusses it,
and when to drop it. :data:`PATCHES` is what :mod:`sglang_rdt.activation` installs, what
``sglang-rdt doctor`` prints, and what the tests hold against the released sources. The files
under ``patches/`` put calls to the same functions into the sources. :data:`SOURCE_PATCHES` is what
only they can do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

SGLANG_VERSIONS = ("0.5.16", "0.5.23")
MEGATRON_VERSIONS = ("0.16.1", "0.19.2")
RAY_VERSIONS = ("2.56", None)

# Set as a module attribute by the patch set, beside each of its hooks.
SOURCE_MARKER = "_SGLANG_RDT_PATCHED"
# For a second patch of one module.
DP_MARKER = f"{SOURCE_MARKER}_DP"
PLACEMENT_MARKER = f"{SOURCE_MARKER}_PLACEMENT"
ARGUMENT_MARKER = f"{SOURCE_MARKER}_ARGUMENT"


@dataclass(frozen=True)
class Expectation:
    """What the source of one function or class must look like for a patch to be safe.

    ``qualname``: dotted path inside the module (``Class.method``).
    ``params``: these parameter names must be present, in this order.
    ``mentions``: these identifiers or attribute names must occur in its body.
    """

    qualname: str
    params: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()

    def mismatch(self, tree: ast.Module) -> str | None:
        """Why the parsed module ``tree`` does not fit, or None."""
        node: Any = tree
        for part in self.qualname.split("."):
            node = next(
                (
                    n
                    for n in node.body
                    if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                    and n.name == part
                ),
                None,
            )
            if node is None:
                return "does not exist"
        if self.params:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return "is not a function"
            found = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            missing = [p for p in self.params if p not in found]
            if missing:
                return f"has no parameter {', '.join(missing)} (it has {', '.join(found)})"
            if sorted(self.params, key=found.index) != list(self.params):
                return f"has its parameters in another order: {', '.join(found)}"
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        missing = [m for m in self.mentions if m not in names]
        if missing:
            return f"does not use {', '.join(missing)}"
        return None


@dataclass(frozen=True)
class Patch:
    """One patch of one upstream module.

    ``toggle`` is the name of the field in :class:`sglang_rdt.settings.Settings`. ``apply`` gets
    the imported module. ``on_refusal``: ``raise`` where nothing of this package can work without
    the patch and the module is imported only by users of the Ray back end or of Megatron;
    ``log`` where others import the module too. ``marker``: the module attribute that the patch
    set leaves beside its hook.
    """

    name: str
    package: Literal["sglang", "megatron-core"]
    module: str
    what: str
    why: str
    upstream: str
    drop_when: str
    expects: tuple[Expectation, ...]
    toggle: str
    apply: Callable[[ModuleType], None]
    on_refusal: Literal["raise", "log"] = "raise"
    marker: str = SOURCE_MARKER

    def mismatch(self, source: str) -> tuple[str, str] | None:
        """``(symbol, why)`` of the first expectation that ``source`` does not meet, or None."""
        tree = ast.parse(source)
        for expectation in self.expects:
            why = expectation.mismatch(tree)
            if why is not None:
                return f"{self.module}.{expectation.qualname}", why
        return None


@dataclass(frozen=True)
class SourcePatch:
    """One that exists in the patch set only.

    ``modules``: where, newest releases first; a release has one of them patched. ``instead``: what
    does the same without it. ``toggle``: the field in :class:`sglang_rdt.settings.Settings` of the
    patch that makes use of it.
    """

    name: str
    package: Literal["sglang", "megatron-core"]
    modules: tuple[str, ...]
    what: str
    why: str
    upstream: str
    drop_when: str
    instead: str
    toggle: str
    marker: str


# The apply functions import lazily: this table is read by processes without SGLang or Megatron.
def _apply_scheduler_actor(module: ModuleType) -> None:
    from sglang_rdt.engine.hooks import scheduler_actor_class

    module.SchedulerActor = scheduler_actor_class(module.SchedulerActor)  # type: ignore[attr-defined]


def _apply_dp_controller(module: ModuleType) -> None:
    import inspect

    import wrapt

    from sglang_rdt.engine.hooks import dp_server_args

    def launch(wrapped: Callable[..., Any], _cls: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        given["server_args"] = dp_server_args(
            given["server_args"], given["port_args"], given["rank0_node_ip"]
        )
        return wrapped(**given)

    wrapt.wrap_function_wrapper(module, "RayEngine._launch_dp_scheduler_processes", launch)


def _apply_placement(module: ModuleType) -> None:
    from sglang_rdt.engine.placement import instrument

    instrument(vars(module))


def _apply_event_loop(module: ModuleType) -> None:
    import wrapt

    from sglang_rdt.engine.loop_inbox import add_loop_calls

    def pull_raw_reqs(wrapped: Callable[[], Any], _self: Any, _args: Any, _kwargs: Any) -> Any:
        return add_loop_calls(wrapped())

    wrapt.wrap_function_wrapper(module, "SchedulerRequestReceiver._pull_raw_reqs", pull_raw_reqs)


def _apply_weight_version(module: ModuleType) -> None:
    import wrapt

    from sglang_rdt.engine.hooks import follow_weight_version

    def init_dispatcher(wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        follow_weight_version(manager)
        return result

    wrapt.wrap_function_wrapper(module, "TokenizerManager.init_request_dispatcher", init_dispatcher)


def _apply_quantised_weights(module: ModuleType) -> None:
    from sglang_rdt.engine.quantised import instrument

    instrument(vars(module))


def _apply_optimizer_step(module: ModuleType) -> None:
    from megatron_rdt.hooks import instrument_optimizers

    instrument_optimizers(vars(module))


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="scheduler_actor",
        package="sglang",
        module="sglang.srt.ray.engine",
        what="RayEngine launches a subclass of SchedulerActor: stable name, more threads, weight-sync methods.",
        why="The released actor cannot be called while its event loop runs, has no pull_weights, and "
        "its name holds a placement-group id that nobody else can know.",
        upstream="sgl-project/sglang#27723 (landed on a fork branch only), sgl-project/sglang#34621 (closed)",
        drop_when="a released SGLang has SchedulerActor.pull_weights and port-based actor names",
        expects=(
            Expectation(
                "_create_scheduler_actor",
                params=(
                    "pg",
                    "bundle_idx",
                    "server_args",
                    "port_args",
                    "tp_rank",
                    "pp_rank",
                    "dp_rank",
                ),
                mentions=(
                    "SchedulerActor",
                    "options",
                    "remote",
                    "PlacementGroupSchedulingStrategy",
                ),
            ),
        ),
        toggle="patch_scheduler_actor",
        apply=_apply_scheduler_actor,
    ),
    Patch(
        name="dp_controller",
        package="sglang",
        module="sglang.srt.ray.engine",
        what="RayEngine gives its data-parallel controller a copy of the server arguments.",
        why="0.5.20 to 0.5.23 declare dist_init_addr on the arguments that the engine has published "
        "already, which SGLang itself refuses: dp_size above 1, DP attention too, cannot start. Ports "
        "are then made from the field itself, which that declaration would not have changed either.",
        upstream="no issue found; 0.5.16 to 0.5.19 copy (replace_resolved in 0.5.19), 0.5.23 is the "
        "newest release",
        drop_when="the supported releases start a RayEngine with dp_size=2",
        expects=(
            Expectation(
                "RayEngine._launch_dp_scheduler_processes",
                params=("server_args", "port_args", "pg", "bundle_for_node", "rank0_node_ip"),
                mentions=("RayDataParallelController", "dp_server_args"),
            ),
        ),
        toggle="patch_dp_controller",
        apply=_apply_dp_controller,
        on_refusal="log",
        marker=DP_MARKER,
    ),
    Patch(
        name="placement",
        package="sglang",
        module="sglang.srt.ray.engine",
        what="RayEngine starts its ranks on bundles that a framework has reserved, and nothing on other "
        "nodes than the first; it can serve engine info, and ends only what it has started (for that, "
        "kill_process_tree of sglang.srt.entrypoints.engine is wrapped at the first shutdown).",
        why="Without the keyword the released one makes a second group, or uses the calling actor's as if "
        "each bundle were a node, and waits for ever; the HTTP server has no keyword; every node of a "
        "multi-node engine starts all ranks; shutdown kills all children and leaves the group.",
        upstream="sgl-project/sglang#24667 (placement_group=), sgl-project/sglang#27723 and "
        "sgl-project/sglang#20907 (engine info), radixark/miles#1313 (what reviewers asked for)",
        drop_when="RayEngine and --use-ray take the group and bundles of the calling actor, and clean up",
        expects=(
            Expectation(
                "RayEngine._launch_scheduler_processes",
                params=("cls", "server_args", "port_args", "run_scheduler_process_func"),
                mentions=(
                    "get_current_placement_group",
                    "_find_engine_bundle",
                    "_compute_world_size",
                    "is_custom_pg",
                    "SGLANG_RAY_BUNDLE_INDICES",
                    "RaySchedulerInitResult",
                ),
            ),
            Expectation("RayEngine.__init__", params=("self",)),
            Expectation("RayEngine.shutdown", params=("self",), mentions=("scheduler_actors",)),
            Expectation("_find_engine_bundle", params=("placement_group", "nnodes")),
            Expectation("_compute_world_size"),
        ),
        toggle="patch_placement",
        apply=_apply_placement,
        on_refusal="log",
        marker=PLACEMENT_MARKER,
    ),
    Patch(
        name="event_loop",
        package="sglang",
        module="sglang.srt.managers.scheduler_components.request_receiver",
        what="SchedulerRequestReceiver adds this process's waiting weight-sync calls to the received requests.",
        why="Weights may only move on the event-loop thread, on all TP ranks in the same turn: on any "
        "other thread the pull fights the spinning loop for the GIL (measured: 45 s instead of 0.04 s).",
        upstream="sgl-project/sglang#27723 (pulls on an actor thread there)",
        drop_when="SGLang offers a way to run a callable on the event loop of every rank under Ray",
        expects=(
            Expectation("SchedulerRequestReceiver._pull_raw_reqs", params=("self",)),
            Expectation(
                "SchedulerRequestReceiver.recv_requests",
                params=("self",),
                mentions=("_pull_raw_reqs", "_broadcast_reqs_across_ranks"),
            ),
        ),
        toggle="patch_event_loop",
        apply=_apply_event_loop,
        on_refusal="log",
    ),
    Patch(
        name="weight_version",
        package="sglang",
        module="sglang.srt.managers.tokenizer_manager",
        what="TokenizerManager accepts UpdateWeightVersionReqInput from the schedulers and follows it.",
        why="The schedulers know when new weights are complete; replies and /get_model_info are labelled "
        "by the tokenizer manager, in another process.",
        upstream="sgl-project/sglang#27723 (the trainer calls the HTTP endpoint there)",
        drop_when="the tokenizer manager takes its version from the schedulers",
        expects=(
            Expectation(
                "TokenizerManager.init_request_dispatcher",
                params=("self",),
                mentions=("_result_dispatcher", "TypeBasedDispatcher"),
            ),
        ),
        toggle="patch_weight_version",
        apply=_apply_weight_version,
        on_refusal="log",
    ),
    Patch(
        name="quantised_weights",
        package="sglang",
        module="sglang.srt.layers.quantization.fp8",
        what="The FP8 methods note what a layer's weights looked like before they were quantised, and "
        "quantise new ones into the served parameters.",
        why="Quantising puts a parameter without a loader in the place of the loadable one, and the pass "
        "that every weight-update session ends with would quantise what is quantised.",
        upstream="sgl-project/sglang#7421 and sgl-project/sglang#30761 (both closed); 0.5.21 to 0.5.23 bring "
        "back only what has restore_weights_before_loading, load_format=flash_rl knows Qwen2 and Qwen3",
        drop_when="Fp8LinearMethod and Fp8MoEMethod have restore_weights_before_loading",
        expects=(
            Expectation(
                "Fp8LinearMethod.process_weights_after_loading",
                params=("self", "layer"),
                mentions=("is_checkpoint_fp8_serialized", "weight", "weight_scale"),
            ),
            Expectation(
                "Fp8MoEMethod.process_weights_after_loading",
                params=("self", "layer"),
                mentions=("is_checkpoint_fp8_serialized", "w13_weight", "w2_weight"),
            ),
        ),
        toggle="patch_quantised_weights",
        apply=_apply_quantised_weights,
        on_refusal="log",
    ),
    Patch(
        name="optimizer_step",
        package="megatron-core",
        module="megatron.core.optimizer.optimizer",
        what="The outermost optimizer's step() tells listeners after a successful step.",
        why="Weight export must run when parameters are final, on all ranks together, without edits "
        "to the training loop.",
        upstream="radixark/miles#1313 (calls its updater from its own training loop)",
        drop_when="Megatron-core has post-step hooks that see final parameters",
        expects=(
            Expectation("MixedPrecisionOptimizer.step", params=("self",)),
            Expectation("FP32Optimizer.step", params=("self",)),
            Expectation("ChainedOptimizer.step", params=("self",)),
        ),
        toggle="patch_optimizer_step",
        apply=_apply_optimizer_step,
    ),
)

SOURCE_PATCHES: tuple[SourcePatch, ...] = (
    SourcePatch(
        name="engine_info_argument",
        package="sglang",
        modules=("sglang.srt.arg_groups.fields.model", "sglang.srt.server_args"),
        what="The server argument --enable-engine-info-bootstrap, which the patch placement reads.",
        why="SGLang makes its command line from the fields of ServerArgs, when the class is built: "
        "none can be added to it at import.",
        upstream="sgl-project/sglang#27723 (on a fork branch only), sgl-project/sglang#20907 (no "
        "argument: always with the transfer engine)",
        drop_when="ServerArgs has enable_engine_info_bootstrap",
        instead="SGLANG_RDT_ENGINE_INFO=1, or the keyword of RayEngine",
        toggle="patch_placement",
        marker=ARGUMENT_MARKER,
    ),
)


def patch(name: str) -> Patch:
    """The patch called ``name``; KeyError if there is none."""
    return {p.name: p for p in PATCHES}[name]
