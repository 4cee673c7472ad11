"""Finds engines, drives one sync over all of them. Runs on one process (trainer rank 0)."""

from sglang_rdt.coordinator.discovery import engine_at, engine_of, find_engines, resolve_actor
from sglang_rdt.coordinator.engine import Engine
from sglang_rdt.coordinator.roster import Standing, current_engines, roster

__all__ = [
    "Engine",
    "Standing",
    "current_engines",
    "engine_at",
    "engine_of",
    "find_engines",
    "resolve_actor",
    "roster",
]
