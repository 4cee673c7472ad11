"""Multi-token-prediction layers as DeepSeek and GLM checkpoints have them.

There, the layers behind the last one predict further tokens, each with its own copy of the
embedding and of the head. mbridge 0.15.1 knows these names for a model of 61 layers only
(DeepSeek-V3), does not cut the padding off the copies, and leaves the copies out for GLM.
To be dropped once mbridge's bridges do it for any number of layers.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(transformer_layer\.)?(.*)$")
_OWN = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_COPIES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}


class NextN:
    """To be mixed into a bridge of mbridge's."""

    config: Any

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        match = _LAYER.match(name)
        names: Any = super()
        if match is None:
            return names._weight_name_mapping_mcore_to_hf(name)
        layer, tail = self.config.num_layers + int(match[1]), match[3]
        if match[2]:
            return names._weight_name_mapping_mcore_to_hf(f"decoder.layers.{layer}.{tail}")
        if tail not in _OWN:
            raise NotImplementedError(f"Unsupported parameter name: {name}")
        return [f"model.layers.{layer}.{_OWN[tail]}"]

    def _weight_to_hf_format(
        self, name: str, weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        # Bridge's own; DeepseekV3Bridge's makes the copies of layer 61, with the padding.
        from mbridge.core import LLMBridge

        names, tensors = LLMBridge._weight_to_hf_format(self, name, weights)
        if name in _COPIES and len(names) == 1:
            for i in range(self.config.mtp_num_layers or 0):
                names = [*names, f"model.layers.{self.config.num_layers + i}.{_COPIES[name]}"]
                tensors = [*tensors, tensors[0]]
        return names, tensors
