"""Block-quantised FP8 out of any source, as DeepSeek-V3's checkpoints have it.

A weight becomes float8_e4m3fn and gets a ``weight_scale_inv``: one float32 for each block of 128 x
128, by which an engine multiplies. Engines that serve such a checkpoint take these two tensors
in a sync as they took them from the file.

The numbers are computed on the trainer, one tensor at a time, so there is nothing of them in live
memory: bucketed mode only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sglang_rdt.errors import ExportError
from sglang_rdt.plan.specs import TensorSpec

if TYPE_CHECKING:
    from megatron_rdt.sources.base import WeightSource
    from sglang_rdt.coordinator.phases import PhaseTimer

_DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(_DTYPE).max
# A smaller scale is no normal float32: it would be wrong or zero itself, and so would be what is
# divided by it. All of such a block is nothing beside any other.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# Linear layers that no released block-FP8 checkpoint quantises, and engines build without scales:
# embedding and head and their copies, routers, the projection before a layer of multi-token
# prediction, the gate of a shared expert.
_NEVER = re.compile(
    r"(^|\.)([a-z_]*embed[a-z_]*|lm_head|head|eh_proj|fc|gate|router|shared_expert_gate"
    r"|[a-z_0-9]*norm[a-z_0-9]*|conv1d)\.weight$"
)


class BlockFp8Source:
    """See :class:`megatron_rdt.sources.base.WeightSource`.

    Args:
        source: where the tensors come from.
        quantization_config: of the HF config (the dict, or the config that has it); says the size
            of the blocks and what is not quantised.

    Raises:
        ExportError: the config asks for another kind of quantisation.
    """

    def __init__(self, source: WeightSource, quantization_config: Any) -> None:
        self._source = source
        config = _as_dict(quantization_config)
        self._block = _block_size(config)
        self._skipped = _skipped(config)
        self._specs: list[TensorSpec] | None = None

    def quantises(self, spec: TensorSpec) -> bool:
        """Whether ``spec`` becomes FP8.

        Raises:
            ExportError: it is a block of experts, which no engine takes in this format.
        """
        if ".experts." in spec.name and len(spec.shape) == 3:
            raise ExportError(
                f"{spec.name} {list(spec.shape)}: all experts in one tensor have no block-FP8 form "
                "in any checkpoint; the source must yield a tensor for each"
            )
        if not spec.name.endswith(".weight") or len(spec.shape) != 2 or _NEVER.search(spec.name):
            return False
        module = spec.name.removesuffix(".weight")
        return not any(_covers(skipped, module) for skipped in self._skipped)

    def specs(self) -> Sequence[TensorSpec]:
        """Each quantised weight, and its scales behind it."""
        if self._specs is None:
            self._specs = [made for spec in self._source.specs() for made in self._made_of(spec)]
        return self._specs

    def _made_of(self, spec: TensorSpec) -> Iterator[TensorSpec]:
        if not self.quantises(spec):
            yield spec
            return
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            raise ExportError(f"{spec.name} is {spec.dtype}, which is not quantised again")
        rows, columns = (-(-n // b) for n, b in zip(spec.shape, self._block, strict=True))
        yield TensorSpec(spec.name, spec.shape, "float8_e4m3fn")
        yield TensorSpec(f"{spec.name}_scale_inv", (rows, columns), "float32")

    def export(self, timer: PhaseTimer) -> Iterator[tuple[str, torch.Tensor]]:
        """As the source does; quantising counts as ``convert``.

        Raises:
            ExportError: at the end, if there was a weight with infinite or NaN values; names it.
        """
        quantised = {s.name for s in self.specs() if s.dtype == "float8_e4m3fn"}
        names: list[str] = []
        good: list[torch.Tensor] = []
        for name, tensor in self._source.export(timer):
            if name not in quantised:
                yield name, tensor
                continue
            with timer.phase("convert"):
                weight, scale = quantise(tensor, self._block)
                # Looked at once, at the end: each look waits for the GPU.
                names.append(name)
                good.append(torch.isfinite(scale).all())
            yield name, weight
            yield f"{name}_scale_inv", scale
        bad = (
            [n for n, ok in zip(names, torch.stack(good).tolist(), strict=True) if not ok]
            if good
            else []
        )
        if bad:
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            raise ExportError(f"not finite, so not to be quantised: {', '.join(bad[:8])}{more}")

    def holds(self) -> NoReturn:
        """Direct mode is refused."""
        name = next((s.name for s in self.specs() if s.dtype == "float8_e4m3fn"), "every weight")
        raise ExportError(
            f"{name} is quantised on the trainer (BlockFp8Source): it is no slice of live memory; "
            'use mode "bucketed"'
        )

    def addresses(self) -> tuple[int, ...]:
        """Of nothing: see :meth:`holds`."""
        return ()


def quantise(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """``(float8_e4m3fn, scales)`` of a matrix: value = FP8 x scale of its block.

    The largest magnitude of a block becomes 448, the largest that FP8 has. A block of zeros (or of
    values whose scale would not be a normal float32) has the scale 1.
    """
    rows, columns = tensor.shape
    height, width = block
    down, across = -(-rows // height), -(-columns // width)
    wide = tensor.new_zeros((down * height, across * width), dtype=torch.float32)
    wide[:rows, :columns] = tensor
    blocks = wide.view(down, height, across, width)
    scale = blocks.abs().amax(dim=(1, 3)) / _MAX
    scale = torch.where(scale < _LEAST_SCALE, 1.0, scale)
    blocks = (blocks / scale[:, None, :, None]).clamp_(-_MAX, _MAX)
    quantised = blocks.view(down * height, across * width)[:rows, :columns].to(_DTYPE)
    return quantised.contiguous(), scale


def _as_dict(config: Any) -> Mapping[str, Any]:
    found = getattr(config, "quantization_config", config)
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    if not isinstance(found, Mapping):
        raise ExportError("the HF config has no quantization_config: nothing says what to quantise")
    return found


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    method, size = config.get("quant_method"), config.get("weight_block_size")
    if str(getattr(method, "value", method)) != "fp8" or not size:
        raise ExportError(
            f"quantization_config has quant_method {method!r} and weight_block_size {size!r}; "
            "BlockFp8Source makes quant_method 'fp8' with blocks"
        )
    for key, known in (("fmt", (None, "e4m3")), ("scale_fmt", (None, "float32"))):
        if config.get(key) not in known:
            raise ExportError(f"quantization_config has {key} {config[key]!r}, not {known[1]!r}")
    height, width = (int(n) for n in size)
    return height, width


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return tuple(names)


def _covers(skipped: str, module: str) -> bool:
    """Whether ``skipped`` is the path of the module, a part of it between dots, or contains it."""
    return f".{skipped.strip('.')}." in f".{module}."
