"""The trainer's end of the process group that SGLang's ``init_weights_update_group`` makes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def make(address: str, port: int, world: int, name: str, backend: str, timeout_s: float) -> Any:
    """Rank 0 of a group besides the default one; returns when all others are there.

    torch has no public call for a group that reaches beyond the default one. This is what
    RL frameworks copy from each other, and SGLang has on its side
    (sglang.srt.utils.common.init_custom_process_group); torch 2.6 to 2.14.
    """
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", 0, world, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        timeout=timeout,
        backend_options=None,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
