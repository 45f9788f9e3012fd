"""Messages to and from durable queues and topics.

A *queue* gives each item to one consumer, which leases and acknowledges it. A *topic* delivers
every item to every subscription; each named subscription has its own position.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.wire.message import MOST_ITEMS, Finite, Message, Number

PAYLOAD_MAGIC = b"ATQ\x01"
"""First bytes of a payload that is not plain bytes; a letter and the value follow."""
JSON_PAYLOAD = PAYLOAD_MAGIC + b"j"
"""The same of a JSON value."""

Overflow = Literal["reject", "drop-oldest", "wait"]

Leases = Annotated[list[str], msgspec.Meta(max_length=MOST_ITEMS)]


class QueueOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Capacity of a queue or topic, and its behaviour when full."""

    max_items: Number = 1_000_000
    """Items ready or leased (in a topic: kept); 0: unlimited."""
    max_bytes: Number = 4 * 2**30
    """Payload bytes of those items, blobs included; 0: unlimited."""
    overflow: Overflow = "reject"
    """When full, a put is rejected, drops the oldest ready items, or waits; topics drop the
    oldest."""
    max_attempts: Number = 5
    """Claims of one item before it becomes a dead letter."""
    keep_s: Finite = 0.0
    """Seconds after which an unclaimed item is dropped; 0: never."""


class QueueOpen(Message, frozen=True):
    """Ask: set the options of a queue or topic. Answered by `Done`."""

    queue: str
    options: QueueOptions
    topic: bool = False


class QueueEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item to store. A large payload is uploaded as a blob and referenced by its hash."""

    key: str
    payload: bytes = b""
    blob: str = ""
    """SHA-256 of the uploaded payload; empty: the payload is in `payload`."""
    nbytes: Number = 0
    """Size of the blob; the hub uses its own figure."""


class QueuePut(Message, frozen=True):
    """Ask: store an item. A repeated `key` is accepted and stored once."""

    queue: str
    key: str
    payload: bytes
    blob: str = ""
    wait_s: Finite = 0.0
    """Longest wait for room if the queue's overflow is `wait`."""


class QueuePutDone(Message, frozen=True):
    """Answer: the item is durable. `duplicate`: the key existed already."""

    seq: Number
    duplicate: bool
    waited_s: Finite = 0.0
    """Seconds that the hub waited for room."""


class QueuePutMany(Message, frozen=True):
    """Ask: store items in this order, all or none."""

    queue: str
    items: list[QueueEntry]
    wait_s: Finite = 0.0


class QueuePutManyDone(Message, frozen=True):
    """Answer: all items are durable; their numbers, in the order of the items."""

    seqs: list[Number]
    duplicates: list[Number] = []
    """Indices in `seqs` of items with a key that existed already."""
    waited_s: Finite = 0.0


class QueueClaim(Message, frozen=True):
    """Ask: lease up to `limit` items for `lease_s`; waits up to `wait_s` for the first."""

    queue: str
    lease_s: Finite
    limit: Number = 1
    wait_s: Finite = 0.0


class QueueItem(Message, frozen=True):
    """One leased item. `attempt` counts from 1; `lease` names this claim."""

    seq: Number
    key: str
    payload: bytes
    attempt: Number
    lease: str
    blob: str = ""
    """SHA-256 of a payload to be fetched as a blob."""


class QueueItems(Message, frozen=True):
    """Answer to a claim; empty if no item was ready in time."""

    items: list[QueueItem]


class QueueAck(Message, frozen=True):
    """Ask: the item is done; never deliver it again."""

    queue: str
    lease: str


class QueueAckMany(Message, frozen=True):
    """Ask: these items are done; answered by `QueueLost`."""

    queue: str
    leases: Leases


class QueueExtend(Message, frozen=True):
    """Ask: extend the lease to `lease_s` from now."""

    queue: str
    lease: str
    lease_s: Finite


class QueueExtendMany(Message, frozen=True):
    """Ask: extend these leases to `lease_s` from now; answered by `QueueLost`."""

    queue: str
    leases: Leases
    lease_s: Finite


class QueueLost(Message, frozen=True):
    """Answer to `QueueAckMany` and `QueueExtendMany`: the leases that had expired."""

    leases: list[str] = []


class QueueRelease(Message, frozen=True):
    """Ask: return the item (counts as an attempt; too many make it a dead letter)."""

    queue: str
    lease: str
    reason: str = ""


class TopicPublish(Message, frozen=True):
    """Ask: append items in this order, all or none; answered by `QueuePutManyDone`."""

    topic: str
    items: list[QueueEntry]


class TopicRead(Message, frozen=True):
    """Ask: items of a topic after a position; waits up to `wait_s` for the first.

    The first read under a subscription's name creates it; `limit=0` does only that.
    """

    topic: str
    subscription: str
    after: Number = 0
    """Last item already read; ignored if the acknowledged position is later."""
    limit: Number = 1
    wait_s: Finite = 0.0
    start: Literal["new", "oldest"] = "new"
    """Where a new subscription begins."""


class TopicItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a topic; numbers increase, with gaps."""

    seq: Number
    key: str
    payload: bytes
    time: Finite
    """Time of publication, seconds since 1970."""
    blob: str = ""


class TopicItems(Message, frozen=True):
    """Answer to a read."""

    items: list[TopicItem]
    position: Number = 0
    """The subscription's acknowledged position."""
    missed: bool = False
    """Items after that position were dropped before this subscription read them."""


class TopicAck(Message, frozen=True):
    """Ask: acknowledge everything up to `seq`. Answered by `Done`."""

    topic: str
    subscription: str
    seq: Number
