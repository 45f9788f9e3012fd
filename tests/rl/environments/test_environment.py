from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError
from atoll.rl.environments.environment import EXTRAS, make_environment, task_of
from atoll.rl.environments.flat import actions_of, observations_of
from tests.rl import worlds

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def table(env: str, **options: Any) -> PolicyTable:
    return PolicyTable(name="light", env=env, options=options)


def spaced(**spaces_of: Any) -> PolicyTable:
    return table("tests.rl.worlds:spaced", **spaces_of)


@pytest.mark.parametrize(
    ("space", "row", "action"),
    [
        (spaces.Discrete(3), [2], 2),
        (spaces.Discrete(3, start=5), [2], 7),
        (spaces.MultiDiscrete([3, 2]), [2, 1], [2, 1]),
        (spaces.MultiDiscrete([3, 2], start=[1, 4]), [2, 1], [3, 5]),
        (spaces.MultiDiscrete(np.array([[3, 2], [4, 5]])), [2, 1, 3, 4], [[2, 1], [3, 4]]),
        (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
        (spaces.Box(-1.0, 2.0, (3,), np.float32), [-7.0, 0.5, 7.0], [-1.0, 0.5, 2.0]),
        (spaces.Box(-1.0, 1.0, (2, 1), np.float64), [0.25, 3.0], [[0.25], [1.0]]),
    ],
)
def test_a_row_of_numbers_becomes_an_action_of_its_space(space: Any, row: Any, action: Any) -> None:
    environment = make_environment(spaced(done=space))
    environment.reset(1)
    numbers = np.array([row], np.float32 if isinstance(row[0], float) else np.int64)
    environment.step(numbers)
    done = environment._environment.done  # type: ignore[attr-defined]
    assert np.array_equal(done, action)
    assert space.contains(done) or space.dtype == np.float64
    assert environment.actions.width == len(row)


def test_the_space_of_actions_is_described_in_numbers() -> None:
    kinds = [
        (spaces.Discrete(3), "discrete", (3,)),
        (spaces.MultiDiscrete([3, 2]), "multi-discrete", (3, 2)),
        (spaces.MultiBinary(2), "multi-discrete", (2, 2)),
        (spaces.Box(-1.0, 2.0, (3,), np.float32), "continuous", (3,)),
    ]
    for space, kind, sizes in kinds:
        found, _ = actions_of(space, name="it")
        assert (found.kind, found.sizes) == (kind, sizes)
    assert found.low == (-1.0,) * 3
    assert found.high == (2.0,) * 3


@pytest.mark.parametrize(
    ("space", "seen", "flat"),
    [
        (BOX, np.array([0.5, -0.5]), [0.5, -0.5]),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.array([[1, 2], [3, 255]]), [1, 2, 3, 255]),
        (spaces.Discrete(3), 1, [0, 1, 0]),
        (spaces.Discrete(3, start=5), 7, [0, 0, 1]),
        (spaces.MultiBinary(3), np.array([1, 0, 1]), [1, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (spaces.Tuple([spaces.Discrete(2), BOX]), (1, np.array([0.5, 1.0])), [0, 1, 0.5, 1]),
        (
            spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}),
            {"a": np.array([0.5, 1.0]), "b": 0},
            [0.5, 1, 1, 0],
        ),
    ],
)
def test_an_observation_of_any_kind_becomes_a_flat_vector(space: Any, seen: Any, flat: Any) -> None:
    width, flatten = observations_of(space, name="it")
    assert np.asarray(flatten(seen), np.float32).tolist() == flat
    assert width == len(flat)
    environment = make_environment(spaced(seen=space))
    assert environment.observation == (width,)
    assert np.shape(environment.reset(1)) == (width,)


@pytest.mark.parametrize("space", [spaces.Sequence(BOX), spaces.Graph(BOX, None)])
def test_variable_size_observations_are_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"observations of .*spaced cannot be used.*Box, Disc"):
        make_environment(spaced(seen=space))


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 9, (2,), np.int64), spaces.Tuple([BOX]), spaces.Text(5)]
)
def test_other_actions_are_refused_with_what_is_supported(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"actions of .*spaced cannot be used.*Box of floats"):
        make_environment(spaced(done=space))


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("CartPole-v1", "gymnasium", "rl"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_missing_package_is_named_with_its_extra(
    env: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.")]:
        if module.split(".")[2] in ("box2d", "mujoco"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        make_environment(table(env))
    assert f"the package {package} is missing".lower() in str(caught.value).lower()
    assert f'pip install "atoll[{extra}]"' in str(caught.value)


@pytest.mark.parametrize("env", ["tests.rl.worlds:counter", "tests.rl.worlds:pair"])
@pytest.mark.parametrize("rate", [None, 0])
def test_a_missing_frame_rate_has_a_default(
    monkeypatch: pytest.MonkeyPatch, env: str, rate: int | None
) -> None:
    for world in (worlds.Counter, worlds.Pair):
        monkeypatch.setitem(world.metadata, "render_fps", rate)
    assert make_environment(table(env)).frames_per_s > 0


def test_every_extra_that_is_named_exists() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("CartPolo-v1", {}, r"cannot be made.*CartPolo.*CartPole"),
        ("CartPole-v9", {}, r"cannot be made.*v9"),
        ("CartPole-v1", {"gravity": 3}, r"cannot be made.*unexpected keyword argument 'gravity'"),
        ("tests.rl.worlds:counter", {"size": 3}, r"cannot be made.*size"),
        ("tests.rl.worlds:nothing", {}, r"there is no nothing in tests\.rl\.worlds"),
        ("tests.rl.no_world:counter", {}, r"no module tests\.rl\.no_world here.*code"),
        ("no_such_package:counter", {}, r"no module no_such_package here.*install it"),
        ("tests.rl.worlds:failing", {}, r"cannot be made.*ValueError: no such world"),
        (
            "atoll.rl.environments.physics:cartpole",
            {"length": -1},
            r"length is too small; given: -1",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(
    env: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_environment(table(env, **options))
    assert "\n" not in str(caught.value)


def test_a_task_says_all_that_a_critic_has_to_know() -> None:
    policy = table("Pendulum-v1", g=5.0)
    environment = make_environment(policy)
    task = task_of(policy, RlTable(gamma=0.9), environment)
    assert (task.policy, task.env, task.gamma, task.agents) == ("light", "Pendulum-v1", 0.9, 1)
    assert task.observation == (3,)
    assert task.actions.high == (2.0,)
    assert task.task == policy.task_word
    assert task.state == ()
    assert task_of(policy, RlTable(critic="joint"), environment).state == (3,)


def test_registering_package_is_imported_by_name() -> None:
    assert make_environment(table("gymnasium:CartPole-v1")).observation == (4,)


def test_what_ended_by_itself_was_not_cut_off() -> None:
    for cut in (False, True):
        environment = make_environment(table("tests.rl.worlds:counter", length=1, cut=cut))
        environment.reset(1)
        _, _, terminated, truncated, over = environment.step(np.zeros((1, 1), np.int64))
        assert (terminated, truncated, over) == (not cut, cut, True)
