"""Who holds which item of a queue in NATS: leases, attempts, dead letters, in the hub's database.

An item without a row was never claimed. Rows of done items stay until their keys are forgotten;
until its message is removed from the stream, such a row says that nobody may get it again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from atoll.hub.database import Database, span
from atoll.hub.queue_backend import Holds

SCHEMA = """
CREATE TABLE IF NOT EXISTS nats_items (
    queue TEXT NOT NULL, seq INTEGER NOT NULL, key TEXT NOT NULL, nbytes INTEGER NOT NULL,
    blob TEXT NOT NULL, put REAL NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    lease TEXT NOT NULL, request TEXT NOT NULL, until REAL NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (queue, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nats_streams (queue TEXT PRIMARY KEY, created TEXT NOT NULL);
"""

_ROW = "INSERT OR REPLACE INTO nats_items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(slots=True)
class Row:
    """What is known of one item beside its payload."""

    queue: str
    seq: int
    key: str
    nbytes: int
    blob: str
    put: float
    state: str = "ready"
    attempt: int = 0
    lease: str = ""
    request: str = ""
    until: float = 0.0
    reason: str = ""

    def copy(self) -> Row:
        """Return another row with the same values."""
        return replace(self)


class Book:
    """The rows of all queues."""

    def __init__(self, database: Database, *, blobs: Holds | None) -> None:
        self._database = database
        self._blobs = blobs
        database.write_now(_prepare)

    async def rows(self, queue: str, *, created: str) -> list[Row]:
        """Return the rows of a queue; those of an older stream of this name are forgotten."""

        def work(connection: sqlite3.Connection) -> list[Row]:
            known = connection.execute(
                "SELECT created FROM nats_streams WHERE queue = ?", (queue,)
            ).fetchone()
            if known is None or known[0] != created:
                connection.execute("DELETE FROM nats_items WHERE queue = ?", (queue,))
                connection.execute(
                    "INSERT OR REPLACE INTO nats_streams VALUES (?, ?)", (queue, created)
                )
            found = connection.execute("SELECT * FROM nats_items WHERE queue = ?", (queue,))
            return [Row(*row) for row in found]

        return await self._database.write(work)

    async def write(self, rows: Sequence[Row]) -> None:
        """Keep rows as they are at this moment; the blobs of done items are let go."""
        values = [astuple(row) for row in rows]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_ROW, values)
            for queue, _, key, _, blob, _, state, *_ in values:
                if blob and state == "done" and self._blobs is not None:
                    self._blobs.drop(connection, _owner(queue, key))

        if values:
            await self._database.write(work)

    async def forget(self, queue: str, seqs: Sequence[int]) -> None:
        """Delete rows."""
        values = [(queue, seq) for seq in seqs]
        await self._database.write(
            lambda c: c.executemany("DELETE FROM nats_items WHERE queue = ? AND seq = ?", values)
        )

    async def remove(self, prefix: str) -> None:
        """Delete all that is known of the queues whose name begins so; their blobs are let go."""

        def work(connection: sqlite3.Connection) -> None:
            for table in ("nats_items", "nats_streams"):
                connection.execute(
                    f"DELETE FROM {table} WHERE queue >= ? AND queue < ?", span(prefix)
                )
            if self._blobs is not None:
                self._blobs.drop_all(connection, f"queue/{prefix}")

        await self._database.write(work)

    async def hold(self, queue: str, blobs: Sequence[tuple[str, str]]) -> None:
        """Keep the blobs of items that are about to be stored, as (key, blob)."""
        held = self._blobs
        if held is None or not blobs:
            return

        def work(connection: sqlite3.Connection) -> None:
            for key, blob in blobs:
                held.hold(connection, blob, _owner(queue, key))

        await self._database.write(work)


def _prepare(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";"):
        connection.execute(statement)


def _owner(queue: str, key: str) -> str:
    return f"queue/{queue}/{key}"
