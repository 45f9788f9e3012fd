from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError, ScriptError
from atoll.rl.environments import film as module
from atoll.rl.environments.environment import make_environment, task_of
from atoll.rl.environments.film import Recording, record
from atoll.rl.nets.policy import Policy
from tests.patience import PATIENCE_S
from tests.rl.box2d import LANDER, NEEDS_BOX2D

WORLD = "tests.rl.worlds:counter"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No episode ends early because the machine is busy."""
    monkeypatch.setattr(module, "LONGEST_S", PATIENCE_S)


def recorded(path: Path, env: str = WORLD, *, recurrent: int = 0, **options: Any) -> Recording:
    table = PolicyTable(name="light", env=env, options=options)
    environment = make_environment(table)
    task = task_of(table, RlTable(), environment)
    environment.close()
    policy = Policy(
        task, hidden=(8,), recurrent=recurrent, generator=torch.Generator().manual_seed(2)
    )
    return record(policy, table, path, seed=5)


def pictures(path: Path) -> list[tuple[Any, int]]:
    """Return the pictures of a GIF, and for how many milliseconds each is shown."""
    with Image.open(path) as image:
        found = []
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            found.append((np.asarray(image.convert("RGB")), image.info["duration"]))
    return found


def test_an_episode_becomes_a_small_moving_picture(tmp_path: Path) -> None:
    path = tmp_path / "episode.gif"
    found = recorded(path, length=10)
    assert found == Recording(path, 10, 55.0, 11, path.stat().st_size)
    shown = pictures(path)
    assert [milliseconds for _, milliseconds in shown] == [40] * 10 + [module.PAUSE_MS]
    for step, (picture, _) in enumerate(shown):
        assert picture.shape == (200, 320, 3)
        red = (picture[..., 0] > 150).mean()
        assert red == pytest.approx(step / 10, abs=0.02)
    assert found.size_bytes < 20_000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("length", "every"), [(200, 1), (201, 2), (900, 8), (3_000, 16)])
@pytest.mark.every(3)
def test_long_episode_is_filmed_at_the_right_speed(
    length: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIDE", 16)
    found = recorded(tmp_path / "episode.gif", length=length)
    assert found.steps == min(length, module.STEPS)
    assert found.frames <= module.FRAMES + 1
    assert found.frames == pytest.approx(found.steps / every, abs=2)
    with Image.open(found.path) as image:
        assert image.info["duration"] == 40 * every


@pytest.mark.parametrize(
    ("env", "options", "recurrent"),
    [
        ("CartPole-v1", {}, 4), ("atoll.rl.environments.physics:pendulum", {"limit": 10}, 0),
        pytest.param(LANDER, {}, 0, marks=NEEDS_BOX2D),
        ("mpe2.simple_spread_v3:parallel_env", {"max_cycles": 5}, 0),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_real_environments_are_recorded_without_a_display(
    env: str, options: dict[str, Any], recurrent: int, tmp_path: Path
) -> None:
    found = recorded(tmp_path / "episode.gif", env, recurrent=recurrent, **options)
    shown = [picture for picture, _ in pictures(found.path)]
    assert max(shown[0].shape) == 320
    assert any(not np.array_equal(shown[0], picture) for picture in shown[1:])
    assert found.size_bytes < 200_000


def test_greedy_episodes_are_reproducible(tmp_path: Path) -> None:
    first = recorded(tmp_path / "a.gif", "CartPole-v1")
    second = recorded(tmp_path / "b.gif", "CartPole-v1")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert (first.steps, first.score) == (second.steps, second.score)


def test_an_episode_that_is_slow_to_draw_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.0)
    found = recorded(tmp_path / "episode.gif", length=50)
    assert (found.steps, found.frames) == (0, 1)


def test_an_environment_without_pictures_is_reported(tmp_path: Path) -> None:
    said = r"policy light cannot be recorded.*bare.*it draws nothing.*rgb_array.*record = false"
    with pytest.raises(ConfigError, match=said):
        recorded(tmp_path / "episode.gif", "tests.rl.worlds:bare")
    assert not list(tmp_path.iterdir())


def test_missing_renderer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=r"package pygame is missing.*atoll\[rl\]"):
        recorded(tmp_path / "episode.gif", "CartPole-v1")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"package PIL is missing.*atoll\[rl\]"):
        recorded(tmp_path / "episode.gif")


def test_an_environment_that_raises_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"while it was recorded.*light, seed 5: ZeroDivision"):
        recorded(tmp_path / "episode.gif", raises=3)
    assert not list(tmp_path.iterdir())
