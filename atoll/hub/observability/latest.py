"""The newest value of every name that a member reported: in memory, and stored with its points.

The last point of a member may lack what an earlier one had, and points are thinned, so the newest
values have rows of their own: a finished job keeps its final values.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.hub.observability.held_out import HELD_OUT
from atoll.wire.messages import Point

SCHEMA = """
CREATE TABLE IF NOT EXISTS latest_values (
    job TEXT NOT NULL, member TEXT NOT NULL, time REAL NOT NULL, step INTEGER NOT NULL,
    round INTEGER NOT NULL, evaluated INTEGER NOT NULL, "values" TEXT NOT NULL,
    PRIMARY KEY (job, member)
) WITHOUT ROWID;
"""

RECENT_POINTS = 64
"""Newest points of a member from which its speed in steps is estimated."""

_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Latest:
    """The newest value of every name that a member reported."""

    time: float = 0.0
    step: int = 0
    round: int = 0
    values: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    """Step of the held-out values; -1: there are none."""
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_POINTS))
    """Times and steps of its newest points, for its speed; not stored."""


def remember(latest: Latest, point: Point) -> None:
    """Take over the values of a newer point."""
    latest.time, latest.step, latest.round = point.time, point.step, point.round
    latest.recent.append((point.time, point.step))
    latest.values.update(point.values)
    if not HELD_OUT.isdisjoint(point.values):
        latest.evaluated = point.step


def after(latest: Latest, points: Sequence[Point]) -> Latest:
    """Return a copy of the newest values after further points."""
    copy = Latest(evaluated=latest.evaluated, values=dict(latest.values))
    for point in points:
        remember(copy, point)
    return copy


def store_latest(connection: sqlite3.Connection, job: str, member: str, latest: Latest) -> None:
    """Write the newest values of a member (writer thread)."""
    row = (latest.time, latest.step, latest.round, latest.evaluated)
    connection.execute(
        "INSERT OR REPLACE INTO latest_values VALUES (?, ?, ?, ?, ?, ?, ?)",
        (job, member, *row, _encoder.encode(latest.values).decode()),
    )


def read_latest(connection: sqlite3.Connection, job: str) -> dict[str, Latest]:
    """Return the newest values of each member of a job."""
    rows = connection.execute(
        'SELECT member, time, step, round, evaluated, "values" FROM latest_values WHERE job = ?',
        (job,),
    )
    latest: dict[str, Latest] = {}
    for member, time, step, round_, evaluated, values in rows:
        found = {k: v for k, v in msgspec.json.decode(values).items() if v is not None}
        latest[member] = Latest(time, step, round_, found, evaluated)
    return latest
