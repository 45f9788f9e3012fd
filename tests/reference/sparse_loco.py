"""SparseLoCo in one process: explicit loops over members and chunks, nothing of Atoll."""

from __future__ import annotations

import copy

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


def sparse_loco(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    inner: Inner,
    outer_lr: float,
    decay: float,
    keep: int,
    chunk: int,
    quantised: bool,
) -> Trajectory:
    """E = decay e + Delta; the `keep` largest of each chunk are sent and leave e; mean over all.

    The mean divides by the number of members, not by that of those who sent a coordinate.
    """
    members = [copy.deepcopy(model) for _ in streams]
    optimizers = [inner.optimizer(member) for member in members]
    start = flat(model)
    residuals = [torch.zeros_like(start) for _ in members]
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for step in range(steps):
        losses.append([backward(m, s) for m, s in zip(members, streams, strict=True)])
        for member, optimizer in zip(members, optimizers, strict=True):
            inner_step(member, optimizer, step, inner)
        if (step + 1) % every and step + 1 != steps:
            continue
        total = torch.zeros_like(start)
        for number, member in enumerate(members):
            e = residuals[number] * decay + (start - flat(member))
            places = _largest(e, keep=keep, chunk=chunk)
            values = e[places]
            sent = torch.zeros_like(e)
            sent[places] = two_bits(values, chunk=4096) if quantised else values
            residuals[number] = e - sent
            total += sent
        start = start - outer_lr * (total / len(members))
        for member in members:
            assign(member, start)
        rounds.append(start.clone())
    return Trajectory(losses, rounds, members[0])


def _largest(e: Tensor, *, keep: int, chunk: int) -> Tensor:
    """Return the places of the largest magnitudes of every chunk, ascending."""
    found = []
    for begin in range(0, len(e), chunk):
        part = e[begin : begin + chunk].abs()
        count = max(1, int(len(part) * keep / chunk + 0.5))
        found.append(part.topk(count).indices.sort().values + begin)
    return torch.cat(found)


def two_bits(values: Tensor, *, chunk: int) -> Tensor:
    """Replace values by the means of four kinds: sign, and above its mean magnitude or not."""
    result = values.clone()
    for begin in range(0, len(values), chunk):
        part, out = values[begin : begin + chunk], result[begin : begin + chunk]
        for side in (part >= 0, part < 0):
            if not side.any():
                continue
            large = part.abs() > part[side].double().mean().abs().float()
            for kind in (side & large, side & ~large):
                if kind.any():
                    out[kind] = part[kind].double().mean().float()
    return result
