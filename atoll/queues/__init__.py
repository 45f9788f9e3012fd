"""Durable queues and topics for programs: `run.queue` and `run.topic` hand these out."""

from atoll.queues.channel import Channel, HubChannel
from atoll.queues.in_memory import InMemoryChannel
from atoll.queues.queue import Item, Queue
from atoll.queues.registry import QueueRegistry
from atoll.queues.topic import Entry, Subscription, Topic

__all__ = [
    "Channel",
    "Entry",
    "HubChannel",
    "InMemoryChannel",
    "Item",
    "Queue",
    "QueueRegistry",
    "Subscription",
    "Topic",
]
