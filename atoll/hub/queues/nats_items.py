"""In-memory state of one queue in NATS that the server does not report.

Which lease belongs to an item, which request claimed it, when the lease ends. A restarted hub
learns an item when it is redelivered or when a consumer names its lease.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.hub.db.database import Database
from atoll.hub.queues.backend import Amount, HeldBlobs, ItemState, lease_seq
from atoll.hub.queues.nats_records import ItemRecord
from atoll.hub.queues.nats_streams import Delivery, StoredMessage, StreamState
from atoll.wire.messages import QueueEntry

LONGEST_LEASE = 100
"""Characters: three 64-bit numbers and a hash are shorter."""
KEYS_KEPT = 100_000
"""Keys and done items of one queue remembered in addition to the server."""


@dataclass(slots=True, eq=False)
class NatsItem:
    """A delivered item that is not done."""

    seq: int
    key: str
    nbytes: int
    blob: str
    put: float
    delivery: int = 0
    deliveries: int = 0
    state: ItemState = ItemState.READY
    attempt: int = 0
    lease: str = ""
    until: float = 0.0
    request: str = ""
    reason: str = ""
    recorded: bool = False

    @property
    def address(self) -> tuple[int, int]:
        """What the server needs to identify a delivery."""
        return self.seq, self.delivery


class QueueBlobs:
    """References to large payloads in the hub's database, kept until the items are done."""

    def __init__(self, database: Database, blobs: HeldBlobs | None) -> None:
        self._database = database
        self._blobs = blobs

    async def hold(self, queue: str, entries: Sequence[QueueEntry]) -> None:
        """Take references for items that are about to be stored."""
        blobs = self._blobs
        held = [entry for entry in entries if entry.blob]
        if blobs is None or not held:
            return

        def work(connection: sqlite3.Connection) -> None:
            for entry in held:
                blobs.hold(connection, entry.blob, _owner(queue, entry.key))

        await self._database.write(work)

    async def drop(self, queue: str, items: Iterable[NatsItem | StoredMessage]) -> None:
        """Drop the references of finished items."""
        blobs = self._blobs
        owners = [_owner(queue, item.key) for item in items if item.blob]
        if blobs is None or not owners:
            return

        def work(connection: sqlite3.Connection) -> None:
            for owner in owners:
                blobs.drop(connection, owner)

        await self._database.write(work)

    async def drop_all(self, prefix: str) -> None:
        """Drop the references of all queues with this prefix."""
        blobs = self._blobs
        if blobs is not None:
            await self._database.write(lambda c: blobs.drop_all(c, f"queue/{prefix}"))


class NatsQueue:
    """State of one queue or topic.

    `state` describes its stream; `records` are its dead letters and requeued items.
    """

    def __init__(self, state: StreamState, records: Sequence[ItemRecord]) -> None:
        self.name = state.queue
        self.topic = state.topic
        self.last = state.last
        gone = not state.topic and not state.pending
        self.delivered = state.last if gone else state.delivered
        """Highest number ever delivered or dropped."""
        self._created = state.created
        self.items: dict[int, NatsItem] = {}
        self.bases: dict[int, int] = {}
        """Deliveries of requeued items that do not count as attempts."""
        self._done: collections.OrderedDict[int, str] = collections.OrderedDict()
        self.keys: collections.OrderedDict[str, int] = collections.OrderedDict()
        # A put recognizes duplicates by numbers up to `last`, so puts to one queue must not
        # overlap.
        self.putting = asyncio.Lock()
        self.changing = asyncio.Lock()
        """Held while items change state, so that none is delivered meanwhile."""
        for record in records:
            if record.dead:
                self.items[record.seq] = _dead(record)
            else:
                self.bases[record.seq] = record.deliveries
        self.amounts = self._amounts(state)
        self.unknown = self.amounts[ItemState.LEASED].items
        """Items delivered before this hub started and not seen since."""
        self.unsure = bool(self.unknown)
        """Whether the server may have delivered items that this hub does not know."""

    def _amounts(self, state: StreamState) -> dict[ItemState, Amount]:
        each = state.nbytes // max(1, state.messages)
        ready = state.messages if self.topic else min(state.pending, state.messages)
        dead = sum(item.nbytes for item in self.items.values())
        leased = max(0, state.messages - ready - len(self.items))
        return {
            ItemState.READY: Amount(ready, ready * each),
            ItemState.LEASED: Amount(leased, leased * each),
            ItemState.DEAD: Amount(len(self.items), dead),
        }

    # ------------------------------------------------------------------------------ queries

    def of_state(self, state: ItemState, seqs: Sequence[int] | None = None) -> list[NatsItem]:
        """Return the items in this state (with these numbers, unless None), oldest first."""
        found = [
            item
            for item in self.items.values()
            if item.state == state and (seqs is None or item.seq in seqs)
        ]
        return sorted(found, key=lambda item: item.seq)

    def of_request(self, request: str) -> list[NatsItem]:
        """Return the items leased under this request."""
        leased = self.of_state(ItemState.LEASED) if request else []
        return [item for item in leased if item.request == request]

    @property
    def undelivered(self) -> bool:
        """Whether an item is stored that was never delivered."""
        return self.delivered < self.last

    def is_done(self, seq: int) -> bool:
        """Return whether this hub has finished the item."""
        return seq in self._done

    def knows(self, lease: str) -> bool | None:
        """Return whether a lease is the latest of its item; None: unknown to this hub."""
        seq = lease_seq(lease)
        if lease != self._lease_of(lease):
            return False
        if seq in self.items:
            return self.items[seq].lease == lease
        return self._done[seq] == lease if seq in self._done else None

    def lease(self, seq: int, attempt: int, delivery: int) -> str:
        """Return the name of a lease; a restarted hub verifies it by the hash at the end."""
        text = f"{seq}.{attempt}.{delivery}"
        mark = hashlib.blake2b(text.encode(), key=self._created.encode()[:64], digest_size=8)
        return f"{text}.{mark.hexdigest()}"

    def _lease_of(self, lease: str) -> str:
        parts = lease.split(".")
        if (
            len(lease) > LONGEST_LEASE
            or len(parts) != 4
            or not all(part.isascii() and part.isdigit() for part in parts[:3])
        ):
            return ""
        return self.lease(int(parts[0]), int(parts[1]), int(parts[2]))

    # ------------------------------------------------------------------------------ changes

    def adopt(self, lease: str, message: StoredMessage) -> NatsItem:
        """Return an item leased by a previous hub, reconstructed from the lease."""
        _, attempt, delivery, _ = lease.split(".")
        item = _item(message)
        item.lease, item.attempt, item.delivery = lease, int(attempt), int(delivery)
        item.deliveries = item.attempt + self.bases.get(item.seq, 0)
        item.state, item.recorded = ItemState.LEASED, item.seq in self.bases
        self.items[item.seq] = item
        self.unknown = max(0, self.unknown - 1)
        return item

    def deliver(self, delivery: Delivery) -> tuple[NatsItem, bool]:
        """Record a delivery; return its item, and whether a previous hub had delivered it."""
        seq = delivery.message.seq
        self.delivered = max(self.delivered, seq)
        item = self.items.get(seq)
        earlier = item is None and delivery.count > 1 and self.unknown > 0
        if item is None:
            item = self.items[seq] = _item(delivery.message)
            item.recorded = seq in self.bases
            self.unknown -= earlier
        item.delivery = delivery.number
        # A killed server may have lost the count of some deliveries.
        item.deliveries = max(item.deliveries + 1, delivery.count)
        return item, earlier

    def attempts_of(self, item: NatsItem) -> int:
        """Return the number of deliveries that count as attempts."""
        return max(1, item.deliveries - self.bases.get(item.seq, 0))

    def finish(self, item: NatsItem) -> None:
        """Forget a done item; its lease is remembered in case the answer was lost."""
        del self.items[item.seq]
        self.bases.pop(item.seq, None)
        self._done[item.seq] = item.lease
        if len(self._done) > KEYS_KEPT:
            self._done.popitem(last=False)

    def learn(self, key: str, seq: int) -> None:
        """Record an item that was just stored."""
        self.last = max(self.last, seq)
        self.keys[key] = seq
        if len(self.keys) > KEYS_KEPT:
            self.keys.popitem(last=False)

    def record(self, item: NatsItem, *, dead: bool) -> ItemRecord:
        """Return the record of a dead letter or a requeued item."""
        return ItemRecord(
            queue=self.name,
            seq=item.seq,
            dead=dead,
            deliveries=item.deliveries,
            delivery=item.delivery,
            key=item.key,
            nbytes=item.nbytes,
            blob=item.blob,
            put=item.put,
            attempt=item.attempt,
            lease=item.lease,
            reason=item.reason,
        )


def _item(message: StoredMessage) -> NatsItem:
    return NatsItem(message.seq, message.key, message.nbytes, message.blob, message.put)


def _dead(record: ItemRecord) -> NatsItem:
    return NatsItem(
        seq=record.seq,
        key=record.key,
        nbytes=record.nbytes,
        blob=record.blob,
        put=record.put,
        delivery=record.delivery,
        deliveries=record.deliveries,
        state=ItemState.DEAD,
        attempt=record.attempt,
        lease=record.lease,
        reason=record.reason,
        recorded=True,
    )


def _owner(queue: str, key: str) -> str:
    return f"queue/{queue}/{key}"
