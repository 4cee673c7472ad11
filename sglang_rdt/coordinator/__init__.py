"""Finds engines, drives one sync over all of them. Runs on one process (trainer rank 0)."""

from sglang_rdt.coordinator.discovery import engine_at, engine_of, find_engines, resolve_actor
from sglang_rdt.coordinator.engine import Engine

__all__ = ["Engine", "engine_at", "engine_of", "find_engines", "resolve_actor"]
