"""What policies draw actions from: categorical, several categoricals at once, a diagonal Gaussian.

Each is built from what a network puts out for a batch of states, [..., outputs], and answers for
the whole batch. Actions have the stored form of `Actions.width` numbers each, [..., width].

The chance in a rollout: drawn for all its steps at once, and judged for all at once.

A policy's network has to run step by step, because the next observation depends on the action. The
random numbers and the probabilities have not, and they cost as much as the network does.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from atoll.rl.environments.spaces import CONTINUOUS, MULTI_DISCRETE, Actions

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """Over the actions in each state of a batch."""

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
        """Normalise the logits."""
        self.log_p = torch.log_softmax(logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw [..., 1], int64: the largest of the logits with Gumbel noise, -ln of Exp(1)."""
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
        """Take the logits of each choice apart."""
        self.parts = [Categorical(part) for part in torch.split(logits, list(sizes), dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw [..., number of choices], int64."""
        return torch.cat([part.sample(generator) for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        """Return the most probable of each choice, [..., number of choices]."""
        return torch.cat([part.mode() for part in self.parts], dim=-1)

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return the sum of ln p over the choices, [...]."""
        each = [part.log_probability(actions[..., i : i + 1]) for i, part in enumerate(self.parts)]
        return torch.stack(each).sum(0)

    def entropy(self) -> Tensor:
        """Return the sum of the choices' entropies, [...]."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


class Gaussian:
    """Independent normal numbers, from means [..., d] and one log deviation for each, [d].

    The probabilities are of what was drawn; bounds of the space are the environment's business.
    """

    def __init__(self, mean: Tensor, log_deviation: Tensor) -> None:
        """Take the mean of each state and the deviation of all."""
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
    """Return how many numbers a network has to put out for a distribution over these actions."""
    return sum(actions.sizes)


def distribution(actions: Actions, output: Tensor, log_deviation: Tensor | None) -> Distribution:
    """Return the distribution that a network's output [..., outputs] stands for.

    Args:
        actions: The space.
        output: Logits, or means of a continuous space.
        log_deviation: [d], of a continuous space; None otherwise.
    """
    if actions.kind == CONTINUOUS:
        assert log_deviation is not None
        return Gaussian(output, log_deviation)
    if actions.kind == MULTI_DISCRETE:
        return MultiCategorical(output, actions.sizes)
    return Categorical(output)


def _lowest(log_p: Tensor) -> float:
    """Return a log probability whose exponential is zero but which is finite: 0 · it is 0."""
    return torch.finfo(log_p.dtype).min


class ActionSampler:
    """ActionSampler the actions of T steps in B columns.

    Args:
        actions: The space.
        log_deviation: [d], of a continuous space; None otherwise.
        length: T.
        columns: B.
        generator: Of the noise.
    """

    def __init__(
        self, actions: Actions, log_deviation: Tensor | None, *, length: int, columns: int,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self._actions, self._log_deviation = actions, log_deviation
        self.outputs = torch.empty(length, columns, outputs(actions))
        """What the policy's network puts out, [T, B, outputs]; filled by `choose`."""
        noise = torch.empty_like(self.outputs)
        if actions.kind == CONTINUOUS:
            assert log_deviation is not None
            noise.normal_(generator=generator).mul_(log_deviation.detach().exp())
        else:
            # The largest of logits with Gumbel noise, -ln of Exp(1), is a draw from their softmax.
            noise.exponential_(generator=generator).log_().neg_()
        self._noise, self._kept = noise.unbind(0), self.outputs.unbind(0)

    def choose(self, step: int, output: Tensor) -> Tensor:
        """Return the actions [B, width] of a step.

        Args:
            step: Which of the T.
            output: [B, outputs], of the policy's network.
        """
        self._kept[step].copy_(output)
        noisy = output + self._noise[step]
        if self._actions.kind == CONTINUOUS:
            return noisy
        if self._actions.kind == MULTI_DISCRETE:
            parts = torch.split(noisy, list(self._actions.sizes), dim=-1)
            return torch.stack([part.argmax(-1) for part in parts], dim=-1)
        return noisy.argmax(-1, keepdim=True)

    @torch.no_grad()
    def log_probabilities(self, actions: Tensor) -> Tensor:
        """Return ln p of all the actions [T, B, width] that were chosen, [T, B]."""
        chances = distribution(self._actions, self.outputs, self._log_deviation)
        return chances.log_probability(actions)
