"""Quotas on the blobs that each token has sent, counted from the table of senders."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable

from atoll.hub.db.database import Database
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import Kind

REMEDY = (
    "acknowledge or discard queue items, or delete jobs: blobs that nothing refers to are deleted "
    "an hour later; or let the hub's owner raise the limit"
)


class BlobQuota:
    """Limits the blobs of tokens."""

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        self._arriving: collections.Counter[Holder] = collections.Counter()
        self._arriving_bytes: collections.Counter[Holder] = collections.Counter()
        ledger.sources.append(self._uses)

    @contextlib.asynccontextmanager
    async def arriving(
        self, holder: Holder, sha256: str, announced: int
    ) -> AsyncIterator[BlobArrival]:
        """Count a blob while it is uploaded; raises LimitReached if it would exceed a quota."""
        arrival = BlobArrival(self, holder, sha256)
        known = await self._database.read(lambda connection: _sent(connection, holder, sha256))
        if known:  # sent before, and counted
            arrival.counts = False
        else:
            await self._check(Kind.BLOBS, holder, 1)
        if arrival.counts:
            self._arriving[holder] += 1
        try:
            await arrival.reserve(announced)
            yield arrival
        finally:
            self._arriving[holder] -= int(arrival.counts)
            self._arriving_bytes[holder] -= arrival.reserved
            if not self._arriving[holder] and not self._arriving_bytes[holder]:
                del self._arriving[holder], self._arriving_bytes[holder]

    async def forget_missing(self, exists: Callable[[str], bool]) -> None:
        """Stop counting blobs that no longer exist."""
        known = await self._database.read(
            lambda connection: [
                row[0] for row in connection.execute("SELECT DISTINCT sha256 FROM blob_senders")
            ]
        )
        gone = await asyncio.to_thread(lambda: [(one,) for one in known if not exists(one)])
        if gone:
            await self._database.write(
                lambda connection: connection.executemany(
                    "DELETE FROM blob_senders WHERE sha256 = ?", gone
                )
            )

    async def _check(self, kind: Kind, holder: Holder, more: int) -> None:
        limit = self._ledger.limit(kind, holder)
        if not limit:
            return
        number, nbytes = await self._database.read(lambda connection: _sum(connection, holder))
        coming = self._arriving if kind is Kind.BLOBS else self._arriving_bytes
        used = (number if kind is Kind.BLOBS else nbytes) + coming[holder]
        if used + more > limit:
            raise self._ledger.refuse(kind, holder, used=used, wanted=more, remedy=REMEDY)

    async def _uses(self) -> list[tuple[Kind, Holder, int]]:
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT role, name, count(*), sum(nbytes) FROM blob_senders GROUP BY role, name"
            ).fetchall()
        )
        found = []
        for role, name, number, nbytes in rows:
            holder = Holder(role, name)
            found += [(Kind.BLOBS, holder, number), (Kind.BLOB_BYTES, holder, nbytes)]
        return found


class BlobArrival:
    """The upload of one blob."""

    def __init__(self, quota: BlobQuota, holder: Holder, sha256: str) -> None:
        self._quota, self._holder, self._sha256 = quota, holder, sha256
        self.counts = True
        """Whether it is new for its holder."""
        self.reserved = 0
        """Bytes counted so far for the holder."""
        self._nbytes = 0

    async def reserve(self, more: int) -> None:
        """Count `more` bytes for the holder; raises LimitReached if they would exceed the quota."""
        if self.counts:
            await self._quota._check(Kind.BLOB_BYTES, self._holder, more)
            self._quota._arriving_bytes[self._holder] += more
            self.reserved += more

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass the chunks on; raises LimitReached at the first that does not fit."""
        async for chunk in chunks:
            self._nbytes += len(chunk)
            if self.counts and self._nbytes > self.reserved:
                await self.reserve(self._nbytes - self.reserved)
            yield chunk

    async def stored(self, nbytes: int) -> None:
        """Count the whole blob for its holder."""
        role, name, _ = self._holder
        row = (role, name, self._sha256, nbytes)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO blob_senders VALUES (?, ?, ?, ?)", row)

        await self._quota._database.write(write)


def _sent(connection: sqlite3.Connection, holder: Holder, sha256: str) -> bool:
    row = connection.execute(
        "SELECT 1 FROM blob_senders WHERE role = ? AND name = ? AND sha256 = ?",
        (holder.role, holder.name, sha256),
    )
    return row.fetchone() is not None


def _sum(connection: sqlite3.Connection, holder: Holder) -> tuple[int, int]:
    number, nbytes = connection.execute(
        "SELECT count(*), total(nbytes) FROM blob_senders WHERE role = ? AND name = ?",
        (holder.role, holder.name),
    ).fetchone()
    return int(number), int(nbytes)
