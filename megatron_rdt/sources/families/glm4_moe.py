"""GLM-4.5 and GLM-4.5-Air: mbridge's own, but for the layers of multi-token prediction.

See :mod:`.nextn` for why, and until when.
"""

from __future__ import annotations

from mbridge.models.glm4moe import GLM4MoEBridge

from megatron_rdt.sources.families.nextn import NextN


class Glm4Moe(NextN, GLM4MoEBridge):
    """Biases on q, k, v; a dense layer first; a shared expert; a correction bias."""
