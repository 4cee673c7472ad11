"""A sync under the next forward and backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class InBackground(Generic[T]):
    """Runs ``run`` on a thread, with a CUDA stream of its own on ``device``.

    The thread is no daemon: a program that ends waits for its last sync.
    """

    def __init__(self, run: Callable[[], T], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._main, name="weight-sync")
        self._thread.start()

    def _main(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(torch.cuda.Stream(self._device)):
                    value = self._run()
            else:
                value = self._run()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self) -> T:
        """Waits for the end (every wait inside has a deadline); the value, or the error."""
        self._thread.join()
        return self._future.result()
