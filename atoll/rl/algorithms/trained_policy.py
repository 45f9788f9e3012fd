"""A policy with its optimizer, learning-rate schedule, generator and counters."""

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

IN_MAIN_MEMORY = torch.device("cpu")


class TrainedPolicy:
    """One policy that takes gradient steps; the base of every algorithm."""

    def __init__(
        self, task: TaskSpec, rl: RlTable, *, total_steps: int, seed: int,
        device: torch.device = IN_MAIN_MEMORY,
    ) -> None:  # fmt: skip
        """Build the policy of a task, which computes on `device`.

        The learning rate is zero after `total_steps` environment steps.
        """
        self.task, self.rl, self.total_steps = task, rl, total_steps
        self.generator = torch.Generator().manual_seed(seed)
        # Drawn in main memory, so that the weights are the same on every device.
        self.policy = Policy.build(task, rl, generator=self.generator).to(device)
        self._apart = [list(self.policy.parameters())]
        """Groups of parameters whose gradient norms are limited separately."""
        self.optimizer: Optimizer = adam(self._apart[0], lr=rl.lr)
        """May be replaced by one that wraps it and synchronizes members' policies."""
        self.version = 0
        """Number of updates."""
        self.steps = 0
        """Environment steps learned from."""

    @property
    def module(self) -> nn.Module:
        """The trained module."""
        return self.policy

    @property
    def rate(self) -> float:
        """The current learning rate."""
        return annealed(self.rl.lr, done=self.steps, total=self.total_steps, anneal=self.rl.anneal)

    def begin(self) -> float:
        """Set the learning rate of the next steps; return it."""
        rate = self.rate
        set_rate(self.optimizer, rate)
        return rate

    def descend(self, loss: Tensor) -> None:
        """Take one gradient step on a loss, with limited gradient norm."""
        for group in self._apart:  # a tenth of the cost of zero_grad
            for parameter in group:
                parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._apart:
            limit_gradients(group, max_norm=self.rl.max_norm)
        self.optimizer.step()

    def end(self, trajectories: Sequence[Trajectory], stats: Mapping[str, float]) -> None:
        """Count an update, and update the normalizer with its observations.

        Raises:
            LossNotFinite: the update made parameters not finite.
        """
        if not all(math.isfinite(value) for value in stats.values()):
            raise LossNotFinite(
                "an update made a policy's parameters not finite",
                given=f"policy {self.task.policy}, update {self.version + 1}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in stats.items()),
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
            DataError: they are not finite; nothing was learned.
        """
        wrong = (~torch.isfinite(advantages)).nonzero()
        if len(wrong):
            # Errors flow back in time, so the last step of the column is the cause.
            step, column = (int(n) for n in wrong[-1])
            raise DataError(
                "rewards or values are not finite",
                given=f"policy {self.task.policy}, step {step}, column {column}",
                expected="finite numbers",
                remedy="the trajectory was left out; look at the environment and at the critic",
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, as tensors only."""
        return {
            **prefixed("module", self.module.state_dict()),
            **prefixed("optimizer", optimizer_tensors(self.optimizer)),
            "generator": self.generator.get_state(),
            "version": torch.tensor(self.version),
            "steps": torch.tensor(self.steps),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            CheckpointCorrupt: it belongs to another network.
        """
        policy = f"policy {self.task.policy}"
        load_module(self.module, parts_of(state, "module"), what=policy)
        load_optimizer_tensors(self.optimizer, parts_of(state, "optimizer"))
        self.generator.set_state(state["generator"])
        self.version, self.steps = int(state["version"]), int(state["steps"])
