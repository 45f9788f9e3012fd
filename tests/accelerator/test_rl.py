"""Reinforcement learning computes on the accelerator: every role, policy and critic."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.rl.actor.learners import FollowerLearner, LocalLearner, make_actor_learner
from atoll.rl.algorithms.a3c import A3c
from atoll.rl.algorithms.impala import ImpalaLearner, load_snapshot
from atoll.rl.channel.messages import decode_snapshot, encode_snapshot
from atoll.rl.critic.critic import Critic
from atoll.rl.critic.learner import CriticLearner, PoliciesLearner
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE
from atoll.rl.in_process import InProcessRun
from atoll.rl.nets.policy import Policy
from atoll.rl.run import device_of_networks
from atoll.rl.text.critic import TextCritic
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.sharing import Exchange
from atoll.rl.text.start import start_model, train_start_model
from tests.accelerator.child import PRETENDED_ONLY
from tests.accelerator.noted import left_behind, on_processor
from tests.accelerator.pretended import RECORD
from tests.rl.text.small import WORDING, gpt, job, rl_table
from tests.rl.text.test_sharing import Half
from tests.rl.walks import task_of, valued, walk

HERE = torch.device("cpu")
NETWORKS = {"mm", "addmm", "bmm", "convolution", "embedding", "tanh", "native_layer_norm"}
"""Operators of policies and critics; actions are drawn in main memory, where they are needed."""

SMALL = RlTable(
    hidden=[8], critic_hidden=[8, 8], epochs=2, minibatches=2, critic_epochs=2,
    critic_minibatches=2, lr=3e-3, entropy=0.01,
)  # fmt: skip


def pooled(*envs: str, **changes: Any) -> RlTable:
    base = RlTable(
        steps=128, environments=2, rollout=8, epochs=2, minibatches=2, hidden=[8],
        critic_hidden=[8], critic_epochs=2, critic_minibatches=2,
        policies=[PolicyTable(name=f"p{n}", env=env) for n, env in enumerate(envs)],
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def nothing_here(found: Counter[str]) -> None:
    assert RECORD.ran("addmm") + RECORD.ran("mm") > 0
    assert not {name: n for name, n in found.items() if name in NETWORKS}


@pytest.mark.parametrize("critic", ["pooled", "unconditioned", "corrected", "own"])
@pytest.mark.every(3)
def test_actors_and_critics_compute_there(critic: str, device: torch.device) -> None:
    rl = pooled("CartPole-v1", "Pendulum-v1", critic=critic, recurrent=4)
    there = InProcessRun(rl, seed=1, device=device)
    here = InProcessRun(rl, seed=1)
    with on_processor() as found:
        updates = there.round()
    nothing_here(found)
    for actor in there.actors:
        assert not left_behind(actor.learner.module, [actor.learner.optimizer])
    for one in there.critics:
        assert not left_behind(one.net)
    for ours, theirs in zip(here.round(), updates, strict=True):
        assert theirs.stats == pytest.approx(ours.stats, rel=1e-3, abs=1e-5)
    there.close()
    here.close()


@pytest.mark.parametrize("kind", [DISCRETE, MULTI_DISCRETE, CONTINUOUS])
@pytest.mark.every(3)
def test_a3c_descends_there(kind: str, device: torch.device) -> None:
    rl = dataclasses.replace(SMALL, algorithm="a3c", critic="own")
    there = A3c(task_of(kind), rl, total_steps=1000, seed=1, device=device)
    here = A3c(task_of(kind), rl, total_steps=1000, seed=1)
    steps = [walk(here.policy, seed=turn) for turn in range(2)]
    figures = [here.improve(step) for step in steps]
    with on_processor() as found:
        assert [there.improve(step) for step in steps] == [
            pytest.approx(one, rel=1e-4, abs=1e-6) for one in figures
        ]
    nothing_here(found)
    assert not left_behind(there.module, [there.optimizer])


def test_the_learner_of_all_policies_learns_there(device: torch.device) -> None:
    rl = dataclasses.replace(SMALL, algorithm="impala", critic="pooled")
    tasks = [task_of(policy="a"), task_of(CONTINUOUS, policy="b")]

    def learner(where: torch.device) -> ImpalaLearner:
        critic = Critic(rl, seed=1, device=where)
        for task in tasks:
            critic.add_policy(task)
        return ImpalaLearner(tasks, rl, critic, total_steps=1000, seed=1, device=where)

    here, there = learner(HERE), learner(device)
    lived = [
        walk(here.learners[task.policy].policy, seed=turn, name=task.policy)
        for task in tasks
        for turn in range(2)
    ]
    expected = here.learn(lived)
    with on_processor() as found:
        told = there.learn(lived)
    nothing_here(found)
    for name, figures in expected.items():
        assert told[name] == pytest.approx(figures, rel=1e-3, abs=1e-5)
    sent = decode_snapshot(encode_snapshot(there.snapshot("a")))
    acting = Policy.build(tasks[0], rl, generator=torch.Generator())
    assert load_snapshot(acting, sent) == 1
    torch.testing.assert_close(acting.head.weight, here.learners["a"].policy.head.weight)


def test_states_move_between_devices(device: torch.device) -> None:
    def made(where: torch.device) -> A3c:
        rl = dataclasses.replace(SMALL, algorithm="a3c", critic="own")
        return A3c(task_of(), rl, total_steps=1000, seed=1, device=where)

    there, here = made(device), made(HERE)
    there.improve(walk(here.policy, seed=0))
    state = {name: tensor.cpu() for name, tensor in there.state_dict().items()}
    again = made(device)
    for learner in (here, again):
        learner.load_state_dict(state)
        learner.improve(walk(made(HERE).policy, seed=1))
    assert not left_behind(again.module, [again.optimizer])
    for ours, theirs in zip(here.module.parameters(), again.module.parameters(), strict=True):
        torch.testing.assert_close(theirs.cpu(), ours)


def test_roles_of_a_job_are_built_there(device: torch.device) -> None:
    task = task_of()
    for learner in (CriticLearner(SMALL, seed=1, device=device),
                    PoliciesLearner(SMALL, seed=1, device=device)):  # fmt: skip
        learner.add_policy(task)
        assert not left_behind(learner.module)
    actor = make_actor_learner(
        task, dataclasses.replace(SMALL, critic="own"), side=None, service=None, total_steps=100,
        seed=lambda _: 1, device=device,
    )  # fmt: skip
    assert isinstance(actor, LocalLearner)
    trajectory = walk(Policy.build(task, SMALL, generator=torch.Generator().manual_seed(1)))
    with on_processor() as found:
        actor.learn(trajectory)
    nothing_here(found)
    follower = FollowerLearner(actor.policy, newest=lambda: None)
    assert not left_behind(follower.module)


def test_values_are_answered_in_main_memory(device: torch.device) -> None:
    critic = Critic(SMALL, seed=1, device=device)
    critic.add_policy(task_of())
    policy = Policy.build(task_of(), SMALL, generator=torch.Generator().manual_seed(1))
    answer = critic.of(walk(policy))
    assert answer.values.device == device
    assert answer.to(HERE).values.device == HERE
    assert valued(walk(policy)).to(device).cut_values.device == device


@pytest.mark.parametrize("changes", [{"critic": "pooled"}, {"algorithm": "grpo"}])
@pytest.mark.every(2)
def test_language_models_write_and_learn_there(
    changes: dict[str, Any], device: torch.device
) -> None:
    spec = job(rl_table(**changes), steps=3)
    beginnings = [start_model(spec), start_model(spec)]
    beginnings[1].model.to(device)
    with on_processor() as found:
        train_start_model(beginnings[1], spec)
        there = TextInProcessRun(spec, beginnings[1])
        there.update()
    nothing_here(found)
    train_start_model(beginnings[0], spec)
    here = TextInProcessRun(spec, beginnings[0])
    here.update()
    for policy, same in zip(there.policies, here.policies, strict=True):
        assert not left_behind(policy.model) + left_behind(policy.reference)
        for ours, theirs in zip(same.model.parameters(), policy.model.parameters(), strict=True):
            torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-2, atol=5e-3)
    for critic in there.critics:
        assert isinstance(critic, TextCritic)
        assert not left_behind(critic.model)


def test_completions_of_others_are_read_there(device: torch.device) -> None:
    rl = rl_table(algorithm="grpo", share=2)
    found: list[torch.Tensor] = []
    for place in (device, HERE):
        policy = LanguagePolicy("one", Half(), gpt().to(place), WORDING, rl, episodes=99, seed=3)
        exchange = Exchange(policy, task="t", seed=3)
        group = {"prompt": "(", "completions": ["a", "bb"] * 2, "ended": [True] * 4}
        exchange.take({"policy": "two", "task": "t", "groups": [group]})
        together = exchange.with_others(policy.write())
        assert together.log_probabilities.device == HERE
        found.append(together.log_probabilities[-4:, :3])  # `bb` and its end
        policy.improve(together, None)
    torch.testing.assert_close(*found, rtol=1e-2, atol=5e-3)


@PRETENDED_ONLY
def test_without_64_bit_numbers_the_processor_computes(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_of_networks(device) == device
    RECORD.missing_dtypes.add(torch.float64)
    assert device_of_networks(device) == HERE
    assert "float64, which pretended does not support" in caplog.text
