"""Bridges of mbridge's kind for what mbridge 0.15.1 lacks or can no longer convert.

Each module says why it exists and when it can go. A bridge that the user passes goes before these,
and these before mbridge's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported when needed: they need mbridge.
_PLACES = {
    "deepseek_v3": "deepseek:DeepseekV3",
    "glm4": "glm4:Glm4",
    "glm4_moe": "glm4_moe:Glm4Moe",
    "glm4_moe_lite": "deepseek:DeepseekV3",
    "gpt_oss": "gpt_oss:GptOss",
    "kimi_k2": "deepseek:DeepseekV3",
    "qwen3_5_moe": "qwen3_5:Qwen35",
    "qwen3_5_moe_text": "qwen3_5:Qwen35",
    "qwen3_5": "qwen3_5:Qwen35",
    "qwen3_5_text": "qwen3_5:Qwen35",
}
MODEL_TYPES = tuple(_PLACES)


def find(model_type: str) -> Any | None:
    """The bridge class for a ``model_type`` of transformers, if one of these is."""
    place = _PLACES.get(model_type)
    if place is None:
        return None
    module, name = place.split(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
