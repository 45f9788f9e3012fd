"""PettingZoo environments whose agents act at the same time.

They have its parallel interface: `reset` and `step` use dictionaries by agent. The agents share one
policy, and each is a column of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError, DataError
from atoll.rl.environments.flat import actions_of, observations_of, render_frame

Array = NDArray[Any]


def is_parallel(environment: Any) -> bool:
    """Return whether `environment` has several agents that act at the same time.

    Raises:
        ConfigError: its agents take turns, which is not supported.
    """
    if not hasattr(environment, "possible_agents"):
        return False
    if hasattr(environment, "agent_iter"):
        raise ConfigError(
            "agents that take turns are not supported", given=str(environment),
            expected="an environment with agents that act at the same time",
            remedy="name its parallel_env, e.g. mpe2.simple_spread_v3:parallel_env",
        )  # fmt: skip
    return True


class ManyAgents:
    """A parallel environment; its agents, in the order it lists them, are rows.

    `name` is its name in error messages.

    Raises:
        ConfigError: its agents have different observations or actions.
    """

    def __init__(self, environment: Any, *, name: str) -> None:
        self._environment, self._name = environment, name
        self._names: list[str] = list(environment.possible_agents)
        self.agents = len(self._names)
        spaces = [
            (environment.observation_space(agent), environment.action_space(agent))
            for agent in self._names
        ]
        made = [
            (
                observations_of(observed, name=f"{name}, agent {agent}"),
                actions_of(acted, name=f"{name}, agent {agent}"),
            )
            for agent, (observed, acted) in zip(self._names, spaces, strict=True)
        ]
        widths, actions = [seen[0] for seen, _ in made], [acted[0] for _, acted in made]
        if len(set(widths)) > 1 or len(set(actions)) > 1:
            raise self._mismatch(widths, [str(acted) for _, acted in spaces])
        self.observation: tuple[int, ...] = (widths[0],)
        self.actions = actions[0]
        self._flat = [seen[1] for seen, _ in made]
        self._to_action = [acted[1] for _, acted in made]
        self.frames_per_s = float(environment.metadata.get("render_fps") or 10)
        self._last: Array = np.zeros((self.agents, widths[0]), np.float32)
        self._read_state: Callable[[], Any] | None = _own_state(environment)
        state = self._read_state and getattr(environment, "state_space", None)
        self.state_width = int(np.prod(state.shape)) if state is not None else self._last.size

    def reset(self, seed: int) -> Array:
        """Start an episode that depends on the seed alone."""
        observations, _ = self._environment.reset(seed=seed)
        return self._rows_of(observations)

    def step(self, actions: Array) -> tuple[Array, Any, Any, Any, bool]:
        """Do one step of all agents.

        Raises:
            DataError: some agents ended and others did not.
        """
        chosen = {
            agent: to_action(row)
            for agent, to_action, row in zip(self._names, self._to_action, actions, strict=True)
        }
        observations, rewards, terminations, truncations, _ = self._environment.step(chosen)
        terminated = np.array([bool(terminations[agent]) for agent in self._names])
        truncated = np.array([bool(truncations[agent]) for agent in self._names]) & ~terminated
        ended = terminated | truncated
        if ended.any() and not ended.all():
            gone = [agent for agent, over in zip(self._names, ended, strict=True) if over]
            raise DataError(
                f"agents of {self._name} do not end together",
                given=f"{', '.join(gone)} of {self.agents} ended",
                expected="an episode that is over for all of them at once",
                remedy="let the environment keep a finished agent, with an observation of "
                "zeros and no reward, until all are",
            )
        return (
            self._rows_of(observations), [rewards[agent] for agent in self._names], terminated,
            truncated, bool(ended.any()),
        )  # fmt: skip

    def joint_state(self) -> Array:
        """Return the environment's joint state, or else all observations in the order of agents."""
        if self._read_state is None:
            return self._last.reshape(-1)
        return np.asarray(self._read_state(), dtype=np.float32).reshape(-1)

    def render(self) -> Array | None:
        """Return a frame."""
        return render_frame(self._environment)

    def close(self) -> None:
        """Release its resources."""
        self._environment.close()

    def _rows_of(self, observations: Mapping[str, Any]) -> Array:
        """Return observations by agent as [agents, width]."""
        rows: Array = np.empty_like(self._last)
        for row, agent, flat in zip(rows, self._names, self._flat, strict=True):
            row[:] = flat(observations[agent])
        self._last = rows
        return rows

    def _mismatch(self, widths: list[int], actions: list[str]) -> ConfigError:
        """Return the error for agents that cannot share a policy."""
        said = [
            f"{agent}: {width} numbers, {acted}"
            for agent, width, acted in zip(self._names, widths, actions, strict=True)
        ]
        return ConfigError(
            f"the agents of {self._name} cannot share a policy", given="; ".join(said),
            expected="the same observations and actions for each",
            remedy="wrap the environment so that they are padded to the same",
        )  # fmt: skip


def _own_state(environment: Any) -> Callable[[], Any] | None:
    """Return the environment's function for the joint state, if it has one."""
    if getattr(environment, "state_space", None) is None:
        return None
    state: Callable[[], Any] = environment.state
    return state
