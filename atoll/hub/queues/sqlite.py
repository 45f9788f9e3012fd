"""Queues in the hub's database.

Operations that arrive during a commit share the next one (`atoll.hub.db.database`), and concurrent
puts are merged into few statements.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from atoll.clock import Clock
from atoll.hub.db.database import Database
from atoll.hub.queues.backend import (
    DONE_KEPT,
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
    lease_name,
    new_lease_mark,
    no_attempts,
    no_notifications,
    retention_s,
    sum_moves,
)
from atoll.hub.queues.sqlite_sql import (
    AMONG,
    OPTIONS,
    POSITION,
    SCHEMA,
    dead,
    dead_letters,
    first_items,
    forget,
    insert,
    known,
    last,
    load,
    of_leases,
    oldest,
    peek,
    positions,
    prepare,
    take,
)
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

__all__ = ["SCHEMA", "SqliteBackend"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Put = tuple[str, Sequence[QueueEntry]]

_AT_ONCE = 20_000


class SqliteBackend:
    """Queues in the hub's database; see `Backend`."""

    capabilities = Capabilities()

    def __init__(self, database: Database, *, clock: Clock, blobs: HeldBlobs | None = None) -> None:
        self._database = database
        self._clock = clock
        self._blobs = blobs
        self._next = database.write_now(prepare)
        self._done = 0
        self.attempts: Callable[[str], int] = no_attempts
        self.moved: Listener = no_notifications

    async def load(self) -> Loaded:
        """Return what is stored, from the indices alone."""
        loaded, self._done = await self._database.read(load)
        return loaded

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Store the options of a queue or topic."""
        text = msgspec.json.encode(options).decode()
        await self._database.write(lambda c: c.execute(OPTIONS, (queue, topic, text)))

    def put(
        self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount
    ) -> asyncio.Future[Stored]:
        """Store items, once per key."""
        put = (queue, entries)
        if drop == NOTHING:
            return self._database.write_each(self._store, put, self._notify)

        def work(connection: sqlite3.Connection, moves: list[Move]) -> Stored:
            self._drop_oldest(connection, moves, queue, drop)
            ((stored, more),) = self._store(connection, [put])
            moves += more
            return stored

        return self._do(work)

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of items with these keys."""
        return await self._database.read(lambda c: known(c, queue, keys))

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        now = self._clock.wall()

        def work(connection: sqlite3.Connection, moves: list[Move]) -> list[QueueItem]:
            self._expire(connection, moves, now)
            if request:
                again = connection.execute(
                    "SELECT seq, key, payload, attempt, lease, blob FROM queue_items"
                    " WHERE queue = ? AND state = 'leased' AND request = ? ORDER BY seq",
                    (queue, request),
                ).fetchall()
                if again:
                    return [QueueItem(*row) for row in again]
            items, sizes = take(connection, queue, limit)
            if items:
                mark = new_lease_mark()
                seqs = [item.seq for item in items]
                connection.execute(
                    "UPDATE queue_items SET state = 'leased', attempt = attempt + 1,"
                    f" lease = seq || '.' || ?, request = ?, until = ? WHERE {AMONG}",
                    (mark, request, now + lease_s, json.dumps(seqs)),
                )
                moves += sum_moves(queue, ItemState.READY, ItemState.LEASED, sizes)
                items = [
                    msgspec.structs.replace(i, attempt=i.attempt + 1, lease=lease_name(i.seq, mark))
                    for i in items
                ]
            return items

        return await self._do(work)

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Mark leased items as done."""
        until = self._clock.wall() + retention_s(queue)

        def work(connection: sqlite3.Connection, moves: list[Move]) -> list[str]:
            found = of_leases(connection, queue, leases)
            rows = [row for row in found.values() if row[1] != ItemState.DONE]
            self._end(connection, [(seq, blob) for seq, _, _, blob in rows], until)
            for state in (ItemState.LEASED, ItemState.READY, ItemState.DEAD):
                sizes = [nbytes for _, other, nbytes, _ in rows if other == state]
                moves += sum_moves(queue, state, ItemState.DONE, sizes)
            return [lease for lease in leases if lease not in found]

        return await self._do(work)

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend leases."""
        now = self._clock.wall()

        def work(connection: sqlite3.Connection, moves: list[Move]) -> list[str]:
            self._expire(connection, moves, now)
            found = of_leases(connection, queue, leases)
            held = {lease: row[0] for lease, row in found.items() if row[1] == "leased"}
            connection.execute(
                f"UPDATE queue_items SET until = ? WHERE {AMONG}",
                (now + lease_s, json.dumps(list(held.values()))),
            )
            return [lease for lease in leases if lease not in held]

        return await self._do(work)

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Return an item to the queue."""

        def work(connection: sqlite3.Connection, moves: list[Move]) -> bool:
            row = of_leases(connection, queue, [lease]).get(lease)
            if row is not None and row[1] == "leased":
                self._give_back(connection, moves, "seq = ?", row[0], reason)
            return row is not None

        return await self._do(work)

    async def expire(self) -> int:
        """Release items with ended leases; forget old keys."""
        now = self._clock.wall()

        def work(connection: sqlite3.Connection, moves: list[Move]) -> int:
            over = min(max(0, self._done - DONE_KEPT), _AT_ONCE)
            for where, values in (("until <= ?", (now, _AT_ONCE)), ("until > ?", (now, over))):
                self._done -= connection.execute(
                    "DELETE FROM queue_items WHERE seq IN (SELECT seq FROM queue_items"
                    f" WHERE state = 'done' AND {where} ORDER BY until LIMIT ?)",
                    values,
                ).rowcount
            return self._expire(connection, moves, now)

        return await self._do(work)

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items that are too old."""
        until = self._clock.wall() + retention_s(queue)

        def work(connection: sqlite3.Connection, moves: list[Move]) -> None:
            for state in (ItemState.READY, ItemState.DEAD):
                rows = connection.execute(
                    "SELECT seq, nbytes, blob, put FROM queue_items"
                    f" WHERE queue = ? AND state = '{state}' ORDER BY seq LIMIT {_AT_ONCE}",
                    (queue,),
                ).fetchall()
                old = [row for row in rows if row[3] < before]
                self._end(connection, [(seq, blob) for seq, _, blob, _ in old], until)
                moves += sum_moves(queue, state, ItemState.DROPPED, [row[1] for row in old])
                if old and state == ItemState.READY:
                    connection.execute(POSITION, (queue, DROPPED, old[-1][0]))

        await self._do(work)

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return the put time of the oldest ready item of each queue."""
        return await self._database.read(lambda c: oldest(c, queues))

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return dead letters, oldest first."""
        return await self._database.read(lambda c: dead_letters(c, queue, limit))

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again."""

        def work(connection: sqlite3.Connection, moves: list[Move]) -> int:
            rows = dead(connection, queue, seqs)
            connection.execute(
                f"UPDATE queue_items SET state = 'ready', attempt = 0 WHERE {AMONG}",
                (json.dumps([row[0] for row in rows]),),
            )
            moves += sum_moves(queue, ItemState.DEAD, ItemState.READY, [row[1] for row in rows])
            return len(rows)

        return await self._do(work)

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Delete dead letters."""
        until = self._clock.wall() + retention_s(queue)

        def work(connection: sqlite3.Connection, moves: list[Move]) -> int:
            rows = dead(connection, queue, seqs)
            self._end(connection, [(seq, blob) for seq, _, blob in rows], until)
            moves += sum_moves(queue, ItemState.DEAD, ItemState.DROPPED, [row[1] for row in rows])
            return len(rows)

        return await self._do(work)

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return ready items after a number."""
        return await self._database.read(lambda c: peek(c, topic, after, limit))

    async def last(self, topic: str) -> int:
        """Return the number of the newest ready item."""
        return await self._database.read(lambda c: last(c, topic))

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription."""
        return await self._database.read(lambda c: positions(c, topic))

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Store the position of a subscription."""
        await self._do(lambda c, moves: c.execute(POSITION, (topic, subscription, seq)).rowcount)

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic with this prefix, in transactions of bounded size."""

        def work(connection: sqlite3.Connection, moves: list[Move]) -> int:
            rows = first_items(connection, prefix, _AT_ONCE)
            for seq, blob, _ in rows:
                if blob and self._blobs is not None:
                    self._blobs.drop(connection, f"queue/{seq}")
            seqs = json.dumps([row[0] for row in rows])
            connection.execute(f"DELETE FROM queue_items WHERE {AMONG}", (seqs,))
            self._done -= sum(row[2] == ItemState.DONE for row in rows)
            if not rows:
                forget(connection, prefix)
            return len(rows)

        while await self._do(work):
            continue

    async def close(self) -> None:
        """Do nothing: closing the database finishes running operations."""

    # ---------------------------------------------------------------------------- internals

    def _do(self, work: Callable[[sqlite3.Connection, list[Move]], T]) -> asyncio.Future[T]:
        """Start a write that collects moves; the listener gets them once durable."""

        def with_moves(connection: sqlite3.Connection) -> tuple[T, list[Move]]:
            moves: list[Move] = []
            return work(connection, moves), moves

        return self._database.write_later(with_moves, self._notify)

    def _notify(self, done: tuple[T, list[Move]]) -> T:
        value, moves = done
        if moves:
            self.moved(moves)
        return value

    def _store(
        self, connection: sqlite3.Connection, puts: Sequence[Put]
    ) -> list[tuple[Stored, list[Move]]]:
        """Store the items of puts; the first result carries the moves of all."""
        moves: list[Move] = []
        first = self._next
        self._next += sum(len(entries) for _, entries in puts)
        stored = insert(
            connection, puts, first=first, now=self._clock.wall(), blobs=self._blobs, moves=moves
        )
        return [(one, moves if place == 0 else []) for place, one in enumerate(stored)]

    def _end(
        self, connection: sqlite3.Connection, rows: Sequence[tuple[int, str]], until: float
    ) -> None:
        """Mark items as done: delete the payload, keep the key to recognize a repeated put."""
        if not rows:
            return
        connection.execute(
            "UPDATE queue_items SET state = 'done', payload = x'', blob = '', until = ?"
            f" WHERE {AMONG}",
            (until, json.dumps([seq for seq, _ in rows])),
        )
        self._done += len(rows)
        for seq, blob in rows:
            if blob and self._blobs is not None:
                self._blobs.drop(connection, f"queue/{seq}")

    def _drop_oldest(
        self, connection: sqlite3.Connection, moves: list[Move], queue: str, drop: Amount
    ) -> None:
        if drop == NOTHING:
            return
        rows: list[tuple[int, int, str]] = []
        nbytes = 0
        cursor = connection.execute(
            "SELECT seq, nbytes, blob FROM queue_items"
            " WHERE queue = ? AND state = 'ready' ORDER BY seq",
            (queue,),
        )
        for row in cursor:
            rows.append(row)
            nbytes += row[1]
            if len(rows) >= drop.items and nbytes >= drop.nbytes:
                break
        cursor.close()
        until = self._clock.wall() + retention_s(queue)
        self._end(connection, [(seq, blob) for seq, _, blob in rows], until)
        moves += sum_moves(queue, ItemState.READY, ItemState.DROPPED, [row[1] for row in rows])
        if rows:
            connection.execute(POSITION, (queue, DROPPED, rows[-1][0]))

    def _expire(self, connection: sqlite3.Connection, moves: list[Move], now: float) -> int:
        return self._give_back(
            connection, moves, "state = 'leased' AND until <= ?", now, "the lease ended"
        )

    def _give_back(
        self,
        connection: sqlite3.Connection,
        moves: list[Move],
        where: str,
        value: float,
        reason: str,
    ) -> int:
        rows = connection.execute(
            f"SELECT seq, queue, key, attempt, nbytes FROM queue_items WHERE {where}", (value,)
        ).fetchall()
        for seq, queue, key, attempt, nbytes in rows:
            last = attempt >= self.attempts(queue)
            state = ItemState.DEAD if last else ItemState.READY
            connection.execute(
                "UPDATE queue_items SET state = ?, reason = ? WHERE seq = ?", (state, reason, seq)
            )
            moves.append(Move(queue, ItemState.LEASED, state, 1, nbytes))
            if last:
                log.warning("item %r of queue %r is a dead letter: %s", key, queue, reason)
        return len(rows)
