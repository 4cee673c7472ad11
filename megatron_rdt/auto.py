"""Weight sync switched on by environment variables alone."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from sglang_rdt.errors import ExportError
from sglang_rdt.settings import Settings

logger = logging.getLogger("megatron_rdt")


class AutoSync:
    """Listens to every optimizer; makes a WeightSync for the first one that steps.

    Needs an optimizer that knows its model chunks (any with a distributed optimizer in it);
    others must create a :class:`megatron_rdt.WeightSync` in the training program.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._owner: weakref.ref[Any] | None = None
        self._sync: Any = None

    def on_step(self, optimizer: Any) -> None:
        """After a successful step: the first makes the sync, the others pass it on."""
        from megatron_rdt.weight_sync import WeightSync

        if self._sync is None:
            chunks = getattr(optimizer, "model_chunks", None)
            if not chunks:
                raise ExportError(
                    f"MEGATRON_RDT_HF_CONFIG is set, but {type(optimizer).__name__} does not know its "
                    "model; create megatron_rdt.WeightSync(model_chunks, ...) in the program instead"
                )
            self._owner = weakref.ref(optimizer)
            self._sync = WeightSync(
                list(chunks), hf_config=self._settings.hf_config, settings=self._settings
            )
        if self._owner is not None and self._owner() is optimizer:
            self._sync.on_step(optimizer)
