"""The learner of all policies: V-trace corrects what was lived by older ones."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import CheckpointCorrupt, ConfigError, DataError
from atoll.rl.algorithms.impala import ImpalaLearner, load_snapshot
from atoll.rl.algorithms.losses import vtrace
from atoll.rl.critic.critic import Critic
from atoll.rl.critic.learner import SeparateCritics
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.trajectory import Trajectory
from tests.rl.walks import task_of, walk

SMALL = RlTable(
    algorithm="impala", hidden=[8], critic_hidden=[8, 8], epochs=1, minibatches=2,
    critic_epochs=1, critic_minibatches=2, lr=3e-3, gae_lambda=1.0,
)  # fmt: skip
TASKS = [task_of(policy="a"), task_of(CONTINUOUS, policy="b")]


def made(tasks: list[TaskSpec] = TASKS, *, seed: int = 1, **changes: Any) -> ImpalaLearner:
    rl = dataclasses.replace(SMALL, **changes)
    critic = Critic(rl, seed=seed)
    for task in tasks:
        critic.add_policy(task)
    return ImpalaLearner(tasks, rl, critic, total_steps=1000, seed=seed)


def acting(learner: ImpalaLearner, name: str) -> Policy:
    """Return an actor's policy with what the learner hands out."""
    task = learner.learners[name].task
    policy = Policy.build(task, learner.rl, generator=torch.Generator().manual_seed(9))
    load_snapshot(policy, learner.snapshot(name))
    return policy


def lived(learner: ImpalaLearner, *, seed: int = 0, **changes: Any) -> list[Trajectory]:
    """Return two trajectories of each policy."""
    return [
        walk(acting(learner, name), seed=2 * seed + turn, name=name, **changes)
        for name in learner.learners
        for turn in range(2)
    ]


def weights(learner: ImpalaLearner) -> Tensor:
    state = learner.state_dict()
    return torch.cat([state[key].flatten().double() for key in sorted(state)])


@pytest.mark.parametrize("recurrent", [0, 5])
def test_the_order_of_arrival_changes_no_bit(recurrent: int) -> None:
    one, other = made(recurrent=recurrent), made(recurrent=recurrent)
    for update in range(3):
        batch = lived(one, seed=update)
        assert one.learn(batch) == other.learn(batch[::-1])
    assert torch.equal(weights(one), weights(other))
    assert one.version("a") == one.version("b") == 3


def test_saving_and_loading_is_as_if_nothing_had_happened() -> None:
    whole, first = made(), made()
    batches = [lived(whole, seed=s) for s in range(4)]  # stale ones, on purpose
    for batch in batches:
        whole.learn(batch)
    for batch in batches[:2]:
        first.learn(batch)
    second = made(seed=5)
    second.load_state_dict(first.state_dict())
    for batch in batches[2:]:
        second.learn(batch)
    assert torch.equal(weights(whole), weights(second))


def test_separate_critics_keep_their_number_of_updates() -> None:
    one, other = (SeparateCritics(SMALL, seed=1) for _ in range(2))
    for task in TASKS:
        one.add_policy(task)
        other.add_policy(task)
    for batch in (lived(made())[:2], lived(made())[2:]):  # in turn, of one policy each
        one.learn(batch)
    other.load_state_dict(one.state_dict())
    assert other.version == one.version == 2


def test_an_actor_is_what_the_learner_handed_out() -> None:
    learner = made()
    learner.learn(lived(learner))
    actor = acting(learner, "a")
    policy = learner.learners["a"].policy
    assert actor.norm is not None
    assert float(actor.norm.count) > 0
    for mine, theirs in zip(actor.parameters(), policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert load_snapshot(actor, learner.snapshot("a")) == 1
    with pytest.raises(CheckpointCorrupt, match="the policy that the learner sent"):
        load_snapshot(actor, learner.snapshot("b"))


def test_only_stale_experience_is_corrected() -> None:
    learner = made(lr=0.03, epochs=4)
    batch = lived(learner)
    stats = learner.learn(batch)
    assert stats["a"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["a"]["rho"] == pytest.approx(1.0, abs=1e-5)
    stale = learner.learn(batch)
    assert stale["a"]["kl"] > 1e-3
    assert stale["a"]["rho"] < 0.99


def test_the_critic_learns_the_targets_of_vtrace() -> None:
    learner = made([TASKS[0]], lr=0.03)
    batch = lived(learner)
    learner.learn(batch)
    before = copy.deepcopy(learner.learners["a"].policy)
    goals: list[Tensor] = []
    critic = learner.critic
    values = critic.values_of(batch)

    class Listening:
        values_of, state_dict, load_state_dict = (
            critic.values_of, critic.state_dict, critic.load_state_dict,
        )  # fmt: skip

        def learn(self, trajectories: Any, *, targets: Any = None) -> Any:
            goals.extend(targets)
            return critic.learn(trajectories, targets=targets)

    learner.critic = Listening()
    learner.learn(batch)
    for trajectory, valued, found in zip(batch, values, goals, strict=True):
        now, _ = before.evaluate(trajectory)
        wanted, _ = vtrace(
            now.detach() - trajectory.log_probabilities,
            trajectory.with_values(valued.values, valued.cut_values), gamma=0.97,
        )  # fmt: skip
        torch.testing.assert_close(found, wanted)


def test_better_actions_become_more_likely() -> None:
    learner = made([TASKS[0]], epochs=5, lr=0.01)
    for seed in range(4):
        batch = lived(learner, seed=seed, length=20, ends=False)
        for trajectory in batch:
            trajectory.rewards = (trajectory.actions[..., 0] == 2).float()
        learner.learn(batch)
    trajectory = batch[-1]
    good = trajectory.actions[..., 0] == 2
    log_probabilities, _ = learner.learners["a"].policy.evaluate(trajectory)
    assert float(log_probabilities.detach()[good].exp().mean()) > 0.45  # it began with a third


def test_later_policy_begins_fresh() -> None:
    learner = made([TASKS[0]])
    learner.learn(lived(learner))
    before = learner.snapshot("a")
    newcomer = task_of(DISCRETE, policy="c")
    assert isinstance(learner.critic, Critic)
    learner.critic.add_policy(newcomer)
    learner.add_policy(newcomer)
    learner.add_policy(TASKS[0])  # again: nothing happens
    after = learner.snapshot("a")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert learner.version("c") == 0
    stats = learner.learn([walk(acting(learner, "c"), name="c")])
    assert set(stats) == {"c"}
    assert (learner.version("a"), learner.version("c")) == (1, 1)


def test_non_finite_numbers_are_named_without_effect() -> None:
    learner = made()
    before = weights(learner)
    batch = lived(learner, ends=False)
    batch[2].rewards[1, 3] = math.nan
    with pytest.raises(DataError, match="policy b, step 1, column 3"):
        learner.learn(batch)
    assert torch.equal(weights(learner), before)


def test_an_unknown_policy_is_refused() -> None:
    learner = made()
    stranger = lived(learner)[0]
    stranger.policy = "aa"
    critic = learner.critic
    assert isinstance(critic, Critic)
    critic.add_policy(task_of(policy="aa"))
    with pytest.raises(ConfigError, match="unknown policy of a trajectory"):
        learner.learn([stranger])
