"""Distributions over actions: categorical, several independent categoricals, diagonal Gaussian.

Each is built from a network's output for a batch of states, [..., outputs]. Actions have the stored
form, [..., width].

In a rollout the network runs step by step, because the next observation depends on the action. The
random numbers and the log-probabilities do not, and cost as much as the network, so
:class:`ActionSampler` computes them once for all steps.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from atoll.rl.environments.spaces import CONTINUOUS, MULTI_DISCRETE, Actions

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """A distribution over the actions in each state of a batch."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one action per state, [..., width]."""
        ...

    def mode(self) -> Tensor:
        """Return the most probable action of each state, [..., width]."""
        ...

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return ln p of actions [..., width], [...]."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy in each state in nats, [...]."""
        ...


class Categorical:
    """One choice among n, from logits [..., n]."""

    def __init__(self, logits: Tensor) -> None:
        self.log_p = torch.log_softmax(logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw [..., 1], int64, by the Gumbel trick: the largest of logits - ln Exp(1)."""
        noise = torch.empty_like(self.log_p).exponential_(generator=generator).log_()
        return (self.log_p - noise).argmax(dim=-1, keepdim=True)

    def mode(self) -> Tensor:
        """Return the most probable choice, [..., 1]."""
        return self.log_p.argmax(dim=-1, keepdim=True)

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return ln p of choices [..., 1], [...]."""
        return self.log_p.gather(-1, actions).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return -Σ p ln p, [...]; a choice of probability 0 adds nothing."""
        return -(self.log_p.exp() * self.log_p.clamp_min(_lowest(self.log_p))).sum(-1)


class MultiCategorical:
    """Independent choices, from their logits side by side, [..., sum of sizes]."""

    def __init__(self, logits: Tensor, sizes: tuple[int, ...]) -> None:
        self.parts = [Categorical(part) for part in torch.split(logits, list(sizes), dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw [..., number of choices], int64."""
        return torch.cat([part.sample(generator) for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        """Return the most probable choices, [..., number of choices]."""
        return torch.cat([part.mode() for part in self.parts], dim=-1)

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return the sum of ln p over the choices, [...]."""
        each = [part.log_probability(actions[..., i : i + 1]) for i, part in enumerate(self.parts)]
        return torch.stack(each).sum(0)

    def entropy(self) -> Tensor:
        """Return the sum of the choices' entropies, [...]."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


class Gaussian:
    """Independent normal numbers, from means [..., d] and log deviations [d].

    Probabilities are of the unbounded draw; the environment clips actions to the space.
    """

    def __init__(self, mean: Tensor, log_deviation: Tensor) -> None:
        self.mean, self.log_deviation = mean, log_deviation

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw [..., d]."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean + self.log_deviation.exp() * noise

    def mode(self) -> Tensor:
        """Return the means."""
        return self.mean

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return the log density of actions [..., d], [...]."""
        away = (actions - self.mean) * (-self.log_deviation).exp()
        constant = self.log_deviation.sum() + HALF_LOG_TWO_PI * self.log_deviation.numel()
        return -0.5 * away.square().sum(-1) - constant

    def entropy(self) -> Tensor:
        """Return Σ (½ + ½ ln 2π + ln σ), the same in all states, [...]."""
        each = self.log_deviation + (0.5 + HALF_LOG_TWO_PI)
        return each.sum().expand(self.mean.shape[:-1])


def outputs(actions: Actions) -> int:
    """Return the width of a network's output for a distribution over these actions."""
    return sum(actions.sizes)


def distribution(actions: Actions, output: Tensor, log_deviation: Tensor | None) -> Distribution:
    """Return the distribution for a network's output [..., outputs].

    `output` are logits, or means of a continuous space, which has a `log_deviation` [d].
    """
    if actions.kind == CONTINUOUS:
        assert log_deviation is not None
        return Gaussian(output, log_deviation)
    if actions.kind == MULTI_DISCRETE:
        return MultiCategorical(output, actions.sizes)
    return Categorical(output)


def _lowest(log_p: Tensor) -> float:
    """Return a finite log-probability whose exponential is zero, so that 0 times it is 0."""
    return torch.finfo(log_p.dtype).min


class ActionSampler:
    """Draws the actions of T steps in B columns, in main memory.

    A continuous space has a `log_deviation` [d].
    """

    def __init__(
        self, actions: Actions, log_deviation: Tensor | None, *, length: int, columns: int,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self._actions = actions
        self._log_deviation = None if log_deviation is None else log_deviation.detach().cpu()
        self.outputs = torch.empty(length, columns, outputs(actions))
        """What the policy's network puts out, [T, B, outputs]; filled by `choose`."""
        noise = torch.empty_like(self.outputs)
        if actions.kind == CONTINUOUS:
            assert log_deviation is not None
            noise.normal_(generator=generator).mul_(log_deviation.detach().cpu().exp())
        else:
            # The largest of logits with Gumbel noise, -ln Exp(1), is a draw from their softmax.
            noise.exponential_(generator=generator).log_().neg_()
        self._noise, self._kept = noise.unbind(0), self.outputs.unbind(0)

    def choose(self, step: int, output: Tensor) -> Tensor:
        """Return the actions [B, width] of a step.

        `output` is the network's, [B, outputs].
        """
        noisy = self._kept[step].copy_(output) + self._noise[step]
        if self._actions.kind == CONTINUOUS:
            return noisy
        if self._actions.kind == MULTI_DISCRETE:
            parts = torch.split(noisy, list(self._actions.sizes), dim=-1)
            return torch.stack([part.argmax(-1) for part in parts], dim=-1)
        return noisy.argmax(-1, keepdim=True)

    @torch.no_grad()
    def log_probabilities(self, actions: Tensor) -> Tensor:
        """Return ln p of all chosen actions [T, B, width], [T, B]."""
        chances = distribution(self._actions, self.outputs, self._log_deviation)
        return chances.log_probability(actions)
