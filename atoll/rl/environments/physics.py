"""CartPole and Pendulum with other masses, lengths and gravities: a family of related tasks.

    env = "atoll.rl.environments.physics:cartpole"
    options = { gravity = 3.7, length = 1.0 }

With the defaults they exactly equal `CartPole-v1` and `Pendulum-v1` of Gymnasium.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.wrappers import TimeLimit

from atoll.errors import ConfigError

Environment = gymnasium.Env[Any, Any]


def cartpole(
    *,
    gravity: float = 9.8,
    length: float = 0.5,
    masspole: float = 0.1,
    masscart: float = 1.0,
    force: float = 10.0,
    limit: int = 500,
    render_mode: str | None = None,
) -> Environment:
    """Return a pole on a cart.

    Args:
        gravity: Metres per second squared.
        length: Half the pole's length, metres.
        masspole: Kilograms.
        masscart: Kilograms.
        force: Newtons, of a push to the left or to the right.
        limit: Steps after which an episode is truncated.
        render_mode: As in Gymnasium.

    Raises:
        ConfigError: a value that must be positive is not.
    """
    _positive(length=length, masspole=masspole, masscart=masscart, force=force, limit=limit)
    made = CartPoleEnv(render_mode=render_mode)
    made.gravity, made.length, made.force_mag = gravity, length, force
    made.masspole, made.masscart = masspole, masscart
    # Derived in the constructor; the equations of motion read these attributes.
    made.total_mass = masspole + masscart
    made.polemass_length = masspole * length
    return TimeLimit(made, limit)


def pendulum(
    *,
    g: float = 10.0,
    mass: float = 1.0,
    length: float = 1.0,
    limit: int = 200,
    render_mode: str | None = None,
) -> Environment:
    """Return a pendulum to swing up and balance.

    Args:
        g: Gravity, metres per second squared.
        mass: Kilograms.
        length: Metres.
        limit: Steps after which an episode is truncated.
        render_mode: As in Gymnasium.

    Raises:
        ConfigError: a value that must be positive is not.
    """
    _positive(mass=mass, length=length, limit=limit)
    made = PendulumEnv(render_mode=render_mode, g=g)
    made.m, made.l = mass, length
    return TimeLimit(made, limit)


def _positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{name} is too small", given=number, expected="more than 0")
