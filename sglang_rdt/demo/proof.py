"""Proving a sync from outside: live engine parameters against a checkpoint that transformers read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_rdt.demo.models import TinyModel
from sglang_rdt.plan.specs import EngineRank

PROMPT = (1, 10, 20, 30, 40)
NEW_TOKENS = 12
# Two logits nearer than this, relative to the largest, may come out in either order: engine and
# transformers add up in different order. Measured for these models, bf16 against float32: 1.2 % in
# the median, 3.4 % at most in 680 positions.
_TIE = {"torch.float32": 1e-4}
_TIE_HALF = 2.0**-4


def through_transformers(model: TinyModel, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` written as a checkpoint, loaded by transformers, and written out by it again."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_checkpoint(Path(folder, "in"), state)
        loaded = model.transformers_model(Path(folder, "in"))
        loaded.save_pretrained(Path(folder, "out"))
        return load_file(Path(folder, "out", "model.safetensors"))


def unequal_parameters(
    model: TinyModel,
    state: Mapping[str, Any],
    live: Sequence[Mapping[str, Any]],
    ranks: Sequence[EngineRank] = (),
) -> tuple[int, list[str]]:
    """Compares every engine parameter bit for bit.

    Args:
        state: HF tensors that the engine should hold.
        live: per rank, the engine's parameters and buffers.
        ranks: the ranks in the same order; without them they are those of one TP group.

    Returns:
        How many parameters were compared, and one line per difference.
    """
    import torch

    compared, differences = 0, []
    for rank, tensors in enumerate(live):
        expected = (
            _expected(model, state, ranks[rank])
            if ranks
            else model.engine_params(state, len(live), rank)
        )
        for name, want in expected.items():
            compared += 1
            have = tensors.get(name)
            if have is None:
                differences.append(f"rank {rank}: {name} is not there")
            elif have.dtype != want.dtype or have.shape != want.shape:
                differences.append(
                    f"rank {rank}: {name} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
                )
            elif not torch.equal(have.view(torch.uint8), want.contiguous().view(torch.uint8)):
                differences.append(f"rank {rank}: {name} differs")
    return compared, differences


def _expected(model: TinyModel, state: Mapping[str, Any], rank: EngineRank) -> dict[str, Any]:
    return model.engine_params(
        state,
        rank.tp_size,
        rank.rank.tp,
        pp_size=rank.pp_size,
        pp_rank=rank.rank.pp,
        attn_dp_size=rank.dp_size if rank.dp_attention else 1,
        ep_size=rank.ep_size,
    )


def same_tokens(model: TinyModel, checkpoint: Path, tokens: Sequence[int]) -> str | None:
    """Why ``tokens`` are not what transformers generates from ``checkpoint``, or None.

    Ties, nearer than what rounding in the checkpoint's dtype moves, count as equal.

    Args:
        tokens: the engine's greedy continuation of :data:`PROMPT`.
    """
    import torch

    reference = model.transformers_model(checkpoint)
    rounding = _TIE.get(str(reference.dtype), _TIE_HALF)
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        logits = reference(ids).logits[0].float()
    for i, token in enumerate(tokens):
        row = logits[len(PROMPT) - 1 + i]
        best = int(row.argmax())
        if token != best and float(row[best] - row[token]) > rounding * float(row.abs().max()):
            return f"token {i} is {token}, transformers says {best}"
    return None
