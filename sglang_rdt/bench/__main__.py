"""``python -m sglang_rdt.bench``: ``sglang-rdt bench`` where the command is not installed."""

from __future__ import annotations

import sys

from sglang_rdt.cli import main

sys.argv.insert(1, "bench")
main()
