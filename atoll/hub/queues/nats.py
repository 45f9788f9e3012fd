"""Queues in NATS JetStream: items, leases, attempts and dead letters are on the server.

A claim fetches messages and withholds them for the time of the lease; an acknowledgement removes
them; a release, or a lease that ends by the hub's clock, has them redelivered at once. Without the
hub the server redelivers by itself, and a new hub with an empty data folder finds every stored
item. A dead letter stays in its stream, withheld permanently, with a record.

Differences from SQLite are in `CAPABILITIES`, explained in docs/queues.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from atoll.clock import Clock
from atoll.hub.db.database import Database
from atoll.hub.queues.backend import (
    DROPPED,
    NOTHING,
    Amount,
    Capabilities,
    DeadLetter,
    HeldBlobs,
    ItemState,
    Listener,
    Loaded,
    Move,
    Stored,
    no_attempts,
    no_notifications,
)
from atoll.hub.queues.nats_client import NatsClient
from atoll.hub.queues.nats_items import NatsItem, NatsQueue, QueueBlobs
from atoll.hub.queues.nats_leases import NatsLeases
from atoll.hub.queues.nats_records import (
    ItemRecord,
    NatsRecords,
    OptionsRecord,
    PositionRecord,
)
from atoll.hub.queues.nats_streams import (
    NatsStreams,
    StoredMessage,
    StreamState,
)
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

log = logging.getLogger(__name__)

T = TypeVar("T")

CAPABILITIES = Capabilities(atomic_puts=False, remembers_claims=False, exact_counts=False)

_READ = 256


class NatsBackend:
    """Queues on a NATS server; see `Backend`.

    The hub's `database` only holds references to blobs; `clock` ends leases while this hub runs.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        client: NatsClient,
        database: Database,
        *,
        clock: Clock,
        blobs: HeldBlobs | None = None,
    ) -> None:
        self._client = client
        self._streams = NatsStreams(client)
        self._records = NatsRecords(client)
        self._clock = clock
        self._blobs = QueueBlobs(database, blobs)
        self._leases = NatsLeases(
            self._streams,
            self._records,
            clock=clock,
            blobs=self._blobs,
            attempts=lambda queue: self.attempts(queue),
            moved=lambda moves: self.moved(moves),
        )
        self._queues: dict[str, NatsQueue] = {}
        self._topics: dict[str, bool] = {}
        """Whether a name with options is a topic."""
        self._positions: dict[str, dict[str, int]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self.attempts: Callable[[str], int] = no_attempts
        self.moved: Listener = no_notifications

    async def load(self) -> Loaded:
        """Connect and return what is stored; raises HubError if the server does not answer."""
        await self._client.connect()
        loaded = Loaded()
        items: dict[str, list[ItemRecord]] = {}
        for record in await self._records.load():
            match record:
                case OptionsRecord():
                    loaded.options[record.queue] = record.options
                    self._topics[record.queue] = record.topic
                case PositionRecord():
                    positions = self._positions.setdefault(record.queue, {})
                    positions[record.subscription] = record.seq
                case ItemRecord():
                    items.setdefault(record.queue, []).append(record)
        loaded.topics = {name for name, topic in self._topics.items() if topic}
        for state in await self._streams.find():
            queue = NatsQueue(state, items.get(state.queue, ()))
            self._queues[state.queue] = queue
            loaded.amounts[state.queue] = {str(s): a for s, a in queue.amounts.items()}
        return loaded

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Store the options of a queue or topic; an idle one may change its kind."""
        known = self._queues.get(queue)
        if known is not None and known.topic != topic:
            await self._streams.remove(queue)
            self._queues.pop(queue, None)
        before = self._topics.get(queue, False)
        self._topics[queue] = topic  # a put during the write creates the stream
        try:
            await self._records.store(OptionsRecord(queue, topic, options))
        except BaseException:
            self._topics[queue] = before
            raise

    # ---------------------------------------------------------------------------- producing

    async def put(self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount) -> Stored:
        """Append items, once per key."""
        known = self._queues.get(queue) or self._opened(
            await self._streams.make(queue, topic=self._topics.get(queue, False))
        )
        if drop != NOTHING:
            async with known.changing:
                await self._drop_oldest(known, drop)
        async with known.putting:
            return await self._append(known, entries)

    async def _append(self, queue: NatsQueue, entries: Sequence[QueueEntry]) -> Stored:
        fresh = [entry for entry in entries if entry.key not in queue.keys]
        await self._blobs.hold(queue.name, fresh)
        last = queue.last
        answers = iter(
            await self._streams.publish(queue.name, fresh, now=self._clock.wall()) if fresh else []
        )
        sizes: dict[int, int] = {}
        duplicates: list[int] = []
        seqs: list[int] = []
        fresh_keys = {entry.key for entry in fresh}
        for place, entry in enumerate(entries):
            seq = next(answers)[0] if entry.key in fresh_keys else queue.keys[entry.key]
            # After a lost answer, a repeated put is a duplicate to the server but new to this hub.
            if seq > last and seq not in sizes:
                sizes[seq] = len(entry.payload) + entry.nbytes
            else:
                duplicates.append(place)
            seqs.append(seq)
            queue.learn(entry.key, seq)
        if sizes:
            total = sum(sizes.values())
            self.moved([Move(queue.name, ItemState.NEW, ItemState.READY, len(sizes), total)])
        return Stored(seqs, duplicates)

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of items with these keys, as far as this hub has seen them."""
        known = self._queues.get(queue)
        return {key: known.keys[key] for key in keys if key in known.keys} if known else {}

    # ---------------------------------------------------------------------------- consuming

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        known = self._queues.get(queue)
        if known is None:
            return []
        return await self._whole(self._leases.claim(known, lease_s, limit, request))

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Mark leased items as done."""
        known = self._queues.get(queue)
        if known is None:
            return list(leases)
        return await self._whole(self._leases.ack(known, leases))

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend leases."""
        known = self._queues.get(queue)
        if known is None:
            return list(leases)
        return await self._whole(self._leases.extend(known, leases, lease_s))

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Return an item to the queue."""
        known = self._queues.get(queue)
        return known is not None and await self._whole(self._leases.release(known, lease, reason))

    # ------------------------------------------------------------------------- housekeeping

    async def expire(self) -> int:
        """Release items with ended leases; wake claims for items the server may redeliver."""
        count = 0
        for queue in [queue for queue in self._queues.values() if not queue.topic]:
            async with queue.changing:
                count += await self._leases.take_back(queue)
                if queue.unsure:
                    hidden = await self._streams.unsettled(queue.name) - len(queue.items)
                    queue.unsure = hidden > 0
                    if hidden > 0:
                        ready = ItemState.READY
                        self.moved([Move(queue.name, ready, ready, hidden, 0)])
        return count

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items that are too old."""
        known = self._queues.get(queue)
        if known is None:
            return
        async with known.changing:
            back = [*known.of_state(ItemState.DEAD), *known.of_state(ItemState.READY)]
            old = [item for item in back if item.put < before]
            await self._leases.end(known, old, ItemState.DROPPED)
            messages: list[StoredMessage] = []
            async for message in self._unclaimed(known):
                if message.put >= before:
                    break
                messages.append(message)
            await self._drop(known, messages)

    async def _drop_oldest(self, queue: NatsQueue, drop: Amount) -> None:
        back: list[NatsItem] = []
        messages: list[StoredMessage] = []
        items = nbytes = 0
        for item in queue.of_state(ItemState.READY):
            if items < drop.items or nbytes < drop.nbytes:
                back.append(item)
                items, nbytes = items + 1, nbytes + item.nbytes
        if items < drop.items or nbytes < drop.nbytes:
            async for message in self._unclaimed(queue):
                messages.append(message)
                items, nbytes = items + 1, nbytes + message.nbytes
                if items >= drop.items and nbytes >= drop.nbytes:
                    break
        await self._leases.end(queue, back, ItemState.DROPPED)
        await self._drop(queue, messages)

    async def _unclaimed(self, queue: NatsQueue) -> AsyncIterator[StoredMessage]:
        first = queue.delivered + 1
        while first <= queue.last:
            found = await self._streams.read(queue.name, first, limit=_READ)
            for message in found:
                yield message
            first = found[-1].seq + 1 if found else queue.last + 1

    async def _drop(self, queue: NatsQueue, messages: Sequence[StoredMessage]) -> None:
        if not messages:
            return
        if queue.topic:  # so that subscriptions that have not read them notice
            await self.set_position(queue.name, DROPPED, messages[-1].seq)
        await self._streams.delete(queue.name, [message.seq for message in messages])
        queue.delivered = max(queue.delivered, messages[-1].seq)
        await self._blobs.drop(queue.name, messages)
        total = sum(message.nbytes for message in messages)
        ready, dropped = ItemState.READY, ItemState.DROPPED
        self.moved([Move(queue.name, ready, dropped, len(messages), total)])

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return the put time of the oldest ready item of each queue."""
        found: dict[str, float] = {}
        for name in queues:
            queue = self._queues.get(name)
            if queue is None:
                continue
            puts = [item.put for item in queue.of_state(ItemState.READY)[:1]]
            puts += [
                one.put for one in await self._streams.read(name, queue.delivered + 1, limit=1)
            ]
            if puts:
                found[name] = min(puts)
        return found

    # ------------------------------------------------------------------------- dead letters

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return dead letters, oldest first."""
        known = self._queues.get(queue)
        if known is None:
            return []
        async with known.changing:
            dead = known.of_state(ItemState.DEAD)[:limit]
            messages = await self._leases.messages(known, dead)
        return [
            DeadLetter(i.seq, i.key, one.payload, i.attempt, i.reason, i.blob)
            for i, one in zip(dead, messages, strict=True)
            if one is not None
        ]

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again."""
        known = self._queues.get(queue)
        return await self._whole(self._leases.requeue(known, seqs)) if known else 0

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Delete dead letters."""
        known = self._queues.get(queue)
        return await self._whole(self._leases.discard(known, seqs)) if known else 0

    # ------------------------------------------------------------------------------- topics

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return items after a number."""
        known = self._queues.get(topic)
        if known is None or after >= known.last:
            return []
        found = await self._streams.read(topic, after + 1, limit=limit)
        return [TopicItem(one.seq, one.key, one.payload, one.put, one.blob) for one in found]

    async def last(self, topic: str) -> int:
        """Return the number of the newest item."""
        known = self._queues.get(topic)
        return known.last if known else 0

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription."""
        return dict(self._positions.get(topic, {}))

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Store the position of a subscription."""
        await self._records.store(PositionRecord(topic, subscription, seq))
        self._positions.setdefault(topic, {})[subscription] = seq

    async def remove(self, prefix: str) -> None:
        """Remove the streams and records of all queues and topics with this prefix."""
        names = {*self._queues, *self._topics, *self._positions}
        for name in sorted(name for name in names if name.startswith(prefix)):
            await self._streams.remove(name)
            await self._records.forget_all(name)
            self._queues.pop(name, None)
            self._topics.pop(name, None)
            self._positions.pop(name, None)
        await self._blobs.drop_all(prefix)

    async def close(self) -> None:
        """Finish running operations, then disconnect."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=2.0)
            for task in late:
                task.cancel()
        await self._client.close()

    # ---------------------------------------------------------------------------- internals

    def _opened(self, state: StreamState) -> NatsQueue:
        return self._queues.setdefault(state.queue, NatsQueue(state, ()))

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation to completion even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)
