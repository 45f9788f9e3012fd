"""The table of timelines: where the time of each decided attempt went. Old ones are thinned.

When a job has more than its share, every second one of the older half goes, so the past gets
coarser but never shorter.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.hub.database import Database
from atoll.hub.timeline import ROW_FIELDS, Row, row_view

SCHEMA = """
CREATE TABLE IF NOT EXISTS round_timelines (
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    members BLOB NOT NULL,
    PRIMARY KEY (job, epoch)
) WITHOUT ROWID;
"""

MAX_ROWS = 50_000
"""Members times attempts of one job, about 5 MB."""
LEAST_KEPT = 200
"""Attempts of one job that are kept however many members it has."""

_THIN_EVERY = 64

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[list[Any]])


def encode(rows: Sequence[Row]) -> bytes:
    """Return rows as they are stored: values without names."""
    return _encoder.encode([[getattr(row, name) for name in ROW_FIELDS] for row in rows])


def decode(data: bytes) -> list[Row]:
    """Return what :func:`encode` was given; columns that came later are left at their defaults."""
    return [
        Row(**dict(zip(ROW_FIELDS, values, strict=False)))  # values of an older hub are fewer
        for values in _decoder.decode(data)
    ]


def views(data: bytes | None) -> list[dict[str, Any]]:
    """Return stored rows as the API shows them."""
    return [] if data is None else [row_view(row) for row in decode(data)]


def store(connection: sqlite3.Connection, job: str, epoch: int, rows: bytes) -> None:
    """Write the rows of an attempt, again if they are known better by now (writer thread)."""
    connection.execute(
        "INSERT OR REPLACE INTO round_timelines VALUES (?, ?, ?)", (job, epoch, rows)
    )


def thin(connection: sqlite3.Connection, job: str, epoch: int, *, members: int) -> None:
    """Drop every second timeline of the older half when there are too many (writer thread)."""
    if epoch % _THIN_EVERY:
        return
    epochs = [
        found
        for (found,) in connection.execute(
            "SELECT epoch FROM round_timelines WHERE job = ? ORDER BY epoch", (job,)
        )
    ]
    if len(epochs) > max(LEAST_KEPT, MAX_ROWS // max(1, members)):
        gone = epochs[1 : len(epochs) // 2 : 2]
        connection.executemany(
            "DELETE FROM round_timelines WHERE job = ? AND epoch = ?", [(job, e) for e in gone]
        )


class Passed(msgspec.Struct, frozen=True):
    """A committed round with its timeline."""

    epoch: int
    round: int
    route: str
    members: list[str]
    contributors: list[str]
    time: float
    """Of the verdict, seconds since 1970."""
    seconds: float
    """From its plan to its verdict."""
    nbytes: int
    """Through the relay."""
    rows: list[Row]


class _Plan(msgspec.Struct):
    route: str
    members: list[str]


class _Verdict(msgspec.Struct):
    committed: bool
    contributors: list[str] = []


_plans = msgspec.msgpack.Decoder(_Plan)
_verdicts = msgspec.msgpack.Decoder(_Verdict)


async def passed(
    database: Database, job: str, *, after: int = 0, newest: int = 1_000
) -> list[Passed]:
    """Return the newest committed rounds with an epoch above `after`, oldest first."""
    return await database.read(
        lambda connection: find_passed(connection, job, after=after, newest=newest)
    )


def find_passed(
    connection: sqlite3.Connection, job: str, *, after: int = 0, newest: int = 1_000
) -> list[Passed]:
    """Do what :func:`passed` does, in the thread that reads."""
    rows = connection.execute(
        "SELECT r.epoch, r.round, r.plan, r.verdict, r.decided, r.seconds, r.nbytes, t.members"
        " FROM round_timelines t JOIN rounds r ON r.job = t.job AND r.epoch = t.epoch"
        " WHERE t.job = ? AND t.epoch > ? AND r.verdict IS NOT NULL"
        " ORDER BY t.epoch DESC LIMIT ?",
        (job, after, newest),
    ).fetchall()
    found = []
    for epoch, round_, plan_bytes, verdict_bytes, time, seconds, nbytes, parts in reversed(rows):
        plan, verdict = _plans.decode(plan_bytes), _verdicts.decode(verdict_bytes)
        if verdict.committed:
            found.append(
                Passed(
                    epoch, round_, plan.route, plan.members, verdict.contributors,
                    time, seconds, nbytes, decode(parts),
                )
            )  # fmt: skip
    return found
