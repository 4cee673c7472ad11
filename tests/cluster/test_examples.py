"""One of the examples in docs/deployments, as its reader runs it, in the environment of its job file."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sglang_rdt import cpu

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.long]

FOLDER = Path(__file__).parents[2] / "docs" / "deployments" / "one-job"


@pytest.fixture
def cluster_address() -> Iterator[str]:
    """A cluster that was started before the example, as the page says."""
    import ray

    if ray.is_initialized():  # that of other end-to-end tests in this process has all it takes
        yield ray.get_runtime_context().gcs_address
        return
    os.environ.update(cpu.environment(4))
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def test_one_job(cluster_address: str, tmp_path: Path) -> None:
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())
    environ = {
        **os.environ,
        **job["env_vars"],
        "RAY_ADDRESS": cluster_address,
        # How `ray job submit` hands the runtime environment to the entrypoint.
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": job["env_vars"]}}),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "one_job.py"],
        cwd=FOLDER,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    replies = re.findall(r"(before|now): (\[[\d, ]+\]) version (\w+)", done.stdout)
    assert [(when, version) for when, _, version in replies] == [
        ("before", "default"),
        ("now", "1"),
        ("now", "2"),
    ]
    assert len({tokens for _, tokens, _ in replies}) == 3  # every version says something else
    assert len(re.findall(r"weight sync '\d': 1 engine\(s\)", done.stdout)) == 2
