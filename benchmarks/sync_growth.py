"""Whether a sync takes longer after 500 of them, under a load of requests (target: under 10 %).

    python benchmarks/sync_growth.py

Runs the load test, and compares the quickest tenths of its 51st to 150th and of its last 100 syncs:
the machine's other work only makes a sync longer.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/e2e/test_load.py::test_syncs_under_load"


def quickest_tenth(seconds: str) -> float:
    """Seconds, of the list that the test's property holds."""
    return statistics.quantiles(ast.literal_eval(seconds), n=10)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "long", TEST, f"--junitxml={report}"]
        subprocess.run(pytest, cwd=ROOT, check=True)
        for case in ElementTree.parse(report).iter("testcase"):
            values = {p.get("name"): p.get("value", "") for p in case.iter("property")}
            early, late = (quickest_tenth(values[name]) for name in ("early_s", "late_s"))
            print(
                f"{case.get('name')}: {early * 1e3:.1f} ms, later {late * 1e3:.1f} ms, "
                f"ratio {late / early:.2f}"
            )
