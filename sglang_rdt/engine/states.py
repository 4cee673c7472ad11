"""The one state of an engine's weights, and every way from one to another.

What the world sees is ``current``, ``syncing``, ``dirty`` or ``gone``. A sync goes through three
stages, which decide what giving it up leaves behind::

    current --begin--> begun --land--> landing --finalise--> final --commit--> current (new label)
                       begun --abort--> current              (old label, runs on)
                               landing, final --abort--> dirty   (old label, stays paused)
    dirty   --begin--> landing                               only a commit makes it whole again
    dirty   --accept-> current                               its user says so, under a label of his
    any     --tear---> dirty,  any --die--> gone

The label changes in ``commit`` and in ``accept`` and nowhere else. Generation runs in ``current``
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_rdt.errors import EngineStateError

State = Literal["current", "syncing", "dirty", "gone"]
Stage = Literal["current", "begun", "landing", "final", "dirty", "gone"]
Event = Literal["begin", "land", "finalise", "commit", "leave", "abort", "tear", "accept", "die"]

SHOWN: Mapping[Stage, State] = {
    "current": "current",
    "begun": "syncing",
    "landing": "syncing",
    "final": "syncing",
    "dirty": "dirty",
    "gone": "gone",
}

TRANSITIONS: Mapping[tuple[Stage, Event], Stage] = {
    ("current", "begin"): "begun",
    # Its weights are torn already: giving up leaves it as it was.
    ("dirty", "begin"): "landing",
    ("begun", "land"): "landing",
    ("landing", "land"): "landing",
    # A rank may want nothing of this sync; its engine is finalised as a whole.
    ("begun", "finalise"): "final",
    ("landing", "finalise"): "final",
    ("final", "commit"): "current",
    # A connect session ends without a byte having moved.
    ("begun", "leave"): "current",
    ("landing", "leave"): "dirty",
    ("begun", "abort"): "current",
    ("landing", "abort"): "dirty",
    ("final", "abort"): "dirty",
    # What could not be undone.
    ("current", "tear"): "dirty",
    ("begun", "tear"): "dirty",
    ("landing", "tear"): "dirty",
    ("final", "tear"): "dirty",
    ("dirty", "tear"): "dirty",
    ("dirty", "accept"): "current",
    ("current", "die"): "gone",
    ("begun", "die"): "gone",
    ("landing", "die"): "gone",
    ("final", "die"): "gone",
    ("dirty", "die"): "gone",
    ("gone", "die"): "gone",
}

# The only events that move the label.
LABELLING: tuple[Event, ...] = ("commit", "accept")


@dataclass
class WeightState:
    """State of one engine rank's weights.

    ``version``: the label that replies carry. ``detail``: why a dirty one is dirty.
    """

    version: str
    stage: Stage = "current"
    detail: str = ""

    @property
    def state(self) -> State:
        """What the world sees."""
        return SHOWN[self.stage]

    @property
    def torn(self) -> bool:
        """Whether giving up now leaves weights that must not be served."""
        return self.stage in ("landing", "final", "dirty")

    def on(self, event: Event, *, version: str | None = None, detail: str = "") -> State:
        """Takes the transition of ``event``.

        Args:
            version: the new label; for ``commit`` and ``accept``, which need one.
            detail: why the weights are dirty, if they are now and were not before.

        Raises:
            EngineStateError: there is no such transition; nothing has changed.
        """
        target = TRANSITIONS.get((self.stage, event))
        if target is None:
            raise EngineStateError(f"weights that are {self.stage} cannot {event}")
        if (version is None) == (event in LABELLING):
            raise EngineStateError(f"{event} needs {'a' if version is None else 'no'} version")
        if version is not None:
            self.version = version
        if target == "dirty":
            # The first cause stays: what failed since only failed to heal it.
            self.detail = self.detail or detail
        elif target == "current":
            self.detail = ""
        self.stage = target
        return self.state


def of_engine(ranks: Mapping[str, Any]) -> tuple[State, str]:
    """The state of an engine, from those of its ranks.

    Args:
        ranks: rank (text) -> its RankStatus, or the exception that it answered with.

    Returns:
        The state, and why if it is not ``current``: the worst of the ranks decides, and ranks that
        carry different labels are no current engine.
    """
    dead = [f"{who}: {answer}" for who, answer in ranks.items() if isinstance(answer, Exception)]
    if dead or not ranks:
        return "gone", "; ".join(dead) or "it has no ranks"
    for state in ("gone", "dirty", "syncing"):
        for who, status in ranks.items():
            if status.state == state:
                return state, f"{who}: {status.detail or status.sync_id or state}"  # type: ignore[return-value]
    labels = {who: status.version for who, status in ranks.items()}
    if len(set(labels.values())) > 1:
        told = ", ".join(f"{who} serves {label!r}" for who, label in labels.items())
        return "dirty", f"its ranks disagree: {told}"
    return "current", ""
