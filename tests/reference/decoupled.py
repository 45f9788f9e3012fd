"""Decoupled DiLoCo in one process, the whole model as one fragment; nothing of Atoll."""

from __future__ import annotations

import copy
import re
from itertools import pairwise

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


def decoupled(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    delay: int,
    inner: Inner,
    outer_lr: float,
    momentum: float,
) -> Trajectory:
    """What members have moved at a multiple of `every` is merged and taken `delay` steps later.

    Members have equal tokens and equal steps, so that all weights are equal. The last round is
    taken with the last step.
    """
    members = [copy.deepcopy(model) for _ in streams]
    optimizers = [inner.optimizer(member) for member in members]
    theta = flat(model)
    velocity: Tensor | None = None
    pending: tuple[int, Tensor] | None = None
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for number in range(1, steps + 1):
        losses.append([backward(m, s) for m, s in zip(members, streams, strict=True)])
        for member, optimizer in zip(members, optimizers, strict=True):
            inner_step(member, optimizer, number - 1, inner)
        if number % every == 0:
            pending = number, _merged(model, [theta - flat(member) for member in members])
        if pending is not None and (number == pending[0] + delay or number == steps):
            mean = pending[1]
            velocity = mean if velocity is None else momentum * velocity + mean
            theta = theta - outer_lr * (mean + momentum * velocity)
            for member in members:
                assign(member, theta)
            rounds.append(theta)
            pending = None
    return Trajectory(losses, rounds, members[0])


def _merged(model: nn.Module, updates: list[Tensor]) -> Tensor:
    """Tensors of numbered layers: mean direction times mean length; all others: the mean."""
    named = list(model.named_parameters())
    stops = [0]
    for _, parameter in named:
        stops.append(stops[-1] + parameter.numel())
    merged = torch.empty_like(updates[0])
    for (name, _), (start, stop) in zip(named, pairwise(stops), strict=True):
        parts = [update[start:stop] for update in updates]
        mean = torch.stack(parts).mean(0)
        if re.search(r"\.\d+\.", name):
            length = torch.stack([part.norm() for part in parts]).mean()
            direction = torch.stack([part / part.norm() for part in parts]).mean(0)
            mean = length * direction / direction.norm()
        merged[start:stop] = mean
    return merged
