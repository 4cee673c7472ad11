"""Settings shared by the pure tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from sglang_rdt.engine import loop_inbox

# Tiny tensors: more threads than one only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("pure", deadline=None, max_examples=40, suppress_health_check=_checks)
# For a longer search: pytest tests/pure --hypothesis-profile=thorough
settings.register_profile(
    "thorough", deadline=None, max_examples=3000, suppress_health_check=_checks
)
settings.load_profile("pure")


@pytest.fixture
def empty_inbox() -> Iterator[None]:
    """The process-wide inbox, empty before and after."""
    loop_inbox._waiting.clear()
    yield
    loop_inbox._waiting.clear()
