"""Open the hub's database file: locked, checked, with its tables; and explain its failures."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import AtollError, HubError, StorageFull
from atoll.system import is_full

SCHEMA_VERSION = 1
"""`user_version` of the file; grows when a table changes its form."""

_CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked when opened (below 0.2 s); larger ones are trusted."""

_LOCK_WAIT_S = 2.0


def hold_lock(path: Path) -> sqlite3.Connection:
    """Return a connection whose open transaction keeps a second hub off this file.

    The operating system frees it however this process ends, on every platform.

    Raises:
        HubError: another hub holds it.
    """
    try:
        lock = sqlite3.connect(
            path.with_name(path.name + ".lock"),
            timeout=_LOCK_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise explain(error, path) from error
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        lock.close()
        if "locked" not in str(error):
            raise explain(error, path) from error
        raise HubError(
            "another hub uses this data folder",
            given=str(path.parent),
            remedy="stop that hub, or give this one another folder with --data",
        ) from error
    return lock


def open_reader(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads, for any one thread at a time."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False,
        isolation_level=None,
    )  # fmt: skip


def open_writer(path: Path, schemas: Sequence[str]) -> sqlite3.Connection:
    """Return the writing connection with all tables made.

    Raises:
        HubError: a newer version wrote the file.
        sqlite3.DatabaseError: it is damaged.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute("PRAGMA cache_size=-2048")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise HubError(
                "the hub's database was written by a newer Atoll",
                given=f"{path}, form {version}",
                expected=f"form {SCHEMA_VERSION}",
                remedy="install that version, or start with an empty --data folder",
            )
        if path.stat().st_size <= _CHECKED_BYTES:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"malformed: {verdict}")
        # One transaction is flushed to the disk once; alone, each statement would be.
        script = ["BEGIN IMMEDIATE", *schemas, f"PRAGMA user_version={SCHEMA_VERSION}", "COMMIT;"]
        connection.executescript(";\n".join(script))
    except BaseException:
        connection.close()
        raise
    return connection


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the system's errors for a full disk."""


def full(path: Path) -> StorageFull:
    """Return the error for a full disk."""
    return StorageFull(
        "no room is left for the hub's database",
        given=str(path),
        remedy="free some space; acknowledged data is safe",
    )


def explain(error: sqlite3.Error, path: Path) -> AtollError:
    """Return what an error of SQLite means for the person who runs the hub."""
    text = " ".join(str(error).split())
    if "full" in text or ("I/O" in text and is_full(path.parent)):
        return full(path)
    if "not a database" in text or "malformed" in text:
        return HubError(
            "the hub's database is damaged",
            given=f"{path} ({text})",
            expected="a file that only the hub writes",
            remedy="restore a copy of it, or move it away to start empty (job folders are kept)",
        )
    return HubError("the hub's database failed", given=f"{path} ({text})")
