"""Blobs: files named by their SHA-256, kept while they are referenced.

A client takes a reference (*hold*) in the transaction that records the dependency. Blobs without
one are deleted an hour after their last use, so that a client can first upload and then hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from atoll.clock import Clock
from atoll.errors import ConfigError, HubError
from atoll.hub.db.database import Database, span
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.storage import upload
from atoll.hub.storage.blob_quota import BlobQuota
from atoll.ids import new_token

SCHEMA = """
CREATE TABLE IF NOT EXISTS blob_holds (
    owner TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (owner, sha256)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blob_holds_by_hash ON blob_holds (sha256);
CREATE TABLE IF NOT EXISTS blob_senders (
    role TEXT NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, nbytes INTEGER NOT NULL,
    PRIMARY KEY (role, name, sha256)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blob_senders_by_hash ON blob_senders (sha256);
"""

FOLDER = "blobs"

MAX_BLOB_BYTES = 8 * 2**30

UNHELD_S = 3600.0
"""How long a blob without references is kept."""

_SWEPT_AT_ONCE = 200
"""Blobs deleted in one transaction, so that other writes are not delayed for long."""

_HASH = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """All blobs of a hub: files `ab/HASH` below `folder`, references in `database`."""

    def __init__(
        self, database: Database, *, folder: Path, clock: Clock, ledger: Ledger | None = None
    ) -> None:
        """Keep blobs in `folder`; the `ledger` limits how many each token may send."""
        self._database = database
        self._quota = BlobQuota(database, ledger) if ledger is not None else None
        self._folder = folder
        self._clock = clock
        self._deleting = threading.Lock()
        """Prevents deletion between checking that a blob exists and acting on the result."""
        self._incoming = folder / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self._incoming.iterdir():
            leftover.unlink()

    def path(self, sha256: str) -> Path:
        """Return the path that a blob has or would have; raises ConfigError for a bad hash."""
        if not _HASH.fullmatch(sha256):
            raise ConfigError(
                "this is not the name of a blob",
                given=repr(sha256[:80]),
                expected="a SHA-256: 64 digits of 0-9 a-f",
            )
        return self._folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Return whether a blob exists; if so, it is kept for at least another hour."""
        with self._deleting:
            return self._touch(sha256)

    def nbytes(self, sha256: str) -> int:
        """Return the size of a blob; raises HubError if it does not exist."""
        try:
            return self.path(sha256).stat().st_size
        except OSError:
            raise _missing(sha256) from None

    async def put(
        self, sha256: str, chunks: AsyncIterator[bytes], *, max_bytes: int,
        holder: Holder | None = None, announced: int = 0,
    ) -> int:  # fmt: skip
        """Store the bytes under their hash and return their number; existing blobs are unchanged.

        They count for `holder` until the blob is deleted. `announced` is the size that the sender
        declared, or 0.

        Raises:
            ConfigError: `sha256` is not a SHA-256.
            LimitReached: the holder has sent too many blobs, or too large ones.
            WireError: the bytes have another hash.
            FrameTooLarge: they are more than `max_bytes`.
            StorageFull: no space is left.
        """
        path = self.path(sha256)
        if self._quota is None or holder is None:
            return await self._put(path, sha256, chunks, max_bytes)
        async with self._quota.arriving(holder, sha256, announced) as arrival:
            nbytes = await self._put(path, sha256, arrival.counted(chunks), max_bytes)
            await arrival.stored(nbytes)
        return nbytes

    async def _put(
        self, path: Path, sha256: str, chunks: AsyncIterator[bytes], max_bytes: int
    ) -> int:
        temporary = self._incoming / new_token()
        try:
            with upload.storage_full_as_error(path):
                _, nbytes = await upload.receive(
                    temporary, chunks, sha256=sha256, max_bytes=max_bytes
                )
                await asyncio.to_thread(self._put_in_place, temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return nbytes

    def hold(self, connection: sqlite3.Connection, sha256: str, owner: str) -> None:
        """Take a reference for `owner`, e.g. `job/ID`, in a write; raises HubError if missing."""
        with self._deleting:
            if not self._touch(sha256):
                raise _missing(sha256)
        connection.execute("INSERT OR IGNORE INTO blob_holds VALUES (?, ?)", (owner, sha256))

    def drop(self, connection: sqlite3.Connection, owner: str) -> None:
        """Drop all references of an owner, inside a write transaction."""
        connection.execute("DELETE FROM blob_holds WHERE owner = ?", (owner,))

    def drop_all(self, connection: sqlite3.Connection, prefix: str) -> None:
        """Drop the references of all owners with this prefix, inside a write transaction."""
        connection.execute("DELETE FROM blob_holds WHERE owner >= ? AND owner < ?", span(prefix))

    async def held_alone(self, owner: str) -> list[str]:
        """Return the blobs that only this owner references."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT sha256 FROM blob_holds AS own WHERE owner = ? AND NOT EXISTS"
                " (SELECT 1 FROM blob_holds WHERE sha256 = own.sha256 AND owner <> own.owner)",
                (owner,),
            ).fetchall()
        )
        return [sha256 for (sha256,) in rows]

    async def sweep(self) -> int:
        """Delete unreferenced blobs that were not used in the last hour; return how many."""
        old = await asyncio.to_thread(self._old)
        # Read from the committed state, since a drop that is rolled back must not delete anything.
        held = await self._database.read(_held)
        doomed, deleted = [sha256 for sha256 in old if sha256 not in held], 0
        for start in range(0, len(doomed), _SWEPT_AT_ONCE):
            some = doomed[start : start + _SWEPT_AT_ONCE]

            def delete(connection: sqlite3.Connection, some: list[str] = some) -> int:
                return sum(self._delete(connection, sha256) for sha256 in some)

            deleted += await self._database.write(delete)
        if self._quota is not None:  # backups omit unreferenced blobs, but count them
            await self._quota.forget_missing(lambda sha256: self.path(sha256).exists())
        return deleted

    def _put_in_place(self, temporary: Path, path: Path) -> None:
        now = self._clock.wall()
        os.utime(temporary, (now, now))
        with self._deleting:
            upload.put_in_place(temporary, path)

    def _touch(self, sha256: str) -> bool:
        """Reset the age of a blob; return False if it does not exist."""
        now = self._clock.wall()
        try:
            os.utime(self.path(sha256), (now, now))
        except FileNotFoundError:
            return False
        return True

    def _old(self) -> list[str]:
        return [
            path.name
            for path in self._folder.glob("[0-9a-f][0-9a-f]/*")
            if _HASH.fullmatch(path.name) and self._is_old(path)
        ]

    def _is_old(self, path: Path) -> bool:
        try:
            return self._clock.wall() - path.stat().st_mtime > UNHELD_S
        except FileNotFoundError:
            return False

    def _delete(self, connection: sqlite3.Connection, sha256: str) -> bool:
        row = connection.execute("SELECT 1 FROM blob_holds WHERE sha256 = ? LIMIT 1", (sha256,))
        if row.fetchone() is not None:
            return False
        path = self.path(sha256)
        with self._deleting, contextlib.suppress(OSError):  # Windows refuses to delete open files
            if self._is_old(path):
                path.unlink()
                connection.execute("DELETE FROM blob_senders WHERE sha256 = ?", (sha256,))
                return True
        return False


def blobs_held_in(connection: sqlite3.Connection) -> list[str]:
    """Return the referenced blobs; the database may predate the table of references."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'blob_holds'").fetchone()
    return sorted(_held(connection)) if known else []


def _held(connection: sqlite3.Connection) -> set[str]:
    return {sha256 for (sha256,) in connection.execute("SELECT DISTINCT sha256 FROM blob_holds")}


def _missing(sha256: str) -> HubError:
    return HubError(
        "the hub does not have this blob",
        given=sha256,
        remedy="send it again: blobs without references are kept for an hour",
    )
