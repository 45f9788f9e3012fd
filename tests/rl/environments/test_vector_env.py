from __future__ import annotations

import logging
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from atoll.config.rl_tables import PolicyTable
from atoll.errors import ConfigError, ScriptError
from atoll.rl.environments import vector_env as module
from atoll.rl.environments.vector_env import Rollout, VectorEnv, episode_seed
from tests.rl.box2d import LANDER, NEEDS_BOX2D
from tests.rl.worlds import Counter

WORLD = "tests.rl.worlds:counter"


def columns_of(
    env: str = WORLD, *, count: int = 2, joint: bool = False, **options: Any
) -> VectorEnv:
    table = PolicyTable(name="light", env=env, options=options)
    return VectorEnv(table, count=count, seed=7, policy=1, actor=2, joint=joint)


def lived(columns: VectorEnv, steps: int, *, seed: int = 0) -> Rollout:
    """Live some steps by actions that depend on the seed."""
    room, random = columns.room(steps), np.random.default_rng(seed)
    for step in range(steps):
        actions = room.actions[step]
        if actions.dtype == np.int64:
            actions[:] = random.integers(columns.actions.sizes[0], size=actions.shape)
        else:
            actions[:] = random.uniform(-1, 1, actions.shape)
        columns.step(room, step)
    return room


def test_columns_live_what_single_environments_live() -> None:
    columns = columns_of("CartPole-v1", count=3)
    room = lived(columns, 100)
    for column in range(3):
        alone, episode, total, returns = gymnasium.make("CartPole-v1"), 1, 0.0, []
        seen, _ = alone.reset(seed=episode_seed(7, 1, 2, column, episode))
        for step in range(100):
            assert np.array_equal(room.observations[step, column], seen)
            seen, reward, over, cut, _ = alone.step(int(room.actions[step, column, 0]))
            total += float(reward)
            assert room.rewards[step, column] == reward
            assert room.terminated[step, column] == over
            assert room.truncated[step, column] == cut
            if over or cut:
                returns.append(total)
                episode, total = episode + 1, 0.0
                seen, _ = alone.reset(seed=episode_seed(7, 1, 2, column, episode))
        assert np.array_equal(room.observations[100, column], seen)
        assert returns
        assert set(returns) <= set(room.returns)
    assert columns.episodes == len(room.returns) == room.terminated.sum()


def test_next_episode_begins_in_the_same_step() -> None:
    room = lived(columns_of(length=3), 7)
    assert room.observations[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert room.rewards[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert room.terminated[:, 0].nonzero()[0].tolist() == [2, 5]
    assert room.returns == [6.0, 6.0, 6.0, 6.0]
    assert not room.cuts


def test_truncated_episode_keeps_its_last_observation() -> None:
    room = lived(columns_of(length=3, cut=True), 4)
    assert not room.terminated.any()
    assert [(step, column) for step, column, _, _ in room.cuts] == [(2, 0), (2, 1)]
    for step, column, seen, state in room.cuts:
        assert room.truncated[step, column]
        assert seen.tolist() == [
            3.0,
            room.observations[step, column, 1],
            room.actions[2, column, 0],
        ]
        assert state is None


def test_every_episode_of_everybody_has_a_seed_of_its_own() -> None:
    who = [
        episode_seed(seed, policy, actor, environment, episode)
        for seed in (0, 1) for policy in (0, 1, 11) for actor in (0, 1, 11)
        for environment in (0, 1, 11) for episode in range(1, 40)
    ]  # fmt: skip
    assert len(set(who)) == len(who)
    assert all(0 <= seed < 2**31 for seed in who)
    assert episode_seed(7, 1, 2, 0, 1) == episode_seed(7, 1, 2, 0, 1)


def test_the_joint_state_is_that_of_every_step_and_of_every_cut() -> None:
    room = lived(columns_of(length=3, cut=True, joint=True), 5)
    assert room.states is not None
    assert np.array_equal(room.states, room.observations)
    assert [seen.tolist() for *_, seen, _ in room.cuts] == [
        state.tolist() for *_, state in room.cuts if state is not None
    ]


@pytest.mark.parametrize(
    ("env", "before"),
    [
        (WORLD, 8), ("CartPole-v1", 50), ("Pendulum-v1", 250),
        pytest.param(LANDER, 150, marks=NEEDS_BOX2D),
        ("MountainCarContinuous-v0", 40), ("Acrobot-v1", 30), ("Taxi-v4", 220),
        ("mpe2.simple_spread_v3:parallel_env", 30), ("HalfCheetah-v5", 40),
    ],
)  # fmt: skip
def test_restored_columns_go_on_where_they_were(env: str, before: int) -> None:
    if env == "HalfCheetah-v5":
        pytest.importorskip("mujoco", reason="MuJoCo is not installed")
    columns, restored = columns_of(env, joint=True), columns_of(env, joint=True)
    lived(columns, before)
    saved = {name: part.clone() for name, part in columns.state_dict().items()}
    right = lived(columns, 60, seed=1)
    assert restored.load_state_dict(saved) == []
    again = lived(restored, 60, seed=1)
    for name in ("observations", "rewards", "terminated", "truncated", "states"):
        assert np.array_equal(getattr(again, name), getattr(right, name)), name
    assert again.returns == right.returns
    assert restored.unrepeatable == 0
    now, then = restored.state_dict(), columns.state_dict()
    assert all(torch.equal(now[name], then[name]) for name in then)


def test_a_long_episode_is_remembered_while_others_begin_and_end() -> None:
    columns = columns_of("Pendulum-v1", count=2)
    columns.environments[0]._environment._max_episode_steps = 5_000  # type: ignore[attr-defined]
    lived(columns, 2_600)
    restored = columns_of("Pendulum-v1", count=2)
    restored.environments[0]._environment._max_episode_steps = 5_000  # type: ignore[attr-defined]
    saved = columns.state_dict()
    assert saved["lengths"].tolist() == [2_600, 2_600 % 200]
    assert restored.load_state_dict(saved) == []
    right, again = lived(columns, 2_000, seed=1), lived(restored, 2_000, seed=1)
    assert np.array_equal(again.observations, right.observations)
    assert restored.state_dict()["lengths"].tolist() == [4_600, 4_600 % 200]


def test_an_episode_too_long_to_keep_restarts_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LONGEST", 1_500)
    columns = columns_of(length=10_000, count=1)
    lived(columns, 4_000)
    saved = columns.state_dict()
    assert saved["lengths"].tolist() == [0]
    restored = columns_of(length=10_000, count=1)
    with caplog.at_level(logging.WARNING):
        assert restored.load_state_dict(saved) == [0]
    assert "policy light: the episode of environment 0 is longer than 1500 steps" in caplog.text
    assert restored.unrepeatable == 1
    assert lived(restored, 1).observations[0, 0, 0] == 0.0
    assert restored.state_dict()["episodes"].tolist() == [2]


def test_irreproducible_environment_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    columns = columns_of("tests.rl.worlds:counter", count=2, length=50, forgetful=True)
    lived(columns, 5)
    restored = columns_of("tests.rl.worlds:counter", count=2, length=50, forgetful=True)
    with caplog.at_level(logging.WARNING):
        assert restored.load_state_dict(columns.state_dict()) == [0, 1]
    assert caplog.text.count("differed when it was replayed") == 2
    assert restored.unrepeatable == 2
    room = lived(restored, 3)
    assert room.observations[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert room.rewards[:, 1].tolist() == [1, 2, 3]


def test_a_state_of_another_number_of_environments_is_refused() -> None:
    saved = columns_of(count=2).state_dict()
    with pytest.raises(ConfigError, match=r"given: 2 environments; expected: 3"):
        columns_of(count=3).load_state_dict(saved)


def test_only_the_column_that_is_restarted_starts_anew() -> None:
    columns = columns_of(length=50)
    lived(columns, 5)
    columns.restart(1)
    assert lived(columns, 2).observations[:, :, 0].tolist() == [[5, 0], [6, 1], [7, 2]]


def test_raising_environment_is_named_with_its_seed() -> None:
    columns = columns_of(raises=4, length=3)
    lived(columns, 9)
    columns = columns_of(raises=4, length=6)
    seed = episode_seed(7, 1, 2, 0, 1)
    said = rf"policy light, step 3, environment 0, episode 1 \(seed {seed}\): ZeroDivisionError"
    with pytest.raises(ScriptError, match=said):
        lived(columns, 9)


def test_what_is_handed_out_is_not_changed_by_what_happens_next() -> None:
    columns = columns_of(length=4)
    room = lived(columns, 6)
    before = room.observations.copy()
    columns.restart(0)
    lived(columns, 6)
    assert np.array_equal(room.observations, before)


class Closing(Counter):
    """Remembers all of its kind; the second one fails."""

    made: ClassVar[list[Closing]] = []
    closed = False

    def __init__(self, *, failing: str) -> None:
        super().__init__()
        if self.made:
            setattr(self, failing, None)
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failing", ["reset", "observation_space"])
def test_environments_beside_a_failing_one_are_closed(failing: str) -> None:
    Closing.made.clear()
    with pytest.raises((ConfigError, ScriptError)):
        columns_of(f"{__name__}:Closing", failing=failing)
    assert [one.closed for one in Closing.made] == [True, True]
