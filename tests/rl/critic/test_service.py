"""Values by asking: each gets its own answer, late or refused ones end an update, no more."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError, DeadlineExceeded
from atoll.rl.critic import service
from atoll.rl.critic.service import ServiceValues, ValueService
from atoll.rl.trajectory import Trajectory, ValuedTrajectory
from tests.patience import PATIENCE_S, PROMPT_S
from tests.rl.channel.kit import alone, hurry, registry, trajectory

RL = RlTable(values="service")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(service, "WAIT_S", 0.03)
    monkeypatch.setattr(service, "AGAIN_S", 0.02)


class Hops:
    """A clock of an actor that does not pause: its pauses take no time, and count."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        self._ahead_s += seconds


def refused(values: ServiceValues, request: Trajectory, why: str) -> None:
    """Ask in vain, with time for one answer however busy the machine is: then it is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "time", Hops())
        patch.setattr(service, "AGAIN_S", PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match=why):
            values.of(request)


def sums(t: Trajectory) -> ValuedTrajectory:
    return ValuedTrajectory(
        values=t.observations.sum(-1), cut_values=t.cut_observations.sum(-1), version=4
    )  # fmt: skip


def test_each_actor_gets_the_values_of_its_own_trajectory() -> None:
    channel = alone()
    answering = ValueService(registry(channel, "w0"), rl=RL, of=sums)
    wrong: list[str] = []

    def ask(member: str) -> None:
        values = ServiceValues(registry(channel, member), rl=RL, member=member)
        for seed in range(5):
            request = trajectory(seed=seed + 100 * int(member[1:]))
            got = values.of(request)
            if not torch.equal(got.values, sums(request).values) or got.version != 4:
                wrong.append(f"{member} {seed}")
            if not torch.equal(got.cut_values, sums(request).cut_values):
                wrong.append(f"{member} {seed} cuts")
        assert len(values.waited_s) == 5

    threads = [threading.Thread(target=ask, args=(f"w{n}",)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert (answering.answered, answering.refused) == (20, 0)
    answering.close()


def test_without_a_critic_an_actor_waits_no_longer_than_it_may() -> None:
    values = ServiceValues(registry(alone(), "w1"), rl=RL, member="w1", timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="w1 waited"):
        values.of(trajectory())
    assert time.monotonic() - began < PROMPT_S


def test_late_policy_is_requested_again() -> None:
    channel, asked, gone = alone(), threading.Event(), threading.Event()

    def of(t: Trajectory) -> ValuedTrajectory:
        if gone.is_set() or not asked.is_set():
            asked.set()  # it is known when the actor asks again
            raise ConfigError("there is no such policy", given=t.policy)
        return sums(t)

    answering = ValueService(registry(channel, "w0"), rl=RL, of=of)
    values = ServiceValues(registry(channel, "w1"), rl=RL, member="w1", timeout_s=PATIENCE_S)
    assert values.of(trajectory()).version == 4
    assert answering.refused == 1
    gone.set()
    other = ServiceValues(registry(channel, "w2"), rl=RL, member="w2", timeout_s=PATIENCE_S)
    refused(other, trajectory(), "there is no such policy")
    answering.close()


def test_a_question_that_makes_no_sense_ends_nothing() -> None:
    channel = alone()
    answering = ValueService(registry(channel, "w0"), rl=RL, of=sums)
    registry(channel, "x").queue("ask").put({"what": 1})
    values = ServiceValues(registry(channel, "w1"), rl=RL, member="w1")
    request = trajectory()
    request.rewards[0, 0] = float("inf")
    other = ServiceValues(registry(channel, "w2"), rl=RL, member="w2", timeout_s=PATIENCE_S)
    refused(other, request, "not finite")
    assert values.of(trajectory()).version == 4
    answering.close()


def test_late_answer_is_not_taken_for_the_next() -> None:
    channel, late = alone(), threading.Event()

    def of(t: Trajectory) -> ValuedTrajectory:
        assert late.wait(PATIENCE_S)
        return sums(t)

    answering = ValueService(registry(channel, "w0"), rl=RL, of=of)
    values = ServiceValues(registry(channel, "w1"), rl=RL, member="w1", timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        values.of(trajectory(seed=1))
    late.set()
    patient = ServiceValues(registry(channel, "w1"), rl=RL, member="w1", timeout_s=PATIENCE_S)
    request = trajectory(seed=2)
    assert torch.equal(patient.of(request).values, sums(request).values)
    answering.close()
