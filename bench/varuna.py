"""How well a pipeline's time is predicted: `python -m bench.varuna [--quick]`, one JSON object.

`--only 1x2,2x1` runs some stages x replicas; `--measured FILE` keeps the first measurements.

Measures units, links, reductions and crowded cores of a small GPT on this machine, plans every
number of stages P and replicas D of up to four ranks, and runs each plan: forward, backward and
reduction of one batch, without the optimizer. Ranks are processes with one thread; those beyond the
cores share them. Other programs change the speed from second to second: a step is predicted with
the rates of ranks measured just before and after it. `predicted_s` and `measured_s` are medians
over the steps, `error` is that of measured over predicted, minus 1, and `at_first_s` takes all from
the beginning, as a planner does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from atoll.config import IslandTable, JobSpec, JobTable, ModelTable, StrategyTable, TrainTable
from atoll.config.rank_environment import RankPlace
from atoll.island.world import build_mesh, world
from atoll.plan.benchmarks import measure_here, together
from atoll.plan.crowding import SPAN_S, Crowd
from atoll.plan.measured import Measured, UnitTimes, read_measured, write_measured
from atoll.plan.pipelines import PipelinePlan, Request, plan_pipelines, predicted, with_plan
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import InnerOptions
from atoll.train.build import whole_model
from bench.kit.report import emit

CPU = torch.device("cpu")
MODEL = {"layers": 6, "width": 256, "heads": 4, "context": 128, "tie": False}
BATCH, RANKS = 16, 4
Work: TypeAlias = tuple[JobSpec, UnitTimes, int]
"""The job of a plan, and the times of its units for the rows of its microbatches."""
STEPS, QUICK_STEPS, WARM_UP = 12, 5, 2


def spec_of(*, steps: int) -> JobSpec:
    return JobSpec(
        job=JobTable(threads=1, device="cpu"),
        model=ModelTable(options=MODEL),
        train=TrainTable(batch=BATCH, steps=steps, precision="fp32"),
        strategy=StrategyTable(preset="alone", inner="pipeline"),
        island=IslandTable(ranks=RANKS, elastic=True),
    )


def paired(work: Work, place: RankPlace) -> list[tuple[tuple[float, ...], float]]:
    """Return the rates of a plan's ranks around each step, and its seconds."""
    spec, times, size = work
    source = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (BATCH, MODEL["context"] + 1), generator=source)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    with world(place, device=CPU, timeout_s=120.0):
        crowd = Crowd(
            spec, times, rows=size, most=place.ranks, place=place, device=CPU,
            stages=spec.mesh.pipeline,
        )  # fmt: skip
        mesh = build_mesh(spec.mesh, device=CPU)
        options = InnerOptions.of(spec)
        parts = split_model(whole_model(spec), options, mesh=mesh, device=CPU)
        parts.train(True)
        for _ in range(WARM_UP):
            parts.backward(inputs, targets)
        found: list[tuple[tuple[float, ...], float]] = []
        crowd.measure(span_s=SPAN_S)
        for _ in range(spec.train.steps):
            dist.barrier()
            begun = time.perf_counter()
            parts.backward(inputs, targets)
            dist.barrier()
            seconds = time.perf_counter() - begun
            crowd.measure(span_s=seconds)
            found.append((crowd.rates(last=2)[0], seconds))
        return found


def _predicted_s(
    plan: PipelinePlan, measured: Measured, request: Request, rates: tuple[float, ...]
) -> float:
    """Return the time of a batch by a plan, at these rates of ranks."""
    now = replace(measured, machines=(replace(measured.machines[0], rates=rates),))
    return predicted(plan, now, request).predicted_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps of each plan")
    parser.add_argument("--only", default="", help="stages x replicas to run, e.g. 1x2,2x1")
    parser.add_argument("--measured", type=Path, help="file of the first measurements")
    arguments = parser.parse_args()
    spec = spec_of(steps=QUICK_STEPS if arguments.quick else STEPS)
    request = Request.of(spec)
    measured = read_measured(arguments.measured) if arguments.measured else None
    if measured is None:
        sys.stderr.write("measuring ...\n")
        measured = measure_here(spec)
        if arguments.measured:
            write_measured(measured, arguments.measured)
    sys.stderr.write(f"{measured.machines[0]}, {measured.near}\n")
    rows: list[dict[str, Any]] = []
    plans = plan_pipelines(measured, request)
    for plan in sorted(plans, key=lambda plan: (plan.stages, plan.replicas)):
        if arguments.only and f"{plan.stages}x{plan.replicas}" not in arguments.only.split(","):
            continue
        work = with_plan(spec, plan), measured.sizes[plan.rows], plan.rows
        steps = together(paired, work, ranks=plan.ranks, threads=1)
        seconds = [
            (step_s, _predicted_s(plan, measured, request, rates)) for rates, step_s in steps
        ]
        predicted_s = statistics.median(predicted_s for _, predicted_s in seconds)
        measured_s = statistics.median(step_s for step_s, _ in seconds)
        rows.append(
            {
                "stages": plan.stages, "replicas": plan.replicas, "rows": plan.rows,
                "microbatches": plan.microbatches, "at_first_s": round(plan.predicted_s, 4),
                "predicted_s": round(predicted_s, 4), "measured_s": round(measured_s, 4),
                "error": round(statistics.median(a / b for a, b in seconds) - 1, 3),
                "order": plan.schedule,
            }
        )  # fmt: skip
        sys.stderr.write(f"{rows[-1]} {steps[-1][0]}\n")
    emit({"rows": rows, "cores": measured.machines[0].cores}, rows)


if __name__ == "__main__":
    main()
