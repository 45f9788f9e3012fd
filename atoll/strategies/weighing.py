"""What a strategy would send in a run that nobody has to start: its own `traffic`. Loads torch."""

from __future__ import annotations

import torch
from torch import nn

from atoll.codec.table import make_codec
from atoll.group.alone import Alone
from atoll.strategies.strategy import Traffic
from atoll.strategies.table import Resolved, build_outer
from atoll.task import Task

WIDTH, DEPTH = 64, 4


def stand_in() -> nn.Module:
    """Return a small model whose matrices have the proportions of a transformer's."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(DEPTH)
    ]
    return nn.Sequential(nn.Embedding(256, WIDTH), *blocks)


def weigh(resolved: Resolved, *, elements: int, peers: int, steps: int) -> Traffic:
    """Return what the first of some members would send and receive in a run of `steps`.

    Raises:
        ConfigError: an option or the codec is unknown or out of range.
    """
    model = stand_in()
    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.0), member="w0", last=steps)
    outer = build_outer(resolved)
    outer.setup(task, group=Alone(), codec=make_codec(resolved.codec))
    return outer.traffic(elements, peers, steps=steps)
