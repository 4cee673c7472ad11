"""What cannot be simulated."""

from __future__ import annotations

from sglang_rdt.errors import RdtError


class SimulateError(RdtError):
    """A model or a layout that cannot be; one sentence that says why."""
