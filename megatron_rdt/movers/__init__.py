"""How the bytes of a sync move: bucketed, or straight out of live memory."""

from megatron_rdt.movers.base import Moved, Mover
from megatron_rdt.movers.bucketed import BucketedMover
from megatron_rdt.movers.direct import DirectMover

__all__ = ["BucketedMover", "DirectMover", "Moved", "Mover"]
