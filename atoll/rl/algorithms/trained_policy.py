"""A policy with what trains it: optimizer, schedule, generator, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.config.rl_tables import RlTable
from atoll.errors import DataError, LossNotFinite
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.optimizer import (
    adam,
    annealed,
    limit_gradients,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
)
from atoll.rl.nets.policy import Policy
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory


class TrainedPolicy:
    """What every algorithm has: one policy, taking gradient steps."""

    def __init__(self, task: TaskSpec, rl: RlTable, *, total_steps: int, seed: int) -> None:
        """Build the policy of a task.

        Args:
            task: Whose policy.
            rl: Every number of the algorithm.
            total_steps: Environment steps at whose end the learning rate is zero.
            seed: Of the weights it starts from and of every random choice in learning.
        """
        self.task, self.rl, self.total_steps = task, rl, total_steps
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = Policy.build(task, rl, generator=self.generator)
        self._apart = [list(self.policy.parameters())]
        """Parameters whose gradients are limited together."""
        self.optimizer: Optimizer = adam(self._apart[0], lr=rl.lr)
        """May be replaced by one that wraps it, so that several members' policies agree."""
        self.version = 0
        """Updates so far."""
        self.steps = 0
        """Environment steps learned from so far."""

    @property
    def module(self) -> nn.Module:
        """What the optimizer changes, in one module."""
        return self.policy

    @property
    def rate(self) -> float:
        """The learning rate at this point of the run."""
        return annealed(self.rl.lr, done=self.steps, total=self.total_steps, anneal=self.rl.anneal)

    def begin(self) -> float:
        """Set the learning rate of the steps that follow; return it."""
        rate = self.rate
        set_rate(self.optimizer, rate)
        return rate

    def descend(self, loss: Tensor) -> None:
        """Take one step down the gradient of a loss, its norm limited."""
        for group in self._apart:  # a tenth of what the optimizer's own method takes
            for parameter in group:
                parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._apart:
            limit_gradients(group, max_norm=self.rl.max_norm)
        self.optimizer.step()

    def end(self, trajectories: Sequence[Trajectory], told: Mapping[str, float]) -> None:
        """Count an update as done; only now the normaliser takes its observations in.

        Args:
            trajectories: What was learned from.
            told: What is told about the update.

        Raises:
            LossNotFinite: the update made the policy so.
        """
        if not all(math.isfinite(value) for value in told.values()):
            raise LossNotFinite(
                "an update of a policy went to numbers that are not finite",
                given=f"policy {self.task.policy}, update {self.version + 1}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in told.items()),
                remedy="lower lr in [rl], or normalise observations",
            )
        for trajectory in trajectories:
            if self.policy.norm is not None:
                self.policy.norm.update(trajectory.observations[:-1])
            self.steps += trajectory.steps
        self.version += 1

    def check_advantages(self, advantages: Tensor) -> None:
        """Refuse to learn from advantages [T, B] that are not finite.

        Raises:
            DataError: they are not; nothing was learned.
        """
        wrong = (~torch.isfinite(advantages)).nonzero()
        if len(wrong):
            # Errors flow back in time: the last step of the column is where it comes from.
            step, column = (int(n) for n in wrong[-1])
            raise DataError(
                "rewards or values are not finite",
                given=f"policy {self.task.policy}, step {step}, column {column}",
                expected="finite numbers",
                remedy="the trajectory was left out; look at the environment and at the critic",
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, as tensors alone."""
        return {
            **prefixed("module", self.module.state_dict()),
            **prefixed("optimizer", optimizer_tensors(self.optimizer)),
            "generator": self.generator.get_state(),
            "version": torch.tensor(self.version),
            "steps": torch.tensor(self.steps),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            CheckpointCorrupt: it is of another network.
        """
        policy = f"policy {self.task.policy}"
        load_module(self.module, parts_of(state, "module"), what=policy)
        load_optimizer_tensors(self.optimizer, parts_of(state, "optimizer"))
        self.generator.set_state(state["generator"])
        self.version, self.steps = int(state["version"]), int(state["steps"])
