"""Gradients instead of trajectories: each member learns from its own stretch and shares the step.

Asynchronous Methods for Deep Reinforcement Learning, algorithm S3
(https://arxiv.org/abs/1602.01783): n-step returns, one gradient per stretch, applied to parameters
that others change at the same time. The sharing is an outer strategy's business: it is wrapped
around `optimizer`, e.g. `async-sgd`.

Differs from the paper:
  * Adam instead of RMSProp, and policy and value share no layers;
  * values are learned in units of 1 / (1 - γ);
  * advantages are standardised, so that the size of rewards does not matter;
  * the values may be the pooled critic's: then only the policy has gradients.

What policies agree on by an outer strategy: their weights, and nothing that is counted.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from atoll.config.rl_tables import RlTable
from atoll.rl.algorithms.losses import (
    explained_variance,
    n_step,
    policy_gradient_loss,
    standardised,
    value_loss,
)
from atoll.rl.algorithms.trained_policy import TrainedPolicy
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.optimizer import EPSILON
from atoll.rl.nets.policy import HEAD_GAIN, HIDDEN_GAIN, Policy, linear
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

LARGEST_DISCOUNT = 0.999
"""Of which the unit of values is derived; without discounting it would have no limit."""


class ActorCritic(nn.Module):
    """A policy, and a network of values beside it if it has its own."""

    def __init__(self, policy: Policy, value: nn.Sequential | None) -> None:
        """Hold both."""
        super().__init__()
        self.policy, self.value = policy, value


class A3c(TrainedPolicy):
    """One policy that takes a gradient step per trajectory, by n-step returns.

    With the critic `own` (or `none`) it has a network of values that learns by the same steps.
    """

    def __init__(self, task: TaskSpec, rl: RlTable, *, total_steps: int, seed: int) -> None:
        """Build the policy, and its values if they are its own; see `TrainedPolicy`."""
        super().__init__(task, rl, total_steps=total_steps, seed=seed)
        # What a reward of one at every step is worth: values are learned in units of it. A network
        # of small numbers takes thousands of steps to say 100; and members have it in common.
        self._unit = 1.0 / (1.0 - min(task.gamma, LARGEST_DISCOUNT))
        value = self._values(task, rl) if rl.critic in ("own", "none") else None
        self.model = ActorCritic(self.policy, value)
        """What the optimizer changes: wrap it together with `optimizer`."""
        if value is not None:
            # Apart, because the size of rewards scales the gradients of values alone.
            self._apart.append(list(value.parameters()))
            groups = [
                {"params": group, "lr": lr}
                for group, lr in zip(self._apart, (rl.lr, rl.critic_lr), strict=True)
            ]
            self.optimizer = torch.optim.Adam(groups, eps=EPSILON, fused=True)

    @property
    def module(self) -> nn.Module:
        """Everything that learns."""
        return self.model

    def improve(
        self, trajectory: Trajectory, valued: ValuedTrajectory | None = None
    ) -> dict[str, float]:
        """Take one gradient step; return what can be told about it.

        Args:
            trajectory: A stretch of experience of the policy as it is now, or was a moment ago.
            valued: The values of another critic; ignored by one that has its own.

        Returns:
            `policy_loss`, `entropy`, `explained_variance`, `lr`, and `value_loss` of own values.

        Raises:
            DataError: rewards or values are not finite; nothing was learned.
            LossNotFinite: the step made the policy so.
        """
        own = self._value_of(trajectory) if self.model.value is not None else None
        if own is not None:
            values, cut_values = (part.detach() for part in own)
        else:
            assert valued is not None, "without own values somebody else's are needed"
            values, cut_values = valued.values, valued.cut_values
        advantages, returns = n_step(
            trajectory.rewards, values[:-1], trajectory.next_values(values, cut_values),
            trajectory.terminated, trajectory.ended, gamma=self.task.gamma,
        )  # fmt: skip
        self.check_advantages(advantages)
        rate = self.begin()
        log_probabilities, entropy = self.policy.evaluate(trajectory)
        policy_loss = policy_gradient_loss(log_probabilities, standardised(advantages)).mean()
        loss = policy_loss - self.rl.entropy * entropy.mean()
        told = {
            "policy_loss": float(policy_loss.detach()),
            "entropy": float(entropy.detach().mean()),
            "explained_variance": float(explained_variance(values[:-1], returns)),
            "lr": rate,
        }
        if own is not None:
            errors = value_loss(own[0][:-1] / self._unit, returns / self._unit).mean()
            told["value_loss"] = float(errors.detach())
            loss = loss + errors
        self.descend(loss)
        self.end([trajectory], told)
        return told

    def begin(self) -> float:
        """Set the learning rates of the step that follows; return the policy's."""
        rate = self.rate
        for group, full in zip(
            self.optimizer.param_groups, (self.rl.lr, self.rl.critic_lr), strict=False
        ):
            group["lr"] = full * rate / self.rl.lr
        return rate

    def _values(self, task: TaskSpec, rl: RlTable) -> nn.Sequential:
        widths = [math.prod(task.observation), *rl.critic_hidden]
        layers: list[nn.Module] = []
        for inputs, width in itertools.pairwise(widths):
            layers += [linear(inputs, width, gain=HIDDEN_GAIN, generator=self.generator), nn.Tanh()]
        last = linear(widths[-1], 1, gain=HEAD_GAIN, generator=self.generator)
        return nn.Sequential(*layers, last)

    def _value_of(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Return own values of all observations, [T + 1, B], and of the cut ones, [K]."""
        assert self.model.value is not None
        parts = (trajectory.observations, trajectory.cut_observations)
        values, cut_values = (
            self._unit * self.model.value(self.policy.prepared(part)).squeeze(-1) for part in parts
        )
        return values, cut_values


class ParametersOf(nn.Module):
    """The very parameters of a module, without its buffers.

    Running means and variances of observations are no weights: a strategy that steps beyond a mean,
    as momentum does, would make variances negative. Each member keeps its own; those of one task
    come to the same.
    """

    def __init__(self, module: nn.Module) -> None:
        """Hold the parameters of a module."""
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
