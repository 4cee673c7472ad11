"""What importing the packages costs on top of the interpreter (target: under 0.1 s).

    python benchmarks/bench_import.py

Processor time of the import alone, best of ten fresh interpreters, beside an empty one.
"""

from __future__ import annotations

import subprocess
import sys

CODE = "import time; t = time.process_time(); {}; print(time.process_time() - t)"


def best(statement: str) -> float:
    """Seconds of processor time of ``statement``."""
    command = [sys.executable, "-c", CODE.format(statement)]
    return min(float(subprocess.check_output(command)) for _ in range(10))


if __name__ == "__main__":
    empty = best("pass")
    for package in ("sglang_rdt", "megatron_rdt"):
        print(f"{package}: {(best(f'import {package}') - empty) * 1e3:.0f} ms")
