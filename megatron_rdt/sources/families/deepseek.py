"""DeepSeek-V3, and what has its checkpoint names: Moonlight, Kimi-K2, GLM-4.7-Flash.

mbridge 0.15.1 has DeepSeek-V3, but for 61 layers (see :mod:`.nextn`), and knows neither
``kimi_k2`` nor ``glm4_moe_lite``. To be dropped once it does.
"""

from __future__ import annotations

from mbridge.models.deepseek_v3 import DeepseekV3Bridge

from megatron_rdt.sources.families.nextn import NextN


class DeepseekV3(NextN, DeepseekV3Bridge):
    """Latent attention, a dense or two layers first, a router with a correction bias."""
