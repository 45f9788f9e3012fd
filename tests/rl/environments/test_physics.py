from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest

from atoll.errors import ConfigError
from atoll.rl.environments.physics import cartpole, pendulum


def lived(environment: Any, *, steps: int = 60) -> list[Any]:
    """Return all that an environment says to a fixed row of actions."""
    random = np.random.default_rng(0)
    said = [environment.reset(seed=3)[0]]
    discrete = isinstance(environment.action_space, gymnasium.spaces.Discrete)
    for _ in range(steps):
        action = random.integers(2) if discrete else random.uniform(-2, 2, 1).astype(np.float32)
        observation, reward, terminated, truncated, _ = environment.step(action)
        said += [observation, reward, terminated, truncated]
        if terminated or truncated:
            break
    return said


@pytest.mark.parametrize(("ours", "name"), [(cartpole, "CartPole-v1"), (pendulum, "Pendulum-v1")])
def test_with_nothing_given_they_are_those_of_gymnasium(ours: Any, name: str) -> None:
    for mine, theirs in zip(lived(ours()), lived(gymnasium.make(name)), strict=True):
        assert np.array_equal(mine, theirs)
    assert gymnasium.spec(name).max_episode_steps == ours()._max_episode_steps


def test_a_cart_obeys_the_equations_with_its_own_numbers() -> None:
    g, l, m, cart, force, dt = 3.7, 0.9, 0.4, 2.0, 6.0, 0.02  # noqa: E741
    environment: Any = cartpole(gravity=g, length=l, masspole=m, masscart=cart, force=force)
    environment.reset(seed=1)
    x, v, angle, w = environment.unwrapped.state = np.array([0.1, -0.2, 0.05, 0.3])
    seen, *_ = environment.step(1)
    # Florian (2007), equations 23 and 24, without friction.
    total, sin, cos = m + cart, math.sin(angle), math.cos(angle)
    push = (-force - m * l * w * w * sin) / total
    turn = (g * sin + cos * push) / (l * (4 / 3 - m * cos * cos / total))
    move = (force + m * l * (w * w * sin - turn * cos)) / total
    assert seen == pytest.approx([x + dt * v, v + dt * move, angle + dt * w, w + dt * turn])


def test_a_pendulum_obeys_the_equation_with_its_own_numbers() -> None:
    g, mass, length, torque, dt = 4.0, 2.0, 0.5, 1.5, 0.05
    environment: Any = pendulum(g=g, mass=mass, length=length)
    environment.reset(seed=1)
    angle, speed = environment.unwrapped.state = np.array([0.3, -0.1])
    seen, *_ = environment.step(np.array([torque], np.float32))
    # A rod turned about its end: inertia m l² / 3, and gravity pulls at its middle.
    inertia = mass * length**2 / 3
    faster = speed + dt * (torque + mass * g * length / 2 * math.sin(angle)) / inertia
    now = angle + dt * faster
    assert seen == pytest.approx([math.cos(now), math.sin(now), faster], rel=1e-6)


@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_an_episode_is_cut_off_at_its_limit(make: Any) -> None:
    said = lived(make(limit=4))
    assert said[-2:] == [False, True]
    assert len(said) == 1 + 4 * 4


def test_numbers_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"masspole is too small; given: 0.*more than 0"):
        cartpole(masspole=0)
    with pytest.raises(ConfigError, match="length is too small"):
        pendulum(length=-1.0)
