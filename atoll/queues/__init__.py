"""Durable queues and topics for programs: `run.queue` and `run.topic` hand these out."""

from atoll.queues.channel import Channel, HubChannel
from atoll.queues.in_memory import AloneChannel
from atoll.queues.queue import Item, Queue
from atoll.queues.registry import Shelf
from atoll.queues.topic import Entry, Subscription, Topic

__all__ = [
    "AloneChannel",
    "Channel",
    "Entry",
    "HubChannel",
    "Item",
    "Queue",
    "Shelf",
    "Subscription",
    "Topic",
]
