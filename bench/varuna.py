"""How well a pipeline's time is predicted: `python -m bench.varuna [--quick]`, one JSON object.

Measures units, links and reductions of a small GPT on this machine, plans every number of stages P
and replicas D of up to four ranks, and then runs each plan: forward, backward and reduction of one
batch, without the optimizer. Ranks are processes with one thread; those beyond the cores share
them, which the simulator knows. Of the steps of a plan the shortest counts, as of the units: other
programs can only lengthen them. `error` is measured over predicted, minus 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from atoll.config import IslandTable, JobSpec, JobTable, ModelTable, StrategyTable, TrainTable
from atoll.config.rank_environment import RankPlace
from atoll.island.world import build_mesh, world
from atoll.plan.benchmarks import measure_here, together
from atoll.plan.pipelines import Request, plan_pipelines, with_plan
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import InnerOptions
from atoll.train.build import whole_model
from bench.kit.report import emit

CPU = torch.device("cpu")
MODEL = {"layers": 6, "width": 256, "heads": 4, "context": 128, "tie": False}
BATCH, RANKS = 16, 4
STEPS, QUICK_STEPS = 15, 5


def spec_of(*, steps: int) -> JobSpec:
    return JobSpec(
        job=JobTable(threads=1, device="cpu"),
        model=ModelTable(options=MODEL),
        train=TrainTable(batch=BATCH, steps=steps, precision="fp32"),
        strategy=StrategyTable(preset="alone", inner="pipeline"),
        island=IslandTable(ranks=RANKS, elastic=True),
    )


def shortest_step(spec: JobSpec, place: RankPlace) -> float:
    """Return the shortest time of a batch, as a rank of a plan's mesh."""
    source = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (BATCH, MODEL["context"] + 1), generator=source)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    with world(place, device=CPU, timeout_s=120.0):
        mesh = build_mesh(spec.mesh, device=CPU)
        options = InnerOptions.of(spec)
        parts = split_model(whole_model(spec), options, mesh=mesh, device=CPU)
        parts.train(True)
        found = []
        for _ in range(spec.train.steps + 2):
            dist.barrier()
            begun = time.perf_counter()
            parts.backward(inputs, targets)
            dist.barrier()
            found.append(time.perf_counter() - begun)
    return min(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps of each plan")
    arguments = parser.parse_args()
    spec = spec_of(steps=QUICK_STEPS if arguments.quick else STEPS)
    sys.stderr.write("measuring ...\n")
    measured = measure_here(spec)
    rows: list[dict[str, Any]] = []
    plans = plan_pipelines(measured, Request.of(spec))
    for plan in sorted(plans, key=lambda plan: (plan.stages, plan.replicas)):
        measured_s = together(shortest_step, with_plan(spec, plan), ranks=plan.ranks)
        rows.append(
            {
                "stages": plan.stages, "replicas": plan.replicas, "rows": plan.rows,
                "microbatches": plan.microbatches, "predicted_s": round(plan.predicted_s, 4),
                "measured_s": round(measured_s, 4),
                "error": round(measured_s / plan.predicted_s - 1, 3),
            }
        )  # fmt: skip
        sys.stderr.write(f"{rows[-1]}\n")
    emit({"rows": rows, "cores": measured.machines[0].cores}, rows)


if __name__ == "__main__":
    main()
