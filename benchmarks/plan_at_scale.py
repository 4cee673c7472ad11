"""How long planning takes for large clusters, and how large what each trainer rank is sent is.

    python benchmarks/plan_at_scale.py

Prints one JSON object per plan. Every rank's specs are objects of its own, as they reach the planner
in a live cluster; making them is not counted. ``joined`` is a plan after one engine more has come.
"""

from __future__ import annotations

import gc
import json
import pickle
import resource
import subprocess
import sys
import time
from typing import Any

CASES = {
    "qwen3-235b-a22b": ("tp=4,pp=8,ep=8,etp=1,dp=8", 32, "tp=8,ep=8"),
    "kimi-k2": ("tp=8,pp=8,ep=16,etp=1,dp=4", 16, "tp=8,ep=8"),
}


def measure(model: str, mode: str) -> dict[str, Any]:
    """One plan, and the one that follows."""
    from sglang_rdt.plan.direct import make_direct_plan
    from sglang_rdt.plan.planner import make_plan
    from sglang_rdt.simulate import layouts
    from sglang_rdt.simulate.engine import make_engines
    from sglang_rdt.simulate.shapes import load_shape
    from sglang_rdt.simulate.trainer import make_trainers

    trainer, engines, engine = CASES[model]
    shape, place = load_shape(model), layouts.Placement()
    ranks = make_trainers(shape, layouts.parse_trainer(trainer), place)
    targets = make_engines(shape, layouts.parse_engine(engine), engines, place, len(ranks))
    gc.disable()
    ranks = [pickle.loads(pickle.dumps(r)) for r in ranks]
    targets = [pickle.loads(pickle.dumps(t)) for t in targets]
    gc.enable()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def make(some: list[Any], previous: Any = None) -> tuple[Any, float]:
        begin = time.process_time()
        plan: Any
        if mode == "direct":
            plan = make_direct_plan(ranks, some, previous=previous)
        else:
            plan = make_plan(ranks, some, 512 << 20, previous=previous)
        return plan, round(time.process_time() - begin, 2)

    plan, seconds = make(targets)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fewer, _ = make(targets[: -len(targets) // engines])
    _, again = make(targets, fewer)
    begin = time.process_time()
    shares = [len(pickle.dumps(plan.share(t.rank))) for t in ranks]
    return {
        "model": model,
        "mode": mode,
        "tensors": len(plan.specs),
        "trainer_ranks": len(ranks),
        "engine_ranks": len(targets),
        "bytes": plan.nbytes,
        "plan_cpu_seconds": seconds,
        "joined_cpu_seconds": again,
        "share_all_cpu_seconds": round(time.process_time() - begin, 2),
        "specs_rss_bytes": before,
        "peak_rss_bytes": peak,
        "pickled_plan_bytes": len(pickle.dumps(plan)),
        "largest_share_bytes": max(shares),
    }


def main() -> None:
    """Each in a process of its own, so that its peak memory is its own."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])), flush=True)
        return
    for model in CASES:
        for mode in ("direct", "bucketed"):
            subprocess.run([sys.executable, __file__, model, mode], check=True, timeout=900)


if __name__ == "__main__":
    main()
