"""Actors and critic in one process: the same curves every time, and what one word changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError
from atoll.rl.in_process import Curve, InProcessRun, Update, run_together

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"


def tables(*envs: str, **more: Any) -> RlTable:
    base = RlTable(
        steps=256, environments=4, rollout=16, epochs=2, minibatches=2, hidden=[16],
        critic_hidden=[16], critic_epochs=2, critic_minibatches=2,
        policies=[PolicyTable(name=f"p{n}", env=env) for n, env in enumerate(envs)],
    )  # fmt: skip
    return dataclasses.replace(base, **more)


@pytest.mark.parametrize("critic", ["pooled", "unconditioned", "corrected", "own"])
def test_curves_are_bit_identical_for_one_seed_only(critic: str) -> None:
    rl = tables(CARTPOLE, CARTPOLE, critic=critic)
    first, again, other = (run_together(rl, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [curve.env_steps for curve in first] == [256, 256]


def test_different_environments_share_one_critic() -> None:
    together = InProcessRun(tables(CARTPOLE, PENDULUM), seed=0)
    together.round()
    assert len(together.critics) == 1
    assert set(together.critics[0].policies) == {"p0", "p1"}
    assert together.critics[0].version == 1
    together.close()


def test_own_critics_learn_from_their_own_policy_alone() -> None:
    together = InProcessRun(tables(CARTPOLE, PENDULUM, critic="own"), seed=0)
    together.round()
    assert [critic.policies for critic in together.critics] == [("p0",), ("p1",)]
    together.close()


def test_policy_with_own_critic_is_independent() -> None:
    alone = run_together(tables(CARTPOLE, critic="own"), seed=1)
    beside = run_together(tables(CARTPOLE, CARTPOLE, critic="own"), seed=1)
    assert beside[0] == alone[0]


def test_policy_with_fewer_steps_ends_earlier() -> None:
    rl = tables(CARTPOLE, CARTPOLE)
    rl = dataclasses.replace(
        rl, policies=[dataclasses.replace(rl.policies[0], steps=64), rl.policies[1]]
    )
    seen: list[Update] = []
    curves = run_together(rl, seed=0, on_update=seen.append)
    assert [curve.env_steps for curve in curves] == [64, 256]
    assert [update.policy for update in seen] == ["p0", "p1", "p1", "p1", "p1"]


def test_policies_use_the_critic_as_it_was_last_published() -> None:
    rl = tables(CARTPOLE, CARTPOLE, push_every=2)
    used = [update.stats["value_version"] for update in run_together(rl, seed=0)[0].updates]
    assert used == [0.0, 0.0, 2.0, 2.0]


class Broken:
    """A pole whose third reward is not a number."""

    def __new__(cls) -> Any:
        import gymnasium

        class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
            count = 0

            def step(self, action: Any) -> Any:
                self.count += 1
                observation, reward, *rest = self.env.step(action)
                return observation, float("nan") if self.count == 3 else reward, *rest

        return Wrapped(gymnasium.make(CARTPOLE))


def test_non_finite_rollout_is_dropped_alone() -> None:
    rl = tables(CARTPOLE, f"{__name__}:Broken")
    fine, broken = run_together(rl, seed=0)
    assert (len(fine.updates), fine.dropped) == (4, 0)
    assert (len(broken.updates), broken.dropped) == (3, 1)


def test_returns_are_averaged_over_the_newest_episodes() -> None:
    curve = Curve("p")
    assert curve.last_return() is None
    returns = [(1.0, 2.0), (), (6.0,)]
    curve.updates = [Update("p", n, found, {}) for n, found in enumerate(returns)]
    assert curve.last_return(2) == 4.0
    assert curve.last_return(20) == 3.0


@pytest.mark.parametrize("more", [{"algorithm": "impala"}, {"critic": "none"}])
def test_what_needs_a_job_is_refused(more: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="one process"):
        InProcessRun(tables(CARTPOLE, **more), seed=0)


def test_two_poles_are_learned_with_a_pooled_critic() -> None:
    rl = RlTable(
        steps=12_288,
        lr=1e-3,
        hidden=[32, 32],
        critic_hidden=[32, 32],
        epochs=6,
        policies=[
            PolicyTable(name="plain", env="atoll.rl.environments.physics:cartpole"),
            PolicyTable(
                name="long", env="atoll.rl.environments.physics:cartpole", options={"length": 1.0}
            ),
        ],
    )
    for curve in run_together(rl, seed=1):
        first = sum(curve.updates[0].returns) / len(curve.updates[0].returns)
        last = curve.last_return()
        assert last is not None
        assert first < 40.0 < 120.0 < last
