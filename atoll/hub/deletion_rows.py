"""What the hub's database holds of one job, and how it goes: a bounded number of rows at once."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from atoll.hub.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS deletions (
    job TEXT PRIMARY KEY, keep_files INTEGER NOT NULL, asked REAL NOT NULL, queues TEXT NOT NULL
) WITHOUT ROWID;
"""
"""Jobs whose record is gone and whose rest is being removed."""

OF_JOB = {
    "alarms": "id",
    "checkpoint_parts": "round",
    "events": "id",
    "files": "name",
    "log_cursors": "member",
    "logs": "id",
    "open_joins": "epoch",
    "point_cursors": "member",
    "points": "id",
    "round_leases": "round",
    "round_timelines": "epoch",
    "rounds": "epoch",
}
"""Every table with a column `job`, and the column by whose order its rows go."""

ROWS_AT_ONCE = 2_000
"""Rows deleted between other writes of the database."""

_OPEN_STAY = {"alarms": " AND ended IS NOT NULL"}
"""An alarm that is still open ends by itself, and is told as ended."""


async def delete_rows(database: Database, job: str) -> None:
    """Delete the rows of a job; interrupted, it goes on where it was."""
    while await database.write(lambda connection: _delete_some(connection, job)):
        continue


def _delete_some(connection: sqlite3.Connection, job: str) -> bool:
    """Delete as many rows as one write may; return whether there may be more."""
    left = ROWS_AT_ONCE
    for table, column in OF_JOB.items():
        where = f"job = :job{_OPEN_STAY.get(table, '')}"
        some = f"SELECT {column} AS one FROM {table} WHERE {where} ORDER BY {column} LIMIT :limit"
        left -= connection.execute(
            f"DELETE FROM {table} WHERE {where} AND {column} <= (SELECT max(one) FROM ({some}))",
            {"job": job, "limit": left},
        ).rowcount
        if left <= 0:
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What has to go after the record of a job."""

    keep_files: bool
    """Whether its folder stays."""
    queues: list[str]
    """How the names of its queues and topics begin."""


def begin(connection: sqlite3.Connection, job: str, rest: Rest, *, now: float) -> None:
    """Write down that a job is being deleted, inside a write."""
    row = (job, int(rest.keep_files), now, json.dumps(rest.queues))
    connection.execute("INSERT INTO deletions VALUES (?, ?, ?, ?)", row)


def end(connection: sqlite3.Connection, job: str) -> None:
    """Write down that nothing of a job is left, inside a write."""
    connection.execute("DELETE FROM deletions WHERE job = ?", (job,))


def begun(connection: sqlite3.Connection) -> dict[str, Rest]:
    """Return the jobs whose deletion is not finished, the oldest first."""
    rows = connection.execute("SELECT job, keep_files, queues FROM deletions ORDER BY asked, job")
    return {
        job: Rest(keep_files=bool(keep), queues=json.loads(queues)) for job, keep, queues in rows
    }
