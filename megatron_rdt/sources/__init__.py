"""Where HF tensors come from: a bridge library, or the user's own generator."""

from megatron_rdt.sources.base import WeightSource
from megatron_rdt.sources.generator import GeneratorSource

__all__ = ["GeneratorSource", "WeightSource"]
