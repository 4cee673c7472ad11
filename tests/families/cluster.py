"""A Ray cluster of a test module's own, with two GPUs; on a CPU nothing is behind them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def running(module: str, environ: Mapping[str, str]) -> Iterator[None]:
    """While inside, there is one.

    Args:
        module: name of the test module, whose classes actors get by value.
        environ: what the cluster's processes need.
    """
    import ray

    os.environ.update(environ)
    ray.cloudpickle.register_pickle_by_value(importlib.import_module(module))
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,
        namespace="families",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=bool(os.environ.get("E2E_LOGS")),
    )
    try:
        yield
    finally:
        ray.shutdown()
