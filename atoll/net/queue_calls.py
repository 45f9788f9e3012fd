"""Queues over HTTP, for programs that have no session with the hub."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from atoll.net.rest import Rest
from atoll.wire.messages import (
    Done,
    Message,
    QueueAck,
    QueueClaim,
    QueueExtend,
    QueueItem,
    QueueItems,
    QueueOpen,
    QueueOptions,
    QueuePut,
    QueuePutDone,
    QueueRelease,
)

M = TypeVar("M", bound=Message)


class QueueCalls:
    """The part of `HubClient` that is about queues."""

    _rest: Rest
    _timeout_s: float

    def queues(self) -> list[dict[str, Any]]:
        """Return of each queue and topic how full it is and how fast it moves."""
        return list(self._rest.json("GET", "/api/queues"))

    def dead_letters(self, queue: str) -> list[dict[str, Any]]:
        """Return the items of a queue that were given back too often."""
        return list(self._rest.json("GET", "/api/queues/dead", params={"queue": queue}))

    def requeue(self, queue: str, *, seq: int | None = None) -> int:
        """Make a dead letter (None: all) ready again; return how many."""
        return self._letters("requeue", queue, seq)

    def discard(self, queue: str, *, seq: int | None = None) -> int:
        """Give a dead letter (None: all) up for good; return how many."""
        return self._letters("discard", queue, seq)

    def _letters(self, verb: str, queue: str, seq: int | None) -> int:
        body = {"queue": queue, "seq": seq}
        return int(self._rest.json("POST", f"/api/queues/{verb}", json=body)["items"])

    def queue_open(self, queue: str, options: QueueOptions, *, topic: bool = False) -> None:
        """Give a queue or topic its options."""
        self._queue("open", QueueOpen(queue, options, topic), Done)

    def queue_put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item durably; the same key again is stored once."""
        return self._queue("put", QueuePut(queue, key, payload), QueuePutDone)

    def queue_claim(
        self, queue: str, *, lease_s: float, limit: int = 1, wait_s: float = 0.0
    ) -> list[QueueItem]:
        """Lease up to `limit` items for `lease_s`; waits up to `wait_s` for the first."""
        claim = QueueClaim(queue, lease_s, limit, wait_s)
        return self._queue("claim", claim, QueueItems, wait_s=wait_s).items

    def queue_ack(self, queue: str, *, lease: str) -> None:
        """Say that a leased item is done.

        Raises:
            HubError: the lease was lost to another claim.
        """
        self._queue("ack", QueueAck(queue, lease), Done)

    def queue_extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end `lease_s` from now; raises as `queue_ack` does."""
        self._queue("extend", QueueExtend(queue, lease, lease_s), Done)

    def queue_release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give a leased item back; too often makes it a dead letter."""
        self._queue("release", QueueRelease(queue, lease, reason), Done)

    def _queue(self, verb: str, body: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        """Send a message of the wire as JSON and return the one that answers it."""
        response = self._rest.call(
            "POST",
            f"/api/queues/{verb}",
            content=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout=self._timeout_s + wait_s,
        )
        return msgspec.json.decode(response.content, type=answer)
