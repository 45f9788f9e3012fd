"""The number of the last durable point of every process that reports metrics."""

from __future__ import annotations

import sqlite3

from atoll.errors import LimitReached

SCHEMA = """
CREATE TABLE IF NOT EXISTS point_cursors (
    job TEXT NOT NULL, member TEXT NOT NULL, incarnation TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (job, member, incarnation)
) WITHOUT ROWID;
"""

MAX_PROCESSES = 1_000
"""Most processes of one member that report metrics, restarts included."""

Key = tuple[str, str, str]
"""Job, member and incarnation."""


def first_cursor(connection: sqlite3.Connection, key: Key) -> int:
    """Return the cursor of a process that reports for the first time since the hub started.

    Raises:
        LimitReached: the member had too many processes. Each has a row, and every report sums the
            bytes of all.
    """
    (others,) = connection.execute(
        "SELECT count(*) FROM point_cursors WHERE job = ? AND member = ? AND incarnation != ?", key
    ).fetchone()
    if others >= MAX_PROCESSES:
        raise LimitReached(
            "too many processes of a member have reported metrics",
            given=f"{others} of {key[1]}", expected=f"at most {MAX_PROCESSES}",
            remedy="submit the job again",
        )  # fmt: skip
    return cursor(connection, key)


def cursor(connection: sqlite3.Connection, key: Key) -> int:
    """Return the number of the last durable point of a process; 0: none."""
    row = connection.execute(
        "SELECT seq FROM point_cursors WHERE job = ? AND member = ? AND incarnation = ?", key
    ).fetchone()
    return int(row[0]) if row else 0
