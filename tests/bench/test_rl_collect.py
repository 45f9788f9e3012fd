from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.envs.registration import EnvSpec

from bench.rl.collect import COPIES, LENGTH, atoll_loop, measured, plain_loop


def test_paces_are_compared_in_pairs() -> None:
    found = measured("CartPole-v1", turns=2, slice_s=0.02, ways=["alone", "plain", "atoll"])
    assert found["alone"] > found["plain"] > 0
    low, high = found["to_alone_quartiles"]
    assert low <= found["to_alone"] <= high


class Recorded(PendulumEnv):
    """Pendulum that keeps the actions of all its copies."""

    taken: ClassVar[list[Any]] = []

    def step(self, u: Any) -> Any:
        self.taken.append(u)
        return super().step(u)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("loop", [plain_loop, atoll_loop])
def test_continuous_actions_are_collected_too(
    loop: Callable[[str], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EnvSpec(
        "Recorded-v0", entry_point=lambda **options: Recorded(**options), max_episode_steps=200
    )
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    monkeypatch.setattr(Recorded, "taken", [])
    loop(spec.id)()
    actions = np.stack(Recorded.taken)
    assert actions.shape == (LENGTH * COPIES, 1)
    assert np.abs(actions).max() <= 2.0
    assert len(np.unique(actions)) > 1
