"""The outer optimizer: SGD with Nesterov momentum on one flat float32 vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.errors import ConfigError


class OuterSGD:
    """SGD with Nesterov momentum, bit for bit `torch.optim.SGD(nesterov=True)`.

    Legend: theta parameters, g the mean pseudo-gradient, v the velocity, mu the momentum.

        v     = g on the first call, then mu * v + g
        theta = theta - lr * (g + mu * v)

    With the same g every time the moves are lr (1 + mu) g, lr (1 + mu + mu^2) g, ... and tend to
    lr / (1 - mu) g: 1.33, 1.897, ... 7 for 0.7 and 0.9. With mu = 0 it is plain SGD, for which
    torch has to be asked without Nesterov.
    """

    def __init__(self, *, lr: float, momentum: float) -> None:
        """Start without velocity.

        Raises:
            ConfigError: the rate is not above 0, or the momentum not in 0 <= mu < 1.
        """
        if not lr > 0 or not 0 <= momentum < 1:
            raise ConfigError(
                "the outer optimizer cannot work with these numbers",
                given=f"outer_lr = {lr}, outer_momentum = {momentum}",
                expected="outer_lr above 0 and outer_momentum of 0 up to below 1",
            )
        self.lr, self.momentum = lr, momentum
        self.velocity: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a step takes the members' mean as it is."""
        return self.lr == 1.0 and self.momentum == 0.0

    @torch.no_grad()
    def step(self, theta: Tensor, g: Tensor) -> None:
        """Change `theta` in place; `g` is used up as scratch."""
        if self.momentum:
            if self.velocity is None:
                self.velocity = g.clone()
            else:
                self.velocity.mul_(self.momentum).add_(g)
            g.add_(self.velocity, alpha=self.momentum)
        theta.add_(g, alpha=-self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the velocity, if there is one already."""
        return {} if self.velocity is None else {"velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        velocity = state.get("velocity")
        self.velocity = None if velocity is None else velocity.clone()
