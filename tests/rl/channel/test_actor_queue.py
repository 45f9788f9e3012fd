"""What a critic has leased of an actor comes again at once when it cannot use it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from atoll.errors import HubUnreachable
from atoll.queues import Channel, InMemoryChannel
from atoll.rl.channel import actor_queue
from atoll.rl.channel.actor_queue import ActorQueue
from atoll.rl.channel.latest import Background
from atoll.wire.messages import Message
from atoll.wire.queue_messages import QueueClaim
from tests.rl.channel.kit import (
    BOUND_S,
    BadLink,
    alone,
    hurry,
    registry,
    until,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(actor_queue, "LEASE_S", 1000.0)


@pytest.fixture
def channel() -> InMemoryChannel:
    return alone()


class LosingChannel(BadLink):
    """A channel whose first large payload cannot be fetched."""

    lost = False

    def large(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        if not self.lost:
            self.lost = True
            raise HubUnreachable("killed")
        return super().large(sha256)


def test_items_that_cannot_be_fetched_come_again_at_once(channel: InMemoryChannel) -> None:
    queue = registry(LosingChannel(channel), "w0").queue("experience")
    for number in range(3):
        queue.put(bytes([number]) * 100_000)
    own = ActorQueue(
        queue, decode=lambda value: (value, 0.0), ahead=3, most_held=9, wake=lambda: None
    )
    try:
        until(lambda: own.depth == 3)
        found = [own.take() for _ in range(3)]
    finally:
        own.close()
    assert [one.value[0] for one in found if one is not None] == [0, 1, 2]


class LateChannel(BadLink):
    """A channel whose answers with items come once it is `open`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.asked, self.open = threading.Event(), threading.Event()

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        answer = super().ask(body, timeout_s=timeout_s)
        if isinstance(body, QueueClaim):
            self.asked.set()
            assert self.open.wait(BOUND_S)
        return answer


def test_items_that_come_as_a_critic_ends_are_given_back(
    channel: InMemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(channel, "w1").queue("experience").put(b"x")
    late = LateChannel(channel)
    own = ActorQueue(
        registry(late, "w0").queue("experience"), decode=lambda value: (value, 0.0), ahead=3,
        most_held=9, wake=lambda: None,
    )  # fmt: skip
    assert late.asked.wait(BOUND_S)
    # Its thread takes longer than it is waited for.
    monkeypatch.setattr(Background, "close", Background.end)
    own.close()
    late.open.set()
    (item,) = registry(channel, "w2").queue("experience").claim(wait_s=BOUND_S)
    assert (item.value, item.attempt) == (b"x", 2)
