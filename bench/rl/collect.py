"""How fast experience is collected: `python -m bench.rl.collect`, JSON.

Steps per second of processor time on one thread, eight copies of an environment side by side, in
four ways that take turns, so that a busy machine is as unkind to each:

    alone         bare loops over Gymnasium's environments, actions drawn beforehand, no policy
    plain         the loop a PPO script has: Gymnasium's vector of environments, one forward pass of
                  a network of the same widths per step, a draw and its log-probability
    sb3           stable-baselines3's own rollouts of PPO, same widths (they ask for values as well)
    atoll         `Collector.collect`
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.rl.actor.collector import Collector
from atoll.rl.environments.environment import task_of
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.nets.policy import Policy
from bench.kit.report import emit

ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "LunarLander-v3")
COPIES, LENGTH, TURNS, SLICE_S = 8, 64, 12, 0.5


def environment_alone(name: str) -> Callable[[], None]:
    """Return what steps the environments, and nothing else."""
    copies = [gymnasium.make(name) for _ in range(COPIES)]
    for i, copy in enumerate(copies):
        copy.reset(seed=i)
        copy.action_space.seed(i)
    actions = [[copy.action_space.sample() for copy in copies] for _ in range(LENGTH)]

    def rollout() -> None:
        for row in actions:
            for copy, action in zip(copies, row, strict=True):
                _, _, terminated, truncated, _ = copy.step(action)
                if terminated or truncated:
                    copy.reset()

    return rollout


def plain_loop(name: str) -> Callable[[], None]:
    """Return the rollout of a PPO script."""
    vector = SyncVectorEnv(
        [lambda: gymnasium.make(name) for _ in range(COPIES)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    space: Any = vector.single_action_space
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    width = int(space.n) if discrete else space.shape[0]
    seen = vector.single_observation_space.shape
    assert seen is not None
    network = nn.Sequential(
        nn.Linear(seen[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, width)
    )
    deviation = torch.ones(width)
    observations = torch.zeros(LENGTH, COPIES, *seen)
    actions = torch.zeros((LENGTH, COPIES) if discrete else (LENGTH, COPIES, width))
    scores, rewards, ends = (torch.zeros(LENGTH, COPIES) for _ in range(3))
    now = torch.as_tensor(vector.reset(seed=0)[0], dtype=torch.float32)

    def rollout() -> None:
        nonlocal now
        for step in range(LENGTH):
            observations[step] = now
            with torch.no_grad():
                output = network(now)
                chances: Any = (
                    torch.distributions.Categorical(logits=output) if discrete
                    else torch.distributions.Normal(output, deviation)
                )  # fmt: skip
                action = chances.sample()
                score = chances.log_prob(action)
            actions[step] = action
            scores[step] = score if discrete else score.sum(-1)
            chosen = action.numpy()
            following, reward, terminated, truncated, _ = vector.step(
                chosen if discrete else chosen.clip(space.low, space.high)
            )
            rewards[step] = torch.as_tensor(reward)
            ends[step] = torch.as_tensor(terminated | truncated)
            now = torch.as_tensor(following, dtype=torch.float32)

    return rollout


def sb3_loop(name: str) -> Callable[[], None]:
    """Return the rollout of stable-baselines3's PPO."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy", make_vec_env(name, n_envs=COPIES, seed=0), n_steps=LENGTH, batch_size=LENGTH,
        policy_kwargs={"net_arch": [64, 64]}, device="cpu",
    )  # fmt: skip
    _, callback = model._setup_learn(10**9)
    callback.on_training_start({}, {})

    def rollout() -> None:
        assert model.env is not None
        model.collect_rollouts(model.env, callback, model.rollout_buffer, LENGTH)

    return rollout


def atoll_loop(name: str) -> Callable[[], None]:
    """Return the rollout of an actor."""
    table, rl = PolicyTable(name="bench", env=name), RlTable()
    columns = VectorEnv(table, count=COPIES, seed=0)
    task = task_of(table, rl, columns.environments[0])
    policy = Policy.build(task, rl, generator=torch.Generator().manual_seed(0))
    collector = Collector(columns, task, seed=0)

    def rollout() -> None:
        collector.collect(policy, LENGTH)

    return rollout


def pace(rollout: Callable[[], None], *, seconds: float) -> float:
    """Return environment steps per second of processor time."""
    began, rollouts = time.process_time(), 0
    while time.process_time() - began < seconds:
        rollout()
        rollouts += 1
    return rollouts * LENGTH * COPIES / (time.process_time() - began)


WAYS = {
    "alone": environment_alone, "plain": plain_loop, "sb3": sb3_loop, "atoll": atoll_loop,
}  # fmt: skip


def measured(name: str, *, turns: int, slice_s: float, ways: Sequence[str]) -> dict[str, Any]:
    """Return the paces of one environment, and atoll's in units of the others'.

    Args:
        name: Of Gymnasium.
        turns: Pairs of slices.
        slice_s: Seconds of processor time of each.
        ways: Which of WAYS; `atoll` is the last one.
    """
    loops = {way: WAYS[way](name) for way in ways}
    for loop in loops.values():
        loop()
    paces: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns):
        for way in ways if turn % 2 == 0 else reversed(ways):
            paces[way].append(pace(loops[way], seconds=slice_s))
    found: dict[str, Any] = {way: round(statistics.median(paces[way])) for way in ways}
    for way in ways[:-1]:
        ratios = sorted(a / b for a, b in zip(paces["atoll"], paces[way], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        found[f"to_{way}"] = round(statistics.median(ratios), 3)
        found[f"to_{way}_quartiles"] = [round(low, 3), round(high, 3)]
    return found


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    names = [name for name in arguments if not name.startswith("--")] or list(ENVIRONMENTS)
    turns = 4 if "--quick" in arguments else TURNS
    found = {name: measured(name, turns=turns, slice_s=SLICE_S, ways=list(WAYS)) for name in names}
    table = [
        {"environment": name, **{k: v for k, v in row.items() if not k.endswith("quartiles")}}
        for name, row in found.items()
    ]
    emit({"bench": "rl_collect", "copies": COPIES, "steps_per_cpu_s": found}, table)


if __name__ == "__main__":
    main(sys.argv[1:])
