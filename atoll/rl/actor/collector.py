"""Collect trajectories: step a policy in its environments and record what happens."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import DataError
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.environments.vector_env import Rollout, VectorEnv
from atoll.rl.nets.distributions import ActionSampler
from atoll.rl.nets.policy import RunningNorm
from atoll.rl.trajectory import Trajectory


class Acting(Protocol):
    """The part of a policy that a collector needs."""

    norm: RunningNorm | None

    @property
    def log_deviation(self) -> Tensor | None:
        """[d], for continuous actions."""
        ...

    def put_out(
        self, observations: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs in states [B, *shape], and the recurrent state after them."""
        ...

    def initial(self, columns: int) -> Tensor | None:
        """Return the initial recurrent state, [B, H]."""
        ...

    def forget(self, hidden: Tensor | None, ended: Tensor) -> Tensor | None:
        """Return `hidden`, reset wherever an episode ended ([B], bool)."""
        ...


class Collector:
    """Collects the trajectories of one actor.

    `actor` is its name in trajectories, e.g. `w1`; `seed` decides the actions.
    """

    def __init__(
        self, columns: VectorEnv, task: TaskSpec, *, actor: str = "", seed: int = 0
    ) -> None:  # fmt: skip
        self.columns, self.task, self.actor = columns, task, actor
        self.sequence = 0
        """Number of the last trajectory."""
        self.steps = 0
        """Environment steps, with those of dropped trajectories."""
        self.not_finite = 0
        """Trajectories dropped because a value was not finite."""
        self._generator = torch.Generator().manual_seed(seed)
        self._hidden: Tensor | None = None

    def collect(self, policy: Acting, length: int) -> Trajectory:
        """Return the next `length` steps of every column.

        The policy must not change meanwhile; its normalizer is used, not updated.

        Raises:
            DataError: a value is NaN or infinite; the policy, the step and the column are named.
                The trajectory is dropped and counted in `not_finite`, and that column starts a new
                episode: collecting may continue.
            ScriptError: an environment raised.
        """
        if self._hidden is None:
            self._hidden = policy.initial(self.columns.count)
        before = None if self._hidden is None else self._hidden.to("cpu", copy=True)
        room = self.columns.room(length)
        sampler = ActionSampler(
            self.task.actions, policy.log_deviation, length=length, columns=self.columns.count,
            generator=self._generator,
        )  # fmt: skip
        self._live(policy, room, sampler)
        log_probabilities = sampler.log_probabilities(torch.from_numpy(room.actions))
        # In causal order, so that the cause is named; once per trajectory, since a check at every
        # step would cost a few per cent.
        self._check("observations", room.observations)
        self._check_cuts(room)
        if room.states is not None:
            self._check("joint states", room.states)
        self._check("rewards", room.rewards)
        self._check("log-probabilities of actions", log_probabilities.numpy())
        self.sequence += 1
        return self._trajectory(room, log_probabilities, before, policy.norm)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next trajectory depends on, except the policy."""
        saved = {f"columns.{k}": v for k, v in self.columns.state_dict().items()}
        saved["counts"] = torch.tensor([self.sequence, self.steps, self.not_finite])
        saved["generator"] = self._generator.get_state()
        if self._hidden is not None:
            saved["hidden"] = self._hidden.clone()
        return saved

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Load a saved state; the continuation is exact if the environment is deterministic."""
        anew = self.columns.load_state_dict(
            {k.removeprefix("columns."): v for k, v in saved.items() if k.startswith("columns.")}
        )
        self.sequence, self.steps, self.not_finite = saved["counts"].tolist()
        self._generator.set_state(saved["generator"])
        self._hidden = saved["hidden"].clone() if "hidden" in saved else None
        self._forget(anew)

    def _live(self, policy: Acting, room: Rollout, sampler: ActionSampler) -> None:
        """Fill the rollout step by step."""
        observed = torch.from_numpy(room.observations).unbind(0)
        chosen = torch.from_numpy(room.actions).unbind(0)
        floats = chosen[0].is_floating_point()
        with torch.inference_mode():
            for step in range(len(chosen)):
                output, hidden = policy.put_out(observed[step], self._hidden)
                chosen[step].copy_(sampler.choose(step, output))
                if floats and not np.isfinite(room.actions[step]).all():
                    # An environment may crash on such an action, so look for the cause now.
                    self._check("observations", room.observations[: step + 1])
                    self._check("actions", room.actions[: step + 1])
                self.columns.step(room, step)
                self.steps += self.columns.count
                if hidden is not None:
                    ended = torch.from_numpy(room.terminated[step] | room.truncated[step])
                    self._hidden = policy.forget(hidden, ended)

    def _trajectory(
        self, room: Rollout, log_probabilities: Tensor, hidden: Tensor | None,
        norm: RunningNorm | None,
    ) -> Trajectory:  # fmt: skip
        """Return a rollout as a trajectory, which shares its arrays."""
        cuts = room.cuts
        at = torch.tensor([cut[:2] for cut in cuts], dtype=torch.int64).reshape(-1, 2)
        return Trajectory(
            policy=self.task.policy,
            observations=torch.from_numpy(room.observations),
            actions=torch.from_numpy(room.actions),
            log_probabilities=log_probabilities,
            rewards=torch.from_numpy(room.rewards),
            terminated=torch.from_numpy(room.terminated),
            truncated=torch.from_numpy(room.truncated),
            cut_at=at,
            cut_observations=_stacked([cut[2] for cut in cuts], self.columns.observation),
            states=None if room.states is None else torch.from_numpy(room.states),
            cut_states=None if room.states is None else _stacked(
                [cut[3] for cut in cuts if cut[3] is not None], self.columns.state
            ),
            hidden=hidden,
            scale=None if norm is None else _in_main_memory(norm.scale()),
            sequence=self.sequence,
            actor=self.actor,
            returns=room.returns,
        )  # fmt: skip

    def _check(self, what: str, values: NDArray[Any]) -> None:
        """Drop the trajectory if a value [T, B, ...] is not finite."""
        finite = np.isfinite(values)
        if not finite.all():
            self._drop(what, np.argwhere(~finite.reshape(*finite.shape[:2], -1).all(-1)))

    def _check_cuts(self, room: Rollout) -> None:
        """Drop the trajectory if the last observation of a truncated episode is not finite."""
        wrong = [
            (step, column) for step, column, seen, state in room.cuts
            if not (np.isfinite(seen).all() and (state is None or np.isfinite(state).all()))
        ]  # fmt: skip
        if wrong:
            self._drop("last observations of episodes", np.array(wrong))

    def _drop(self, what: str, places: NDArray[Any]) -> NoReturn:
        """Drop this trajectory, and restart the episodes with wrong values.

        `places` [N, 2] are the steps and columns of the values, the first one first.
        """
        agents, first = self.columns.agents, places[0]
        for environment in sorted({int(column) // agents for column in places[:, 1]}):
            self.columns.restart(environment * agents)
            self._forget(list(range(environment * agents, (environment + 1) * agents)))
        self.not_finite += 1
        raise DataError(
            f"{what} are not finite",
            given=f"policy {self.task.policy}, actor {self.actor or '?'}, trajectory "
            f"{self.sequence + 1}, step {int(first[0])}, column {int(first[1])}",
            expected="finite numbers",
            remedy="look at the environment (or at the learning rate, if it is the actions); the "
            "trajectory was dropped, and the column starts a new episode",
        )

    def _forget(self, columns: list[int]) -> None:
        """Reset the recurrent state of columns that start a new episode."""
        if self._hidden is not None and columns:
            self._hidden = self._hidden.clone()
            self._hidden[columns] = 0.0


def _in_main_memory(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].cpu(), pair[1].cpu()


def _stacked(parts: list[NDArray[Any]], shape: tuple[int, ...]) -> Tensor:
    """Return arrays of one shape as [K, *shape]."""
    return torch.from_numpy(np.stack(parts)) if parts else torch.empty(0, *shape)
