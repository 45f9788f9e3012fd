"""Measurements of members: each stored once, old ones thinned, the latest kept in memory.

`metrics.jsonl` in the job's folder keeps every point. The database keeps enough of them for a
chart: when a member has more than `MAX_POINTS`, every second point of its older half goes, so the
past gets coarser but never shorter. Points with held-out figures are rare and stay, up to a bound
of their own. What single points do not tell any more, the buckets of the history do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from atoll.hub.db.database import Database, LastIdCache
from atoll.hub.nodes.history import History
from atoll.hub.observability.events import append_lines
from atoll.wire.messages import Point

SCHEMA = """
CREATE TABLE IF NOT EXISTS points (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, member TEXT NOT NULL, time REAL NOT NULL,
    step INTEGER NOT NULL, round INTEGER NOT NULL, kept INTEGER NOT NULL, "values" TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS points_of_job ON points (job, id);
CREATE INDEX IF NOT EXISTS points_of_member ON points (job, member, kept, id);
CREATE TABLE IF NOT EXISTS point_cursors (
    job TEXT NOT NULL, member TEXT NOT NULL, incarnation TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (job, member, incarnation)
) WITHOUT ROWID;
"""

MAX_POINTS = 4_000
"""Points of one member in the database, but for those with held-out figures."""

CONDENSED_POINTS = 150
"""The same, some time after the end of the job."""

MAX_HELD_OUT = 1_000
"""Points of one member with held-out figures in the database."""

HELD_OUT_LOSS = "held_out_loss"
HELD_OUT_LOSS_SUM = "held_out_loss_sum"
HELD_OUT_TOKENS = "held_out_tokens"
"""Name of the value that a member measures on text that nobody trains on, nats per token."""

_HELD_OUT = frozenset({HELD_OUT_LOSS, HELD_OUT_LOSS_SUM, HELD_OUT_TOKENS})
_MAX_VALUES = 64
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Latest:
    """The last that a member told: the newest value seen of every name."""

    time: float = 0.0
    step: int = 0
    round: int = 0
    values: dict[str, float] = field(default_factory=dict)


class Metrics:
    """The measurements of all jobs."""

    def __init__(
        self,
        database: Database,
        *,
        jobs_dir: Path,
        history: History | None = None,
        max_points: int = MAX_POINTS,
    ) -> None:
        """Start with what the database has.

        Args:
            database: Where points are kept.
            jobs_dir: Folder with the folders of the jobs.
            history: Gets the figures of every point besides.
            max_points: Points of one member that are kept, but for those with held-out figures.
        """
        self._database = database
        self._jobs_dir = jobs_dir
        self._history = history
        self._max_points = max_points
        self._counts: dict[tuple[str, str, int], int] = {}
        self._newest = LastIdCache()
        self._latest: dict[str, dict[str, Latest]] = {}

    async def add(
        self, job: str, member: str, *, incarnation: str, seq: int, points: Sequence[Point]
    ) -> int:
        """Store points numbered from `seq` (from 1 per incarnation); known ones are dropped.

        Returns:
            The last number that is durable.
        """
        last = seq + len(points) - 1

        def write(connection: sqlite3.Connection) -> tuple[int, Sequence[Point]]:
            row = connection.execute(
                "SELECT seq FROM point_cursors WHERE job = ? AND member = ? AND incarnation = ?",
                (job, member, incarnation),
            ).fetchone()
            known = row[0] if row else 0
            fresh = points[max(0, known - seq + 1) :]
            if not fresh:
                return max(known, last), fresh
            connection.executemany(
                'INSERT INTO points (job, member, time, step, round, kept, "values")'
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [_row(job, member, point) for point in fresh],
            )
            connection.execute(
                "INSERT OR REPLACE INTO point_cursors VALUES (?, ?, ?, ?)",
                (job, member, incarnation, last),
            )
            self._newest.stored(job, _last_id(connection, job))
            held_out = sum(_is_held_out(point) for point in fresh)
            self._thin(connection, job, member, len(fresh) - held_out)
            if held_out:
                self._thin_held_out(connection, job, member, held_out)
            first = last - len(fresh) + 1
            append_lines(
                self._jobs_dir / job / "metrics.jsonl",
                [_line(member, incarnation, first + i, point) for i, point in enumerate(fresh)],
            )
            return last, fresh

        done, fresh = await self._database.write(write)
        latest = self._of(job).setdefault(member, Latest())
        for point in fresh:
            values = _bounded(point.values)
            _remember(latest, point.time, point.step, point.round, values)
            if self._history is not None:
                self._history.note(f"{job}/{member}", point.time, {**values, "step": point.step})
        return done

    def latest(self, job: str) -> dict[str, Latest]:
        """Return the last that each member told."""
        return self._of(job)

    async def read(self, job: str, *, after: int = 0, limit: int = 2000) -> list[dict[str, Any]]:
        """Return points with an id above `after`, in the order in which they arrived."""
        if self._newest.is_all(job, after):
            return []
        rows = await self._database.read(
            lambda connection: connection.execute(
                'SELECT id, member, time, step, round, "values" FROM points'
                " WHERE job = ? AND id > ? ORDER BY id LIMIT ?",
                (job, after, limit),
            ).fetchall()
        )
        if not rows:
            self._newest.nothing_after(job, after)
        return [_point(*row) for row in rows]

    async def curves(self, job: str, *, points: int) -> list[dict[str, Any]]:
        """Return a whole job in at most so many points of each member, and all held-out ones."""

        def find(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            return connection.execute(
                'SELECT id, member, time, step, round, "values" FROM'
                " (SELECT *, row_number() OVER part AS number, count(*) OVER part AS count"
                "  FROM points WHERE job = :job WINDOW part AS (PARTITION BY member, kept))"
                " WHERE kept OR number = count OR number % max(1, (count + :most - 1) / :most) = 1"
                " OR count <= :most ORDER BY id",
                {"job": job, "most": points},
            ).fetchall()

        return [_point(*row) for row in await self._database.read(find)]

    async def condense(self, job: str) -> None:
        """Thin the points of a job that has ended: its buckets in the history keep the rest."""

        def write(connection: sqlite3.Connection) -> None:
            members = connection.execute(
                "SELECT DISTINCT member FROM points WHERE job = ?", (job,)
            ).fetchall()
            for (member,) in members:
                _halve(connection, job, member, kept=0, most=CONDENSED_POINTS)
                self._counts.pop((job, member, 0), None)

        await self._database.write(write)

    def forget(self, job: str) -> None:
        """Drop from memory what is known of a job that was deleted."""
        self._newest.forget(job)
        self._latest.pop(job, None)
        self._counts = {key: count for key, count in self._counts.items() if key[0] != job}

    def _of(self, job: str) -> dict[str, Latest]:
        """Return the latest values of a job, read from disk after a restart."""
        known = self._latest.get(job)
        if known is None:
            known = self._latest[job] = self._database.read_now(
                lambda connection: _read_latest(connection, job)
            )
        return known

    def _thin(self, connection: sqlite3.Connection, job: str, member: str, added: int) -> None:
        """Drop every second point of the older half when there are too many (writer thread)."""
        if self._count(connection, job, member, 0, added) <= self._max_points:
            return
        ids = _ids(connection, job, member, kept=0)
        gone = ids[1 : len(ids) // 2 : 2]
        _delete(connection, gone)
        self._counts[job, member, 0] = len(ids) - len(gone)

    def _thin_held_out(
        self, connection: sqlite3.Connection, job: str, member: str, added: int
    ) -> None:
        """Keep the held-out points of every second round when there are too many (writer thread).

        All members drop the same rounds, so that shares of one evaluation stay together.
        """
        if self._count(connection, job, member, 1, added) <= MAX_HELD_OUT:
            return
        rows = connection.execute(
            "SELECT id, round FROM points WHERE job = ? AND member = ? AND kept = 1 ORDER BY id",
            (job, member),
        ).fetchall()
        stride = 2
        while sum(round_ % stride == 0 for _, round_ in rows) > MAX_HELD_OUT // 2:
            stride *= 2
        gone = [id_ for id_, round_ in rows[:-1] if round_ % stride]
        _delete(connection, gone)
        self._counts[job, member, 1] = len(rows) - len(gone)

    def _count(
        self, connection: sqlite3.Connection, job: str, member: str, kept: int, added: int
    ) -> int:
        """Return how many points there are, `added` just now among them."""
        key = (job, member, kept)
        if key not in self._counts:
            (self._counts[key],) = connection.execute(
                "SELECT count(*) FROM points WHERE job = ? AND member = ? AND kept = ?", key
            ).fetchone()
        else:
            self._counts[key] += added
        return self._counts[key]


def _last_id(connection: sqlite3.Connection, job: str) -> int:
    (last,) = connection.execute("SELECT max(id) FROM points WHERE job = ?", (job,)).fetchone()
    return int(last or 0)


def _ids(connection: sqlite3.Connection, job: str, member: str, *, kept: int) -> list[int]:
    rows = connection.execute(
        "SELECT id FROM points WHERE job = ? AND member = ? AND kept = ? ORDER BY id",
        (job, member, kept),
    )
    return [id_ for (id_,) in rows]


def _delete(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    connection.executemany("DELETE FROM points WHERE id = ?", [(id_,) for id_ in ids])


def _halve(connection: sqlite3.Connection, job: str, member: str, *, kept: int, most: int) -> None:
    """Drop every second point until at most so many are left; the last one stays."""
    ids = _ids(connection, job, member, kept=kept)
    gone: list[int] = []
    while len(ids) > most:
        gone += ids[-2::-2]
        ids = ids[::-1][::2][::-1]
    _delete(connection, gone)


def _is_held_out(point: Point) -> bool:
    return not _HELD_OUT.isdisjoint(point.values)


def _point(
    id_: int, member: str, time: float, step: int, round_: int, values: str
) -> dict[str, Any]:
    return {
        "id": id_, "member": member, "time": time, "step": step, "round": round_,
        "values": msgspec.json.decode(values),
    }  # fmt: skip


def _row(job: str, member: str, point: Point) -> tuple[object, ...]:
    kept = int(_is_held_out(point))
    values = _encoder.encode(_bounded(point.values)).decode()
    return job, member, point.time, point.step, point.round, kept, values


def _bounded(values: dict[str, float]) -> dict[str, float]:
    """Return at most `_MAX_VALUES` of the values; NaN and infinity stay (JSON has null)."""
    return {name[:64]: value for name, value in list(values.items())[:_MAX_VALUES]}


def _line(member: str, incarnation: str, seq: int, point: Point) -> dict[str, Any]:
    return {
        "time": point.time, "member": member, "incarnation": incarnation, "seq": seq,
        "step": point.step, "round": point.round, "values": point.values,
    }  # fmt: skip


def _remember(
    latest: Latest, time: float, step: int, round_: int, values: dict[str, float]
) -> None:
    latest.time, latest.step, latest.round = time, step, round_
    latest.values.update(values)


def _read_latest(connection: sqlite3.Connection, job: str) -> dict[str, Latest]:
    """Return the latest values of each member: from its last point and its last held-out one."""
    rows = connection.execute(
        'SELECT member, time, step, round, "values" FROM points WHERE id IN'
        " (SELECT max(id) FROM points WHERE job = ? GROUP BY member, kept) ORDER BY id",
        (job,),
    )
    latest: dict[str, Latest] = {}
    for member, time, step, round_, values in rows:
        found = {k: v for k, v in msgspec.json.decode(values).items() if v is not None}
        _remember(latest.setdefault(member, Latest()), time, step, round_, found)
    return latest
