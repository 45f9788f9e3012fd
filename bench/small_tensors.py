"""What a round costs with many small tensors: `python -m bench.small_tensors [--quick]`, JSON.

A user's loop over a model of 10,000 tensors of 10 elements, once with its bare optimizer and once
with the one that `run.wrap` returns and a round in every step, in turns; one member, so nothing is
sent. `bare_steps` is the median of what a round adds, in steps of the bare loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.group.single import SingleGroup
from atoll.methods.periodic import Average, DiLoCo
from atoll.run import Run
from atoll.run.place import Membership
from bench.kit.report import emit

METHODS: dict[str, Any] = {"average": Average(every=1), "diloco": DiLoCo(every=1), "ddp": "ddp"}
ELEMENTS = 10


def make_model(tensors: int) -> nn.ParameterList:
    torch.manual_seed(7)
    return nn.ParameterList(torch.randn(ELEMENTS) for _ in range(tensors))


def stepper(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Return a step of training that returns its seconds of processor time."""

    def step() -> float:
        began = time.process_time()
        optimizer.zero_grad()
        torch.cat(list(model)).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.process_time() - began

    return step


def bare(tensors: int) -> Callable[[], float]:
    model = make_model(tensors)
    return stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))


def measure(name: str, *, tensors: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one method."""
    with Run(SingleGroup(), Membership(folder)) as run:
        model = make_model(tensors)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        ours = stepper(model, run.wrap(model, inner, outer=METHODS[name]))
        by_hand = bare(tensors)
        pairs = [(ours(), by_hand()) for _ in range(steps + 3)][3:]
    bare_s = statistics.median(hand for _, hand in pairs)
    added_s = statistics.median(one - hand for one, hand in pairs)
    return {
        "method": name,
        "bare_ms": round(bare_s * 1e3, 2),
        "round_ms": round(added_s * 1e3, 2),
        "bare_steps": round(added_s / bare_s, 2),
    }


def rows(*, tensors: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [measure(one, tensors=tensors, steps=steps, folder=folder) for one in METHODS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(tensors=10_000, steps=10 if arguments.quick else 100)
    emit({"tensors": 10_000, "elements": ELEMENTS, "rows": found}, found)


if __name__ == "__main__":
    main()
