"""Queues in NATS JetStream: the items are there, who holds them is in the hub's database.

What differs from the default: a put of many is not one transaction (what arrived before a crash
stays, and is known by its key when it is sent again), and keys are known for ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from atoll.clock import Clock
from atoll.errors import AtollError, HubError
from atoll.hub.db.database import Database
from atoll.hub.queues.backend import (
    DROPPED,
    NOTHING,
    Amount,
    DeadLetter,
    HeldBlobs,
    Listener,
    Loaded,
    Move,
    Stored,
    lease_name,
    new_lease_mark,
    no_attempts,
    no_notifications,
    retention_s,
)
from atoll.hub.queues.nats_client import NatsStore, StoredMessage, StreamState
from atoll.hub.queues.nats_leases import LeaseTable, NatsStream, Row
from atoll.hub.queues.sqlite import SqliteBackend
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

log = logging.getLogger(__name__)


class NatsBackend:
    """Named queues at a NATS server; see `atoll.hub.queues.backend.Backend`.

    Args:
        store: The server.
        database: Of the hub: options, positions and the book of leases.
        beside: The backend of the hub's own queues, which keeps options and positions for both.
        clock: Whence leases are told.
        blobs: Where large payloads are held.
    """

    def __init__(
        self,
        store: NatsStore,
        database: Database,
        *,
        beside: SqliteBackend,
        clock: Clock,
        blobs: HeldBlobs | None = None,
    ) -> None:
        self._store = store
        self._book = LeaseTable(database, blobs=blobs)
        self._beside = beside
        self._clock = clock
        self._streams: dict[str, NatsStream] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self.attempts: Callable[[str], int] = no_attempts
        self.moved: Listener = no_notifications

    async def load(self) -> Loaded:
        """Connect, and return what is stored.

        Raises:
            HubError: the server does not answer.
        """
        await self._store.connect()
        loaded = Loaded()
        for state in await self._store.streams():
            stream = await self._opened(state)
            loaded.amounts[state.queue] = stream.amounts(state)
            self._remove(stream, stream.done_seqs())
        return loaded

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Keep the options of a queue or topic."""
        await self._beside.set_options(queue, options, topic=topic)

    # ------------------------------------------------------------------------ producing

    async def put(self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount) -> Stored:
        """Append items once per key."""
        stream = self._streams.get(queue) or await self._opened(await self._store.make(queue))
        if drop != NOTHING:
            await self._drop_oldest(stream, drop)
        now = self._clock.wall()
        async with stream.putting:
            known = {e.key: stream.keys[e.key] for e in entries if e.key in stream.keys}
            fresh = [entry for entry in entries if entry.key not in known]
            await self._book.hold(queue, [(e.key, e.blob) for e in fresh if e.blob])
            acks = await self._store.publish(queue, fresh, now=now) if fresh else []
        seqs: list[int] = []
        duplicates: list[int] = []
        answers, nbytes = iter(acks), 0
        for place, entry in enumerate(entries):
            seq, again = (known[entry.key], True) if entry.key in known else next(answers)
            seqs.append(seq)
            if again:
                duplicates.append(place)
            else:
                nbytes += len(entry.payload) + entry.nbytes
                stream.learn(entry.key, seq)
        if len(seqs) > len(duplicates):
            new = len(seqs) - len(duplicates)
            self.moved([Move(queue, "new", "ready", new, nbytes)])
        return Stored(seqs, duplicates)

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of items that have these keys, as far as this hub has seen them."""
        stream = self._streams.get(queue)
        return {key: stream.keys[key] for key in keys if key in stream.keys} if stream else {}

    # ------------------------------------------------------------------------ consuming

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        await self._expire()
        stream = self._streams.get(queue)
        if stream is None:
            return []
        async with stream.claiming:
            again = stream.of_request(request)
            rows = again or await stream.take(limit)
            if not again:
                mark, until = new_lease_mark(), self._clock.wall() + lease_s
                for row in rows:
                    row.lease, row.request = lease_name(row.seq, mark), request
                    row.attempt, row.until = row.attempt + 1, until
                    stream.mark(row, "leased")
                await self._book.write(rows)
                self._tell(rows, "ready", "leased")
            payloads = await asyncio.gather(*(stream.payload(row) for row in rows))
        gone = [row for row, payload in zip(rows, payloads, strict=True) if payload is None]
        if gone:  # somebody has removed messages at the server itself
            await self._end(stream, gone, "dropped")
        return [
            QueueItem(row.seq, row.key, payload, row.attempt, row.lease, row.blob)
            for row, payload in zip(rows, payloads, strict=True)
            if payload is not None
        ]

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Make leased items done."""
        stream, lost, rows = self._streams.get(queue), list[str](), list[Row]()
        for lease in leases:
            row = stream.find(lease) if stream else None
            if row is None:
                lost.append(lease)
            elif row.state != "done":
                rows.append(row)
        if stream is not None and rows:
            await self._end(stream, rows, "done")
        return lost

    async def _end(self, stream: NatsStream, rows: Sequence[Row], end: str) -> None:
        """Let items end: written first, then removed from the stream."""
        before = [row.copy() for row in rows]
        until = self._clock.wall() + retention_s(stream.queue)
        for row in rows:
            stream.withdraw(row)
            stream.mark(row, "done")
            row.until = until
        try:
            await self._book.write(rows)
        except AtollError:
            for row, old in zip(rows, before, strict=True):
                row.until = old.until
                stream.mark(row, old.state)
            raise
        self.moved([Move(old.queue, old.state, end, 1, old.nbytes) for old in before])
        self._remove(stream, [row.seq for row in rows])

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Let leases end later."""
        await self._expire()
        stream = self._streams.get(queue)
        found = {lease: stream.find(lease) if stream else None for lease in leases}
        held = {lease: row for lease, row in found.items() if row and row.state == "leased"}
        for row in held.values():
            row.until = self._clock.wall() + lease_s
        await self._book.write(list(held.values()))
        return [lease for lease in leases if lease not in held]

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Give an item back."""
        stream = self._streams.get(queue)
        row = stream.find(lease) if stream else None
        if stream is not None and row is not None and row.state == "leased":
            await self._give_back(stream, [row], reason)
        return row is not None

    # ------------------------------------------------------------------- house-keeping

    async def expire(self) -> int:
        """Take back items whose lease ended; forget old keys."""
        now = self._clock.wall()
        for stream in list(self._streams.values()):
            if old := stream.forget(now):
                await self._book.forget(stream.queue, old)
        return await self._expire()

    async def _expire(self) -> int:
        now, count = self._clock.wall(), 0
        for stream in list(self._streams.values()):
            ended = [row for row in stream.leased.values() if row.until <= now]
            if ended:
                await self._give_back(stream, ended, "the lease ended")
                count += len(ended)
        return count

    async def _give_back(self, stream: NatsStream, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            dead = row.attempt >= self.attempts(stream.queue)
            row.reason = reason
            stream.mark(row, "dead" if dead else "ready")
            if dead:
                log.warning("item %r of queue %r is a dead letter: %s", row.key, row.queue, reason)
        back = [row for row in rows if row.state == "ready"]
        dead_rows = [row for row in rows if row.state == "dead"]
        await self._book.write(rows)
        self._tell(back, "leased", "ready")
        self._tell(dead_rows, "leased", "dead")

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items that are too old."""
        stream = self._streams.get(queue)
        if stream is None:
            return
        async with stream.claiming:
            old = [row for row in stream.dead_letters(None) if row.put < before]
            ready: list[Row] = []
            while (row := await stream.first()) is not None and row.put < before:
                stream.pop(row)
                ready.append(row)
            if old or ready:
                await self._dropped(stream, ready)
                await self._end(stream, [*old, *ready], "dropped")

    async def _drop_oldest(self, stream: NatsStream, drop: Amount) -> None:
        async with stream.claiming:
            rows: list[Row] = []
            nbytes = 0
            while len(rows) < drop.items or nbytes < drop.nbytes:
                row = await stream.first()
                if row is None:
                    break
                stream.pop(row)
                rows.append(row)
                nbytes += row.nbytes
            await self._dropped(stream, rows)
            await self._end(stream, rows, "dropped")

    async def _dropped(self, stream: NatsStream, rows: Sequence[Row]) -> None:
        """Note that ready items are given up, for subscriptions that have not read them."""
        if rows:
            await self.set_position(stream.queue, DROPPED, rows[-1].seq)

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return when the oldest ready item of each queue was put."""
        found: dict[str, float] = {}
        for queue in queues:
            stream = self._streams.get(queue)
            if stream is None:
                continue
            async with stream.claiming:
                row = await stream.first()
            if row is not None:
                found[queue] = row.put
        return found

    # -------------------------------------------------------------------- dead letters

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return items that were given back too often."""
        stream = self._streams.get(queue)
        rows = stream.dead_letters(None)[:limit] if stream else []
        kept = await asyncio.gather(*(self._store.get(queue, row.seq) for row in rows))
        return [
            DeadLetter(
                row.seq, row.key, one.payload if one else b"", row.attempt, row.reason, row.blob
            )
            for row, one in zip(rows, kept, strict=True)
        ]

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again."""
        stream = self._streams.get(queue)
        rows = stream.dead_letters(seqs) if stream else []
        for row in rows:
            row.attempt = 0
            if stream is not None:
                stream.mark(row, "ready")
        await self._book.write(rows)
        self._tell(rows, "dead", "ready")
        return len(rows)

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Give dead letters up for good."""
        stream = self._streams.get(queue)
        rows = stream.dead_letters(seqs) if stream else []
        if stream is not None and rows:
            await self._end(stream, rows, "dropped")
        return len(rows)

    # -------------------------------------------------------------------------- topics

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return items after a number."""
        stream = self._streams.get(topic)
        if stream is None or after >= stream.last:
            return []
        first = after + 1
        while True:
            found = await self._store.read(topic, first, limit=limit)
            items = [_shown(kept) for kept in found if kept.seq not in stream.rows]
            if items or not found:
                return items
            first = found[-1].seq + 1  # all of these were dropped just now

    async def last(self, topic: str) -> int:
        """Return the number of the newest item."""
        stream = self._streams.get(topic)
        return stream.last if stream else 0

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription."""
        return await self._beside.positions(topic)

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Keep the position of a subscription."""
        await self._beside.set_position(topic, subscription, seq)

    async def remove(self, prefix: str) -> None:
        """Remove the streams of the queues and topics whose name begins so, then their rows."""
        for queue in [queue for queue in self._streams if queue.startswith(prefix)]:
            await self._store.remove(queue)
            self._streams.pop(queue, None)
        await self._book.remove(prefix)
        await self._beside.remove(prefix)

    async def close(self) -> None:
        """Remove what is done from the streams, then leave the server."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*self._removing, return_exceptions=True)
        for task in self._removing:
            task.cancel()
        await self._store.close()

    # -------------------------------------------------------------------------- inside

    async def _opened(self, state: StreamState) -> NatsStream:
        known = self._streams.get(state.queue)
        if known is not None:
            return known
        rows = await self._book.rows(state.queue, created=state.created)
        stream = NatsStream(self._store, state.queue, rows=rows, last=state.last)
        return self._streams.setdefault(state.queue, stream)

    def _tell(self, rows: Sequence[Row], source: str, target: str) -> None:
        if rows:
            nbytes = sum(row.nbytes for row in rows)
            self.moved([Move(rows[0].queue, source, target, len(rows), nbytes)])

    def _remove(self, stream: NatsStream, seqs: Sequence[int]) -> None:
        """Remove done items from their stream in the background; a crash leaves it to `load`."""
        if not seqs:
            return

        async def work() -> None:
            try:
                await self._store.delete(stream.queue, seqs)
            except HubError as error:
                log.warning("done items stay in the queue server for now: %s", error)
                return
            stream.removed.extend(seqs)

        task = asyncio.get_running_loop().create_task(work(), name="removal of done items")
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)


def _shown(kept: StoredMessage) -> TopicItem:
    return TopicItem(kept.seq, kept.key, kept.payload, kept.put, kept.blob)
