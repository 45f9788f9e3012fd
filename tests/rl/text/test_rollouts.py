"""Completions that other members write: whole jobs of threads, kills, and batches of no use."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import JobSpec, parse_spec
from atoll.config.rl_roles import ACTOR, SAMPLER, member_roles
from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError
from atoll.queues import InMemoryChannel
from atoll.rl.text import rollouts
from atoll.rl.text.actor import TextActor
from atoll.rl.text.compatibility import check_text
from atoll.rl.text.episodes import encode_episodes
from atoll.rl.text.rollouts import Collector, RolloutWorker
from atoll.rl.text.start import shared_start_model
from atoll.rl.text.trained import trained_tensors
from atoll.train.results.rl_summary import rl_summary
from tests.patience import PATIENCE_S
from tests.rl.text.small import job, rl_table
from tests.rl.text.test_run import member, run_all


def with_samplers(count: int = 2, **changes: Any) -> RlTable:
    table = rl_table(**{"algorithm": "grpo"} | changes)
    policies = [dataclasses.replace(one, samplers=count) for one in table.policies]
    return dataclasses.replace(table, policies=policies)


def test_samplers_come_after_the_trainers() -> None:
    rl = with_samplers(2)
    assert [role.role for role in member_roles(rl)] == [ACTOR, SAMPLER, SAMPLER]
    assert rl.members == 3


def test_a_trainer_learns_from_what_two_others_wrote(tmp_path: Path) -> None:
    rl = with_samplers(2)
    results = run_all(job(rl, steps=5), tmp_path)
    trainer, *writers = results
    assert (trainer["role"], trainer["episodes"], trainer["updates"]) == ("actor", 64, 4)
    assert trainer["sent_bytes"] > 0
    assert (tmp_path / "w0" / "policy-one.safetensors").exists()
    assert [one["role"] for one in writers] == ["sampler", "sampler"]
    assert sum(one["updates"] for one in writers) >= 4  # batches
    summary = rl_summary(
        rl, results={f"w{n}": {"rl": one} for n, one in enumerate(results)}, points=[], sent={}
    )
    assert summary["critic_member"] is None
    assert (summary["env_steps"], summary["policies"][0]["members"]) == (64, ["w0"])


@pytest.mark.parametrize("critic", ["pooled", "own"])
def test_values_of_completions_of_others_are_learned_by_ppo(tmp_path: Path, critic: str) -> None:
    spec = job(with_samplers(2, algorithm="ppo", critic=critic, queue_items=8), steps=5)
    check_text(spec)
    results = run_all(spec, tmp_path)
    trainer = next(one for one in results if one["role"] == "actor")
    assert (trainer["episodes"], trainer["updates"]) == (64, 4)
    if critic == "pooled":
        values = next(one for one in results if one["role"] == "critic")
        assert (values["trajectories"], values["dropped"]) == (4, {})


class Scene:
    """A trainer and a worker of one policy on a channel, moved by hand."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.spec: JobSpec = job(with_samplers(1, **changes), steps=3)
        self.folder, self.channel = folder, InMemoryChannel()
        self.trainer = self.train()

    def train(self) -> TextActor:
        run = member(0, self.spec, self.channel, self.folder)
        beginning = shared_start_model(self.spec, run)
        assert beginning is not None
        return TextActor(self.spec, run, member_roles(self.spec.rl)[0], beginning)

    def worker(self) -> RolloutWorker:
        run = member(1, self.spec, self.channel, self.folder)
        beginning = shared_start_model(self.spec, run)
        assert beginning is not None
        run.track(beginning.model)
        return RolloutWorker(self.spec, run, member_roles(self.spec.rl)[1], beginning)

    def write(self, worker: RolloutWorker, *, number: int = 1) -> None:
        """Let a worker put a batch with the newest weights."""
        if worker._receiver.receive():
            worker._load()
        episodes = worker._policy.write(writer="w1", number=number)
        episodes.actor = "w1"
        assert worker._put(episodes)

    @property
    def collector(self) -> Collector:
        found = self.trainer._collector
        assert found is not None
        return found

    def learn(self) -> None:
        episodes = self.collector.next()
        assert episodes is not None
        self.trainer._policy.improve(episodes, None)
        self.collector.learned()


def rounded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: part.bfloat16().float() for name, part in trained_tensors(model).items()}


def test_workers_sample_with_the_trainers_weights_bit_for_bit(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.collector.publish()
    worker = scene.worker()
    scene.write(worker)
    assert worker._receiver.received_bytes < 500, "both have the start model"
    scene.learn()
    scene.write(worker)
    assert worker._policy.learner.version == 1
    for name, ours in rounded(scene.trainer._policy.model).items():
        assert torch.equal(ours, worker._policy.model.state_dict()[name])


def test_a_worker_that_was_killed_follows_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.collector.publish()
    scene.write(scene.worker())
    scene.learn()
    again = scene.worker()
    scene.write(again)
    assert (again._receiver.version, again._receiver.skipped) == (1, 0)
    scene.learn()
    assert scene.trainer._policy.learner.version == 2


def test_a_trainer_that_was_killed_takes_what_is_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.collector.publish()
    worker = scene.worker()
    scene.write(worker)
    scene.learn()
    scene.write(worker)  # with version 1, which is lost now: nothing was saved
    scene.trainer = scene.train()
    scene.collector.publish()
    scene.write(worker, number=2)
    assert worker._policy.learner.version == 0
    scene.learn()
    assert scene.collector.dropped == {"of_lost_weights": 1}
    assert scene.trainer._policy.learner.version == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"policy": "other"}, "damaged"),
        ({"policy_version": 9}, "of_lost_weights"),
        ({"policy_version": 0}, "stale"),
    ],
)
def test_batches_of_no_use_are_dropped_and_counted(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    scene = Scene(tmp_path, staleness=1)
    scene.trainer._policy.learner.version = 2
    scene.collector.publish()
    worker = scene.worker()
    assert worker._receiver.receive()
    worker._load()
    wrong = dataclasses.replace(worker._policy.write(writer="w1", number=7), actor="w1", **change)
    worker._batches.put(encode_episodes(wrong))
    scene.write(worker)
    scene.learn()
    assert scene.collector.dropped == {why: 1}
    assert scene.trainer._policy.learner.version == 3


def test_a_batch_written_twice_is_learned_from_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.collector.publish()
    first, again = scene.worker(), scene.worker()
    scene.write(first)
    scene.write(again)  # killed before it knew: the same weights and number give the same batch
    scene.write(again, number=2)
    scene.learn()
    scene.learn()
    assert scene.trainer._policy.learner.version == 2
    assert not scene.collector._batches.claim()


def test_a_worker_outlasts_a_trainer_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    scene.collector.publish()
    worker = scene.worker()
    for number in (1, 2):  # as many as the queue holds
        scene.write(worker, number=number)
    monkeypatch.setattr(rollouts, "LEASE_S", 1e-3)
    episodes = worker._policy.write(writer="w1", number=3)
    episodes.actor = "w1"
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(worker._put, episodes)
        with pytest.raises(TimeoutError):
            put.result(0.3)
        scene.collector.end()
        assert put.result(PATIENCE_S) is False


def test_samplers_are_for_language_models() -> None:
    table = '[[rl.policies]]\nname = "p"\nenv = "CartPole-v1"\nsamplers = 2\n'
    with pytest.raises(ConfigError, match="samplers write completions of language models"):
        parse_spec(table)
