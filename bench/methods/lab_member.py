"""One member of `python -m bench.methods.lab`: rows one after the other, rounds real, steps slept.

A step lasts `step_s`: what its gradients would take on a machine of its own is slept, and they are
the same numbers every time. Model, method, codec and rounds are those of the row. A member joins
once for all rows: to start a process takes longer than many a run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.codec import make_codec
from atoll.task import Task
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from bench.methods.rows import Row, named
from bench.methods.running import Trial
from bench.methods.setting import FULL

WARM = Row(name="warm", preset="ddp")
"""Run before the rows: connections are made, and every member has started."""
WARM_STEPS = 8


def train(run: Any, trial: Trial, *, steps: int, step_s: float) -> dict[str, Any]:
    """Run a row for so many of its steps, and return what its member saw."""
    resolved, table, group = trial.resolved(), trial.setting.table(trial.row.train), run.group
    model = trial.setting.model(trial.seed)
    optimizer = build_optimizer(model, table)
    schedule = StepSchedule(optimizer, learning_rate(table))
    task = Task(
        model, optimizer, schedule, member=run.member, last=table.steps,
        round=group.committed_round,
    )  # fmt: skip
    group.aggregation, outer = resolved.aggregation, resolved.build()
    outer.setup(task, group=group, codec=make_codec(resolved.codec))
    outer.begin(task)
    gradients = [torch.full_like(p, 1e-3) for p in model.parameters()]
    began, sent = time.monotonic(), group.sent_bytes
    contributors = set()
    while task.step < steps:
        step_ends = time.monotonic() + step_s
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        task.tokens += 1
        outer.gradients(task)
        optimizer.step()
        schedule.step()
        time.sleep(max(0.0, step_ends - time.monotonic()))
        task.advance()
        if (done := outer.sync(task)) is not None:
            contributors.add(len(done.contributors))
    while (result := outer.finish(task)) is not None and result.more:
        pass
    return {
        "row": trial.row.name, "steps": steps, "seconds": time.monotonic() - began,
        "sent_bytes": group.sent_bytes - sent, "contributors": sorted(contributors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="JSON of `lab.measure`")
    parser.add_argument("--out", type=Path, required=True, help="folder of a file per member")
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with (
        atoll.join() as run,
        (given.out / f"{run.member}.jsonl").open("w", encoding="utf-8", buffering=1) as file,
    ):
        for name, steps in [("", WARM_STEPS), *plan["rows"]]:
            row = named(name)[0] if name else WARM
            trial = Trial(row, plan["members"], 0, FULL)
            line = train(run, trial, steps=steps, step_s=plan["step_s"])
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
