"""DES-LOC and MT-DAO in one process: AdamW written out, explicit averages, nothing of Atoll."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.reference.algorithms import Inner, Streams, Trajectory, assign, backward, flat, mean_of

EPS = 1e-8


@dataclass
class Member:
    """A member's model and the moments of its AdamW, flat float32."""

    model: nn.Module
    m: Tensor
    v: Tensor
    u: Tensor
    """The slow momentum of MT-DAO."""

    def step(self, number: int, inner: Inner, *, beta: float, omega: float) -> None:
        """Take step `number`, counted from 1, with the gradients that are there."""
        parameters = list(self.model.parameters())
        g = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        norm = float(g.norm())
        if inner.clip and norm > inner.clip:
            g = g * (inner.clip / (norm + 1e-6))
        decay = torch.cat(
            [torch.full_like(p, inner.weight_decay if p.dim() >= 2 else 0.0).flatten()
             for p in parameters]
        )  # fmt: skip
        beta1, beta2 = inner.betas
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        self.u = beta * self.u + (1 - beta) * g
        fast, slow = self.m / (1 - beta1**number), self.u / (1 - beta**number)
        root = (self.v / (1 - beta2**number)).sqrt() + EPS
        lr, x = inner.lr(number - 1), flat(self.model)
        x = x - lr * decay * x - lr * ((1 - omega) * fast + omega * slow) / root
        assign(self.model, x)


def local_adam(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    mean_every: int,
    variance_every: int,
    inner: Inner,
    slow_every: int = 1,
    beta: float = 0.0,
    omega: float = 0.0,
) -> Trajectory:
    """Parameters and every moment are averaged after steps that are multiples of their periods.

    `omega` is the share of the slow momentum, which decays with `beta`; 0 is DES-LOC.
    """
    zeros = torch.zeros_like(flat(model))
    members = [Member(copy.deepcopy(model), zeros, zeros, zeros) for _ in streams]
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for number in range(1, steps + 1):
        losses.append([backward(m.model, s) for m, s in zip(members, streams, strict=True)])
        for member in members:
            member.step(number, inner, beta=beta, omega=omega)
        if number % every == 0 or number == steps:
            x = mean_of([flat(member.model) for member in members])
            for member in members:
                assign(member.model, x)
            rounds.append(x)
        for name, period in (("m", mean_every), ("v", variance_every), ("u", slow_every)):
            if number % period == 0:
                found = mean_of([getattr(member, name) for member in members])
                for member in members:
                    setattr(member, name, found)
    return Trajectory(losses, rounds, members[0].model)
