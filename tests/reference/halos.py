"""HALoS in one process, as the paper's Algorithm 1 writes it; nothing of Atoll.

A region's server keeps its model and the one of its last merge, and reports the difference; with
equally fast members that push in slot order, and lines between servers that take no time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

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
from tests.reference.asynchronous import DelayedServer


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rate and the momentum of a server's delayed Nesterov."""

    lr: float
    momentum: float


class Hierarchy:
    """A global server, and one for each region: neighbouring slots."""

    def __init__(
        self, theta: Tensor, *, members: int, regions: int, local: Step, above: Step,
        merge_every: int, mix: float,
    ) -> None:  # fmt: skip
        self.region_of = [slot * regions // members for slot in range(members)]
        self.top = DelayedServer(theta, regions, above.lr, above.momentum)
        self.servers = [
            DelayedServer(theta, self.region_of.count(region), local.lr, local.momentum)
            for region in range(regions)
        ]
        self.merged = [theta] * regions
        self.waiting = [0] * regions
        self.merge_every, self.mix = merge_every, mix

    def push(self, slot: int, delta: Tensor) -> Tensor:
        """Apply a member's update; return the model of its region."""
        region = self.region_of[slot]
        server = self.servers[region]
        server.arrive(delta)
        self.waiting[region] += 1
        if self.waiting[region] == self.merge_every:
            self.report(region)
            server.theta = (1 - self.mix) * server.theta + self.mix * self.top.theta
            self.merged[region] = server.theta
        return server.theta

    def report(self, region: int) -> None:
        """Send the region's update since its last merge to the global server."""
        self.top.arrive(self.merged[region] - self.servers[region].theta)
        self.waiting[region] = 0

    def meet(self) -> Tensor:
        """Merge all regions at a sync point; return the model of all."""
        for region, waiting in enumerate(self.waiting):
            if waiting:
                self.report(region)
        for region, server in enumerate(self.servers):
            server.theta = self.merged[region] = self.top.theta
        return self.top.theta


def halos(
    model: nn.Module, streams: Streams, *, steps: int, every: int, sync_every: int, inner: Inner,
    hierarchy: Hierarchy,
) -> Trajectory:  # fmt: skip
    """Train; `rounds` has the global model every `sync_every` steps and at the end."""
    members = [copy.deepcopy(model) for _ in streams]
    optimizers = [inner.optimizer(member) for member in members]
    starts = [flat(model)] * len(members)
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for number in range(1, steps + 1):
        losses.append([backward(m, s) for m, s in zip(members, streams, strict=True)])
        for member, optimizer in zip(members, optimizers, strict=True):
            inner_step(member, optimizer, number - 1, inner)
        if number % every and number != steps:
            continue
        for slot, member in enumerate(members):
            starts[slot] = hierarchy.push(slot, starts[slot] - flat(member))
            assign(member, starts[slot])
        if number % sync_every == 0 or number == steps:
            theta = hierarchy.meet()
            rounds.append(theta)
            starts = [theta] * len(members)
            for member in members:
                assign(member, theta)
    return Trajectory(losses, rounds, members[0])
