"""Which pieces an engine rank reads straight into its parameters, and which take a detour.

Reading run by run costs a descriptor a run. Where these take longer than the bytes, the pieces
with the smallest runs are staged instead: the source's few runs go to scratch memory and are
copied into place ("unpack"), or the source copies its strided slice together first ("pack").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.strided import Ints, count_runs

DIRECT, UNPACK, PACK = range(3)  # indices into transfers.HOWS

Hows = NDArray[np.int8]


def decide(
    shape: Ints,
    dst_stride: Ints,
    src_stride: Ints,
    dst_item: Ints,
    src_item: Ints,
    cast: NDArray[np.bool_],
    costs: LinkCosts,
) -> Hows:
    """How each piece of one engine rank moves; one row per piece, strides in elements.

    Args:
        dst_item, src_item: bytes per element on either side.
        cast: where the dtypes differ; such a piece is never direct.

    The model of an engine rank's time is ``max(bytes / link, descriptors * descriptor_s)``, plus
    staged bytes over the copy rate, plus ``round_s`` if anything is packed. Where the descriptors
    stay hidden behind the bytes nothing is staged that need not be.
    """
    how = np.zeros(len(shape), np.int8)
    if not len(shape):
        return how
    numel = shape.prod(axis=1)
    direct = count_runs(shape, dst_stride, src_stride)
    unpacked = count_runs(shape, src_stride)
    runs = direct.copy()

    # What must change on the way. Packing narrow values where they lie halves the traffic;
    # widening is for the engine, unless the source's runs cost more than that saves.
    slow = unpacked * costs.descriptor_s > numel * dst_item / costs.link_bytes_per_s + costs.round_s
    how[cast] = np.where((dst_item < src_item) | slow, PACK, UNPACK)[cast]
    runs = np.where(cast, np.where(how == PACK, 1, unpacked), runs)
    nbytes = np.where(how == PACK, numel * dst_item, numel * src_item)
    link_s = float(nbytes.sum()) / costs.link_bytes_per_s
    packs = bool((how == PACK).any())

    # What copying costs, and what it would leave to read: the source's runs, or one piece. Packing
    # takes a second copy where the destination has gaps, which the engine fills from scratch.
    copy_s = nbytes / costs.copy_bytes_per_s
    gaps = count_runs(shape, dst_stride) > 1
    unpack = np.full(len(shape), UNPACK, np.int8), unpacked, copy_s
    # The source's time is everybody's: it packs only what it has in many small runs.
    many = (unpacked - 1) * costs.descriptor_s > copy_s
    either = (
        np.where(many, PACK, UNPACK).astype(np.int8),
        np.where(many, 1, unpacked),
        np.where(many & gaps, 2 * copy_s, copy_s),
    )

    def staged(kinds: Hows, after: Ints, copy_s: NDArray[np.float64]) -> tuple[float, Hows]:
        """The time, and the decision, if pieces may be staged as ``kinds`` says, which leaves
        ``after`` runs of each."""
        saved = runs - after
        # The smallest runs first: they save most for the bytes.
        order = np.flatnonzero(~cast & (saved * costs.descriptor_s > copy_s))
        order = order[np.argsort((nbytes / direct)[order], kind="stable")]
        # Descriptors that the bytes do not hide, before each of them is staged.
        over = runs.sum() - link_s / costs.descriptor_s
        over = over - (np.cumsum(saved[order]) - saved[order])
        order = order[np.minimum(saved[order], over) * costs.descriptor_s > copy_s[order]]
        out = how.copy()
        out[order] = kinds[order]
        left = float(runs.sum() - saved[order].sum()) * costs.descriptor_s
        seconds = max(link_s, left) + float(copy_s[order].sum())
        if not packs and (out == PACK).any():
            seconds += costs.round_s
        return seconds, out

    # Packing costs a round with the source, so it must be worth it for the engine rank as a whole.
    nothing = max(link_s, float(runs.sum()) * costs.descriptor_s), how
    return min(nothing, staged(*unpack), staged(*either), key=lambda choice: choice[0])[1]
