"""Which pieces an engine rank reads straight into its parameters, and which take a detour.

Reading run by run costs a descriptor a run. A piece whose runs are so small that these cost more
than copying it once is staged instead: the source's few runs go to scratch memory and are
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

    The model of an engine rank's time is bytes over the link, plus descriptors times
    ``descriptor_s``, plus staged bytes over the copy rate, plus ``round_s`` if anything is packed.
    It is a sum: one copy engine does one run after the other, and what it needs to begin each is
    not hidden behind the bytes of another (2xH200: 1,119 runs took 4.1 ms, 12,288 took 47 ms more
    than their bytes, so 3.7 and 3.8 us each).
    """
    how = np.zeros(len(shape), np.int8)
    if not len(shape):
        return how
    numel = shape.prod(axis=1)
    direct = count_runs(shape, dst_stride, src_stride)
    unpacked = count_runs(shape, src_stride)

    # What must change on the way. Packing narrow values where they lie halves the traffic;
    # widening is for the engine, unless the source's runs cost more than that saves.
    slow = unpacked * costs.descriptor_s > numel * dst_item / costs.link_bytes_per_s + costs.round_s
    how[cast] = np.where((dst_item < src_item) | slow, PACK, UNPACK)[cast]
    packs = bool((how == PACK).any())

    # What each would cost beyond its bytes. Packing takes a second copy where the destination has
    # gaps, which the engine fills from scratch; and the source's time is everybody's, so it packs
    # only what it has in many small runs.
    copy_s = numel * src_item / costs.copy_bytes_per_s
    gaps = count_runs(shape, dst_stride) > 1
    in_place = direct * costs.descriptor_s
    unpack = unpacked * costs.descriptor_s + copy_s
    pack = costs.descriptor_s + np.where(gaps, 2 * copy_s, copy_s)
    pack = np.where((unpacked - 1) * costs.descriptor_s > copy_s, pack, np.inf)

    how = np.where(cast, how, np.where(unpack < in_place, UNPACK, DIRECT)).astype(np.int8)
    saved = np.where(cast, 0.0, np.minimum(in_place, unpack) - pack)
    worth = saved > 0
    # A round with the source must be worth it for the engine rank as a whole.
    if packs or float(saved[worth].sum()) > costs.round_s:
        how[worth] = PACK
    return how
