"""The same tasks by stable-baselines3's PPO: same networks, steps, seeds and numbers.

What is the same: widths and tanh of both networks, orthogonal start, copies of the environment,
length of a rollout, passes and minibatches, discount, lambda, clipping, gradient norm, the policy's
learning rate and its fall to zero, normalised observations. What is its own: one optimizer for both
networks (so the critic has the policy's rate), and rewards scaled by the deviation of returns where
Atoll's critic scales its targets (PopArt).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError
from bench.pooled.learning import Drawn, Point, settings


def learn_one(rl: RlTable, table: PolicyTable, *, seed: int) -> list[Point]:
    """Return the curve of one policy.

    Raises:
        ConfigError: stable-baselines3 is not installed.
    """
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
    except ImportError as error:
        raise ConfigError(
            "the comparison needs stable-baselines3", given="it is not installed",
            remedy="pip install 'atoll[bench]'",
        ) from error  # fmt: skip
    from torch import nn

    drawn = Drawn()

    class Noting(BaseCallback):
        """Hears of every episode, and makes a point after every rollout."""

        returns: list[float]

        def _on_training_start(self) -> None:
            self.returns = []

        def _on_step(self) -> bool:
            for info in self.locals["infos"]:
                if "episode" in info:
                    self.returns.append(float(info["episode"]["r"]))
            return True

        def _on_rollout_end(self) -> None:
            drawn.add(self.num_timesteps, self.returns)
            self.returns = []

    options = settings(rl, table)
    steps = options.pop("total_timesteps")
    environments = VecMonitor(DummyVecEnv([_maker(table)] * rl.environments))
    normalised = VecNormalize(environments, norm_obs=rl.normalise, norm_reward=True, gamma=rl.gamma)
    rate: Callable[[float], float] | float = _falling(rl.lr) if rl.anneal else rl.lr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices and batch sizes that are ours to choose
        model = PPO(
            "MlpPolicy", normalised, learning_rate=rate, seed=seed, device="cpu",
            policy_kwargs={
                "net_arch": {"pi": list(rl.hidden), "vf": list(rl.critic_hidden)},
                "activation_fn": nn.Tanh,
            },
            **options,
        )  # fmt: skip
        model.learn(steps, callback=Noting())
    normalised.close()
    return drawn.points


def _maker(table: PolicyTable) -> Callable[[], Any]:
    def make() -> Any:
        import gymnasium

        module, _, factory = table.env.partition(":")
        if factory:
            return getattr(importlib.import_module(module), factory)(**table.options)
        return gymnasium.make(table.env, **table.options)

    return make


def _falling(rate: float) -> Callable[[float], float]:
    """Return the learning rate by the share of steps that remains."""
    return lambda remains: rate * remains
