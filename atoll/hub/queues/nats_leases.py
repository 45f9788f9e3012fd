"""One queue in NATS as the hub knows it: what was read ahead, what came back, who holds what.

Who holds which item of a queue in NATS: leases, attempts, dead letters, in the hub's database.

An item without a row was never claimed. Rows of done items stay until their keys are forgotten;
until its message is removed from the stream, such a row says that nobody may get it again.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import sqlite3
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from atoll.hub.db.database import Database, span
from atoll.hub.queues.backend import MAX_CLAIM_BYTES, Amount, HeldBlobs, lease_seq
from atoll.hub.queues.nats_client import NatsStore, StoredMessage, StreamState

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


class LeaseTable:
    """The rows of all queues."""

    def __init__(self, database: Database, *, blobs: HeldBlobs | None) -> None:
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


KEYS_KEPT = 100_000
"""Keys of one queue that this hub itself remembers."""

_READ = 256
"""Items that are read ahead."""


class NatsStream:
    """The state of one queue beside its stream.

    Args:
        store: Where the stream is.
        queue: Its name.
        rows: What the book says.
        last: Number of the newest item in the stream.
    """

    def __init__(self, store: NatsStore, queue: str, *, rows: Sequence[Row], last: int) -> None:
        self._store = store
        self.queue = queue
        self.rows = {row.seq: row for row in rows}
        self.last = last
        self._cursor = 1
        """Number from which the stream is read next."""
        self._ahead: collections.deque[StoredMessage] = collections.deque()
        """Read, and never claimed."""
        self._back: list[int] = sorted(row.seq for row in rows if row.state == "ready")
        """Heap of items that were claimed before and are ready again."""
        self._payloads: dict[int, StoredMessage] = {}
        """Of items that are being handed out."""
        self.keys: collections.OrderedDict[str, int] = collections.OrderedDict(
            (row.key, row.seq) for row in rows
        )
        self.removed: collections.deque[int] = collections.deque()
        """Done items that are gone from the stream; their keys are remembered."""
        self.putting = asyncio.Lock()
        self.claiming = asyncio.Lock()
        """Held by whoever takes ready items out of the line."""
        self.leased = {row.seq: row for row in rows if row.state == "leased"}
        self.dead = {row.seq: row for row in rows if row.state == "dead"}

    # -------------------------------------------------------------------------- looking

    def amounts(self, state: StreamState) -> dict[str, Amount]:
        """Return how much is in which state; the bytes of ready items are the server's figure."""
        done = [row.nbytes for row in self.rows.values() if row.state == "done"]
        found = {
            name: Amount(len(rows), sum(row.nbytes for row in rows.values()))
            for name, rows in (("leased", self.leased), ("dead", self.dead))
        }
        others = len(done) + sum(amount.items for amount in found.values())
        nbytes = sum(done) + sum(amount.nbytes for amount in found.values())
        ready = max(0, state.messages - others)
        return found | {"ready": Amount(ready, max(0, state.nbytes - nbytes) if ready else 0)}

    def find(self, lease: str) -> Row | None:
        """Return the item whose last lease this is."""
        row = self.rows.get(lease_seq(lease))
        return row if row is not None and lease and row.lease == lease else None

    def of_request(self, request: str) -> list[Row]:
        """Return the items that were leased under this request."""
        rows = [row for row in self.leased.values() if row.request == request] if request else []
        return sorted(rows, key=lambda row: row.seq)

    def dead_letters(self, seqs: Sequence[int] | None) -> list[Row]:
        """Return dead letters (None: all), oldest first."""
        rows = [row for row in self.dead.values() if seqs is None or row.seq in seqs]
        return sorted(rows, key=lambda row: row.seq)

    def done_seqs(self) -> list[int]:
        """Return the numbers of items that are done."""
        return [seq for seq, row in self.rows.items() if row.state == "done"]

    async def payload(self, row: Row) -> bytes | None:
        """Return the payload of an item; None when its message is gone."""
        kept = self._payloads.pop(row.seq, None) or await self._store.get(self.queue, row.seq)
        return None if kept is None else kept.payload

    # --------------------------------------------------------------------- the line

    async def first(self) -> Row | None:
        """Return the oldest ready item; it stays in line."""
        while not self._back and not self._ahead and self._cursor <= self.last:
            last = self.last
            found = await self._store.read(self.queue, self._cursor, limit=_READ)
            self._ahead.extend(kept for kept in found if kept.seq not in self.rows)
            self._cursor = found[-1].seq + 1 if found else last + 1
        if self._back:
            return self.rows[self._back[0]]
        if not self._ahead:
            return None
        kept = self._ahead[0]
        return Row(self.queue, kept.seq, kept.key, kept.nbytes, kept.blob, kept.put)

    def pop(self, row: Row) -> None:
        """Take the item that `first` returned out of the line; it has a row from now on."""
        if self._back and self._back[0] == row.seq:
            heapq.heappop(self._back)
        else:
            self._payloads[row.seq] = self._ahead.popleft()
        self.rows[row.seq] = row

    async def take(self, limit: int) -> list[Row]:
        """Take the oldest ready items out of the line, as many as one answer holds."""
        taken: list[Row] = []
        nbytes = 0
        while len(taken) < limit and (row := await self.first()) is not None:
            nbytes += 0 if row.blob else row.nbytes
            if taken and nbytes > MAX_CLAIM_BYTES:
                break
            self.pop(row)
            taken.append(row)
        return taken

    # ------------------------------------------------------------------------- changing

    def learn(self, key: str, seq: int) -> None:
        """Note an item that was just stored."""
        self.last = max(self.last, seq)
        self.keys[key] = seq
        if len(self.keys) > KEYS_KEPT:
            self.keys.popitem(last=False)

    def mark(self, row: Row, state: str) -> None:
        """Give an item another state; it has a row and, if it was ready, is out of the line."""
        self.leased.pop(row.seq, None)
        self.dead.pop(row.seq, None)
        row.state = state
        if state == "leased":
            self.leased[row.seq] = row
            return
        self._payloads.pop(row.seq, None)
        if state == "dead":
            self.dead[row.seq] = row
        elif state == "ready":
            heapq.heappush(self._back, row.seq)

    def withdraw(self, row: Row) -> None:
        """Take an item out of the line, wherever in it, if it is there."""
        if row.state == "ready" and row.seq in self._back:
            self._back.remove(row.seq)
            heapq.heapify(self._back)

    def forget(self, now: float) -> list[int]:
        """Forget done items whose time is over, and their keys; return their numbers."""
        old: list[int] = []
        while self.removed and (
            len(self.removed) > KEYS_KEPT or self.rows[self.removed[0]].until <= now
        ):
            seq = self.removed.popleft()
            row = self.rows.pop(seq)
            if self.keys.get(row.key) == seq:
                del self.keys[row.key]
            old.append(seq)
        return old
