"""Messages to and from the durable queues."""

from __future__ import annotations

from atoll.wire.message import Message


class QueuePut(Message, frozen=True):
    """Ask: store an item. The same `key` again is accepted and stored once."""

    queue: str
    key: str
    payload: bytes


class QueuePutDone(Message, frozen=True):
    """Answer: the item is durable. `duplicate`: the key was there already."""

    seq: int
    duplicate: bool


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


class QueueItems(Message, frozen=True):
    """Answer to a claim; empty when nothing came in time."""

    items: list[QueueItem]


class QueueAck(Message, frozen=True):
    """Ask: the item is done; never give it out again."""

    queue: str
    lease: str


class QueueExtend(Message, frozen=True):
    """Ask: the lease now ends `lease_s` from now."""

    queue: str
    lease: str
    lease_s: float


class QueueRelease(Message, frozen=True):
    """Ask: give the item back (counts as an attempt; too many make it a dead letter)."""

    queue: str
    lease: str
    reason: str = ""
