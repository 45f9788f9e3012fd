from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import AtollError, ConfigError
from atoll.rl.actor.collector import Collector
from atoll.rl.environments.environment import make_environment, task_of
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.nets.policy import Policy

PAIR = "tests.rl.worlds:pair"
SPREAD = "mpe2.simple_spread_v3:parallel_env"


def columns_of(env: str = PAIR, *, count: int = 2, **options: Any) -> VectorEnv:
    table = PolicyTable(name="team", env=env, options=options)
    return VectorEnv(table, count=count, seed=7, joint=True)


def test_each_agent_is_a_column_in_the_order_of_the_environment() -> None:
    columns = columns_of()
    room = columns.room(4)
    for step in range(4):
        room.actions[step, :, 0] = [0, 1, 2, 0]
        columns.step(room, step)
    assert columns.count == 4
    assert room.observations[:, :, 0].tolist() == [[0, 1, 0, 1]] * 5
    assert room.observations[1, :, 2:].tolist() == [[0, 1], [0, 1], [2, 0], [2, 0]]
    assert room.rewards[0].tolist() == [1, 10, 1, 10]
    assert room.terminated.tolist() == [[False] * 4] * 3 + [[True] * 4]
    assert room.returns == [22.0, 22.0]  # the mean of 4 and 40, of each environment


@pytest.mark.parametrize("own", [False, True])
def test_joint_state_is_the_environments_or_concatenated(own: bool) -> None:
    columns = columns_of(own_state=own)
    room = columns.room(1)
    room.actions[0, :, 0] = [0, 1, 2, 0]
    columns.step(room, 0)
    assert room.states is not None
    right = (
        [[1, -1]] * 4 if own else [[0, 1, 0, 1, 1, 1, 0, 1]] * 2 + [[0, 1, 2, 0, 1, 1, 2, 0]] * 2
    )
    assert room.states[1].tolist() == right
    assert columns.state == (2 if own else 8,)


def test_agents_that_differ_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match=r"cannot share a policy.*left: 4 num.*right: 5 numbers"):
        make_environment(PolicyTable(name="team", env=PAIR, options={"wider": True}))
    uneven = PolicyTable(name="team", env="mpe2.simple_speaker_listener_v4:parallel_env")
    with pytest.raises(ConfigError, match=r"speaker_0: 3 numbers.*listener_0: 11 numbers"):
        make_environment(uneven)


def test_agents_that_take_turns_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"take turns.*simple_spread_v3:parallel_env"):
        make_environment(PolicyTable(name="team", env="mpe2.simple_spread_v3:env"))


def test_agents_that_end_apart_are_refused_by_name() -> None:
    columns = columns_of(apart=True, length=1)
    room = columns.room(1)
    room.actions[:] = 0
    with pytest.raises(AtollError, match=r"do not end together.*left of 2 ended"):
        columns.step(room, 0)


@pytest.mark.parametrize("continuous", [False, True])
def test_a_real_team_lives_with_one_policy(continuous: bool) -> None:
    table = PolicyTable(
        name="team",
        env=SPREAD,
        options={"N": 3, "max_cycles": 10, "continuous_actions": continuous},
    )
    columns = VectorEnv(table, count=2, seed=7, joint=True)
    task = task_of(table, RlTable(critic="joint"), columns.environments[0])
    assert (task.agents, task.observation, task.state) == (3, (18,), (54,))
    policy = Policy(task, hidden=(8,), generator=torch.Generator().manual_seed(0))
    trajectory = Collector(columns, task, actor="w1").collect(policy, 12).check()
    assert trajectory.steps == 12 * 6
    assert trajectory.truncated[9].all()
    assert len(trajectory.returns) == 2
    assert trajectory.states is not None
    assert trajectory.cut_states is not None
    assert trajectory.cut_states.shape == (6, 54)
    own = trajectory.observations.numpy().reshape(13, 2, 54)
    assert np.array_equal(trajectory.states[:, ::3], own)
