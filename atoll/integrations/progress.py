"""The schedule of a member that joins, recovers or resumes in the middle of a run."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from atoll.run import Run


def step_to_follow(run: Run, *, trainer_step: int) -> int | None:
    """Return the step at which a trainer has to go on; None: where it is.

    They differ after a member has joined late, has recovered, or resumes with its job. Ranks of an
    island see the step of their member late, so there the trainer's own count stays.
    """
    if run.ranks > 1 or run.step in (0, trainer_step):  # 0: nothing is wrapped
        return None
    return run.step


def go_to_step(schedule: Any, step: int) -> None:
    """Set a learning-rate scheduler as it is after `step` steps from its beginning.

    All steps are replayed: schedulers that compute a rate from the last one then have the same rate
    to the last bit as on members that took these steps. Schedulers that follow measurements
    (`ReduceLROnPlateau`) stay as they are.
    """
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # steps without the optimizer's
        _reset_rates(schedule)
        _restart(schedule)
        for _ in range(step):
            schedule.step()


def _reset_rates(schedule: Any) -> None:
    """Set the rates from before the first step: a donor's optimizer state has later ones."""
    for group in schedule.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["initial_lr"])
        else:
            group["lr"] = group["initial_lr"]


def _restart(schedule: Any) -> None:
    """Do again what the scheduler's constructor does for its first step."""
    for inner in getattr(schedule, "_schedulers", ()):
        _restart(inner)
    if isinstance(schedule, SequentialLR):
        _reset_rates(schedule)
        schedule.last_epoch = 0
        schedule.recursive_undo()
        schedule._schedulers[0]._initial_step()
    elif not isinstance(schedule, ChainedScheduler):
        schedule.last_epoch = -1
        schedule._initial_step()
