"""GLM-4 dense (GLM-4-0414, GLM-Z1): norms before and after both blocks, gate and up in one tensor.

mbridge 0.15.1 does not have it. megatron-core 0.16 to 0.19 has no norms behind the blocks either;
frameworks add them, as modules of the layer (``post_self_attn_layernorm``, ``post_mlp_layernorm``:
slime) or of the linear layers (``linear_proj.post_layernorm``, ``linear_fc2.post_layernorm``:
Megatron-Bridge's sandwich norms). Both spellings are known here. To be dropped once mbridge has it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mbridge.models.qwen2 import Qwen2Bridge

_LAYER = "model.layers.{layer_number}."


class Glm4(Qwen2Bridge):
    """A dense Qwen2 with four norms a layer."""

    _ATTENTION_MAPPING: ClassVar[dict[str, Any]] = {
        **Qwen2Bridge._ATTENTION_MAPPING,
        "self_attention.linear_proj.post_layernorm.weight": [
            f"{_LAYER}post_self_attn_layernorm.weight"
        ],
    }
    _MLP_MAPPING: ClassVar[dict[str, Any]] = {
        **Qwen2Bridge._MLP_MAPPING,
        # One tensor, gate first, which is how Megatron has it too.
        "mlp.linear_fc1.weight": [f"{_LAYER}mlp.gate_up_proj.weight"],
        "post_mlp_layernorm.weight": [f"{_LAYER}post_mlp_layernorm.weight"],
        "mlp.linear_fc2.post_layernorm.weight": [f"{_LAYER}post_mlp_layernorm.weight"],
    }
    _OTHER_MAPPING: ClassVar[dict[str, Any]] = {
        "post_self_attn_layernorm.weight": [f"{_LAYER}post_self_attn_layernorm.weight"],
    }
