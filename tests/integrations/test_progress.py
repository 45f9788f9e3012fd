"""Learning-rate schedulers that are set to a step in the middle of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from atoll.integrations.progress import go_to_step

STEPS, STOP = 20, 9
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, STEPS),
    "steps": lambda o: lrs.StepLR(o, 4, gamma=0.5),
    "linear": lambda o: lrs.LinearLR(o, start_factor=0.2, total_iters=12),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9 if step % 2 else 1.0),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 15)], [5]
    ),
    "chained": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, total_iters=5), lrs.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def optimizer() -> torch.optim.Optimizer:
    own = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.3, 0.07)]
    return torch.optim.SGD(own, lr=1.0, momentum=0.5)


def rates(schedule: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_schedule_goes_on_with_the_rates_of_the_others(make: Callable[[Any], Any]) -> None:
    expected = rates(make(optimizer()), STEPS)[STOP:]
    donor = make(optimizer())
    rates(donor, STOP + 2)
    late = optimizer()
    late.load_state_dict(donor.optimizer.state_dict())  # with the donor's rates
    schedule = make(late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_to_step(schedule, STOP)
    assert rates(schedule, STEPS - STOP) == expected
    go_to_step(schedule, STOP)  # also back from a later step
    assert rates(schedule, STEPS - STOP) == expected


def test_a_schedule_of_measurements_stays() -> None:
    schedule = lrs.ReduceLROnPlateau(optimizer(), patience=0)
    for loss in (1.0, 2.0, 3.0):
        schedule.step(loss)
    before = schedule.get_last_lr()
    go_to_step(schedule, STOP)
    assert schedule.get_last_lr() == before != [0.3, 0.07]
