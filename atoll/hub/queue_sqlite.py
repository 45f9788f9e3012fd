"""The queue on disk: rows of the hub's database, durable before anything is acknowledged."""

from __future__ import annotations

import logging
import sqlite3

from atoll.clock import Clock
from atoll.hub.database import Database
from atoll.hub.queue import (
    DONE_KEPT_S,
    MAX_ATTEMPTS,
    MAX_CLAIM,
    MAX_CLAIM_BYTES,
    DeadLetter,
    Depth,
    Waiters,
    check_lease_time,
    check_put,
    lease_lost,
    lease_seq,
    new_lease,
)
from atoll.wire.messages import QueueItem, QueuePutDone

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS queue_items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    key TEXT NOT NULL,
    payload BLOB NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready',
    attempt INTEGER NOT NULL DEFAULT 0,
    lease TEXT NOT NULL DEFAULT '',
    request TEXT NOT NULL DEFAULT '',
    until REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    UNIQUE (queue, key)
);
CREATE INDEX IF NOT EXISTS queue_ready ON queue_items (queue, seq) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS queue_leased ON queue_items (until) WHERE state = 'leased';
CREATE INDEX IF NOT EXISTS queue_done ON queue_items (until) WHERE state = 'done';
CREATE INDEX IF NOT EXISTS queue_open ON queue_items (queue, state) WHERE state <> 'done';
"""

_ITEM = "seq, key, payload, attempt, lease"
_PRUNED_AT_ONCE = 1_000


class SqliteQueue:
    """Named queues in the hub's database; see `atoll.hub.queue.Queue` for the promises."""

    def __init__(
        self, database: Database, *, clock: Clock, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        self._database = database
        self._clock = clock
        self._max_attempts = max_attempts
        self._waiters = Waiters()

    async def put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item once per key."""
        check_put(queue, key)

        def write(connection: sqlite3.Connection) -> QueuePutDone:
            row = connection.execute(
                "INSERT INTO queue_items (queue, key, payload) VALUES (?, ?, ?)"
                " ON CONFLICT DO NOTHING RETURNING seq",
                (queue, key, payload),
            ).fetchone()
            if row is not None:
                return QueuePutDone(row[0], duplicate=False)
            (seq,) = connection.execute(
                "SELECT seq FROM queue_items WHERE queue = ? AND key = ?", (queue, key)
            ).fetchone()
            return QueuePutDone(seq, duplicate=True)

        done = await self._database.write(write)
        if not done.duplicate:
            self._waiters.wake(queue)
        return done

    async def claim(
        self,
        queue: str,
        *,
        lease_s: float,
        limit: int = 1,
        wait_s: float = 0.0,
        request: str = "",
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        check_lease_time(lease_s)
        limit = max(1, min(limit, MAX_CLAIM))

        async def attempt() -> list[QueueItem]:
            now = self._clock.wall()
            items, woken = await self._database.write(
                lambda connection: self._claim(connection, queue, now, lease_s, limit, request)
            )
            self._wake_others(woken, queue)
            return items

        return await self._waiters.until_some(queue, attempt, limit=limit, wait_s=wait_s)

    def _claim(
        self,
        connection: sqlite3.Connection,
        queue: str,
        now: float,
        lease_s: float,
        limit: int,
        request: str,
    ) -> tuple[list[QueueItem], list[str]]:
        woken = self._expire(connection, now)
        if request:
            again = connection.execute(
                f"SELECT {_ITEM} FROM queue_items"
                " WHERE queue = ? AND state = 'leased' AND request = ? ORDER BY seq",
                (queue, request),
            ).fetchall()
            if again:
                return [QueueItem(*row) for row in again], woken
        ready = connection.execute(
            "SELECT seq, length(payload) FROM queue_items"
            " WHERE queue = ? AND state = 'ready' ORDER BY seq LIMIT ?",
            (queue, limit),
        ).fetchall()
        items: list[QueueItem] = []
        nbytes = 0
        for seq, size in ready:
            nbytes += size
            if items and nbytes > MAX_CLAIM_BYTES:
                break
            row = connection.execute(
                "UPDATE queue_items SET state = 'leased', attempt = attempt + 1, lease = ?,"
                f" request = ?, until = ? WHERE seq = ? RETURNING {_ITEM}",
                (new_lease(seq), request, now + lease_s, seq),
            ).fetchone()
            items.append(QueueItem(*row))
        return items, woken

    async def ack(self, queue: str, *, lease: str) -> None:
        """Make a leased item done."""
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            if _state(connection, queue, lease) != "done":
                # The payload goes, the key stays to recognise a put that is sent again.
                connection.execute(
                    "UPDATE queue_items SET state = 'done', payload = x'', until = ? WHERE seq = ?",
                    (now, lease_seq(lease)),
                )

        await self._database.write(write)

    async def extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end later."""
        check_lease_time(lease_s)
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> list[str]:
            woken = self._expire(connection, now)
            if _state(connection, queue, lease) == "leased":
                connection.execute(
                    "UPDATE queue_items SET until = ? WHERE seq = ?",
                    (now + lease_s, lease_seq(lease)),
                )
                return woken
            raise lease_lost(queue, lease)

        self._wake_others(await self._database.write(write))

    async def release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give an item back."""

        def write(connection: sqlite3.Connection) -> None:
            if _state(connection, queue, lease) == "leased":
                self._give_back(connection, "seq = ?", (lease_seq(lease),), reason)

        await self._database.write(write)
        self._waiters.wake(queue)

    async def expire(self) -> int:
        """Take back items whose lease ended; forget keys that were done long ago."""
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> list[str]:
            connection.execute(
                "DELETE FROM queue_items WHERE seq IN (SELECT seq FROM queue_items"
                " WHERE state = 'done' AND until <= ? LIMIT ?)",
                (now - DONE_KEPT_S, _PRUNED_AT_ONCE),
            )
            return self._expire(connection, now)

        woken = await self._database.write(write)
        self._wake_others(woken)
        return len(woken)

    async def depths(self) -> dict[str, Depth]:
        """Return how full each queue is."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT queue, state, count(*) FROM queue_items WHERE state <> 'done'"
                " GROUP BY queue, state"
            ).fetchall()
        )
        counts: dict[str, dict[str, int]] = {}
        for queue, state, count in rows:
            counts.setdefault(queue, {})[state] = count
        return {queue: Depth(**states) for queue, states in counts.items()}

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return items that were given back too often."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT seq, key, payload, attempt, reason FROM queue_items"
                " WHERE queue = ? AND state = 'dead' ORDER BY seq LIMIT ?",
                (queue, limit),
            ).fetchall()
        )
        return [DeadLetter(*row) for row in rows]

    def _expire(self, connection: sqlite3.Connection, now: float) -> list[str]:
        """Give back what is overdue; return the queue of each item."""
        return self._give_back(
            connection, "state = 'leased' AND until <= ?", (now,), "the lease ended"
        )

    def _give_back(
        self,
        connection: sqlite3.Connection,
        where: str,
        values: tuple[float, ...],
        reason: str,
    ) -> list[str]:
        rows = connection.execute(
            "UPDATE queue_items SET reason = ?,"
            " state = CASE WHEN attempt >= ? THEN 'dead' ELSE 'ready' END"
            f" WHERE {where} RETURNING queue, key, state",
            (reason[:1000], self._max_attempts, *values),
        ).fetchall()
        for queue, key, state in rows:
            if state == "dead":
                log.warning("item %r of queue %r is a dead letter: %s", key, queue, reason)
        return [queue for queue, _, _ in rows]

    def _wake_others(self, queues: list[str], own: str = "") -> None:
        """Wake one waiting claim per item given back, but for the queue being claimed."""
        for queue in queues:
            if queue != own:
                self._waiters.wake(queue)


def _state(connection: sqlite3.Connection, queue: str, lease: str) -> str:
    """Return the state of the item whose last lease this is.

    Raises:
        HubError: the lease is of another queue, was followed by another one, or is unknown.
    """
    row = connection.execute(
        "SELECT state FROM queue_items WHERE seq = ? AND queue = ? AND lease = ?",
        (lease_seq(lease), queue, lease),
    ).fetchone()
    if row is None:
        raise lease_lost(queue, lease)
    return str(row[0])
