"""Bridges from a table of exact names, for architectures that mbridge does not have.

mbridge's own tables are searched for a name that is contained in the parameter's, and how a
parameter is cut over TP is told from its name and from attributes that Megatron does not always
set (attention sinks, experts of TransformerEngine). Here every parameter has a rule of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from mbridge.core import LLMBridge

Tensors = list[torch.Tensor]
Merge = Callable[[Any, Sequence[torch.Tensor]], torch.Tensor]
Convert = Callable[[Any, torch.Tensor], Tensors]

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.*)$")
_EXPERT = re.compile(r"^(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def rows(_: Any, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cut along the first dimension."""
    return torch.cat(list(shards), dim=0)


def columns(_: Any, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cut along the second dimension."""
    return torch.cat(list(shards), dim=1)


def gated(_: Any, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each shard has its part of the gate, then its part of up."""
    halves = [shard.chunk(2) for shard in shards]
    return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])


def in_sections(sizes: Callable[[Any], Sequence[int]]) -> Merge:
    """Each shard has its part of each section; ``sizes(config)`` are those of the whole ones."""

    def merge(bridge: Any, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [size // len(shards) for size in sizes(bridge.hf_config)]
        split = [shard.split(parts) for shard in shards]
        return torch.cat([torch.cat(section) for section in zip(*split, strict=True)])

    return merge


def as_is(_: Any, tensor: torch.Tensor) -> Tensors:
    """One HF tensor."""
    return [tensor]


def halves(_: Any, tensor: torch.Tensor) -> Tensors:
    """Gate and up."""
    return list(tensor.chunk(2))


def _grouped(bridge: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """[groups, heads of a group x head size, ...], query heads of a group, head size."""
    c = bridge.hf_config
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    groups = c.num_key_value_heads
    return tensor.view(groups, -1, *tensor.shape[1:]), c.num_attention_heads // groups, size


def qkv(bridge: Any, tensor: torch.Tensor) -> Tensors:
    """Query heads, key head and value head of one group after the other."""
    grouped, heads, size = _grouped(bridge, tensor)
    parts = grouped.split([heads * size, size, size], dim=1)
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


def qkv_with_gate(bridge: Any, tensor: torch.Tensor) -> Tensors:
    """As :func:`qkv`, with a gate for each query head; HF has a head's gate behind the head."""
    grouped, heads, size = _grouped(bridge, tensor)
    q, gate, k, v = grouped.split([heads * size, heads * size, size, size], dim=1)
    shape = (grouped.shape[0], heads, size, *tensor.shape[1:])
    q = torch.stack([q.reshape(shape), gate.reshape(shape)], dim=2)
    return [part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)]


@dataclass(frozen=True)
class Rule:
    """What a parameter becomes.

    Args:
        names: HF names; ``{layer}`` and ``{expert}`` are filled in.
        merge: shards of the TP (ETP) ranks -> whole parameter; None: every rank has all of it.
        convert: whole parameter -> HF tensors; of a block: all experts, stacked.
        block: all experts of a layer are one HF tensor.
        computed: ``convert`` may compute; direct mode keeps a copy of the result.
    """

    names: tuple[str, ...]
    merge: Merge | None = None
    convert: Convert = as_is
    block: bool = False
    computed: bool = False


def rule(*names: str, merge: Merge | None = None, **more: Any) -> Rule:
    """A :class:`Rule` for ``names``."""
    return Rule(names, merge, **more)


class TableBridge(LLMBridge):
    """See the module. Subclasses have the tables."""

    # Names as they are.
    WHOLE: ClassVar[dict[str, Rule]] = {}
    # Names behind ``decoder.layers.N.``.
    LAYER: ClassVar[dict[str, Rule]] = {}
    # Names behind ``mtp.layers.N.``; those of its transformer layer are found in LAYER.
    MTP: ClassVar[dict[str, Rule]] = {}
    # Where the names of LAYER begin, in a decoder layer and in one of multi-token prediction.
    PREFIX: ClassVar[dict[str, str]] = {"decoder": "model.layers.{layer}."}

    def _build_config(self) -> Any:
        # Only asked for where no model is there to have one; nothing here builds a model.
        return None

    def is_split(self, name: str) -> bool | None:
        """Whether the parameter is cut over TP (ETP), whatever its attributes say; None: it is
        unknown, which its conversion will say."""
        found = self._find(name)[0]
        return None if found is None else found.merge is not None

    def is_block(self, name: str) -> bool:
        """Whether all experts of a layer are one HF tensor; ``name`` has no expert's number."""
        found = self._find(name)[0]
        return found is not None and found.block

    def may_compute(self, name: str) -> bool:
        """Whether an HF tensor may be computed of the parameter, and is small."""
        found = self._find(name)[0]
        return found is not None and found.computed

    def block_to_hf(
        self, name: str, experts: Sequence[torch.Tensor]
    ) -> tuple[list[str], list[torch.Tensor]]:
        """HF tensors of all experts of a layer."""
        found, fields = self._rule(name)
        return _named(found, fields, found.convert(self, torch.stack(list(experts))))

    def _rule(self, name: str) -> tuple[Rule, dict[str, str]]:
        found, fields = self._find(name)
        if found is None:
            raise NotImplementedError(f"Unsupported parameter name: {name}")
        return found, fields

    def _find(self, name: str) -> tuple[Rule | None, dict[str, str]]:
        plain = _EXPERT.match(name)
        fields = {"expert": plain[2]} if plain else {}
        match = _LAYER.match(plain[1] if plain else name)
        if match is None:
            found, prefix = self.WHOLE.get(name), ""
        else:
            inner = "transformer_layer." in name or match[1] == "decoder"
            found = (self.LAYER if inner else self.MTP).get(match[3])
            prefix = self.PREFIX.get(match[1], "") if inner else ""
            fields["layer"] = match[2]
        if match is not None and match[1] not in self.PREFIX:
            found = None
        return found, {**fields, "prefix": prefix}

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        found, fields = self._rule(name)
        return [_fill(one, fields) for one in found.names]

    def _weight_merge_across_tp(
        self, name: str, shards: list[torch.Tensor], param: torch.Tensor
    ) -> torch.Tensor:
        merge = self._rule(name)[0].merge
        assert merge is not None, "every rank has all of it"
        return merge(self, shards)

    def _weight_to_hf_format(
        self, name: str, weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        found, fields = self._rule(name)
        if name in _VOCABULARY and self.vocab_size is not None:
            assert weights.shape[0] == self.padded_vocab_size
            weights = weights[: self.vocab_size]
        return _named(found, fields, found.convert(self, weights))


def _fill(name: str, fields: dict[str, str]) -> str:
    return (fields["prefix"] + name).format(**fields)


def _named(found: Rule, fields: dict[str, str], tensors: Tensors) -> tuple[list[str], Tensors]:
    assert len(tensors) == len(found.names)
    return [_fill(name, fields) for name in found.names], tensors
