"""The two poolings beside the conditioned one: joint states, and everybody's experience."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError
from atoll.rl.critic.critic import Critic
from atoll.rl.critic.learner import CriticLearner, PoliciesLearner
from atoll.rl.nets.policy import Policy
from atoll.rl.trajectory import Trajectory
from tests.rl.channel.kit import SPEC, actor, alone, critic, trajectory, until
from tests.rl.lived import lived, table, task


def joint(step: int, *, ends: float = 1.1) -> Trajectory:
    """Return experience of two copies of two agents; rewards lie in the joint state alone."""
    t = lived("team", seed=step, sequence=step, columns=4, ends=ends, cut=ends < 1.0)
    generator = torch.Generator().manual_seed(step)
    states = torch.randn(len(t.observations), 2, 6, generator=generator)
    t.states = states.repeat_interleave(2, dim=1)
    t.cut_states = torch.randn(len(t.cut_at), 6, generator=generator)
    agent = torch.arange(4) % 2
    t.rewards = t.states[:-1, :, 5] + 3.0 * agent
    return t


def test_a_joint_critic_sees_the_state_and_who_asks() -> None:
    made = Critic(table(critic_lr=1e-2), seed=0, kind="joint")
    made.add_policy(task("team", state=(6,), agents=2))
    for step in range(1, 31):
        stats = made.learn([joint(step)])
    assert stats["team"]["explained_variance"] > 0.9
    t = joint(99, ends=0.1)
    found = made.of(t)
    wanted = t.cut_states[:, 5] + 3.0 * (t.cut_at[:, 1] % 2) if t.cut_states is not None else None
    assert wanted is not None
    assert len(wanted) > 1
    assert float((found.cut_values - wanted).square().mean()) < 0.3


def test_a_joint_critic_refuses_what_it_cannot_see() -> None:
    made = Critic(table(), seed=0, kind="joint")
    with pytest.raises(ConfigError, match=r"'alone'.*observations"):
        made.add_policy(task("alone"))
    made.add_policy(task("team", state=(6,), agents=2))
    with pytest.raises(ConfigError, match=r"\(8,\) for 2 agents.*\(6,\) for 2 agents.*'team'"):
        made.add_policy(task("larger", state=(8,), agents=2))
    with pytest.raises(ConfigError, match=r"3 agents.*2 agents"):
        made.add_policy(task("more", state=(6,), agents=3))
    with pytest.raises(ConfigError, match="without joint states"):
        made.of(lived("team"))


class Fixed:
    """A policy that takes action 1 with one probability everywhere."""

    def __init__(self, probability: float) -> None:
        self.probability = torch.tensor(probability)

    def evaluate(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        chosen = trajectory.actions[..., 0] == 1
        likely = torch.where(chosen, self.probability, 1.0 - self.probability).log()
        return likely, torch.zeros_like(likely)


def one_armed(policy: str, probability: float, step: int) -> Trajectory:
    """Return episodes of one step: action 1 is worth 1, action 0 nothing."""
    t = lived(policy, seed=step, sequence=step, columns=32, ends=1.1)
    generator = torch.Generator().manual_seed(step)
    t.actions = (torch.rand(8, 32, 1, generator=generator) < probability).long()
    t.log_probabilities = Fixed(probability).evaluate(t)[0]
    t.rewards = t.actions[..., 0].float()
    return t


def test_corrected_learns_one_policy_from_the_other() -> None:
    made = Critic(table(critic_lr=1e-2), seed=0, kind="corrected")
    likes = {"eager": 0.8, "lazy": 0.4}
    for name, probability in likes.items():
        made.add_policy(task(name, task="arm"))
        made.set_policy(name, Fixed(probability))
    for step in range(1, 21):
        made.learn([one_armed("lazy", 0.4, step)])
    probes = [lived(name, ends=1.1) for name in likes]
    eager, lazy = (float(found.values.mean()) for found in made.values_of(probes))
    assert lazy == pytest.approx(0.4, abs=0.08)
    # Weights of at most 1: what is learned is the value of min(0.4, 0.8) and min(0.6, 0.2), made
    # a distribution again.
    assert eager == pytest.approx(0.4 / (0.4 + 0.2), abs=0.08)


def test_without_policy_weights_it_learns_from_its_own() -> None:
    """Nothing is weighed by a policy that was not published."""
    made = Critic(table(), seed=0, kind="corrected")
    for name in ("eager", "lazy"):
        made.add_policy(task(name, task="arm"))
    made.set_policy("eager", Fixed(0.8))
    assert made.learn([one_armed("lazy", 0.4, 1)]).keys() == {"eager", "lazy"}
    assert made.learn([one_armed("eager", 0.8, 2)]).keys() == {"eager"}


def test_policy_weights_of_another_width_are_left_out() -> None:
    rl = RlTable(critic="corrected", hidden=[8], critic_hidden=[8], critic_minibatches=1)
    policy = Policy.build(SPEC, replace(rl, hidden=[9]), generator=torch.Generator())
    channel, learner = alone(), CriticLearner(rl, seed=1)
    learner.add_policy(SPEC)
    with actor(channel, rl) as one, critic(channel, rl) as side:
        side.newest_policy(SPEC.policy)  # listens from now on
        one.publish_policy(policy.state_dict())
        until(lambda: side._policies[SPEC.policy]._fresh)
        assert learner.learn([trajectory()], side).keys() == {SPEC.policy}


def test_policies_of_other_tasks_teach_nothing() -> None:
    made = Critic(table(), seed=0, kind="corrected")
    for name in ("eager", "lazy"):
        made.add_policy(task(name))
        made.set_policy(name, Fixed(0.5))
    assert made.learn([one_armed("lazy", 0.4, 1)]).keys() == {"lazy"}


def test_policies_with_names_alike_stay_apart_in_the_file() -> None:
    learner = PoliciesLearner(table(algorithm="impala"), seed=1)
    for name in ("a.b", "a_b", "train"):
        learner.add_policy(task(name))
    prefixes = {name.partition(".")[0] for name in learner.module.state_dict()}
    assert len(prefixes) == 3
    assert {"a:b", "a_b"} < prefixes
