"""Environments, made by name, with flat arrays as observations and actions.

Observations become float32 vectors; actions are rows of integers or of floats. The agents of a
multi-agent environment are columns (see :mod:`atoll.rl.environments.multi_agent`).
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import AtollError, ConfigError
from atoll.rl.environments.flat import actions_of, observations_of, render_frame
from atoll.rl.environments.multi_agent import ManyAgents, is_parallel
from atoll.rl.environments.spaces import Actions, TaskSpec

Array = NDArray[Any]

EXTRAS = {
    "gymnasium": "rl", "pygame": "rl", "pil": "rl", "box2d": "box2d", "swig": "box2d",
    "mujoco": "mujoco", "imageio": "mujoco",
}  # fmt: skip
"""Package that may be missing, in lower case, to the extra of atoll that installs it."""


class Environment(Protocol):
    """One environment; its agents are rows."""

    observation: tuple[int, ...]
    """Shape of one agent's flat observation."""
    actions: Actions
    """The action space of one agent."""
    agents: int
    state_width: int
    """Width of the joint state."""
    frames_per_s: float
    """Steps per second of simulated time, for recordings."""

    def reset(self, seed: int) -> Array:
        """Start an episode that depends on the seed alone; return observations as `step` does."""
        ...

    def step(self, actions: Array) -> tuple[Array, Any, Any, Any, bool]:
        """Do one step.

        Args:
            actions: [agents, width], as sampled: the environment clips them.

        Returns:
            Observations [agents, *observation], without the first axis for one agent; rewards,
            terminated and truncated, each a number or an array [agents]; and whether the episode
            is over.
        """
        ...

    def joint_state(self) -> Array:
        """Return the joint state after the last reset or step, [state_width]."""
        ...

    def render(self) -> Array | None:
        """Return a frame [height, width, 3] in bytes; None if the environment cannot render."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


def make_environment(table: PolicyTable, *, render: bool = False) -> Environment:
    """Return a new environment of a policy.

    `table` names it by Gymnasium's name or `module:factory`; `render` allows to request frames.

    Raises:
        ConfigError: the environment does not exist, a package is missing (its extra is named), an
            option is wrong, or the spaces are not supported.
    """
    try:
        with warnings.catch_warnings():
            # Box2D's compiled types warn on import; with warnings as errors that aborts the
            # process.
            warnings.simplefilter("ignore", DeprecationWarning)
            made = _made(table, {"render_mode": "rgb_array"} if render else {})
        with ExitStack() as after_error:
            after_error.callback(getattr(made, "close", lambda: None))
            kind = ManyAgents if is_parallel(made) else SingleAgent
            environment: Environment = kind(made, name=table.env)
            after_error.pop_all()
        return environment
    except AtollError:
        raise
    except Exception as error:
        raise _explained(table, error) from error


def task_of(table: PolicyTable, rl: RlTable, environment: Environment) -> TaskSpec:
    """Return the description of a policy's task."""
    return TaskSpec(
        policy=table.name, task=table.task_word, env=table.env, observation=environment.observation,
        actions=environment.actions, gamma=rl.gamma, agents=environment.agents,
        state=(environment.state_width,) if rl.critic == "joint" else (),
    )  # fmt: skip


class SingleAgent:
    """A Gymnasium environment.

    `name` is its name in error messages.
    """

    agents = 1

    def __init__(self, environment: Any, *, name: str) -> None:
        self._environment = environment
        self.actions, self._to_action = actions_of(environment.action_space, name=name)
        width, self._flat = observations_of(environment.observation_space, name=name)
        self.observation: tuple[int, ...] = (width,)
        self.state_width = width
        self.frames_per_s = float(environment.metadata.get("render_fps") or 30)
        self._last: Array = np.zeros(width, dtype=np.float32)

    def reset(self, seed: int) -> Array:
        """Start an episode that depends on the seed alone."""
        observation, _ = self._environment.reset(seed=seed)
        self._last = self._flat(observation)
        return self._last

    def step(self, actions: Array) -> tuple[Array, Any, Any, Any, bool]:
        """Do one step; an episode that terminated does not count as truncated."""
        observation, reward, terminated, truncated, _ = self._environment.step(
            self._to_action(actions)
        )
        self._last = self._flat(observation)
        return (
            self._last, reward, terminated, truncated and not terminated, terminated or truncated
        )  # fmt: skip

    def joint_state(self) -> Array:
        """Return the observation, the joint state of a single agent."""
        return np.asarray(self._last, dtype=np.float32).reshape(-1)

    def render(self) -> Array | None:
        """Return a frame."""
        return render_frame(self._environment)

    def close(self) -> None:
        """Release its resources."""
        self._environment.close()


def _made(table: PolicyTable, extra: Mapping[str, Any]) -> Any:
    import gymnasium

    options = {**table.options, **extra}
    module, _, factory = table.env.partition(":")
    if factory.isidentifier():
        function = getattr(importlib.import_module(module), factory, None)
        if function is None:
            raise ConfigError(
                f"there is no {factory} in {module}", given=f"env = {table.env!r}",
                expected="module:factory, a function that returns an environment",
            )  # fmt: skip
        if extra and not _takes(function, extra):
            options = dict(table.options)
        return function(**options)
    # Gymnasium's checker repeats the checks made here, at the cost of a call per step.
    return gymnasium.make(table.env, disable_env_checker=True, **options)


def install_hint(package: str) -> str:
    """Return how to install a package."""
    package = package.partition(".")[0]
    extra = EXTRAS.get(package.lower())
    what = f'pip install "atoll[{extra}]"' if extra else f"install {package}"
    return f"{what}, on every machine that acts for this policy"


def _takes(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether a function has parameters of these names."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return True
    return set(options) <= {parameter.name for parameter in parameters}


def _explained(table: PolicyTable, error: Exception) -> ConfigError:
    """Return why an environment could not be made."""
    said = " ".join(f"{dict(table.options)}: {type(error).__name__}: {error}".split())[:400]
    what, remedy = "", "see the name and the options in [[rl.policies]]"
    module, missing = table.env.partition(":")[0], missing_package(error)
    if missing and f"{module}.".startswith(f"{missing}."):
        what = f": there is no module {missing} here"
        remedy = "install it, or name the folder it is in as `code` in [job]: that travels along"
    elif missing:
        what, remedy = (
            f": the package {missing.partition('.')[0]} is missing",
            install_hint(missing),
        )
    return ConfigError(
        f"the environment of policy {table.name or '?'} cannot be made{what}",
        given=f"env = {table.env!r}, options = {said}",
        expected="a Gymnasium name such as CartPole-v1, or module:factory, with options it takes",
        remedy=remedy,
    )


def missing_package(error: BaseException | None) -> str:
    """Return the missing package behind an error or its causes; empty if there is none."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        if type(error).__name__ == "DependencyNotInstalled":
            words = str(error).lower().replace('"', " ").replace("`", " ").split()
            named = [word for word in EXTRAS if any(word in given for given in words)]
            if error.__cause__ is None and error.__context__ is None:
                return named[0] if named else str(error)
        error = error.__cause__ or error.__context__
    return ""
