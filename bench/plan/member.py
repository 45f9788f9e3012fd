"""One member of `python -m bench.plan`: several methods after each other, steps slept, rounds real.

What is tested is the time of rounds and who waits for whom; a step that computes would only measure
how many members share this machine's cores. A member sleeps as long as the plan of its host says,
and joins once for all trials of one route: to start a process takes longer than a trial.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

import atoll
from atoll.codec.registry import make_codec
from atoll.config import StrategyTable
from atoll.strategies.resolve import resolve
from atoll.task import Task

EQUAL = ("every_step",)
"""Methods in whose rounds all do equally many steps, which shows nothing new of the pace."""


class Vector(nn.Module):
    """A model that is only parameters."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(elements))


def own_host() -> int:
    """Return the number of this host of the lab, by its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.88.0.1", 9))
        return int(str(probe.getsockname()[0]).rpartition(".")[2]) - 1


WARM = {
    "trial": -2, "preset": "diloco", "codec": "fp32", "collective": "auto", "steps": 24,
    "options": {"every": 4, "shared_steps": 0},
}  # fmt: skip
"""Short periods first, in which the hub learns who is how fast: with a long one a slow member would
come too late to the first round."""


def train(
    run: Any, plan: dict[str, Any], *, elements: int, step_s: float, pace: float, file: TextIO
) -> float:
    """Do one trial at a pace; write a line per step. Return the pace after it."""
    table = StrategyTable(
        preset=plan["preset"], codec=plan["codec"], collective=plan["collective"],
        options=plan["options"],
    )  # fmt: skip
    resolved, group = resolve(table, steps=plan["steps"]), run.group
    model = Vector(elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    task = Task(
        model, optimizer, member=run.member, last=plan["steps"], round=group.committed_round,
        paced=True, pace=pace,
    )  # fmt: skip
    group.aggregation, outer = resolved.aggregation, resolved.build()
    outer.setup(task, group=group, codec=make_codec(resolved.codec))
    outer.begin(task)
    begun, sent = time.monotonic(), 0
    while task.step < plan["steps"]:
        time.sleep(step_s)
        model.weight.grad = torch.full_like(model.weight, 0.01)
        task.tokens += 1
        outer.gradients(task)
        optimizer.step()
        task.advance()
        done = outer.sync(task)
        here = len(done.contributors) if done is not None else 0
        # Of rounds that are over: what one under way has sent by a step's end is a matter of luck.
        sent += done.sent_bytes if done is not None else 0
        line = {"step": task.step, "seconds": time.monotonic() - begun, "contributors": here}
        file.write(json.dumps({"trial": plan["trial"], **line, "sent": sent}) + "\n")
    while (result := outer.finish(task)) is not None and result.more:
        pass
    return task.pace if resolved.method.name not in EQUAL else pace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True, help="JSON of `runs.run_trials`")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text(encoding="utf-8"))
    step_s = plan["step_s"][own_host()]
    torch.set_num_threads(1)
    with (
        atoll.join() as run,
        (given.out / f"{run.member}.jsonl").open("w", encoding="utf-8", buffering=1) as file,
    ):
        pace = 1.0
        for trial in [WARM, *plan["trials"]]:
            pace = train(run, trial, elements=plan["elements"], step_s=step_s, pace=pace, file=file)
        file.write(json.dumps({"trial": -1, "step": 0}) + "\n")


if __name__ == "__main__":
    main()
