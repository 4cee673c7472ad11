"""Weights that no sync of a part may leave as they are.

A sync with a name filter, or of the draft alone, relies on the rest of the model being whole. It is
not where an earlier sync tore it, where its memory was given back in between, or where it was never
loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_rdt.errors import EngineStateError
from sglang_rdt.plan.specs import Kept

_NAMED = 5


@dataclass(frozen=True)
class _Entry:
    runner: str
    names: frozenset[str] | None  # None: all
    why: str
    own: bool  # the engine's own parameters, too, that no HF tensor is for


class Unsound:
    """Which HF tensors are not whole on this rank. ``who``: the rank, for messages."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._entries: list[_Entry] = []

    def add(
        self,
        names: Iterable[str] | None,
        why: str,
        runner: str = "both",
        *,
        own: bool = False,
    ) -> None:
        """These are not, either; None: none is.

        Args:
            runner: whose they are.
            own: nor are parameters that the trainer has nothing for, which no sync writes.
        """
        if names is None:
            own = own or any(e.own for e in self._entries if e.runner == runner)
            self._entries = [e for e in self._entries if e.runner != runner]
        named = None if names is None else frozenset(names)
        self._entries.append(_Entry(runner, named, why, own))

    def clear(self, runner: str) -> None:
        """A sync of ``runner`` has written all of them."""
        # A draft that is still torn proposes badly, and nothing worse.
        self._entries = [e for e in self._entries if runner == "draft" and e.runner != "draft"]

    def refuse(self, kept: Kept, runner: str) -> None:
        """Raises EngineStateError if what a sync of ``runner`` keeps is not whole."""
        here = {want.source for want in kept.wants}
        here |= {source for one in kept.computed for source in one.sources}
        for entry in self._entries:
            if runner == "draft" and entry.runner != "draft":
                raise EngineStateError(
                    f"{self._who}: a sync of the draft does not mend the target: {entry.why}. Sync "
                    "the target (SGLANG_RDT_RUNNER=target or both), or restart the engine"
                )
            torn = sorted(here if entry.names is None else here & entry.names)
            if torn:
                raise EngineStateError(
                    f"{self._who}: the name filter keeps {_some(torn)}, which cannot be relied on: "
                    f"{entry.why}. Sync once without a filter, or restart the engine"
                )
            if entry.own and kept.params:
                raise EngineStateError(
                    f"{self._who}: SGLANG_RDT_KEEP keeps {_some(sorted(kept.params))}, which cannot "
                    f"be relied on: {entry.why}. No sync writes them: restart the engine with its "
                    "real weights"
                )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
