"""What the opportunistic order saves on slow links: `python -m bench.opportunistic`, one JSON line.

Two stages of a small GPT, each on a host of the network lab, with `--rate` and `--rtt` between
them. The ranks measure units, cores and the line as an elastic island does, and compute batches by
turns in the order of 1f1b and in opportunistic order: forward and backward, without the optimizer.
Each row has the simulated time, the median of the measured ones, and whether both orders gave the
same bits. Needs root and network namespaces (Linux).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from typing import Any, cast

from atoll.config import (
    IslandTable,
    JobSpec,
    JobTable,
    ModelTable,
    RankPlace,
    StrategyTable,
    TrainTable,
    rank_environment,
    rank_place,
)
from atoll.netlab.lab import Lab
from bench.kit.report import emit

ORDERS = ("1f1b", "opportunistic")
PORT, STAGES, ROWS, WARM_UP = 29_507, 2, 1, 2
MODEL = {"layers": 6, "width": 256, "heads": 4, "context": 128, "tie": False}


def spec_of(*, batch: int) -> JobSpec:
    return JobSpec(
        job=JobTable(threads=1, device="cpu"), model=ModelTable(options=MODEL),
        train=TrainTable(batch=batch, precision="fp32"),
        strategy=StrategyTable(preset="alone", inner="pipeline"),
        island=IslandTable(ranks=STAGES, machines=STAGES, elastic=True),
    )  # fmt: skip


def be_rank(batch: int, steps: int) -> None:
    """Be a rank; the first one prints the rows."""
    import torch
    import torch.distributed as dist

    from atoll.island.world import build_mesh, world
    from atoll.plan.benchmarks import measure
    from atoll.plan.pipelines import Request, plan_pipelines, predicted, with_plan
    from atoll.strategies.inner.divide import split_model
    from atoll.strategies.inner.options import InnerOptions
    from atoll.train.build import whole_model

    torch.set_num_threads(1)
    place, spec, cpu = cast(RankPlace, rank_place()), spec_of(batch=batch), torch.device("cpu")
    with world(place, device=cpu, timeout_s=300.0):
        measured = measure(spec, place=place, device=cpu)
        shared: list[Any] = [None]
        if measured is not None:
            some = dataclasses.replace(measured, sizes={ROWS: measured.sizes[ROWS]})
            plans = plan_pipelines(some, Request.of(spec))
            best = next(plan for plan in plans if plan.stages == STAGES)
            request = Request.of(dataclasses.replace(spec))
            shared = [[dataclasses.replace(best, schedule=order) for order in ORDERS]]
        dist.broadcast_object_list(shared, src=0)
        torch.manual_seed(3)
        rows = torch.randint(0, 256, (batch, 129))
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        parts = {}
        for plan in shared[0]:
            torch.manual_seed(3)
            chosen = with_plan(spec, plan)
            mesh = build_mesh(chosen.mesh, device=cpu)
            parts[plan.schedule] = split_model(
                whole_model(chosen), InnerOptions.of(chosen), mesh=mesh, device=cpu
            )
            parts[plan.schedule].train(True)
        found: dict[str, list[float]] = {order: [] for order in ORDERS}
        for step in range(WARM_UP + steps):
            for order in ORDERS:
                dist.barrier()
                begun = time.perf_counter()
                parts[order].backward(inputs, targets)
                dist.barrier()
                if step >= WARM_UP:
                    found[order].append(time.perf_counter() - begun)
        gradients = [
            [parameter.grad for parameter in one.parameters().values()] for one in parts.values()
        ]
        same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        if measured is None:
            return
        for plan in shared[0]:
            predicted_s = predicted(plan, measured, request).predicted_s
            measured_s = statistics.median(found[plan.schedule])
            row = {
                "order": plan.schedule, "microbatches": plan.microbatches,
                "predicted_s": round(predicted_s, 4), "measured_s": round(measured_s, 4),
                "error": round(measured_s / predicted_s - 1, 3), "same_bits": same,
            }  # fmt: skip
            sys.stdout.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the line; as of tc")
    parser.add_argument("--rtt", default="80ms", help="of the line")
    parser.add_argument("--batch", type=int, default=16, help="microbatches of one row")
    parser.add_argument("--steps", type=int, default=8, help="of each order")
    parser.add_argument("--be", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        be_rank(arguments.batch, arguments.steps)
        return
    if reason := Lab.unavailable():
        sys.exit(f"no network lab here: {reason}")
    with Lab(hosts=STAGES, rate=arguments.rate, rtt=arguments.rtt) as lab:
        started = []
        for rank in range(STAGES):
            place = RankPlace(
                rank, STAGES, 0, lab.address(0), PORT, 1, machine=rank, machines=STAGES
            )
            environment = rank_environment(
                place, defaults={}, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0"
            )
            words = ["--be", "--batch", str(arguments.batch), "--steps", str(arguments.steps)]
            started.append(
                lab.popen(
                    rank, [sys.executable, "-m", "bench.opportunistic", *words],
                    env=environment, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        try:
            lines = started[0].communicate(timeout=500)[0].splitlines()
        finally:
            for popen in started:
                popen.kill()
                popen.wait()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    emit({"rtt": arguments.rtt, "rate": arguments.rate, "rows": rows}, rows)


if __name__ == "__main__":
    main()
