"""Actors and a critic through queues in one process: what comes through, and who waits for whom."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError
from atoll.queues import Channel, InMemoryChannel
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.channel.critic import CriticChannel, Received
from atoll.rl.channel.names import most_unsaved
from atoll.rl.environments.spaces import TaskSpec
from atoll.wire.messages import Message
from atoll.wire.queue_messages import QueuePut
from tests.patience import PATIENCE_S
from tests.rl.channel.kit import (
    BOUND_S,
    SPEC,
    BadLink,
    actor,
    alone,
    critic,
    hurry,
    registry,
    trajectory,
    until,
)

RL = RlTable(queue_items=3, save_every=2, staleness=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, lease_s=PATIENCE_S)
    # A critic that a busy machine holds up is neither away nor waited for in vain.
    monkeypatch.setattr("atoll.rl.channel.actor.AWAY_S", PATIENCE_S)
    monkeypatch.setattr("atoll.rl.channel.actor.LONGEST_BACK_PRESSURE_S", PATIENCE_S)


@pytest.fixture
def channel() -> InMemoryChannel:
    return alone()


def take(side: CriticChannel, count: int) -> list[Received]:
    found: list[Received] = []
    deadline = time.monotonic() + BOUND_S
    while len(found) < count and time.monotonic() < deadline:
        found += side.take(count - len(found), wait_s=0.2)
    assert len(found) == count
    return found


def test_experience_comes_with_its_name_its_number_and_its_age(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        for version in range(3):
            one.send(trajectory(version=version, seed=version))
        got = take(side, 3)
        assert [(g.trajectory.actor, g.trajectory.sequence) for g in got] == [
            ("w1", 1), ("w1", 2), ("w1", 3)
        ]  # fmt: skip
        assert torch.equal(got[2].trajectory.observations, trajectory(seed=2).observations)
        assert sum(g.age for g in got) <= 3
        assert all(0 <= g.travelled_s < PATIENCE_S for g in got)
        assert side.newcomers() == [SPEC]
        assert side.newcomers() == []


def test_actors_are_read_in_turn_however_fast_one_is(channel: InMemoryChannel) -> None:
    with (
        actor(channel, RL, "w1") as fast,
        actor(channel, RL, "w2") as slow,
        critic(channel, RL) as side,
    ):
        for number in range(3):
            fast.send(trajectory(seed=number))
        slow.send(trajectory())
        until(lambda: side.depth == {"w1": 3, "w2": 1})
        assert {g.trajectory.actor for g in side.take(2)} == {"w1", "w2"}


def test_an_actor_waits_while_the_critic_has_enough_to_read(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        for number in range(3):
            one.send(trajectory(seed=number))
        until(lambda: side.depth == {"w1": 3})
        released: list[float] = []

        def read_one(wait_s: float) -> None:
            time.sleep(wait_s)  # the actor is to be waiting by then
            released.append(time.monotonic())
            side.take(1)

        reader = threading.Thread(target=read_one, args=(1.0,))
        reader.start()
        one.send(trajectory(seed=9))
        assert released, "it did not wait"
        assert one.queue_wait_s > 0.0
        reader.join()
        assert one.dropped == 0


def test_a_restarted_actor_drops_nothing_the_hub_lacks(
    channel: InMemoryChannel,
) -> None:
    dying = BadLink(channel)
    first = ActorChannel(registry(dying, "w1"), rl=RL, policy=SPEC.policy, member="w1")
    dying.dead = True
    for number in range(RL.queue_items):
        first.send(trajectory(seed=number))
    state = first.state_dict()
    first.close(timeout_s=0.0)
    assert [sequence for sequence, _ in state["unsent"]] == [1, 2, 3]

    slow = SlowChannel(channel)
    second = ActorChannel(registry(slow, "w1"), rl=RL, policy=SPEC.policy, member="w1")
    second.load_state_dict(state)
    second.announce(SPEC)
    with critic(channel, RL) as side:

        def send() -> None:
            for _ in range(RL.queue_items):
                second.send(trajectory(seed=9))

        more = threading.Thread(target=send)
        more.start()
        more.join(0.5)
        slow.open.set()
        got = take(side, 2 * RL.queue_items)
        more.join(BOUND_S)
    assert [one.trajectory.sequence for one in got] == [1, 2, 3, 4, 5, 6]
    assert second.dropped == 0
    second.close()


class SlowChannel(BadLink):
    """A channel whose puts wait for `open`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.open = threading.Event()

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        if isinstance(body, QueuePut):
            assert self.open.wait(BOUND_S)
        return super().ask(body, timeout_s=timeout_s)


def test_actor_without_critic_keeps_the_newest_data(
    channel: InMemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.rl.channel.actor.AWAY_S", 0.1)
    count = RL.queue_items + most_unsaved(RL) + 5
    with actor(channel, RL) as one:
        began = time.monotonic()
        for number in range(count):
            one.send(trajectory(seed=number, version=number))
            assert one.flush()
        # Eleven of them would each wait that long for a critic that may come.
        assert time.monotonic() - began < PATIENCE_S
        assert one.dropped == 5
        with critic(channel, RlTable(queue_items=3, save_every=2, staleness=1000)) as side:
            got = take(side, most_unsaved(RL))
            assert got[0].trajectory.sequence == 6  # the oldest made room
            assert side.lost == 5


def test_a_critic_that_ends_is_not_waited_for(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one:
        with critic(channel, RL):
            until(lambda: one.critic_away_s < 5)
        until(lambda: one.critic_away_s == float("inf"))
        began = time.monotonic()
        for number in range(8):
            one.send(trajectory(seed=number))
        assert time.monotonic() - began < PATIENCE_S  # the fourth one alone would wait that long
        with critic(channel, RL):  # and one that comes back is read
            until(lambda: one.critic_away_s < 5)


def test_old_experience_is_dropped_counted_and_reported(
    channel: InMemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        one.send(trajectory(version=0))
        one.send(trajectory(version=5, seed=1))
        until(lambda: side.depth == {"w1": 2})
        with caplog.at_level(logging.WARNING):
            got = side.take(8)
        assert [g.trajectory.sequence for g in got] == [2]
        assert (side.counts["stale"], side.staleness) == (1, {5: 1, 0: 1})
        assert "trajectory 1 of w1 (policy light) is 5 versions old" in caplog.text
        one.send(trajectory(version=5))  # nothing else is affected
        assert take(side, 1)[0].age == 0


def test_damaged_experience_is_dropped_and_counted(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        wrong = trajectory()
        wrong.rewards[3, 0] = float("nan")
        one.send(wrong)
        one.send(trajectory(seed=1))
        queue = registry(channel, "x").queue("experience.w1")
        queue.put(b"nonsense")
        assert [g.trajectory.sequence for g in take(side, 1)] == [2]
        until(lambda: side.take(4) == [] and side.counts["damaged"] == 2)


def test_experience_in_the_queue_of_another_actor_is_refused(channel: InMemoryChannel) -> None:
    with actor(channel, RL, "w1") as one, critic(channel, RL) as side:
        thief = ActorChannel(registry(channel, "w9"), rl=RL, policy="light", member="w9")
        thief._queue = registry(channel, "w9").queue("experience.w1")
        thief.send(trajectory())
        one.send(trajectory(seed=1))
        assert [g.trajectory.actor for g in take(side, 1)] == ["w1"]
        until(lambda: side.take(4) == [] and side.counts["damaged"] == 1)
        thief.close()


def test_weights_come_down_once_each_and_the_newest_wins(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        assert one.newest_values() is None
        for version in range(1, 6):
            side.publish({"w": torch.full((2,), float(version))}, version=version)
        until(lambda: (found := one.newest_values()) is not None and float(found["w"][0]) == 5)
        assert one.newest_values() is None
        late = ActorChannel(registry(channel, "w2"), rl=RL, policy="light", member="w2")
        found = until(late.newest_values)  # who comes later gets what there is
        assert float(found["w"][0]) == 5
        late.close()


def test_policies_travel_from_learner_and_to_critic(
    channel: InMemoryChannel,
) -> None:
    impala = RlTable(algorithm="impala")
    with actor(channel, impala) as one, critic(channel, impala) as side:
        side.publish_policy("light", {"p": torch.ones(3)})
        assert until(one.newest_values)["p"].sum() == 3
    channel = alone()
    corrected = RlTable(critic="corrected")
    with actor(channel, corrected) as one, critic(channel, corrected) as side:
        one.publish_policy({"p": torch.ones(4)})
        assert until(lambda: side.newest_policy("light"))["p"].sum() == 4
        assert side.newest_policy("light") is None


def test_it_has_ended_when_all_are_done_and_everything_was_read(channel: InMemoryChannel) -> None:
    with (
        actor(channel, RL, "w1") as one,
        actor(channel, RL, "w2") as two,
        critic(channel, RL) as side,
    ):
        one.send(trajectory())
        one.end()
        until(lambda: side.running == ["w2"])
        assert not side.ended(expected=2)
        two.send(trajectory())
        two.end()
        until(lambda: side.running == [])
        assert not side.ended(expected=2)  # both wait here to be read
        assert len(take(side, 2)) == 2
        until(lambda: side.ended(expected=2))
        assert not side.ended(expected=3)
        two.announce(SPEC)  # it is back
        until(lambda: side.running == ["w2"])
        assert not side.ended(expected=2)


def test_a_fifth_task_may_come_at_any_time(channel: InMemoryChannel) -> None:
    with actor(channel, RL) as one, critic(channel, RL) as side:
        one.send(trajectory())
        take(side, 1)
        other = ActorChannel(registry(channel, "w5"), rl=RL, policy="heavy", member="w5")
        spec = TaskSpec(
            policy="heavy", task="y", observation=(4,), actions=SPEC.actions, gamma=0.9
        )  # fmt: skip
        other.announce(spec)
        other.send(trajectory(policy="heavy"))
        assert take(side, 1)[0].trajectory.policy == "heavy"
        assert set(side.tasks) == {"light", "heavy"}
        other.close()


def test_names_in_a_pool_tell_jobs_apart(channel: InMemoryChannel) -> None:
    rl = RlTable(pool="pool/balance", queue_items=3)
    sides = [
        ActorChannel(registry(channel, "w1"), rl=rl, policy="light", member="w1", job=job)
        for job in ("north", "south")
    ]
    side = CriticChannel(registry(channel, "w0"), rl=rl, job="north")
    for number, one in enumerate(sides):
        one.announce(SPEC)
        one.send(trajectory(seed=number))
    got = take(side, 2)
    assert {g.trajectory.policy for g in got} == {"north.light", "south.light"}
    assert {g.trajectory.actor for g in got} == {"north.w1", "south.w1"}
    assert set(side.tasks) == {"north.light", "south.light"}
    for one in sides:
        one.close()
    side.close()


@pytest.mark.parametrize("pool", ["pool/x", ""])
def test_only_a_pool_leaves_a_silent_actor(
    channel: InMemoryChannel, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    rl = RlTable(pool=pool)
    side = CriticChannel(registry(channel, "w0"), rl=rl, job="north")
    for job in ("north", "south"):
        name = f"w-{job}"
        one = ActorChannel(registry(channel, name), rl=rl, policy=name, member=name, job=job)
        one.announce(SPEC)
        if job == "north":
            one.end()
        one.close()
    until(lambda: len(side.tasks) == 2 and len(side.depth) == 2)
    assert not side.ended(expected=1)
    monkeypatch.setattr("atoll.rl.channel.critic.SILENT_S", 0.05)
    if pool:
        until(lambda: side.ended(expected=1))
    else:
        time.sleep(0.3)  # six times as long as a pool would wait
        assert not side.ended(expected=1)
    side.close()


def test_a_message_of_another_version_ends_nothing(channel: InMemoryChannel) -> None:
    with critic(channel, RL) as side:
        roster = registry(channel, "x").topic("roster")
        other = {"actor": "w7", "policy": "heavy", "kind": "here", "spec": SPEC.to_json()}
        for said in (
            {"format": 2}, ["x"], {"format": 1, "kind": "here", "actor": "w8"},
            {"format": 1, **other},  # its task is of another policy
        ):  # fmt: skip
            roster.publish(said)
        with actor(channel, RL) as one:
            one.send(trajectory())
            assert take(side, 1)
            assert side.running == ["w1"]


def test_an_unknown_description_of_a_task_is_refused() -> None:
    with pytest.raises(ConfigError):
        TaskSpec.from_json("{}")
