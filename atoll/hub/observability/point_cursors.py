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
"""Processes of one member that report, one after the other."""

Key = tuple[str, str, str]
"""Job, member and incarnation."""


def first_cursor(connection: sqlite3.Connection, key: Key) -> int:
    """Return the cursor of a process that has not reported to this process of the hub before.

    Raises:
        LimitReached: it is one too many. All are remembered, and their bytes summed with every
            report.
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
