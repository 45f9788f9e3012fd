"""Messages to and from durable queues and topics.

A *queue* gives each item to one consumer, which leases and acknowledges it. A *topic* keeps its
items for everybody: each named subscription has a position of its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.wire.message import Message

Overflow = Literal["reject", "drop-oldest", "wait"]


class QueueOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much a queue or topic holds, and what happens then."""

    max_items: int = 1_000_000
    """Items that are ready or leased (a topic: kept) at a time; 0: no limit."""
    max_bytes: int = 4 * 2**30
    """Payload bytes of them, large ones included; 0: no limit."""
    overflow: Overflow = "reject"
    """A put too many is refused, drops the oldest ready items, or waits. Topics drop the oldest."""
    max_attempts: int = 5
    """Claims of one item before it becomes a dead letter."""
    keep_s: float = 0.0
    """Items that nobody took for so long are dropped; 0: they stay."""


class QueueOpen(Message, frozen=True):
    """Ask: a queue or topic has these options from now on. Answered by `Done`."""

    queue: str
    options: QueueOptions
    topic: bool = False


class QueueEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item to be stored. A large payload travels as a blob and is named here by its hash."""

    key: str
    payload: bytes = b""
    blob: str = ""
    """SHA-256 of the payload, uploaded before; empty: `payload` is all."""
    nbytes: int = 0
    """Size of the blob; the hub trusts its own figure."""


class QueuePut(Message, frozen=True):
    """Ask: store an item. The same `key` again is accepted and stored once."""

    queue: str
    key: str
    payload: bytes
    blob: str = ""
    wait_s: float = 0.0
    """Longest wait for room where the queue's overflow is `wait`."""


class QueuePutDone(Message, frozen=True):
    """Answer: the item is durable. `duplicate`: the key was there already."""

    seq: int
    duplicate: bool
    waited_s: float = 0.0
    """How long the hub held it back for want of room."""


class QueuePutMany(Message, frozen=True):
    """Ask: store items in this order, all of them or none."""

    queue: str
    items: list[QueueEntry]
    wait_s: float = 0.0


class QueuePutManyDone(Message, frozen=True):
    """Answer: all are durable; their numbers, in the order of the items."""

    seqs: list[int]
    duplicates: list[int] = []
    """Places in `seqs` of items whose key was there already."""
    waited_s: float = 0.0


class QueueClaim(Message, frozen=True):
    """Ask: lease up to `limit` items for `lease_s`; waits up to `wait_s` for the first."""

    queue: str
    lease_s: float
    limit: int = 1
    wait_s: float = 0.0


class QueueItem(Message, frozen=True):
    """One leased item. `attempt` counts from 1; `lease` names this claim."""

    seq: int
    key: str
    payload: bytes
    attempt: int
    lease: str
    blob: str = ""
    """SHA-256 of a payload that is fetched as a blob."""


class QueueItems(Message, frozen=True):
    """Answer to a claim; empty when nothing came in time."""

    items: list[QueueItem]


class QueueAck(Message, frozen=True):
    """Ask: the item is done; never give it out again."""

    queue: str
    lease: str


class QueueAckMany(Message, frozen=True):
    """Ask: these items are done; answered by `QueueLost`."""

    queue: str
    leases: list[str]


class QueueExtend(Message, frozen=True):
    """Ask: the lease now ends `lease_s` from now."""

    queue: str
    lease: str
    lease_s: float


class QueueExtendMany(Message, frozen=True):
    """Ask: these leases now end `lease_s` from now; answered by `QueueLost`."""

    queue: str
    leases: list[str]
    lease_s: float


class QueueLost(Message, frozen=True):
    """Answer to acks or extensions of many: the leases that were not held any more."""

    leases: list[str] = []


class QueueRelease(Message, frozen=True):
    """Ask: give the item back (counts as an attempt; too many make it a dead letter)."""

    queue: str
    lease: str
    reason: str = ""


class TopicPublish(Message, frozen=True):
    """Ask: append items in this order, all or none; answered by `QueuePutManyDone`."""

    topic: str
    items: list[QueueEntry]


class TopicRead(Message, frozen=True):
    """Ask: items of a topic after a place; waits up to `wait_s` for the first.

    The first read under a subscription's name makes the subscription; `limit=0` does only that.
    """

    topic: str
    subscription: str
    after: int = 0
    """Items up to this number were read already; its acknowledged position counts at least."""
    limit: int = 1
    wait_s: float = 0.0
    start: Literal["new", "oldest"] = "new"
    """Where a subscription that did not exist begins."""


class TopicItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a topic; numbers grow, with gaps."""

    seq: int
    key: str
    payload: bytes
    time: float
    """When it was published, seconds since 1970."""
    blob: str = ""


class TopicItems(Message, frozen=True):
    """Answer to a read."""

    items: list[TopicItem]
    position: int = 0
    """Up to here the subscription has acknowledged."""
    missed: bool = False
    """Items after that position were dropped before this subscription read them."""


class TopicAck(Message, frozen=True):
    """Ask: this subscription is done with everything up to `seq`. Answered by `Done`."""

    topic: str
    subscription: str
    seq: int
