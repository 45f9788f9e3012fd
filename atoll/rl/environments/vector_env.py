"""Copies of an environment side by side: the columns of trajectories.

Every episode has a seed derived from its actor and its number, so the seed and the actions since
the reset identify its state. That is how columns are saved, and they are restored by replaying the
unfinished episodes.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.config.rl_tables import PolicyTable
from atoll.errors import ConfigError, ScriptError
from atoll.rl.environments.environment import Environment, make_environment
from atoll.rl.environments.spaces import CONTINUOUS

log = logging.getLogger(__name__)

Array = NDArray[Any]
LONGEST = 100_000
"""Most remembered steps of an episode; a longer one starts over when it is restored."""


@dataclass(slots=True)
class Rollout:
    """Arrays for T steps of B columns, filled step by step."""

    observations: Array
    """[T + 1, B, *shape], float32."""
    actions: Array
    """[T, B, width]."""
    rewards: Array
    """[T, B], float32."""
    terminated: Array
    """[T, B], bool."""
    truncated: Array
    """[T, B], bool."""
    states: Array | None
    """[T + 1, B, state], float32; None if the joint state is not needed."""
    cuts: list[tuple[int, int, Array, Array | None]] = field(default_factory=list)
    """Step, column, last observation and last joint state of each truncation."""
    returns: list[float] = field(default_factory=list)
    """Returns of the episodes that ended, each the mean over the agents."""


class VectorEnv:
    """Environments of one policy, stepped together; each restarts when its episode ends.

    Args:
        table: The policy's table, which names the environment.
        count: Number of environments; each has as many columns as agents.
        seed: The job's seed.
        policy: Index of the policy in the job.
        actor: Index of the actor among the policy's.
        joint: Whether the joint state is collected as well.

    Raises:
        ConfigError: the environment cannot be made.
    """

    def __init__(
        self, table: PolicyTable, *, count: int, seed: int, policy: int = 0, actor: int = 0,
        joint: bool = False,
    ) -> None:  # fmt: skip
        self.environments: list[Environment] = []
        with ExitStack() as after_error:
            after_error.callback(self.close)
            for _ in range(count):
                self.environments.append(make_environment(table))
            self._set_up(table, count=count, joint=joint, identity=(seed, policy, actor))
            after_error.pop_all()

    def _set_up(
        self, table: PolicyTable, *, count: int, joint: bool, identity: tuple[int, int, int]
    ) -> None:
        """Begin the first episode of every environment."""
        one = self.environments[0]
        self.agents, self.actions, self.joint = one.agents, one.actions, joint
        self.count = count * one.agents
        """Columns: environments times agents."""
        self.observation = one.observation
        self.state = (one.state_width,) if joint else ()
        self.unrepeatable = 0
        """Episodes whose replay ended in another observation."""
        self._name = table.name
        self._identity = identity
        self._rows = [slice(e * self.agents, (e + 1) * self.agents) for e in range(count)]
        self._episodes = [0] * count
        self._lost = [False] * count
        self._returns = np.zeros(self.count, dtype=np.float64)
        self._log: Array = np.zeros((1024, self.count, self.actions.width), self.action_type)
        self._now = 0
        self._since = [0] * count
        self._observations: Array = np.zeros((self.count, *self.observation), dtype=np.float32)
        self._states: Array = np.zeros((self.count, *self.state), dtype=np.float32)
        for e in range(count):
            self._begin(e)

    @property
    def action_type(self) -> Any:
        """Numpy dtype of stored actions."""
        return np.float32 if self.actions.kind == CONTINUOUS else np.int64

    @property
    def episodes(self) -> int:
        """Number of finished episodes."""
        return sum(self._episodes) - len(self._episodes)

    def room(self, length: int) -> Rollout:
        """Return arrays for `length` steps, with the first observations filled in."""
        shape = (length, self.count)
        states = np.empty((length + 1, self.count, *self.state), np.float32) if self.joint else None
        room = Rollout(
            observations=np.empty((length + 1, self.count, *self.observation), np.float32),
            actions=np.empty((*shape, self.actions.width), self.action_type),
            rewards=np.empty(shape, np.float32), terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_), states=states,
        )  # fmt: skip
        room.observations[0] = self._observations
        if states is not None:
            states[0] = self._states
        return room

    def step(self, room: Rollout, step: int) -> None:
        """Do one step in all columns, by `room.actions[step]`.

        Raises:
            ScriptError: an environment raised.
        """
        actions, rewards = room.actions[step], room.rewards[step]
        following = room.observations[step + 1]
        self._remember(actions)
        ended = []
        for e, (environment, rows) in enumerate(zip(self.environments, self._rows, strict=True)):
            try:
                observation, reward, terminated, truncated, over = environment.step(actions[rows])
                following[rows] = observation
                rewards[rows] = reward
            except Exception as error:
                raise self._raised(error, e, step) from error
            if over:
                room.terminated[step, rows] = terminated
                room.truncated[step, rows] = truncated
                ended.append(e)
        self._returns += rewards
        # Views of the rollout's arrays: copied only at a save, where it is needed.
        self._observations = following
        if room.states is not None:
            self._states = room.states[step + 1]
            for environment, rows in zip(self.environments, self._rows, strict=True):
                self._states[rows] = environment.joint_state()
        for e in ended:
            self._end(room, step, e)

    def restart(self, column: int) -> None:
        """Start a new episode in the environment of a column."""
        # Copy: they may be views of a trajectory that was already returned.
        self._observations, self._states = self._observations.copy(), self._states.copy()
        self._begin(column // self.agents)

    def close(self) -> None:
        """Close the environments."""
        with ExitStack() as closing:  # the others are closed also if one raises
            for environment in self.environments:
                closing.callback(environment.close)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the unfinished episodes: numbers, actions since the reset, and observations."""
        lengths = [0 if lost else self._now - since for lost, since in self._lives()]
        actions = [
            self._log[self._now - length : self._now, rows].reshape(-1)
            for length, rows in zip(lengths, self._rows, strict=True)
        ]
        return {
            "episodes": torch.tensor(self._episodes),
            "lengths": torch.tensor(lengths),
            "lost": torch.tensor(self._lost),
            "actions": torch.from_numpy(np.concatenate(actions).copy()),
            "observations": torch.from_numpy(self._observations.copy()),
            "returns": torch.from_numpy(self._returns.copy()),
            "unrepeatable": torch.tensor(self.unrepeatable),
        }

    def load_state_dict(self, saved: dict[str, Tensor]) -> list[int]:
        """Replay the saved episodes up to where they were.

        Returns:
            The columns that start a new episode because their replay failed; they are logged and
            counted in `unrepeatable`.

        Raises:
            ConfigError: the state has another number of environments.
            ScriptError: an environment raised.
        """
        lengths, lost = saved["lengths"].tolist(), saved["lost"].tolist()
        if len(lengths) != len(self.environments):
            raise ConfigError(
                "the saved state of an actor does not fit", given=f"{len(lengths)} environments",
                expected=f"{len(self.environments)}, as many as `environments` in [rl]",
            )  # fmt: skip
        self._episodes = saved["episodes"].tolist()
        self.unrepeatable = int(saved["unrepeatable"])
        self._now = max(lengths)
        self._log = np.zeros((max(1024, 2 * self._now), *self._log.shape[1:]), self.action_type)
        self._observations, self._states = self._observations.copy(), self._states.copy()
        self._returns = saved["returns"].numpy().copy()
        where = 0
        anew: list[int] = []
        for e, (length, rows) in enumerate(zip(lengths, self._rows, strict=True)):
            size = length * self.agents * self.actions.width
            actions = saved["actions"][where : where + size].numpy()
            where += size
            self._since[e], self._lost[e] = self._now - length, False
            self._log[self._now - length : self._now, rows] = actions.reshape(
                length, self.agents, self.actions.width
            )
            right = saved["observations"][rows].numpy()
            try:
                same = not lost[e] and self._lived_again(e, right)
            except Exception as error:
                raise self._raised(error, e, 0) from error
            if not same:
                self._warn(e, too_long=lost[e])
                self._begin(e)
                anew.extend(range(rows.start, rows.stop))
        return anew

    def _lived_again(self, e: int, right: Array) -> bool:
        """Replay the episode of an environment; return whether it led to the same observation."""
        environment, rows = self.environments[e], self._rows[e]
        observation: Array = np.empty_like(right)
        observation[:] = environment.reset(self._seed(e))
        for step in range(self._since[e], self._now):
            observed, _, _, _, over = environment.step(self._log[step, rows])
            if over:
                return False
            observation[:] = observed
        self._observations[rows] = observation
        if self.joint:
            self._states[rows] = environment.joint_state()
        return bool(np.array_equal(observation, right))

    def _warn(self, e: int, *, too_long: bool) -> None:
        self.unrepeatable += 1
        log.warning(
            "policy %s: the episode of environment %d %s; a new one starts", self._name, e,
            f"is longer than {LONGEST} steps and was not saved" if too_long else
            "differed when it was replayed, so the environment does not depend on "
            "seed and actions alone",
        )  # fmt: skip

    def _begin(self, e: int) -> None:
        """Start the next episode of an environment."""
        rows = self._rows[e]
        self._episodes[e] += 1
        self._since[e], self._lost[e] = self._now, False
        self._returns[rows] = 0.0
        try:
            self._observations[rows] = self.environments[e].reset(self._seed(e))
        except Exception as error:
            raise self._raised(error, e, 0) from error
        if self.joint:
            self._states[rows] = self.environments[e].joint_state()

    def _end(self, room: Rollout, step: int, e: int) -> None:
        """Record the end of an episode, and start the next one."""
        rows = self._rows[e]
        for column in range(rows.start, rows.stop):
            if room.truncated[step, column]:
                state = self._states[column].copy() if self.joint else None
                room.cuts.append((step, column, self._observations[column].copy(), state))
        room.returns.append(float(self._returns[rows].mean()))
        self._begin(e)

    def _seed(self, e: int) -> int:
        return episode_seed(*self._identity, e, self._episodes[e])

    def _lives(self) -> list[tuple[bool, int]]:
        return list(zip(self._lost, self._since, strict=True))

    def _remember(self, actions: Array) -> None:
        """Append the actions of one step; forget those of finished episodes."""
        if self._now == len(self._log):
            oldest = min((since for lost, since in self._lives() if not lost), default=self._now)
            if self._now - oldest > LONGEST:
                for e, since in enumerate(self._since):
                    self._lost[e] = self._lost[e] or self._now - since > LONGEST
                oldest = min(
                    (since for lost, since in self._lives() if not lost), default=self._now
                )
            kept = self._log[oldest : self._now]
            grown = np.zeros((max(1024, 2 * len(kept)), *kept.shape[1:]), kept.dtype)
            grown[: len(kept)] = kept
            self._since = [since - oldest for since in self._since]
            self._log, self._now = grown, len(kept)
        self._log[self._now] = actions
        self._now += 1

    def _raised(self, error: Exception, e: int, step: int) -> ScriptError:
        """Return an environment's error with the place where it happened."""
        return ScriptError(
            "an environment raised",
            given=f"policy {self._name}, step {step}, environment {e}, episode "
            f"{self._episodes[e]} (seed {self._seed(e)}): {type(error).__name__}: {error}",
            remedy="fix the environment: this episode can be repeated with its seed",
        )


def episode_seed(seed: int, policy: int, actor: int, environment: int, episode: int) -> int:
    """Return the seed of one episode, from 0 to 2^31 - 1; collisions are possible but rare."""
    words = f"{seed} {policy} {actor} {environment} {episode}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little") >> 1
