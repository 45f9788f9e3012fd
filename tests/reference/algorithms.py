"""Single-process references of the algorithms: explicit loops, plain torch, no networking.

The distributed implementation is compared with these, round by round. Nothing here may import more
of Atoll than its models and its data. Members are visited in slot order; sums are float32 in that
order, divided by the total weight; the outer step is written out and not taken from an optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atoll.data import BatchStream

Streams = Sequence[Iterator[tuple[Tensor, Tensor]] | BatchStream]
Lossy = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Inner:
    """AdamW as every member runs it; matrices decay, vectors do not."""

    lr: Callable[[int], float]
    """Rate of each step, counted from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm; 0: none."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.dim() >= 2]
        vectors = [p for p in parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr(0), betas=self.betas, fused=True)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What the wire makes of a vector; exact by default.

    ``up(member, vector)`` and ``down(round, vector)`` return what the other side decodes.
    """

    up: Lossy = field(default=lambda member, vector: vector)
    down: Lossy = field(default=lambda round_, vector: vector)


@dataclass(frozen=True)
class Trajectory:
    """What happened.

    Attributes:
        losses: Training loss, ``[step][member]``.
        rounds: The common parameters after each sync, flat float32.
        model: The common model at the end.
    """

    losses: list[list[float]]
    rounds: list[Tensor]
    model: nn.Module


def one_node(
    model: nn.Module, stream: Iterator[tuple[Tensor, Tensor]], *, steps: int, inner: Inner
) -> Trajectory:
    """Plain training on one stream."""
    model = copy.deepcopy(model)
    optimizer = inner.optimizer(model)
    losses = []
    for step in range(steps):
        losses.append([backward(model, stream)])
        inner_step(model, optimizer, step, inner)
    return Trajectory(losses, [flat(model)], model)


def data_parallel(
    model: nn.Module, streams: Streams, *, steps: int, inner: Inner, wire: Wire | None = None
) -> Trajectory:
    """Every step uses the mean of the members' gradients."""
    wire = wire or Wire()
    model = copy.deepcopy(model)
    optimizer = inner.optimizer(model)
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for step in range(steps):
        losses.append([])
        gradients = []
        for member, stream in enumerate(streams):
            losses[-1].append(backward(model, stream))
            gradient = torch.cat([_grad(p).flatten() for p in model.parameters()])
            gradients.append(wire.up(member, gradient))
        mean = wire.down(step, mean_of(gradients))
        for parameter, part in zip(model.parameters(), _parts(model, mean), strict=True):
            parameter.grad = part.clone()
        inner_step(model, optimizer, step, inner)
        rounds.append(flat(model))
    return Trajectory(losses, rounds, model)


def local_sgd(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    inner: Inner,
    wire: Wire | None = None,
) -> Trajectory:
    """Parameters are averaged every ``every`` steps."""
    return diloco(
        model, streams, steps=steps, every=every, outer_lr=1.0, momentum=0.0, inner=inner, wire=wire
    )


def diloco(
    model: nn.Module,
    streams: Streams,
    *,
    steps: int,
    every: int,
    outer_lr: float,
    momentum: float,
    inner: Inner,
    warmup_steps: int = 0,
    warmup_every: int = 1,
    wire: Wire | None = None,
    rates: Callable[[int], tuple[float, float]] | None = None,
) -> Trajectory:
    """DiLoCo; the first ``warmup_steps`` are Local SGD with a sync every ``warmup_every``.

    Afterwards a sync is due ``every`` steps, counted from the end of the warm-up, and at the last
    step. ``rates(round)``, if given, replaces the constant outer rate and momentum.
    """
    wire = wire or Wire()
    members = [copy.deepcopy(model) for _ in streams]
    optimizers = [inner.optimizer(member) for member in members]
    start, velocity = flat(model), None
    losses: list[list[float]] = []
    rounds: list[Tensor] = []
    for step in range(steps):
        losses.append([backward(m, s) for m, s in zip(members, streams, strict=True)])
        for member, optimizer in zip(members, optimizers, strict=True):
            inner_step(member, optimizer, step, inner)
        done = step + 1
        is_warm = done <= warmup_steps
        counted = done if is_warm else done - warmup_steps
        if counted % (warmup_every if is_warm else every) and done not in (warmup_steps, steps):
            continue
        moves = [wire.up(index, start - flat(member)) for index, member in enumerate(members)]
        delta = wire.down(len(rounds), mean_of(moves))
        lr, mu = (1.0, 0.0) if is_warm else (outer_lr, momentum)
        if rates is not None and not is_warm:
            lr, mu = rates(len(rounds))
        direction = delta
        if mu:
            velocity = delta.clone() if velocity is None else velocity.mul(mu).add(delta)
            direction = delta.add(velocity, alpha=mu)
        start = start.add(direction, alpha=-lr)  # fused multiply-add, as torch.optim.SGD does
        for member in members:
            assign(member, start)
        rounds.append(start.clone())
    return Trajectory(losses, rounds, members[0])


def flat(model: nn.Module) -> Tensor:
    """The parameters as one float32 vector, in registration order."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def assign(model: nn.Module, vector: Tensor) -> None:
    """Set the parameters from such a vector."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), _parts(model, vector), strict=True):
            parameter.copy_(part)


def backward(model: nn.Module, stream: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Compute the gradient of the next batch and return its loss."""
    model.zero_grad(set_to_none=True)
    inputs, targets = next(stream)
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, targets.dim() - 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, inner: Inner) -> None:
    """Take one step with the gradients that are there."""
    if inner.clip:
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
    for group in optimizer.param_groups:
        group["lr"] = inner.lr(step)
    optimizer.step()


def mean_of(vectors: list[Tensor]) -> Tensor:
    """Add in this order, and divide."""
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    return total / len(vectors)


def _parts(model: nn.Module, vector: Tensor) -> list[Tensor]:
    shapes = [p.shape for p in model.parameters()]
    parts = torch.split(vector, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
