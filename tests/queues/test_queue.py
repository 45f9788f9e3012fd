"""What programs do with queues, without a hub and with a real one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError, DeadlineExceeded, LeaseEnded, QueueFull
from atoll.hub.server import HubServer
from atoll.queues import Item, Queue, QueueRegistry
from tests.patience import PATIENCE_S
from tests.queues.conftest import channel_to

BOUND_S = PATIENCE_S


def test_what_is_put_is_claimed_in_order_and_acknowledged(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    numbers = queue.put_many([{"n": n} for n in range(20)])
    assert numbers == sorted(numbers)
    items = queue.claim(50)
    assert [item.value["n"] for item in items] == list(range(20))
    assert {item.attempt for item in items} == {1}
    queue.ack(items)
    assert queue.claim() == []


def test_the_same_key_is_stored_once(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    assert queue.put("a", key="k") == queue.put("b", key="k")
    (item,) = queue.claim(10)
    assert (item.key, item.value) == ("k", "a")
    item.ack()
    queue.put("c", key="k")
    assert queue.claim() == []


def test_tensors_larger_than_a_message_go_there_and_back(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    sent = {"x": torch.randn(600, 600), "y": torch.arange(10)}
    queue.put(sent)
    queue.put({"x": np.ones(1000, np.float32)})
    large, small = queue.claim(2)
    got = large.value
    assert all(torch.equal(got[name], sent[name]) for name in sent)
    assert small.value["x"].sum() == 1000
    assert torch.equal(large.value["x"], sent["x"])  # again
    queue.ack([large, small])


def test_equal_large_values_are_kept_until_each_is_acked(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    sent = {"x": torch.randn(600, 600)}
    queue.put_many([sent, sent])
    first, second = queue.claim(2)
    first.ack()
    assert torch.equal(second.value["x"], sent["x"])
    second.ack()


def test_options_given_again_change_the_same_queue(registry: QueueRegistry) -> None:
    queue, topic = registry.queue("q", max_items=100), registry.topic("t", max_items=100)
    assert registry.queue("q", max_items=2) is queue
    assert registry.topic("t", max_items=2) is topic
    puts = [queue.put_later(n) for n in range(3)]
    assert [isinstance(put.exception(BOUND_S), QueueFull) for put in puts] == [False, False, True]


def test_item_is_acked_after_its_block_or_released_on_error(
    registry: QueueRegistry,
) -> None:
    queue = registry.queue("q")
    queue.put("job")
    (item,) = queue.claim()
    with pytest.raises(ZeroDivisionError), item:
        _ = 1 / 0
    (again,) = queue.claim()
    assert again.attempt == 2
    with again:
        pass
    assert queue.claim() == []


def test_expired_lease_is_lost_to_its_first_consumer(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    queue.put("x")
    (first,) = queue.claim(lease_s=0.05)
    (second,) = queue.claim(wait_s=BOUND_S)
    assert second.attempt == 2
    second.extend(60.0)
    with pytest.raises(LeaseEnded, match="not held"):
        first.ack()
    with pytest.raises(LeaseEnded, match="not held"):
        first.extend(60.0)
    second.ack()


def test_an_item_given_back_too_often_is_not_claimed_any_more(registry: QueueRegistry) -> None:
    queue = registry.queue("q", max_attempts=2)
    queue.put("poison")
    for _ in range(2):
        (item,) = queue.claim()
        item.release("no")
    assert queue.claim() == []


def test_a_full_queue_refuses_and_takes_what_came_before(registry: QueueRegistry) -> None:
    queue = registry.queue("q", max_items=3)
    puts = [queue.put_later(n) for n in range(5)]
    failed = [isinstance(put.exception(BOUND_S), QueueFull) for put in puts]
    assert failed == [False, False, False, True, True]
    assert [item.value for item in queue.claim(10)] == [0, 1, 2]


def test_a_queue_that_drops_keeps_the_newest(registry: QueueRegistry) -> None:
    queue = registry.queue("q", max_items=4, overflow="drop-oldest")
    for n in range(10):
        queue.put(n)
    assert [item.value for item in queue.claim(10)] == [6, 7, 8, 9]


def test_producer_waits_until_there_is_room(registry: QueueRegistry) -> None:
    queue = registry.queue("q", max_items=4, overflow="wait")
    seen: list[int] = []

    def consume() -> None:
        while len(seen) < 40:
            items = queue.claim(3, wait_s=BOUND_S)
            seen.extend(item.value for item in items)
            queue.ack(items)

    consumer = threading.Thread(target=consume)
    consumer.start()
    queue.put_many(list(range(40)), timeout_s=BOUND_S)
    consumer.join(BOUND_S)
    assert seen == list(range(40))


def test_a_wait_for_room_that_never_comes_ends_at_its_deadline(registry: QueueRegistry) -> None:
    queue = registry.queue("q", max_items=1, overflow="wait")
    queue.put(1)
    with pytest.raises((QueueFull, DeadlineExceeded)):
        queue.put(2, timeout_s=0.2)
    (item,) = queue.claim(5)
    item.ack()
    assert queue.put(3, timeout_s=BOUND_S) > 0


def test_every_item_reaches_one_consumer_only(registry: QueueRegistry) -> None:
    queue = registry.queue("q")
    total, lock = 200, threading.Lock()
    got: list[int] = []

    def consume() -> None:
        while len(got) < total:
            items = queue.claim(7, wait_s=0.2)
            queue.ack(items)
            with lock:
                got.extend(item.value for item in items)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for consumer in consumers:
        consumer.start()
    for n in range(total):
        queue.put_later(n)
    assert queue.flush(timeout_s=BOUND_S)
    for consumer in consumers:
        consumer.join(BOUND_S)
    assert sorted(got) == list(range(total))


def test_wrong_options_and_names_are_explained(registry: QueueRegistry) -> None:
    with pytest.raises(ConfigError, match="max_items"):
        registry.queue("q", max_item=3)
    with pytest.raises(ConfigError, match="overflow"):
        registry.queue("q", overflow="explode")
    with pytest.raises(ConfigError, match="name of a queue"):
        registry.queue("")


def test_iterating_ends_when_the_run_is_asked_to_stop(hub: HubServer, tmp_path: Path) -> None:
    seen: list[Item] = []
    with channel_to(hub, "job/w7", tmp_path) as channel:
        registry = QueueRegistry(
            channel, prefix="job", reader="w7", stopping=lambda: len(seen) == 3
        )
        queue: Queue = registry.queue("stop")
        queue.put_many([1, 2, 3, 4])
        for item in queue:
            item.ack()
            seen.append(item)
        assert [item.value for item in seen] == [1, 2, 3]
        assert registry.close(timeout_s=BOUND_S)


def test_puts_survive_a_broken_connection_once_each(hub: HubServer, tmp_path: Path) -> None:
    with channel_to(hub, "job/w8", tmp_path) as channel:
        queue = QueueRegistry(channel, prefix="job", reader="w8").queue("broken")
        puts = []
        for n in range(300):
            puts.append(queue.put_later(n))
            if n % 100 == 50:
                puts[-1].result(BOUND_S)
                cut(hub, "job/w8")
        assert len({put.result(BOUND_S) for put in puts}) == 300
        items = queue.claim(1000)
        assert [item.value for item in items] == list(range(300))
        queue.ack(items)


def cut(hub: HubServer, session: str) -> None:
    """Break the connection of a session without ending the session."""
    inner = hub.hub
    assert inner is not None

    async def work() -> None:
        found = inner.sessions.get(session)
        assert found is not None
        found.hang_up(1012, "cut by a test")

    hub.call(work())
