"""A progress bar for syncs that take long enough for somebody to wonder."""

from __future__ import annotations

import sys
import time
from typing import Any

# Shorter syncs draw nothing.
APPEARS_AFTER_S = 2.0


class Progress:
    """Draws on stderr if that is a terminal, and only once the sync has taken a while."""

    def __init__(self, total: int, title: str, *, enabled: bool) -> None:
        self._total, self._title = total, title
        self._enabled = enabled and sys.stderr.isatty()
        self._done = 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more have been exported."""
        self._done += nbytes
        if not self._enabled:
            return
        if self._bar is None:
            if time.monotonic() - self._started < APPEARS_AFTER_S:
                return
            self._open()
        self._bar.update(self._task, completed=self._done)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            "{task.description}",
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=self._total)

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
