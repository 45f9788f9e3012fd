"""Blobs: files that are named by their SHA-256, kept while somebody holds them.

Code of jobs and large payloads of queues are stored once, whoever sends them. A blob is there
whole or not at all: bytes go to `.incoming/` first, are checked and flushed, and only then get
their name.

Who needs a blob *holds* it, in the same transaction in which it writes down that it needs it. What
nobody holds is deleted an hour after it was last sent, asked for or held: in that hour a client may
say that it has sent it, and hold it.
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
from atoll.hub.storage import upload
from atoll.ids import new_token

SCHEMA = """
CREATE TABLE IF NOT EXISTS blob_holds (
    owner TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (owner, sha256)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blob_holds_by_hash ON blob_holds (sha256);
"""

FOLDER = "blobs"
"""Name of their folder in the hub's data folder."""

MAX_BLOB_BYTES = 8 * 2**30
"""Largest blob that is accepted over the wire."""

UNHELD_S = 3600.0
"""How long a blob stays that nobody holds."""

_SWEPT_AT_ONCE = 200
"""Blobs deleted between other writes of the database."""

_HASH = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """All blobs of a hub, under one folder.

    Args:
        database: Where it is written down who holds what.
        folder: Where they lie, as `ab/HASH`.
        clock: Whence their age is told.
    """

    def __init__(self, database: Database, *, folder: Path, clock: Clock) -> None:
        self._database = database
        self._folder = folder
        self._clock = clock
        self._deleting = threading.Lock()
        """Nothing is deleted between a look at a blob and what is done because it is there."""
        self._incoming = folder / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self._incoming.iterdir():
            leftover.unlink()

    def path(self, sha256: str) -> Path:
        """Return where a blob lies, or would lie.

        Raises:
            ConfigError: this is no SHA-256.
        """
        if not _HASH.fullmatch(sha256):
            raise ConfigError(
                "this is not the name of a blob",
                given=repr(sha256[:80]),
                expected="a SHA-256: 64 digits of 0-9 a-f",
            )
        return self._folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Return whether a blob is here; if it is, it stays for another hour at least."""
        with self._deleting:
            return self._touch(sha256)

    def nbytes(self, sha256: str) -> int:
        """Return the size of a blob.

        Raises:
            HubError: it is not here.
        """
        try:
            return self.path(sha256).stat().st_size
        except OSError:
            raise _missing(sha256) from None

    async def put(self, sha256: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> int:
        """Store what `chunks` yields under its hash, and return its size; again changes nothing.

        Raises:
            ConfigError: this is no SHA-256.
            WireError: the bytes hash to something else.
            FrameTooLarge: they are more than `max_bytes`.
            StorageFull: no room is left.
        """
        path, temporary = self.path(sha256), self._incoming / new_token()
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
        """Keep a blob for somebody, inside a write of the database.

        Args:
            connection: The one of the write.
            sha256: The blob.
            owner: Who needs it, e.g. `job/ID`; one owner may hold many.

        Raises:
            HubError: it is not here.
        """
        with self._deleting:
            if not self._touch(sha256):
                raise _missing(sha256)
        connection.execute("INSERT OR IGNORE INTO blob_holds VALUES (?, ?)", (owner, sha256))

    def drop(self, connection: sqlite3.Connection, owner: str) -> None:
        """Let go of everything that somebody holds, inside a write of the database."""
        connection.execute("DELETE FROM blob_holds WHERE owner = ?", (owner,))

    def drop_all(self, connection: sqlite3.Connection, prefix: str) -> None:
        """Let go of everything that owners hold whose names begin so, inside a write."""
        connection.execute("DELETE FROM blob_holds WHERE owner >= ? AND owner < ?", span(prefix))

    async def held_alone(self, owner: str) -> list[str]:
        """Return the blobs that somebody holds and nobody else does."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT sha256 FROM blob_holds AS own WHERE owner = ? AND NOT EXISTS"
                " (SELECT 1 FROM blob_holds WHERE sha256 = own.sha256 AND owner <> own.owner)",
                (owner,),
            ).fetchall()
        )
        return [sha256 for (sha256,) in rows]

    async def sweep(self) -> int:
        """Delete what nobody holds and nobody has asked for in the last hour; return how many."""
        old = await asyncio.to_thread(self._old)
        # Looked up in what is committed first: a drop that is rolled back has never happened.
        held = await self._database.read(_held)
        doomed, deleted = [sha256 for sha256 in old if sha256 not in held], 0
        for start in range(0, len(doomed), _SWEPT_AT_ONCE):
            some = doomed[start : start + _SWEPT_AT_ONCE]

            def delete(connection: sqlite3.Connection, some: list[str] = some) -> int:
                return sum(self._delete(connection, sha256) for sha256 in some)

            deleted += await self._database.write(delete)
        return deleted

    def _put_in_place(self, temporary: Path, path: Path) -> None:
        now = self._clock.wall()
        os.utime(temporary, (now, now))
        with self._deleting:
            upload.put_in_place(temporary, path)

    def _touch(self, sha256: str) -> bool:
        """Start the hour of a blob anew; False when it is not here."""
        now = self._clock.wall()
        try:
            os.utime(self.path(sha256), (now, now))
        except FileNotFoundError:
            return False
        return True

    def _old(self) -> list[str]:
        """Return the blobs whose hour is over."""
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
        """Delete a blob unless it is needed by now."""
        row = connection.execute("SELECT 1 FROM blob_holds WHERE sha256 = ? LIMIT 1", (sha256,))
        if row.fetchone() is not None:
            return False
        path = self.path(sha256)
        with self._deleting, contextlib.suppress(OSError):  # e.g. open, where that is in the way
            if self._is_old(path):
                path.unlink()
                return True
        return False


def blobs_held_in(connection: sqlite3.Connection) -> list[str]:
    """Return the blobs that somebody holds, in a database that may be older than blobs are."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'blob_holds'").fetchone()
    return sorted(_held(connection)) if known else []


def _held(connection: sqlite3.Connection) -> set[str]:
    return {sha256 for (sha256,) in connection.execute("SELECT DISTINCT sha256 FROM blob_holds")}


def _missing(sha256: str) -> HubError:
    return HubError(
        "the hub does not have this blob",
        given=sha256,
        remedy="send it again: what nobody holds is kept for an hour",
    )
