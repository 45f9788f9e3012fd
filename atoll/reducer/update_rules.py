"""Update rules of a parameter server, on one flat float32 vector; all only add to it.

Legend: theta the vector, x a push (a gradient, or a difference `before - after`), lr the rate, mu
the momentum, N the pushes per momentum step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atoll.errors import WireError
from atoll.wire.parameter_server_messages import Setup


class Rule(ABC):
    """Updates theta with every push, and keeps its own state."""

    vectors: dict[str, Tensor]
    """State vectors, each of the length of theta."""
    scalars: dict[str, float]

    @abstractmethod
    def apply(self, theta: Tensor, x: Tensor, *, lr: float, region: int = 0) -> None:
        """Update `theta` in place with the push of a member of a region; overwrites `x`."""

    def momentum_move(self, pushes: int, *, lr: float) -> Tensor | None:
        """Return by how much `pushes` pushes of zeros would lower theta; None: not at all."""
        return None

    # Rules with a model per region override these, see `atoll.reducer.region_rule`.

    def start(self, theta: Tensor, scalars: Mapping[str, float]) -> None:
        """Restore the scalars of a saved state, after its vectors; `theta` is the saved vector."""
        self.scalars.update({name: scalars[name] for name in scalars if name in self.scalars})

    def model_of(self, theta: Tensor, region: int) -> Tensor:
        """Return the vector that a region's members train from."""
        return theta

    def settle(self, theta: Tensor, *, lr: float) -> bool:
        """Apply pushes that `theta` does not contain yet; return whether there were any."""
        return False

    def working(self) -> list[Tensor]:
        """Return the vectors that are not part of the saved state."""
        return []


class Plain(Rule):
    """theta -= lr x: bitwise equal to `torch.optim.SGD` without momentum."""

    def __init__(self, setup: Setup) -> None:
        self.vectors: dict[str, Tensor] = {}
        self.scalars: dict[str, float] = {}

    def apply(self, theta: Tensor, x: Tensor, *, lr: float, region: int = 0) -> None:
        """See :meth:`Rule.apply`."""
        theta.add_(x, alpha=-lr)


class Momentum(Rule):
    """v = mu v + x (x the first time); theta -= lr v. With Nesterov: theta -= lr (x + mu v)."""

    def __init__(self, setup: Setup, *, nesterov: bool) -> None:
        self._mu, self._nesterov = setup.momentum, nesterov
        self.vectors = {"velocity": torch.zeros(setup.parameters)}
        self.scalars = {"moving": 0.0}

    def apply(self, theta: Tensor, x: Tensor, *, lr: float, region: int = 0) -> None:
        """See :meth:`Rule.apply`."""
        velocity = self.vectors["velocity"]
        if self.scalars["moving"]:
            velocity.mul_(self._mu).add_(x)
        else:
            velocity.copy_(x)
            self.scalars["moving"] = 1.0
        move = x.add_(velocity, alpha=self._mu) if self._nesterov else velocity
        theta.add_(move, alpha=-lr)

    def momentum_move(self, pushes: int, *, lr: float) -> Tensor | None:
        """See :meth:`Rule.momentum_move`: lr (mu + ... + mu^n) v, with Nesterov mu times that."""
        if not pushes or not self.scalars["moving"]:
            return None
        share = sum(self._mu**power for power in range(1, pushes + 1))
        return self.vectors["velocity"] * (lr * share * (self._mu if self._nesterov else 1.0))


class DelayedNesterov(Rule):
    """Momentum applied once per N pushes, as if they had arrived together.

    Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"
    (https://arxiv.org/abs/2401.09135), Algorithm 2. Legend: m the momentum, D the sum of the pushes
    since the last momentum step, c the share of the momentum applied with every push.

      D += x
      every N-th push:  m = mu m + D / N ; theta -= lr ((1 - c N + c) mu m + x / N) ; D = 0
      any other:        theta -= lr (c mu m + x / N)

    With c = 0 and all N computed from the same theta the updates add up to one step of Nesterov's
    momentum on their mean.
    """

    def __init__(self, setup: Setup) -> None:
        self._mu, self._n, self._c = setup.momentum, setup.buffer, setup.activation
        self.vectors = {
            "momentum": torch.zeros(setup.parameters),
            "arrived": torch.zeros(setup.parameters),
        }
        self.scalars = {"arrivals": 0.0}

    def apply(self, theta: Tensor, x: Tensor, *, lr: float, region: int = 0) -> None:
        """See :meth:`Rule.apply`."""
        momentum, arrived = self.vectors["momentum"], self.vectors["arrived"]
        arrived.add_(x)
        self.scalars["arrivals"] += 1.0
        share = self._c
        if self.scalars["arrivals"] >= self._n:
            momentum.mul_(self._mu).add_(arrived, alpha=1.0 / self._n)
            arrived.zero_()
            self.scalars["arrivals"] = 0.0
            share = 1.0 - self._c * self._n + self._c
        theta.add_(x, alpha=-lr / self._n)
        if share:
            theta.add_(momentum, alpha=-lr * share * self._mu)

    def momentum_move(self, pushes: int, *, lr: float) -> Tensor | None:
        """See :meth:`Rule.momentum_move`. m and the move stay linear in the present m and D."""
        arrivals, of_m, of_d, waiting = self.scalars["arrivals"], 1.0, 0.0, 1.0 / self._n
        move_m = move_d = 0.0
        for _ in range(pushes):
            arrivals += 1.0
            share = self._c
            if arrivals >= self._n:
                of_m, of_d, waiting = self._mu * of_m, self._mu * of_d + waiting, 0.0
                arrivals, share = 0.0, 1.0 - self._c * self._n + self._c
            move_m += share * self._mu * of_m
            move_d += share * self._mu * of_d
        if not (move_m or move_d):
            return None
        return (self.vectors["momentum"] * (lr * move_m)).add_(
            self.vectors["arrived"], alpha=lr * move_d
        )


RULES: Mapping[str, Callable[[Setup], Rule]] = {
    "sgd": Plain,
    "momentum": lambda setup: Momentum(setup, nesterov=False),
    "nesterov": lambda setup: Momentum(setup, nesterov=True),
    "delayed-nesterov": DelayedNesterov,
}


def make_rule(setup: Setup) -> Rule:
    """Return the configured rule; raises WireError if the name is unknown."""
    if setup.rule not in RULES:
        raise WireError(
            "unknown rule of a parameter server", given=setup.rule, expected=", ".join(RULES)
        )
    return RULES[setup.rule](setup)


def late_factor(setup: Setup, staleness: int) -> float:
    """Return the weight of a push that is `staleness` versions late.

    `inverse` is 1 / max(1, tau) (Zhang et al. 2015, https://arxiv.org/abs/1511.05950), `power` is
    (1 + tau) ** -a (Xie et al. 2019, https://arxiv.org/abs/1903.03934).
    """
    if setup.staleness == "inverse":
        return 1.0 / max(1, staleness)
    if setup.staleness == "power":
        return float((1 + staleness) ** -setup.power)
    return 1.0


def compensate(x: Tensor, now: Tensor, read: Tensor, *, strength: float) -> None:
    """Correct a late gradient in place for the change of theta since it was read.

    Zheng et al. 2017, DC-ASGD (https://arxiv.org/abs/1609.08326): g + lambda g g (now - read).
    """
    x.add_(x * x * (now - read), alpha=strength)
