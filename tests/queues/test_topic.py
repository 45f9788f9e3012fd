"""What programs do with topics, without a hub and with a real one."""

from __future__ import annotations

import threading

import torch

from atoll.queues import Entry, QueueRegistry
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S


def values(entries: list[Entry]) -> list[object]:
    return [entry.value for entry in entries]


def test_every_subscription_reads_everything_for_itself(registry: QueueRegistry) -> None:
    topic = registry.topic("t")
    one, two = topic.subscribe("one"), topic.subscribe("two")
    for n in range(5):
        topic.publish(n)
    assert values(one.read(10)) == [0, 1, 2, 3, 4]
    assert values(two.read(2)) == [0, 1]
    assert values(two.read(10)) == [2, 3, 4]
    assert one.read() == []


def test_a_late_subscriber_begins_where_it_wants(registry: QueueRegistry) -> None:
    topic = registry.topic("t")
    topic.subscribe("early")
    topic.publish("old")
    late = topic.subscribe("late")
    all_of_it = topic.subscribe("all", start="oldest")
    topic.publish("new")
    assert values(late.read(10)) == ["new"]
    assert values(all_of_it.read(10)) == ["old", "new"]


def test_a_subscription_goes_on_behind_what_it_acknowledged(registry: QueueRegistry) -> None:
    topic = registry.topic("t")
    first = topic.subscribe("s")
    for n in range(4):
        topic.publish(n)
    entries = first.read(10)
    first.ack(entries[1])
    first.ack(entries[0])  # earlier ones change nothing
    again = topic.subscribe("s", start="oldest")
    assert values(again.read(10)) == [2, 3]


def test_retention_by_count_drops_the_oldest_and_says_so(registry: QueueRegistry) -> None:
    topic = registry.topic("t", max_items=3)
    reader = topic.subscribe("s", start="oldest")
    for n in range(8):
        topic.publish(n)
    assert values(reader.read(10)) == [5, 6, 7]
    assert reader.missed


def test_a_waiting_reader_hears_at_once_and_skips_to_the_newest(registry: QueueRegistry) -> None:
    topic = registry.topic("weights")
    reader = topic.subscribe("s")
    found: list[Entry] = []
    waiting = threading.Thread(target=lambda: found.extend(reader.read(wait_s=BOUND_S)))
    waiting.start()
    topic.publish({"w": torch.ones(3)})
    waiting.join(BOUND_S)
    assert torch.equal(found[0].value["w"], torch.ones(3))
    for n in range(5):
        topic.publish({"w": torch.full((200, 200), float(n))})
    newest = reader.newest()
    assert newest is not None
    assert float(newest.value["w"][0, 0]) == 4.0
    assert reader.newest() is None
