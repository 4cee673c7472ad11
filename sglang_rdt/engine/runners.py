"""Which of an engine's models a sync is about: the target, the draft of speculative decoding, both.

A draft proposes tokens and the target decides: with an old draft the output is the target's all the
same, only slower. So the target alone is what a sync is about unless told otherwise, and a draft's
own weights are never written by tensors that were meant for the target.

Most drafts share tensors with the target (embedding, head). These are the target's: they change
with it, whoever looks at them, and are never written through the draft's loader.

Source: sglang/srt/managers/scheduler_components/weight_updater.py (_select_runners), 0.5.21 to
0.5.23; sglang/srt/speculative/*_worker_v2.py (weight_update_runners, set_embed_and_head).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_rdt.coordinator.phases import human_bytes
from sglang_rdt.engine.recorder import record_load
from sglang_rdt.errors import EngineStateError, RecordError
from sglang_rdt.plan.specs import Constant, Kept, Recording, TensorSpec, Want

# What SGLang calls them.
SELECTORS = {"target": "target", "draft": "draft", "both": "all"}


class Models:
    """Several models as one: what describes and records a model sees the parameters of all.

    Args:
        parts: prefix of the parameters' names, and model.
        target: the target, be it one of ``parts`` or not; what the others share with it is not
            theirs, and not among their parameters here.
    """

    def __init__(
        self, parts: Sequence[tuple[str, torch.nn.Module]], target: torch.nn.Module
    ) -> None:
        self._parts = [
            (prefix, model, set() if model is target else set(shared(model, target)))
            for prefix, model in parts
        ]

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        """As a module's."""
        for prefix, model, theirs in self._parts:
            for name, tensor in model.named_parameters(remove_duplicate=remove_duplicate):
                if name not in theirs:
                    yield prefix + name, tensor

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        """As a module's."""
        for prefix, model, theirs in self._parts:
            for name, tensor in model.named_buffers(remove_duplicate=remove_duplicate):
                if name not in theirs:
                    yield prefix + name, tensor

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """As a module's."""
        for prefix, model, _ in self._parts:
            for name, module in model.named_modules():
                yield prefix + name, module

    def modules(self) -> Iterator[torch.nn.Module]:
        """As a module's."""
        for _, model, _ in self._parts:
            yield from model.modules()

    def record(self, specs: Sequence[TensorSpec]) -> Recording:
        """What the models' loaders do, each with all ``specs``. What would fill nothing but tensors
        that belong to the target is kept.

        Raises:
            RecordError: one of them cannot be followed, or computes something.
        """
        wants: list[Want] = []
        constants: list[Constant] = []
        padding: dict[str, int] = {}
        left: set[str] = set()
        for prefix, model, theirs in self._parts:
            one = record_load(model, specs)
            computed = one.computed
            if computed:
                raise RecordError(
                    f"{type(model).__name__}.load_weights computes "
                    f"{', '.join(computed[0].params)}, which is done for the target alone "
                    "(SGLANG_RDT_RUNNER=target)"
                )
            left |= {w.source for w in one.wants if w.param in theirs}
            wants += [
                replace(w, param=prefix + w.param) for w in one.wants if w.param not in theirs
            ]
            constants += [
                replace(c, param=prefix + c.param) for c in one.constants if c.param not in theirs
            ]
            padding |= {prefix + name: count for name, count in one.padding.items()}
        names = frozenset(left - {w.source for w in wants})
        return Recording(tuple(wants), tuple(constants), padding, kept=Kept(names))


def record(model: Any, specs: Sequence[TensorSpec]) -> Recording:
    """See :func:`sglang_rdt.engine.recorder.record_load`; for several models, too."""
    return model.record(specs) if isinstance(model, Models) else record_load(model, specs)


def shared(draft: torch.nn.Module, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The draft's parameters and buffers that lie in memory of the target, by the draft's names."""
    theirs = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*target.parameters(), *target.buffers())
        if tensor.numel()
    }
    named = (
        *draft.named_parameters(remove_duplicate=False),
        *draft.named_buffers(remove_duplicate=False),
    )
    return {
        name: tensor
        for name, tensor in named
        if tensor.numel() and tensor.untyped_storage().data_ptr() in theirs
    }


def drafts(scheduler: Any) -> list[tuple[str, Any]]:
    """``(role, model)`` of every draft with weights of its own, on this rank.

    Before 0.5.21 there is one way to know that there is a draft, and none to update it.
    """
    worker = getattr(scheduler.weight_updater, "draft_worker", None)
    if worker is None or not hasattr(worker, "weight_update_runners"):
        return []
    return [(role, runner.model) for role, runner in worker.weight_update_runners()]


def models(scheduler: Any, runner: str) -> list[tuple[str, torch.nn.Module, Any]]:
    """``(role, model, SGLang's updater of it)`` of what a session of ``runner`` opens."""
    target = scheduler.tp_worker.model_runner
    found = [("target", target.model, getattr(target, "weight_updater", None))]
    worker = getattr(scheduler.weight_updater, "draft_worker", None)
    theirs: list[tuple[str, Any]] = getattr(worker, "weight_update_runners", list)()
    found += [(role, one.model, getattr(one, "weight_updater", None)) for role, one in theirs]
    return [
        one for one in found if runner == "both" or (one[0] == "target") == (runner == "target")
    ]


def _speculates(args: Any) -> bool:
    return str(getattr(args, "speculative_algorithm", None)).upper() not in ("NONE", "NGRAM")


def select(scheduler: Any, runner: str, who: str) -> Any:
    """The models that a sync of ``runner`` is about, as one.

    Raises:
        EngineStateError: there is no draft, it cannot be updated, or its tensors are not those of
            the target's checkpoint.
    """
    target = scheduler.tp_worker.model_runner.model
    if runner == "target":
        return target
    found = drafts(scheduler)
    args = scheduler.server_args
    elsewhere = int(getattr(args, "pp_size", 1)) > 1 and _speculates(args)
    if not found and runner == "both" and elsewhere:
        return target  # the draft is on another pipeline stage
    if not found:
        has_one = getattr(scheduler.weight_updater, "draft_worker", None) is not None
        raise EngineStateError(
            f"{who}: runner {runner!r} was asked for, and it has no draft model that can be updated"
            + (" (that needs SGLang 0.5.21 or newer)" if has_one else "")
        )
    if runner == "draft":
        return Models([(f"{role}:", model) for role, model in found], target)
    path = getattr(args, "speculative_draft_model_path", None)
    if path not in (None, args.model_path):
        raise EngineStateError(
            f"{who}: runner 'both' was asked for, and its draft comes from a checkpoint of its own "
            f"({path}): the target's tensors are none of that. Sync with runner 'target', or "
            "what trains the draft with runner 'draft'"
        )
    return Models([("", target), *((f"{role}:", model) for role, model in found)], target)


def describe(scheduler: Any) -> str:
    """One line: which models there are, and whose tensors are whose."""
    found = drafts(scheduler)
    if not found:
        worker = getattr(scheduler.weight_updater, "draft_worker", None)
        return "target" if worker is None else "target, draft"
    target = scheduler.tp_worker.model_runner.model
    parts = ["target"]
    for role, model in found:
        theirs = shared(model, target)
        own = sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in model.named_parameters()
            if name not in theirs
        )
        also = f"; of the target: {', '.join(sorted(theirs))}" if theirs else ""
        parts.append(f"{role} (own: {human_bytes(own)}{also})")
    return ", ".join(parts)
