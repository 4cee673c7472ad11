"""NVIDIA Megatron-Bridge as a source.

``pip install megatron-bridge`` needs Python 3.12 and megatron-core 0.17 or later. Its export is
collective over all ranks and gives every HF tensor to each of them (over the pipeline, too), so
every rank counts as a holder of everything, and there is no direct mode. Use it for families that
only it knows; :class:`megatron_rdt.sources.mbridge.MBridgeSource` moves less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rdt.sources.mbridge import unwrap
from sglang_rdt.dtypes import dtype_name
from sglang_rdt.errors import ExportError
from sglang_rdt.plan.specs import TensorSpec

if TYPE_CHECKING:
    import torch

    from sglang_rdt.coordinator.phases import PhaseTimer

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class MegatronBridgeSource:
    """See :class:`megatron_rdt.sources.base.WeightSource`.

    Args:
        model_chunks: the model's (virtual pipeline) chunks on this rank, wrapped or not.
        bridge_or_hf_config: a ``megatron.bridge.AutoBridge``, or the transformers config to make
            one of.
        tasks_at_once: how many Megatron parameters are gathered and converted in one go; all
            ranks must have the same number. Parameters that become one HF tensor together (a
            block of experts) are never parted.

    Raises:
        ExportError: Megatron-Bridge is not there, or this Python or megatron-core is too old.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        bridge_or_hf_config: Any,
        *,
        tasks_at_once: int = 64,
    ) -> None:
        self._models = [unwrap(chunk) for chunk in model_chunks]
        self._bridge = (
            bridge_or_hf_config
            if hasattr(bridge_or_hf_config, "export_hf_weights")
            else _make(bridge_or_hf_config)
        )
        config = getattr(self._bridge.hf_pretrained, "config", self._bridge.hf_pretrained)
        text = getattr(config, "get_text_config", None)
        self._vocabulary = int((text() if text is not None else config).vocab_size)
        self._at_once = tasks_at_once
        self._specs: list[TensorSpec] | None = None

    def specs(self) -> Sequence[TensorSpec]:
        """Costs one export, which is thrown away: Megatron-Bridge tells names and shapes of HF
        tensors only with the tensors."""
        if self._specs is None:
            self._specs = [
                TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
                for name, tensor in self._tensors()
            ]
        return self._specs

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """Some tasks at a time; gathering and converting are one, and count as ``convert``."""
        tensors = self._tensors()
        while True:
            with timer.phase("convert"):
                item = next(tensors, None)
            if item is None:
                return
            yield item

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Tasks hold on to the parameters: made anew each time, they are those of now.
        for some in self._slices(self._tasks()):
            for name, tensor in self._bridge.export_hf_weights(
                self._models, cpu=False, show_progress=False, conversion_tasks=some
            ):
                if name.endswith(_VOCABULARY):
                    tensor = self._cut(name, tensor)
                yield name, tensor

    def _tasks(self) -> list[Any]:
        bridge = self._bridge
        inner = getattr(bridge, "_model_bridge", None)
        if inner is not None and hasattr(inner, "build_conversion_tasks"):
            # The public method wants the path of a checkpoint where the bridge has only a config.
            tasks = inner.build_conversion_tasks(bridge.hf_pretrained, self._models)
        else:
            tasks = bridge.get_conversion_tasks(self._models)
        unknown = sum(task is None for task in tasks)
        if unknown:
            # It only logs that, and exports the rest.
            known = {task.param_name for task in tasks if task is not None}
            own = (name for model in self._models for name, _ in model.named_parameters())
            names = [name for name in own if name not in known][:4] or ["those of other stages"]
            raise ExportError(
                f"Megatron-Bridge has no mapping for {unknown} parameters, such as "
                f"{', '.join(names)}; it may know them under TransformerEngine's names only"
            )
        return list(tasks)

    def _slices(self, tasks: Sequence[Any]) -> Iterator[list[Any]]:
        groups = [getattr(task.mapping, "group_key", None) for task in tasks]
        last = {group: index for index, group in enumerate(groups) if group is not None}
        some: list[Any] = []
        until = -1
        for index, (task, group) in enumerate(zip(tasks, groups, strict=True)):
            some.append(task)
            until = max(until, last.get(group, -1))
            if len(some) >= self._at_once and until <= index:
                yield some
                some = []
        if some:
            yield some

    def _cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # A hand-built GPTModel's padding is not cut off by Megatron-Bridge.
        if tensor.shape[0] < self._vocabulary:
            raise ExportError(
                f"{name} has {tensor.shape[0]} rows, fewer than the vocabulary of "
                f"{self._vocabulary} in the HF config"
            )
        return tensor[: self._vocabulary]


def _make(hf_config: Any) -> Any:
    if sys.version_info < (3, 12):
        raise ExportError(
            "Megatron-Bridge needs Python 3.12 and megatron-core 0.17 or later, and this is Python "
            f"{sys.version_info.major}.{sys.version_info.minor}: use MBridgeSource"
        )
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ExportError(
            f"Megatron-Bridge cannot be imported ({error}); it needs megatron-core 0.17 or later "
            "and Transformer Engine: install megatron-bridge, or use MBridgeSource"
        ) from error
    try:
        return AutoBridge.from_hf_config(hf_config)
    except ValueError as error:
        raise ExportError(
            f"Megatron-Bridge does not know {type(hf_config).__name__}: {error}"
        ) from error
