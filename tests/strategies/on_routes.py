"""What the tests of strategies on real routes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll.group.base import Group
from tests.contracts.strategy_suite import Run, start_run


def wide_model() -> nn.Module:
    """Return 32,002 numbers: enough that headers weigh less than one per cent."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4_000), nn.Tanh(), nn.Linear(4_000, 2))


def train(options: Any, *, steps: int, **settings: Any) -> Callable[[Group], Run]:
    """Return what one member does: so many steps, then the end."""

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), **settings)
        run.train(steps)
        run.note(run.outer.finish(run.task))
        return run

    return body
