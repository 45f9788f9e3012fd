"""A3C: each member computes gradients on its own trajectories, and an outer strategy shares them.

Asynchronous Methods for Deep Reinforcement Learning, algorithm S3
(https://arxiv.org/abs/1602.01783): n-step returns, one gradient per trajectory, applied to
parameters that other members change at the same time. The strategy wraps `optimizer`, e.g. with
`async-sgd`.

Differs from the paper:
  * Adam instead of RMSProp, and policy and value share no layers;
  * values are learned in units of 1 / (1 - γ);
  * advantages are standardised, so that the size of rewards does not matter;
  * the values may be the pooled critic's: then only the policy has gradients.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from atoll.config.rl_tables import RlTable
from atoll.devices.optimizers import has_fused
from atoll.rl.algorithms.losses import (
    explained_variance,
    n_step,
    policy_gradient_loss,
    standardised,
    value_loss,
)
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY, TrainedPolicy
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.optimizer import EPSILON
from atoll.rl.nets.policy import HEAD_GAIN, HIDDEN_GAIN, Policy, linear
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

LARGEST_DISCOUNT = 0.999
"""Limit of γ in the unit of values, which would be infinite without discounting."""


class ActorCritic(nn.Module):
    """A policy, and its own value network if it has one."""

    def __init__(self, policy: Policy, value: nn.Sequential | None) -> None:
        super().__init__()
        self.policy, self.value = policy, value


class A3c(TrainedPolicy):
    """One policy that takes a gradient step per trajectory, by n-step returns.

    With the critic `own` (or `none`) it has a value network trained by the same steps.
    """

    def __init__(
        self, task: TaskSpec, rl: RlTable, *, total_steps: int, seed: int,
        device: torch.device = IN_MAIN_MEMORY,
    ) -> None:  # fmt: skip
        """Build the policy, and its values if they are its own; see `TrainedPolicy`."""
        super().__init__(task, rl, total_steps=total_steps, seed=seed, device=device)
        # The value of a reward of 1 at every step. In this unit values are near 1; a network would
        # need thousands of steps to reach 100. All members derive the same unit.
        self._unit = 1.0 / (1.0 - min(task.gamma, LARGEST_DISCOUNT))
        value = self._values(task, rl) if rl.critic in ("own", "none") else None
        self.model = ActorCritic(self.policy, value).to(device)
        """What the optimizer changes: wrap it together with `optimizer`."""
        if value is not None:
            # A norm limit of its own, because the size of rewards scales only the values'
            # gradients.
            self._apart.append(list(value.parameters()))
            groups = [
                {"params": group, "lr": lr}
                for group, lr in zip(self._apart, (rl.lr, rl.critic_lr), strict=True)
            ]
            self.optimizer = torch.optim.Adam(groups, eps=EPSILON, fused=has_fused(device))

    @property
    def module(self) -> nn.Module:
        """Everything that is trained."""
        return self.model

    def improve(
        self, trajectory: Trajectory, valued: ValuedTrajectory | None = None
    ) -> dict[str, float]:
        """Take one gradient step; return its figures.

        Args:
            trajectory: Experience of the policy, possibly a few updates old.
            valued: The values of another critic; ignored with own values.

        Returns:
            `policy_loss`, `entropy`, `explained_variance`, `lr`, and `value_loss` of own values.

        Raises:
            DataError: rewards or values are not finite; nothing was learned.
            LossNotFinite: the step made parameters not finite.
        """
        device = self.policy.device
        trajectory = trajectory.to(device)
        own = self._value_of(trajectory) if self.model.value is not None else None
        if own is not None:
            values, cut_values = (part.detach() for part in own)
        else:
            assert valued is not None, "values of another critic are needed"
            there = valued.to(device)
            values, cut_values = there.values, there.cut_values
        steps = trajectory.with_values(values, cut_values)
        advantages, returns = n_step(steps, gamma=self.task.gamma)
        self.check_advantages(advantages)
        rate = self.begin()
        log_probabilities, entropy = self.policy.evaluate(trajectory)
        policy_loss = policy_gradient_loss(log_probabilities, standardised(advantages)).mean()
        loss = policy_loss - self.rl.entropy * entropy.mean()
        stats = {
            "policy_loss": float(policy_loss.detach()),
            "entropy": float(entropy.detach().mean()),
            "explained_variance": float(explained_variance(values[:-1], returns)),
            "lr": rate,
        }
        if own is not None:
            errors = value_loss(own[0][:-1] / self._unit, returns / self._unit).mean()
            stats["value_loss"] = float(errors.detach())
            loss = loss + errors
        self.descend(loss)
        self.end([trajectory], stats)
        return stats

    def begin(self) -> float:
        """Set the learning rates of the next step; return the policy's."""
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
        """Return own values of all observations, [T + 1, B], and of the truncated ones, [K]."""
        assert self.model.value is not None
        parts = (trajectory.observations, trajectory.cut_observations)
        values, cut_values = (
            self._unit * self.model.value(self.policy.prepared(part)).squeeze(-1) for part in parts
        )
        return values, cut_values


class ParametersOf(nn.Module):
    """The parameters of a module, shared with it, without its buffers.

    Running statistics of observations must not be synchronized: a strategy that extrapolates, e.g.
    with momentum, would make variances negative. Each member keeps its own; those of one task
    converge.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
