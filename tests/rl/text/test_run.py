"""The roles of a job for language models, each in a thread, over one in-process channel."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import JobSpec
from atoll.config.rl_roles import member_roles
from atoll.config.rl_tables import PolicyTable
from atoll.errors import DataError
from atoll.group.single import SingleGroup
from atoll.queues import InMemoryChannel, QueueRegistry
from atoll.rl.channel import latest
from atoll.rl.state_saver import StateSaver
from atoll.rl.text import actor as actor_module
from atoll.rl.text import start
from atoll.rl.text.actor import TextActor
from atoll.rl.text.prompts import Wording
from atoll.rl.text.run import run_text_job
from atoll.rl.text.start import shared_start_model, start_model
from atoll.rl.text.tasks import Brackets
from atoll.run import Run
from atoll.run.place import Membership
from atoll.wire.message import Message
from atoll.wire.messages import TopicRead
from tests.patience import PATIENCE_S
from tests.rl.text.small import job, rl_table

POLICIES = [
    PolicyTable(name="one", env="text:brackets", options={"kinds": "()", "most": 3}),
    PolicyTable(name="two", env="text:expressions", options={"most": 2}),
]


def member(slot: int, spec: JobSpec, channel: InMemoryChannel, folder: Path) -> Run:
    """Return a member whose queues are those of all on this channel."""
    directory = folder / f"w{slot}"
    directory.mkdir(exist_ok=True)
    run = Run(
        SingleGroup(me=f"w{slot}"),
        Membership(directory, seed=spec.job.seed, slot=slot, num_slots=spec.job.nodes),
    )
    run._queues = QueueRegistry(
        channel, prefix="job", reader=run.member, stopping=lambda: run.stopping
    )
    return run


def run_all(spec: JobSpec, folder: Path, *, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    """Return what each member reports at its end."""
    channel = InMemoryChannel()
    found: dict[int, dict[str, Any]] = {}
    errors: list[BaseException] = []

    def body(slot: int) -> None:
        try:
            found[slot] = run_text_job(spec, member(slot, spec, channel, folder))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=body, args=(slot,), daemon=True) for slot in range(spec.job.nodes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not errors, errors
    return [found[slot] for slot in range(spec.job.nodes)]


def test_two_actors_and_a_critic_do_a_whole_job(tmp_path: Path) -> None:
    critic, one, two = run_all(job(rl_table(policies=POLICIES), steps=5), tmp_path)
    assert critic["role"] == "critic"
    assert critic["trajectories"] == 8  # 64 completions in batches of 16, of each policy
    assert critic["updates"] >= 4
    assert not critic["dropped"]
    for result, name in ((one, "one"), (two, "two")):
        assert result["policy"] == name
        assert (result["episodes"], result["updates"]) == (64, 4)
        assert result["sent_bytes"] > 0
        assert 0 <= result["score_before"] <= 1
        assert 0 <= result["score_after"] <= 1
        assert len(result["texts"]) == 3
    assert (tmp_path / "w1" / "policy-one.safetensors").exists()
    assert (tmp_path / "w0" / "critic.safetensors").exists()


@pytest.mark.parametrize("changes", [{"algorithm": "grpo"}, {"critic": "own"}])
def test_a_policy_alone_needs_no_other_member(tmp_path: Path, changes: dict[str, Any]) -> None:
    (result,) = run_all(job(rl_table(**changes), steps=3), tmp_path)
    assert (result["role"], result["updates"]) == ("actor", 4)


def test_weights_left_behind_begin_another_job(tmp_path: Path) -> None:
    run_all(job(rl_table(algorithm="grpo"), steps=3), tmp_path)
    path = tmp_path / "w0" / "policy-one.safetensors"
    again = job(rl_table(algorithm="grpo", start=str(path)))
    assert start_model(again).trained
    (result,) = run_all(again, tmp_path)
    assert result["updates"] == 4


def test_one_member_trains_the_beginning_and_the_others_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, channel = job(rl_table(), steps=3), InMemoryChannel()
    first = shared_start_model(spec, member(0, spec, channel, tmp_path))
    monkeypatch.delattr(start, "train_start_model")  # no other member has to
    other = shared_start_model(spec, member(1, spec, channel, tmp_path))
    assert first is not None
    assert other is not None
    for ours, theirs in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_member_without_news_trains_the_same_beginning_itself(tmp_path: Path) -> None:
    spec = job(rl_table(), steps=3)
    usual = shared_start_model(spec, member(0, spec, InMemoryChannel(), tmp_path))
    lonely = shared_start_model(spec, member(1, spec, InMemoryChannel(), tmp_path), wait_s=0.05)
    assert usual is not None
    assert lonely is not None
    for ours, theirs in zip(usual.model.parameters(), lonely.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class StoppingChannel(InMemoryChannel):
    """Asks its member to leave at its first long read, and notes how long reads may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.leave, self.waits = threading.Event(), list[float]()

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        if isinstance(body, TopicRead) and body.wait_s:
            self.waits.append(body.wait_s)
            self.leave.set()
        return super().ask(body, timeout_s=timeout_s)


def test_a_stop_ends_the_wait_for_the_beginning_soon(tmp_path: Path) -> None:
    spec, channel = job(rl_table(), steps=3), StoppingChannel()
    run = member(1, spec, channel, tmp_path)
    run._leave_requested = channel.leave
    assert shared_start_model(spec, run) is None
    (wait_s,) = channel.waits
    assert 0 < wait_s <= latest.WAIT_S


def test_a_stop_before_the_beginning_ends_quietly(tmp_path: Path) -> None:
    spec = job(rl_table(), steps=100_000)
    run = member(0, spec, InMemoryChannel(), tmp_path)
    run._leave_requested.set()
    result = run_text_job(spec, run)
    assert (result["role"], result["updates"]) == ("critic", 0)


class StopsAfter(Run):
    """Asks itself to stop once it has counted so many steps."""

    limit = 10**9

    def stepped(self, count: int = 1) -> None:
        super().stepped(count)
        self.limit -= count
        if self.limit <= 0:
            self._leave_requested.set()


def test_an_actor_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    spec = job(rl_table(algorithm="grpo"), steps=3)
    run_all(spec, tmp_path)
    whole = (tmp_path / "w0" / "policy-one.safetensors").read_bytes()

    channel = InMemoryChannel()
    stopped = member(0, spec, channel, tmp_path)
    stopped.__class__, stopped.limit = StopsAfter, 32  # type: ignore[attr-defined]
    half = run_text_job(spec, stopped)
    assert half["updates"] == 2
    rest = run_text_job(spec, member(0, spec, channel, tmp_path))
    assert (rest["updates"], rest["episodes"]) == (4, 64)
    assert rest["score_before"] == half["score_before"]
    assert (tmp_path / "w0" / "policy-one.safetensors").read_bytes() == whole


class Spoiled(Brackets):
    """The third reward is no number."""

    calls = 0

    def reward(self, prompt: str, completion: str) -> float:
        self.calls += 1
        return float("nan") if self.calls == 3 else super().reward(prompt, completion)


class AlwaysSpoiled(Brackets):
    def reward(self, prompt: str, completion: str) -> float:
        return float("nan")


def actor_with(task: Brackets, folder: Path) -> TextActor:
    spec = job(rl_table(algorithm="grpo"), steps=3)
    run = member(0, spec, InMemoryChannel(), folder)
    beginning = shared_start_model(spec, run)
    assert beginning is not None
    beginning = dataclasses.replace(beginning, tasks={"one": task})
    return TextActor(spec, run, member_roles(spec.rl)[0], beginning)


def always_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every completion count as one that ended, so that the task is asked for each."""
    monkeypatch.setattr(Wording, "read", lambda self, tokens: "x")


def test_non_finite_reward_batch_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ended(monkeypatch)
    task = Spoiled(kinds="()", most=3)
    actor = actor_with(task, tmp_path)
    actor._before = 0.0  # the examination asks the task, too
    result = actor.run()
    assert result["dropped"] == {"not_finite": 1}
    assert result["updates"] == 4


def test_a_task_that_never_gives_a_number_ends_the_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ended(monkeypatch)
    monkeypatch.setattr(actor_module, "MOST_BAD", 5)
    actor = actor_with(AlwaysSpoiled(kinds="()", most=3), tmp_path)
    actor._before = 0.0
    with pytest.raises(DataError, match="nan for"):
        actor.run()


def test_what_was_learned_is_saved_for_each_member(tmp_path: Path) -> None:
    spec, channel = job(rl_table(algorithm="grpo"), steps=3), InMemoryChannel()
    run = member(0, spec, channel, tmp_path)
    run_text_job(spec, run)
    state = StateSaver(member(0, spec, channel, tmp_path), member="w0").newest()
    assert set(state) == {"policy", "metrics", "before"}
