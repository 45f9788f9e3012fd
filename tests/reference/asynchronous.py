"""Asynchronous Local SGD in one process, with and without look-ahead; nothing of Atoll.

Members are equally fast: every `every` steps they push in slot order, so that each update arrives
after those of all others since the member's last pull.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tests.reference.algorithms import (
    Inner,
    Streams,
    Trajectory,
    assign,
    backward,
    flat,
    inner_step,
)


@dataclass
class DelayedServer:
    """Liu et al. 2024, Algorithm 2 with c = 0, written out."""

    theta: Tensor
    buffer: int
    lr: float
    momentum: float
    m: Tensor = field(default_factory=lambda: torch.zeros(1))
    total: Tensor = field(default_factory=lambda: torch.zeros(1))
    t: int = 0

    def arrive(self, delta: Tensor) -> None:
        """Apply one update."""
        self.total = self.total + delta
        step = delta / self.buffer
        if (self.t + 1) % self.buffer == 0:
            self.m = self.momentum * self.m + self.total / self.buffer
            step, self.total = step + self.momentum * self.m, torch.zeros(1)
        self.theta = self.theta - self.lr * step
        self.t += 1

    def ahead(self, pushes: int, share: float) -> Tensor:
        """Return theta, moved by a share of what so many updates of zero would do to it."""
        other = replace(self)
        for _ in range(pushes):
            other.arrive(torch.zeros_like(self.theta))
        return self.theta + share * (other.theta - self.theta)


def async_diloco(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    sync_every: int,
    inner: Inner,
    outer_lr: float,
    momentum: float,
    look_ahead: float = 0.0,
) -> Trajectory:
    """Every `sync_every` steps, and at the end, all members take the server's vector.

    `rounds` has that vector.
    """
    members = [copy.deepcopy(model) for _ in streams]
    optimizers = [inner.optimizer(member) for member in members]
    server = DelayedServer(flat(model), len(members), outer_lr, momentum)
    starts = [server.theta] * len(members)
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for number in range(1, steps + 1):
        losses.append([backward(m, s) for m, s in zip(members, streams, strict=True)])
        for member, optimizer in zip(members, optimizers, strict=True):
            inner_step(member, optimizer, number - 1, inner)
        if number % every and number != steps:
            continue
        for slot, member in enumerate(members):
            server.arrive(starts[slot] - flat(member))
            starts[slot] = server.ahead(len(members) - 1, look_ahead)
            assign(member, starts[slot])
        if number % sync_every == 0 or number == steps:
            rounds.append(server.theta)
            starts = [server.theta] * len(members)
            for member in members:
                assign(member, server.theta)
    return Trajectory(losses, rounds, members[0])
