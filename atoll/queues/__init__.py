"""Durable queues and topics, returned by `run.queue` and `run.topic`.

May import: atoll.net, atoll.wire and the leaves; torch and numpy only inside functions.
Start in queue.py (put, claim, ack), then channel.py (how requests reach the hub).
"""

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
