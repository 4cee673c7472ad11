"""Before anything imports Ray, which reads its authentication settings once; and what a failure says
last, in one place: an error that crossed processes says what went wrong at its end."""

from __future__ import annotations

import os
import secrets
from typing import Any

# The end-to-end tests run under Ray's token authentication, as clusters of careful people do.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

_LINES, _WIDTH = 4, 400


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The last lines of every error."""
    reports = [r for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, ())]
    for report in reports:
        said = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:1] == "E"]
        terminalreporter.write_line(report.nodeid, bold=True)
        for line in [line for line in said if line.strip("^ ")][-_LINES:]:
            terminalreporter.write_line(f"    {line[:_WIDTH]}")
