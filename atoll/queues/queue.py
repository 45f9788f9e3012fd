"""A durable queue for programs: put, claim, acknowledge."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from atoll.clock import Clock
from atoll.errors import DeadlineExceeded, LeaseEnded
from atoll.ids import new_token
from atoll.queues import serialization
from atoll.queues.channel import Channel
from atoll.queues.outbox import BATCH_ITEMS, Outbox
from atoll.wire.message import MOST_ITEMS, Message
from atoll.wire.messages import (
    QueueAckMany,
    QueueClaim,
    QueueEntry,
    QueueExtendMany,
    QueueItem,
    QueueItems,
    QueueLost,
    QueueOpen,
    QueueOptions,
    QueuePutMany,
    QueueRelease,
)

INLINE_BYTES = 64 * 2**10
"""Payloads up to this size travel in the message; larger ones as blobs, block by block."""

PUT_S = 60.0
"""Longest wait for one put, unless the caller sets another."""

ASK_S = 60.0
LONGEST_WAIT_S = 20.0
"""Longest wait of one request at the hub; longer waits repeat the request."""

Put = concurrent.futures.Future[int]
"""Result of `put_later`: the item's number once it is durable, or the error."""


@dataclass(frozen=True, slots=True)
class Item:
    """One leased item. As a context manager it is acknowledged, or released after an error."""

    key: str
    attempt: int
    """Counts from 1; more than 1: an earlier consumer did not finish it."""
    seq: int
    lease: str
    _queue: Queue = field(repr=False)
    _payload: bytes = field(repr=False)
    _blob: str = field(repr=False)

    @property
    def value(self) -> Any:
        """The value; a large one is fetched at every access."""
        return self._queue.fetch(self._payload, self._blob)

    def ack(self) -> None:
        """Mark it done: it is not delivered again.

        Raises:
            LeaseEnded: another consumer may have it.
        """
        self._queue.ack([self])

    def extend(self, lease_s: float) -> None:
        """Extend the lease to `lease_s` from now; raises as `ack` does."""
        self._queue.extend([self], lease_s=lease_s)

    def release(self, reason: str = "") -> None:
        """Release it; after too many releases it becomes a dead letter. Raises as `ack` does."""
        self._queue.release(self, reason=reason)

    def __enter__(self) -> Item:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Acknowledge it, or release it with the error as the reason."""
        if error is None:
            self.ack()
        else:
            self.release(reason=f"{type(error).__name__}: {error}"[:1000])


class Queue:
    """A named queue, made by `run.queue`; thread-safe."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        *,
        clock: Clock,
        options: QueueOptions | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the queue and set its options, if any are given.

        Args:
            name: Its full name at the hub.
            channel: How it is reached.
            clock: Source of time for deadlines.
            options: Its limits, and what happens when it is full; None: unchanged.
            stopping: Checked while waiting for items; True ends the wait.

        Raises:
            ConfigError: the options are invalid.
            AuthError: this process may not use it.
        """
        self.name = name
        self._channel = channel
        self._clock = clock
        self._stopping = stopping
        self._outbox = Outbox(
            channel, lambda entries, wait_s: QueuePutMany(name, entries, wait_s), clock=clock
        )
        if options is not None:
            self.set_options(options)

    def set_options(self, options: QueueOptions) -> None:
        """Set its limits, and what happens when it is full; raises as the constructor does."""
        self._channel.ask(QueueOpen(self.name, options), timeout_s=ASK_S)
        batch = BATCH_ITEMS
        if options.max_items:
            batch = max(1, min(batch, options.max_items // 4))
        self._outbox.configure(batch_items=batch, waits=options.overflow == "wait")

    # -------------------------------------------------------------------------- producing

    def put(self, value: Any, *, key: str = "", timeout_s: float = PUT_S) -> int:
        """Store a value durably; return its number.

        Args:
            value: Bytes, a JSON value, or a dict of tensors or numpy arrays.
            key: Items with the same key are stored once; empty: a fresh key.
            timeout_s: Longest wait for it.

        Raises:
            QueueFull: there is no room, and the queue does not wait or drop.
            DeadlineExceeded: it was not acknowledged in time; it may have been stored.
            ConfigError: the value has an unsupported type.
        """
        return self._wait(self.put_later(value, key=key, timeout_s=timeout_s), timeout_s)

    def put_later(self, value: Any, *, key: str = "", timeout_s: float = PUT_S) -> Put:
        """Store a value in the background; the future has its number, or what `put` raises.

        Many that are under way at once share messages. When too many are, this waits.
        """
        entry = entry_of(self._channel, value, key)
        return self._outbox.add(entry, deadline=self._clock.monotonic() + timeout_s)

    def put_many(self, many: Iterable[Any], *, timeout_s: float = PUT_S) -> list[int]:
        """Store values in order; return their numbers once all are durable. See `put`."""
        puts = [self.put_later(value, timeout_s=timeout_s) for value in many]
        return [self._wait(put, timeout_s) for put in puts]

    def flush(self, *, timeout_s: float = PUT_S) -> bool:
        """Wait until every put is acknowledged or has failed; return whether that was in time."""
        return self._outbox.flush(deadline=self._clock.monotonic() + timeout_s)

    def _wait(self, put: Put, timeout_s: float) -> int:
        try:
            return put.result(timeout_s + ASK_S)
        except TimeoutError:
            if put.done():
                raise
            raise DeadlineExceeded("a put was not answered in time", given=self.name) from None

    # -------------------------------------------------------------------------- consuming

    def claim(self, limit: int = 1, *, lease_s: float = 60.0, wait_s: float = 0.0) -> list[Item]:
        """Lease up to `limit` items, oldest first.

        Args:
            limit: Largest number of items.
            lease_s: How long no other consumer gets them; extend it for longer work.
            wait_s: Longest wait for the first one.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            left_s = max(0.0, min(deadline - self._clock.monotonic(), LONGEST_WAIT_S))
            ask = QueueClaim(self.name, lease_s, limit, left_s)
            answer = self._channel.ask(ask, timeout_s=left_s + ASK_S)
            found = answer.items if isinstance(answer, QueueItems) else []
            late = self._clock.monotonic() >= deadline
            if found or late or self._stopping():
                return [self._item(item) for item in found]

    def __iter__(self) -> Iterator[Item]:
        """Yield items one by one, leased for a minute, until the run is asked to stop."""
        while not self._stopping():
            yield from self.claim(wait_s=LONGEST_WAIT_S)

    def ack(self, items: Sequence[Item]) -> None:
        """Acknowledge items, a thousand with one message.

        Raises:
            LeaseEnded: some leases had ended and other consumers may have these items; the rest
                is done.
        """
        self._held(items, lambda leases: QueueAckMany(self.name, leases))

    def extend(self, items: Sequence[Item], *, lease_s: float) -> None:
        """Extend leases to `lease_s` from now, as `ack` does; raises as it does."""
        self._held(items, lambda leases: QueueExtendMany(self.name, leases, lease_s))

    def release(self, item: Item, *, reason: str = "") -> None:
        """Release an item; after too many releases it becomes a dead letter."""
        self._channel.ask(QueueRelease(self.name, item.lease, reason), timeout_s=ASK_S)

    def fetch(self, payload: bytes, blob: str) -> Any:
        """Return the value of an inline payload or a blob."""
        return fetch(self._channel, payload, blob)

    def _item(self, item: QueueItem) -> Item:
        return Item(item.key, item.attempt, item.seq, item.lease, self, item.payload, item.blob)

    def _held(self, items: Sequence[Item], ask: Callable[[list[str]], Message]) -> None:
        leases, lost = [item.lease for item in items], 0
        for at in range(0, len(leases), MOST_ITEMS):
            answer = self._channel.ask(ask(leases[at : at + MOST_ITEMS]), timeout_s=ASK_S)
            lost += len(answer.leases) if isinstance(answer, QueueLost) else 0
        if lost:
            raise LeaseEnded(
                "these leases are not held any more",
                given=f"{lost} of {len(leases)} of queue {self.name!r}",
                expected="leases whose time has not ended",
                remedy="claim with a longer lease_s, or extend in time",
            )


def entry_of(channel: Channel, value: Any, key: str) -> QueueEntry:
    """Return a value as an item, uploading its payload if it is large."""
    parts = serialization.encode(value)
    key = key or new_token()
    if serialization.size(parts) <= INLINE_BYTES:
        return QueueEntry(key, b"".join(parts))
    sha256, nbytes = channel.put_large(parts)
    return QueueEntry(key, b"", sha256, nbytes)


def fetch(channel: Channel, payload: bytes, blob: str) -> Any:
    """Return the value of an inline payload or a blob."""
    if not blob:
        return serialization.decode(payload)
    with channel.large(blob) as path:
        return serialization.decode_file(path)
