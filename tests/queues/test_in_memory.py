"""What queues without a hub keep in memory, and for how long."""

from __future__ import annotations

import threading

import pytest

from atoll.errors import HubError, QueueFull
from atoll.queues import InMemoryChannel, QueueRegistry
from atoll.queues.queue import INLINE_BYTES
from tests.node.running import until
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S


def queues(channel: InMemoryChannel) -> QueueRegistry:
    return QueueRegistry(channel, prefix="job", reader="w0")


def large(number: int) -> bytes:
    return bytes([number]) * (INLINE_BYTES + 1)


def test_large_values_go_with_the_items_that_are_dropped() -> None:
    channel = InMemoryChannel()
    topic = queues(channel).topic("t", max_items=2)
    reader = topic.subscribe(start="oldest")
    topic.publish(large(0))
    (first,) = reader.read()
    for number in range(1, 5):
        topic.publish(large(number))
    assert len(channel._blobs) == 2
    assert [entry.value for entry in reader.read(10)] == [large(3), large(4)]
    with pytest.raises(HubError, match="no longer stored"):
        _ = first.value


def test_many_waiting_items_are_sent_one_after_the_other() -> None:
    channel = InMemoryChannel()
    queue = queues(channel).queue("q", max_items=4, overflow="drop-oldest")
    with channel._condition:  # the first message is under way until all others wait
        first = threading.Thread(target=queue.put_later, args=(0,))
        first.start()
        until(lambda: queue._outbox._flight)
        puts = [queue.put_later(number) for number in range(1, 2000)]
    first.join(BOUND_S)
    assert queue.flush(timeout_s=BOUND_S)
    assert len({put.result(0.0) for put in puts}) == len(puts)


def test_large_value_of_a_refused_put_is_released() -> None:
    channel = InMemoryChannel()
    queue = queues(channel).queue("q", max_items=1, overflow="reject")
    queue.put(large(0))
    for number in (0, 1):
        with pytest.raises(QueueFull):
            queue.put(large(number))
    (item,) = queue.claim()
    assert item.value == large(0)
    item.ack()
    assert not channel._blobs


def test_large_value_of_a_repeated_key_is_released() -> None:
    channel = InMemoryChannel()
    queue = queues(channel).queue("q")
    assert queue.put(large(0), key="k") == queue.put(large(1), key="k")
    (item,) = queue.claim()
    assert item.value == large(0)
    item.ack()
    assert not channel._blobs
