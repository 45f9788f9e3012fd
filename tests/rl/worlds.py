"""Small environments whose every number is known: for tests of who lives in them."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Seen = tuple[Any, float, bool, bool, dict[str, Any]]


class Counter(gymnasium.Env[Any, Any]):
    """Observes [steps since the reset, a number drawn at the reset, the last action].

    The reward of a step is its number; the episode ends after `length` steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def __init__(
        self, *, length: int = 5, cut: bool = False, bad_reward: int = 0, bad_seen: int = 0,
        raises: int = 0, forgetful: bool = False, render_mode: str | None = None,
    ) -> None:  # fmt: skip
        """Set what happens, and the steps at which something goes wrong; 0: never."""
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.cut, self.forgetful = length, cut, forgetful
        self.bad_reward, self.bad_seen, self.raises = bad_reward, bad_seen, raises
        self.render_mode = render_mode
        self.now, self.drawn, self.last = 0, 0.0, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now, self.last = 0, -1
        self.drawn = random.random() if self.forgetful else float(self.np_random.random())
        return self._seen(), {}

    def step(self, action: int) -> Seen:
        self.now, self.last = self.now + 1, action
        if self.now == self.raises:
            raise ZeroDivisionError("the world ends here")
        over = self.now == self.length
        reward = float("nan") if self.now == self.bad_reward else float(self.now)
        return self._seen(), reward, over and not self.cut, over and self.cut, {}

    def render(self) -> Any:
        picture = np.zeros((400, 640, 3), np.uint8)
        picture[:, : 640 * self.now // self.length] = (200, 40, 40)
        return picture

    def _seen(self) -> Any:
        first = float("inf") if self.now and self.now == self.bad_seen else self.now
        return np.array([first, self.drawn, self.last], np.float32)


def counter(**options: Any) -> Counter:
    return Counter(**options)


def bare(*, length: int = 5) -> Counter:
    """Take no render_mode."""
    return Counter(length=length)


class Spaced(gymnasium.Env[Any, Any]):
    """An environment of any spaces, which gives samples and keeps the last action."""

    def __init__(self, seen: spaces.Space[Any], done: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = seen, done
        self.done: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Seen:
        self.done = action
        return self.observation_space.sample(), 1.0, False, False, {}


def spaced(*, seen: Any = None, done: Any = None) -> Spaced:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    return Spaced(box if seen is None else seen, spaces.Discrete(2) if done is None else done)


class Pair:
    """Two agents that act at the same time; each observes [its number, steps, all actions]."""

    metadata = {"render_fps": 10}  # noqa: RUF012
    render_mode = None

    def __init__(
        self, *, length: int = 4, apart: bool = False, wider: bool = False, own_state: bool = False
    ) -> None:
        """Say whether they end apart, whether the second sees more, and whether it has a state."""
        self.possible_agents = ["left", "right"]
        self.length, self.apart, self.wider = length, apart, wider
        if own_state:
            self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.now, self.actions, self.rewards = 0, [0, 0], {"left": 1.0, "right": 10.0}

    def observation_space(self, agent: str) -> spaces.Box:
        width = 4 + (self.wider and agent == "right")
        return spaces.Box(-np.inf, np.inf, (width,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.now, self.actions = 0, [0, 0]
        return self._seen(), {}

    def step(self, actions: dict[str, int]) -> tuple[Any, Any, Any, Any, Any]:
        self.now, self.actions = self.now + 1, [actions["left"], actions["right"]]
        over = self.now == self.length
        terminated = {"left": over, "right": over and not self.apart}
        return self._seen(), self.rewards, terminated, {"left": False, "right": False}, {}

    def state(self) -> Any:
        return np.array([self.now, -self.now], np.float32)

    def close(self) -> None:
        """Hold nothing."""

    def _seen(self) -> dict[str, Any]:
        return {
            agent: np.array([i, self.now, *self.actions], np.float32)
            for i, agent in enumerate(self.possible_agents)
        }


def pair(**options: Any) -> Pair:
    return Pair(**options)


def failing() -> None:
    raise ValueError("no such world")
