"""PPO as a learner: repeatable, resumable, careful with bad numbers, and it learns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import CheckpointCorrupt, DataError, LossNotFinite
from atoll.rl.actor.collector import Collector
from atoll.rl.algorithms.ppo import Ppo
from atoll.rl.critic.critic import Critic
from atoll.rl.environments.environment import task_of as task_in
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.trajectory import Trajectory, ValuedTrajectory
from tests.rl.walks import task_of, valued, walk

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SMALL = RlTable(hidden=[8, 8], epochs=2, minibatches=2, lr=3e-3)
KINDS = [DISCRETE, MULTI_DISCRETE, CONTINUOUS]


def made(kind: str = DISCRETE, *, seed: int = 1, **changes: Any) -> Ppo:
    rl = dataclasses.replace(SMALL, **changes)
    return Ppo(task_of(kind), rl, total_steps=1000, seed=seed)


def updates(ppo: Ppo, count: int, *, start: int = 0) -> list[dict[str, float]]:
    """Do updates on experience of the policy as it is."""
    stats = []
    for number in range(start, start + count):
        trajectory = walk(ppo.policy, seed=number)
        stats.append(ppo.improve(trajectory, valued(trajectory, seed=number)))
    return stats


def weights(ppo: Ppo) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in ppo.policy.state_dict().values()])


@pytest.mark.parametrize("recurrent", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_repeats_every_bit_and_another_does_not(kind: str, recurrent: int) -> None:
    one, same, other = (made(kind, recurrent=recurrent, seed=s) for s in (1, 1, 2))
    assert updates(one, 3) == updates(same, 3)
    updates(other, 3)
    assert torch.equal(weights(one), weights(same))
    assert not torch.equal(weights(one), weights(other))


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    updates(made(), 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recurrent", [0, 6])
def test_saving_and_loading_is_as_if_nothing_had_happened(recurrent: int) -> None:
    whole, first = made(recurrent=recurrent), made(recurrent=recurrent)
    updates(whole, 5)
    updates(first, 2)
    saved = first.state_dict()
    assert all(isinstance(value, Tensor) for value in saved.values())
    updates(first, 1)  # what is saved does not change with what it was saved from
    second = made(recurrent=recurrent, seed=99)
    second.load_state_dict(saved)
    assert (second.version, second.steps) == (2, 48)
    updates(second, 3, start=2)
    assert torch.equal(weights(whole), weights(second))
    assert torch.equal(whole.generator.get_state(), second.generator.get_state())


def test_a_state_of_another_network_is_refused() -> None:
    saved = made().state_dict()
    with pytest.raises(CheckpointCorrupt, match="do not fit policy p"):
        made(hidden=[9, 8]).load_state_dict(saved)
    updated = made()
    updates(updated, 1)
    saved = updated.state_dict() | {"optimizer.99.exp_avg": torch.zeros(3)}
    with pytest.raises(CheckpointCorrupt, match=r"99\.exp_avg"):
        made().load_state_dict(saved)


def test_the_first_ratio_is_one() -> None:
    ppo = made(lr=0.0)
    stats = updates(ppo, 2)[1]  # the normaliser has moved once, between the two
    assert stats["kl"] == pytest.approx(0.0, abs=1e-9)
    assert stats["clip_fraction"] == 0.0
    assert ppo.policy.norm is not None
    assert float(ppo.policy.norm.count) == 2 * 24


def test_better_actions_become_more_likely() -> None:
    ppo = made(epochs=10)
    trajectory = walk(ppo.policy, length=40, ends=False)
    good = trajectory.actions[..., 0] == 2
    trajectory.rewards = good.float()
    before = float((trajectory.log_probabilities.exp())[good].mean())
    flat = ValuedTrajectory(torch.zeros(41, 4), torch.zeros(0), 0)
    stats = ppo.improve(trajectory, flat)
    log_probabilities, _ = ppo.policy.evaluate(trajectory)
    assert float(log_probabilities.detach().exp()[good].mean()) > before + 0.02
    assert stats["policy_loss"] < 0 < stats["kl"]


def test_a_limit_of_divergence_ends_an_update_early() -> None:
    free, held = made(epochs=20, lr=0.05), made(epochs=20, lr=0.05, target_kl=0.02)
    assert updates(free, 1)[0]["epochs"] == 20
    stats = updates(held, 1)[0]
    assert 1 <= stats["epochs"] < 20
    assert stats["kl"] > 0.02


def test_the_learning_rate_falls_to_zero_at_the_end_of_the_run() -> None:
    ppo = Ppo(task_of(), SMALL, total_steps=72, seed=1)
    rates = [stats["lr"] for stats in updates(ppo, 4)]
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3, 0.0])
    steady = Ppo(task_of(), dataclasses.replace(SMALL, anneal=False), total_steps=72, seed=1)
    assert {stats["lr"] for stats in updates(steady, 4)} == {3e-3}


def test_entropy_is_kept_up_by_its_bonus() -> None:
    plain, kept = made(epochs=20), made(epochs=20, entropy=0.5)
    assert updates(kept, 3)[-1]["entropy"] > updates(plain, 3)[-1]["entropy"]


def test_what_is_cut_off_counts_its_value() -> None:
    ppo = made()
    trajectory = walk(ppo.policy, length=12, columns=6)
    assert len(trajectory.cut_at)
    values = valued(trajectory)
    wild = ValuedTrajectory(values.values, values.cut_values + 50.0, 1)
    one = made().improve(trajectory, values)
    assert one["explained_variance"] != made().improve(trajectory, wild)["explained_variance"]
    # Behind a termination it is without any effect.
    ends = trajectory.terminated
    ends[tuple(trajectory.cut_at.T)] = True
    assert made().improve(trajectory, values) == made().improve(trajectory, wild)


@pytest.mark.parametrize("what", ["reward", "value"])
def test_non_finite_numbers_are_named_without_effect(what: str) -> None:
    ppo = made()
    trajectory = walk(ppo.policy, length=6, columns=4, ends=False)
    values = valued(trajectory)
    if what == "reward":
        trajectory.rewards[3, 2] = math.nan
    else:
        values.values[3, 2] = math.inf
    before = weights(ppo)
    with pytest.raises(DataError, match="policy p, step 3, column 2"):
        ppo.improve(trajectory, values)
    assert torch.equal(weights(ppo), before)
    assert ppo.version == 0


def test_an_update_that_explodes_says_so() -> None:
    ppo = made(lr=1e38)
    with pytest.raises(LossNotFinite, match="policy p, update 1"):
        updates(ppo, 1)


def test_a_wrapped_optimizer_takes_the_steps() -> None:
    class Counting(torch.optim.Adam):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    ppo = made()
    ppo.optimizer = Counting(ppo.policy.parameters(), lr=1.0)
    updates(ppo, 1)
    assert ppo.optimizer.steps == 4
    assert ppo.optimizer.param_groups[0]["lr"] == 3e-3


# ------------------------------------------------------------------------------- on CartPole


ValuesOf = Callable[[Trajectory], ValuedTrajectory]


class Actor:
    """One policy that learns on its own: environments, critic, PPO."""

    def __init__(self, rl: RlTable, *, seed: int, values: ValuesOf | None = None) -> None:
        table = PolicyTable(name="p", env="CartPole-v1")
        columns = VectorEnv(table, count=rl.environments, seed=seed)
        task = task_in(table, rl, columns.environments[0])
        self.ppo = Ppo(task, rl, total_steps=rl.steps, seed=seed)
        self.critic: Critic | None = None
        if values is None:
            self.critic = Critic(rl, seed=seed, kind="own")
            self.critic.add_policy(task)
            values = self.critic.of
        self.values = values
        self.collector = Collector(columns, task, seed=seed)
        self.returns: list[float] = []

    def update(self) -> dict[str, float]:
        trajectory = self.collector.collect(self.ppo.policy, self.ppo.rl.rollout)
        self.returns += trajectory.returns
        stats = self.ppo.improve(trajectory, self.values(trajectory))
        if self.critic is not None:
            self.critic.learn([trajectory])
        return stats


def upright(trajectory: Trajectory) -> ValuedTrajectory:
    """Return values that fall with the angle of the pole: a critic that never changes."""
    seen, cut = trajectory.observations, trajectory.cut_observations
    return ValuedTrajectory(20 - 60 * seen[..., 2].abs(), 20 - 60 * cut[..., 2].abs(), 1)


def test_cartpole_is_learned() -> None:
    rl = RlTable(steps=20_000, hidden=[32, 32], critic_hidden=[32, 32], lr=1e-3, epochs=6)
    actor = Actor(rl, seed=3)
    while actor.ppo.steps < 8_000:
        actor.update()
    early, late = actor.returns[:20], actor.returns[-20:]
    assert sum(early) / 20 < 40
    assert sum(late) / 20 > 100


def test_updates_on_cartpole_are_the_golden_ones(request: pytest.FixtureRequest) -> None:
    rl = RlTable(
        steps=2_000, hidden=[16], lr=5e-3, epochs=4, environments=4, rollout=16, entropy=0.01
    )
    actor = Actor(rl, seed=7, values=upright)
    stats = [actor.update() for _ in range(6)]
    names = ("policy_loss", "kl", "clip_fraction", "entropy", "explained_variance")
    found: dict[str, list[float]] = {name: [round(t[name], 4) for t in stats] for name in names}
    found["returns"] = actor.returns
    parameters = nn.utils.parameters_to_vector(actor.ppo.policy.parameters()).detach()
    found["norm_of_weights"] = [round(float(parameters.norm()), 4)]
    path = GOLDEN / "ppo_cartpole.json"
    if request.config.getoption("--regenerate", default=False):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == set(golden)
    for name, numbers in golden.items():
        assert found[name] == pytest.approx(numbers, abs=2e-3), name
