"""Weights that no filtered sync may leave as they are.

A sync with a name filter relies on the rest of the model being whole. It is not where an earlier
sync tore it, where its memory was given back in between, or where it was never loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rdt.errors import EngineStateError
from sglang_rdt.plan.specs import Kept

_NAMED = 5


class Unsound:
    """Which HF tensors are not whole on this rank. ``who``: the rank, for messages."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._names: frozenset[str] | None = frozenset()  # None: all
        self._why = ""

    def add(self, names: Iterable[str] | None, why: str) -> None:
        """These are not, either; None: none is."""
        if names is None or self._names is None:
            self._names = None
        else:
            self._names |= frozenset(names)
        self._why = why

    def clear(self) -> None:
        """A sync has written all of them."""
        self._names, self._why = frozenset(), ""

    def refuse(self, kept: Kept) -> None:
        """Raises EngineStateError if what a filter keeps is not whole."""
        here = {want.source for want in kept.wants}
        torn = sorted(here if self._names is None else here & self._names)
        if not torn:
            return
        more = f" and {len(torn) - _NAMED} more" if len(torn) > _NAMED else ""
        raise EngineStateError(
            f"{self._who}: the name filter keeps {', '.join(torn[:_NAMED])}{more}, which cannot be "
            f"relied on: {self._why}. Sync once without a filter, or restart the engine"
        )
