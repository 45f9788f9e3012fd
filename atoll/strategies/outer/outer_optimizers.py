"""Outer optimizers: how the mean pseudo-gradient updates one flat float32 parameter vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import ConfigError, unknown
from atoll.strategies.vectors.torch_optimizer import PREFIX, OuterTorch

OUTER_OPTIMIZERS = ("nesterov", "momentum", "sgd", "adam")
"""Names that `make_outer_optimizer` accepts, besides `torch:` and a class of `torch.optim`."""

BETA2 = 0.999
"""Decay of Adam's mean of squares."""


class OuterOptimizer(Protocol):
    """Takes outer steps; its state is equal on all members that took the same steps."""

    @property
    def is_plain(self) -> bool:
        """Whether a step only takes the members' mean."""
        ...

    def step(self, theta: Tensor, g: Tensor) -> None:
        """Update `theta` in place with the pseudo-gradient `g`, which is overwritten."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        ...


class OuterSGD:
    """SGD with momentum, bit for bit `torch.optim.SGD(nesterov=...)`.

    Legend: theta parameters, g the mean pseudo-gradient, v the velocity, mu the momentum.

        v     = g on the first call, then mu * v + g
        theta = theta - lr * (g + mu * v)        with Nesterov
        theta = theta - lr * v                   without (heavy ball)

    With a constant g, Nesterov's steps are lr (1 + mu) g, lr (1 + mu + mu^2) g, ... and tend to lr
    / (1 - mu) g: with 0.7 and 0.9 the factors are 1.33, 1.897, ... 7. With mu = 0 both forms are
    plain SGD; torch then accepts only `nesterov=False`.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool = True) -> None:
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
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.velocity: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a step only takes the members' mean."""
        return self.lr == 1.0 and self.momentum == 0.0

    @torch.no_grad()
    def step(self, theta: Tensor, g: Tensor) -> None:
        """Update `theta` in place; `g` is overwritten."""
        direction = g
        if self.momentum:
            if self.velocity is None:
                self.velocity = g.clone()
            else:
                self.velocity.mul_(self.momentum).add_(g)
            direction = self.velocity
            if self.nesterov:
                direction = g.add_(self.velocity, alpha=self.momentum)
        theta.add_(direction, alpha=-self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the velocity, if there is one already."""
        return {} if self.velocity is None else {"velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        velocity = state.get("velocity")
        self.velocity = None if velocity is None else velocity.clone()


class OuterAdam:
    """Adam on the mean pseudo-gradient, bit for bit `torch.optim.Adam`.

    FedAdam of Reddi et al. 2020, "Adaptive Federated Optimization"
    (https://arxiv.org/abs/2003.00295), with Adam's bias correction. A small epsilon would turn tiny
    pseudo-gradients into full steps; DiLoCo's authors found an epsilon of about 0.1.
    """

    def __init__(self, *, lr: float, beta1: float, eps: float, beta2: float = BETA2) -> None:
        """Start without moments.

        Raises:
            ConfigError: a number is out of range.
        """
        if not lr > 0 or not 0 <= beta1 < 1 or not 0 <= beta2 < 1 or not eps > 0:
            raise ConfigError(
                "the outer optimizer cannot work with these numbers",
                given=f"outer_lr = {lr}, outer_momentum = {beta1}, outer_eps = {eps}",
                expected="outer_lr and outer_eps above 0, outer_momentum of 0 up to below 1",
                remedy="outer_eps = 0.1 is a good start",
            )
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self._steps = 0
        self._mean: Tensor | None = None
        self._square: Tensor | None = None

    is_plain = False

    @torch.no_grad()
    def step(self, theta: Tensor, g: Tensor) -> None:
        """Update `theta` in place; `g` is overwritten."""
        if self._mean is None or self._square is None:
            self._mean, self._square = torch.zeros_like(g), torch.zeros_like(g)
        self._steps += 1
        self._mean.lerp_(g, 1 - self.beta1)
        self._square.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        size = self.lr / (1 - self.beta1**self._steps)
        root = math.sqrt(1 - self.beta2**self._steps)
        denominator = torch.sqrt(self._square, out=g).div_(root).add_(self.eps)
        theta.addcdiv_(self._mean, denominator, value=-size)

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments and the number of steps, if there was one already."""
        if self._mean is None or self._square is None:
            return {}
        return {"mean": self._mean, "square": self._square, "steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        self._steps = int(state["steps"]) if "steps" in state else 0
        self._mean = state["mean"].clone() if "mean" in state else None
        self._square = state["square"].clone() if "square" in state else None


def make_outer_optimizer(
    name: str, *, lr: float, momentum: float, eps: float = 0.1, options: str = ""
) -> OuterOptimizer:
    """Return an outer optimizer by name.

    Args:
        name: One of `OUTER_OPTIMIZERS`; empty means `nesterov`, or `sgd` with momentum 0; or
            `torch:` and a class of `torch.optim`.
        lr: Learning rate.
        momentum: Of `nesterov` and `momentum`; the first beta of `adam`; unused by the others.
        eps: Of `adam`.
        options: Further arguments of a class of `torch.optim`; see :class:`OuterTorch`.

    Raises:
        ConfigError: the name is unknown, or a number is out of its range.
    """
    if name.startswith(PREFIX):
        return OuterTorch(name.removeprefix(PREFIX), lr=lr, options=options)
    if options:
        raise ConfigError(
            f"only optimizers of torch.optim have outer_options, not {name or 'the default'}",
            given=f"outer_options = {options!r}", expected='outer_optimizer = "torch:NAdam"',
        )  # fmt: skip
    if name and name not in OUTER_OPTIMIZERS:
        raise unknown("outer optimizer", name, OUTER_OPTIMIZERS)
    if name in ("nesterov", "momentum") and momentum == 0:
        raise ConfigError(
            f"outer optimizer {name} does not work without momentum",
            given="outer_momentum = 0",
            expected="outer_momentum above 0 and below 1",
            remedy='outer_optimizer = "sgd" is the same without momentum',
        )
    if name == "adam":
        return OuterAdam(lr=lr, beta1=momentum, eps=eps)
    if name == "sgd":
        return OuterSGD(lr=lr, momentum=0.0)
    return OuterSGD(lr=lr, momentum=momentum, nesterov=name != "momentum")
