"""One simulation: specs, the real planner, a prediction, and what the planning cost."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from dataclasses import dataclass

from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan, make_direct_plan
from sglang_rdt.plan.specs import ITEMSIZE, EngineRankLayout
from sglang_rdt.simulate.engine import make_engines
from sglang_rdt.simulate.errors import SimulateError
from sglang_rdt.simulate.layouts import EngineLayout, Placement, TrainerLayout, check_world
from sglang_rdt.simulate.predict import Links, Prediction, predict
from sglang_rdt.simulate.shapes import ModelShape
from sglang_rdt.simulate.trainer import make_trainers


@dataclass(frozen=True)
class Job:
    """What is to be simulated."""

    shape: ModelShape
    trainer: TrainerLayout
    engine: EngineLayout
    engines: int
    placement: Placement
    links: Links


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Args:
        held_bytes: of all parameters of all engine ranks, without rows that pad the vocabulary.
        padding_bytes: those.
        build_s, plan_s, predict_s: wall clock of making specs, of planning, of counting.
        plan_cpu_s: CPU time of planning.
        peak_rss_bytes: the most memory that this process had up to the end of planning, the specs
            of both sides included.
        load_average: of this machine after planning; None where that cannot be known.
    """

    job: Job
    plan: DirectPlan
    prediction: Prediction
    held_bytes: int
    padding_bytes: int
    build_s: float
    plan_s: float
    plan_cpu_s: float
    predict_s: float
    peak_rss_bytes: int
    load_average: float | None

    @property
    def largest_engine_rank(self) -> int:
        """Bytes that the engine rank with most receives."""
        return int(self.plan.ingress.max())


def planner_costs(links: Links, placement: Placement) -> LinkCosts:
    """The costs that the planner decides by: those of the link that most bytes take."""
    packed = placement.how == "packed"
    speed = links.nvlink_bytes_per_s if packed else links.nic_bytes_per_s
    return dataclasses.replace(links.costs, link_bytes_per_s=speed)


def simulate(job: Job) -> Outcome:
    """Plans and predicts.

    Raises:
        SimulateError: the model cannot be cut like that.
        PlanError: trainer and engines do not fit together (a mistake in this package).
    """
    if job.engines < 1:
        raise SimulateError(f"--engines: {job.engines}, must be 1 or more")
    check_world("--engines", job.engines * job.engine.world)
    begin = time.perf_counter()
    trainers = make_trainers(job.shape, job.trainer, job.placement)
    layouts = make_engines(job.shape, job.engine, job.engines, job.placement, len(trainers))
    built, cpu = time.perf_counter(), time.process_time()
    plan = make_direct_plan(trainers, layouts, costs=planner_costs(job.links, job.placement))
    planned, cpu = time.perf_counter(), time.process_time() - cpu
    memory = _peak_rss()
    prediction = predict(plan, trainers, job.links)
    held, padding = held_bytes(layouts)
    return Outcome(
        job=job,
        plan=plan,
        prediction=prediction,
        held_bytes=held,
        padding_bytes=padding,
        build_s=built - begin,
        plan_s=planned - built,
        plan_cpu_s=cpu,
        predict_s=time.perf_counter() - planned,
        peak_rss_bytes=memory,
        load_average=_load(),
    )


def held_bytes(layouts: list[EngineRankLayout]) -> tuple[int, int]:
    """Bytes of all parameters that a sync fills, and of rows that only pad."""
    held = padding = 0
    for one in layouts:
        padded = one.recording.padding
        for param in one.params:
            extra = padded.get(param.name, 0) * ITEMSIZE[param.dtype]
            held += param.nbytes - extra
            padding += extra
    return held, padding


def _peak_rss() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
