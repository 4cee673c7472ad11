"""SGLang's own weight-update calls, inside of the process that owns the engine.

``host`` is an :class:`~sglang_rdt.demo.workers.EngineHost`. ``Engine`` has no method to pause, and
leaves out request fields such as the weight version, so these go to its tokenizer manager as its
own methods and SGLang's HTTP server do. The same from SGLang 0.5.16 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _await(host: Any, coroutine: Any) -> Any:
    return host.engine.loop.run_until_complete(coroutine)


def _checked(what: str, answer: Any) -> None:
    success, message = answer[:2]
    if not success:
        raise RuntimeError(f"SGLang's {what} failed: {message}")


def pause(host: Any, session: bool) -> None:
    """Stops generation, running requests go back to the queue; opens a weight-update session
    where SGLang has one (0.5.21) and ``session`` says so."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    manager = host.engine.tokenizer_manager
    manager.auto_create_handle_loop()
    _await(host, manager.pause_generation(PauseGenerationReqInput(mode="retract")))
    if session and hasattr(host.engine, "begin_weight_update"):
        _checked("begin_weight_update", host.engine.begin_weight_update())


def resume(host: Any, session: bool) -> None:
    """Ends the session, and generation goes on."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    if session and hasattr(host.engine, "end_weight_update"):
        _checked("end_weight_update", host.engine.end_weight_update())
    request = ContinueGenerationReqInput(torch_empty_cache=False)
    _await(host, host.engine.tokenizer_manager.continue_generation(request))


def join_group(
    host: Any, address: str, port: int, offset: int, world: int, name: str, backend: str
) -> None:
    """All ranks of the engine join the trainer's group, from rank ``offset`` on."""
    _checked(
        "init_weights_update_group",
        host.engine.init_weights_update_group(address, port, offset, world, name, backend),
    )


def leave_group(host: Any, name: str) -> None:
    """The engine leaves the group, if it is in it."""
    host.engine.destroy_weights_update_group(name)


def receive(
    host: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group: str,
    version: str | None,
) -> None:
    """Takes one flattened bucket. With a version it is the last one: it also flushes the KV cache
    (without emptying the allocator) and labels replies."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    request = UpdateWeightsFromDistributedReqInput(
        names=list(names),
        dtypes=list(dtypes),
        shapes=[list(shape) for shape in shapes],
        group_name=group,
        flush_cache=version is not None,
        weight_version=version,
        load_format="flattened_bucket",
    )
    manager = host.engine.tokenizer_manager
    _checked(
        "update_weights_from_distributed",
        _await(host, manager.update_weights_from_distributed(request, None)),
    )


def load_from_disk(host: Any, folder: str, version: str) -> None:
    """Loads a checkpoint; flushes the KV cache, without emptying the allocator, and labels
    replies."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(
        model_path=folder, load_format="auto", weight_version=version
    )
    manager = host.engine.tokenizer_manager
    _checked("update_weights_from_disk", _await(host, manager.update_weights_from_disk(request)))
