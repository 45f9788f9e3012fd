"""Metrics of members: deduplicated, thinned in the database, latest values in memory.

`metrics.jsonl` in the job's folder keeps every point, unless the job has used up its disk quota.
Above `MAX_POINTS`, every second point of a member's older half is deleted from the database;
buckets of `history.py` still cover them.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.hub.db.database import Database
from atoll.hub.db.last_ids import LastIdCache
from atoll.hub.observability.events import Events, append_lines
from atoll.hub.observability.held_out import HELD_OUT
from atoll.hub.observability.history import History
from atoll.hub.observability.latest import SCHEMA as LATEST
from atoll.hub.observability.latest import Latest, after, read_latest, remember, store_latest
from atoll.hub.observability.point_cursors import SCHEMA as CURSORS
from atoll.hub.observability.point_cursors import cursor, first_cursor
from atoll.hub.observability.traffic import SCHEMA as TRAFFIC
from atoll.hub.observability.traffic import Growth, Traffic
from atoll.hub.quotas.disk import DiskMeter
from atoll.wire.messages import Point

_POINTS = """
CREATE TABLE IF NOT EXISTS points (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, member TEXT NOT NULL, time REAL NOT NULL,
    step INTEGER NOT NULL, round INTEGER NOT NULL, kept INTEGER NOT NULL, "values" TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS points_of_job ON points (job, id);
CREATE INDEX IF NOT EXISTS points_of_member ON points (job, member, kept, id);
CREATE TABLE IF NOT EXISTS metric_names (
    job TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (job, name)
) WITHOUT ROWID;
"""

SCHEMA = _POINTS + CURSORS + LATEST + TRAFFIC

MAX_NAMES = 256
"""Distinct names in the database per job; an event reports when a job exceeds it."""

MAX_POINTS = 4_000
"""Points of one member in the database, without held-out values."""

CONDENSED_POINTS = 150
"""The same after the job has ended."""

MAX_HELD_OUT = 1_000
"""Points of one member with held-out values in the database."""

_MAX_NAME_LENGTH = 64

_encoder = msgspec.json.Encoder()


class Metrics:
    """The metrics of all jobs."""

    def __init__(
        self,
        database: Database,
        *,
        jobs_dir: Path,
        history: History | None = None,
        events: Events | None = None,
        max_points: int = MAX_POINTS,
        disk: DiskMeter | None = None,
    ) -> None:
        """Store points; those of a job for which `disk` is full only in the database."""
        self._database = database
        self._disk = disk
        self._jobs_dir = jobs_dir
        self._history = history
        self._events = events
        self._max_points = max_points
        self.traffic = Traffic.read(database)
        self._counts: dict[tuple[str, str, int], int] = {}
        self._newest = LastIdCache()
        self._latest: dict[str, dict[str, Latest]] = {}
        self._names: dict[str, set[str]] = {}
        self._too_many: set[str] = set()
        # Makes the check for repeated points and the append to the file one step.
        self._file_lock = asyncio.Lock()
        self._in_file: dict[tuple[str, str, str], int] = {}
        """Number of the last point in `metrics.jsonl`, by job, member and incarnation."""
        self._deleted: set[str] = set()
        """Deleted jobs: a late point must not recreate their folder."""

    async def add(
        self,
        job: str,
        member: str,
        *,
        incarnation: str,
        seq: int,
        points: Sequence[Point],
        node: str = "",
    ) -> int:
        """Store points numbered from `seq`; return the last durable number.

        `node` is where the process runs, for the node's traffic.
        """
        last = seq + len(points) - 1
        # Before the transaction: a crash may duplicate a line in the file but never loses one, and
        # a slow disk does not hold the database lock.
        await self._append(job, member, incarnation, seq, points)
        names, added = self._allowed(job, points)
        too_many = self._say_too_many(job, member, points, names)
        totals = self.traffic.totals(job, member, incarnation, points)
        latest = self._of(job).setdefault(member, Latest())

        def write(
            connection: sqlite3.Connection,
        ) -> tuple[int, Sequence[Point], Growth | None]:
            known = cursor(connection, (job, member, incarnation))
            if too_many is not None:
                too_many(connection)
            repeated = max(0, known - seq + 1)
            fresh = totals[repeated:]
            if not fresh:
                return max(known, last), fresh, None
            connection.executemany(
                'INSERT INTO points (job, member, time, step, round, kept, "values")'
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [_row(job, member, point, names) for point in fresh],
            )
            connection.executemany(
                "INSERT OR IGNORE INTO metric_names VALUES (?, ?)", [(job, name) for name in added]
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
            grown = self.traffic.growth(
                job, member, incarnation, node=node, points=points[repeated:]
            )
            if grown is not None:
                grown.store(connection)
            store_latest(connection, job, member, after(latest, _kept(fresh, names)))
            return last, fresh, grown

        try:
            done, fresh, grown = await self._database.write(write)
        except BaseException:
            self._names.pop(job, None)  # reload later: the names of this call are not stored
            self._too_many.discard(job)
            raise
        if grown is not None:
            self.traffic.count(grown)
        for point in _kept(fresh, names):
            remember(latest, point)
            if self._history is not None:
                values = {**point.values, "step": point.step}
                self._history.note(f"{job}/{member}", point.time, values)
        return done

    def latest(self, job: str) -> dict[str, Latest]:
        """Return the newest values of each member."""
        return self._of(job)

    async def read(self, job: str, *, after: int = 0, limit: int = 2000) -> list[dict[str, Any]]:
        """Return points with an id above `after`, in order of arrival."""
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
        """Return at most `points` points per member over the whole job, and all held-out ones."""

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
        """Thin the points of an ended job; the history keeps buckets of the rest."""

        def write(connection: sqlite3.Connection) -> None:
            members = connection.execute(
                "SELECT DISTINCT member FROM points WHERE job = ?", (job,)
            ).fetchall()
            for (member,) in members:
                _halve(connection, job, member, kept=0, most=CONDENSED_POINTS)
                self._counts.pop((job, member, 0), None)

        await self._database.write(write)

    def forget(self, job: str) -> None:
        """Drop the cached state of a deleted job."""
        self._newest.forget(job)
        self.traffic.forget(job)
        self._latest.pop(job, None)
        self._names.pop(job, None)
        self._too_many.discard(job)
        self._deleted.add(job)
        self._in_file = {key: seq for key, seq in self._in_file.items() if key[0] != job}
        # The writer thread adds to it.
        self._counts = {key: count for key, count in list(self._counts.items()) if key[0] != job}

    async def _append(
        self, job: str, member: str, incarnation: str, seq: int, points: Sequence[Point]
    ) -> None:
        key = (job, member, incarnation)
        async with self._file_lock:
            if key not in self._in_file:
                known = await self._database.read(lambda found: first_cursor(found, key))
                self._in_file[key] = known
            skip = max(0, self._in_file[key] - seq + 1)
            lines = [
                _line(member, incarnation, seq + at, point)
                for at, point in enumerate(points)
                if at >= skip
            ]
            if not lines or job in self._deleted:
                return
            if self._disk is None or not self._disk.full(job):
                path = self._jobs_dir / job / "metrics.jsonl"
                nbytes = await asyncio.to_thread(append_lines, path, lines)
                if self._disk is not None:
                    self._disk.grew(job, nbytes)
            self._in_file[key] = seq + len(points) - 1

    def _allowed(self, job: str, points: Sequence[Point]) -> tuple[set[str], list[str]]:
        """Return the names that the database keeps for a job, and the new ones among them."""
        known = self._names.get(job)
        if known is None:
            known = self._names[job] = self._database.read_now(
                lambda connection: _read_names(connection, job)
            )
        reported = dict.fromkeys(name for point in points for name in point.values)
        new = [name for name in reported if name not in known and len(name) <= _MAX_NAME_LENGTH]
        added = new[: max(0, MAX_NAMES - len(known))]
        known.update(added)
        return known, added

    def _say_too_many(
        self, job: str, member: str, points: Sequence[Point], names: set[str]
    ) -> Callable[[sqlite3.Connection], int] | None:
        """Return a function that stores the event about dropped names; None if all are kept."""
        left_out = next((n for point in points for n in point.values if n not in names), None)
        if left_out is None or job in self._too_many or self._events is None:
            return None
        self._too_many.add(job)
        text = (
            f"{member} reports metrics that only metrics.jsonl keeps, {left_out[:64]!r} first: the "
            f"database holds {MAX_NAMES} names of at most {_MAX_NAME_LENGTH} characters per job"
        )
        return self._events.storing(job, "metric-names", text, member=member)

    def _of(self, job: str) -> dict[str, Latest]:
        known = self._latest.get(job)
        if known is None:
            known = self._latest[job] = self._database.read_now(
                lambda connection: read_latest(connection, job)
            )
        return known

    def _thin(self, connection: sqlite3.Connection, job: str, member: str, added: int) -> None:
        """Delete every second point of the older half above the limit (writer thread)."""
        if self._count(connection, job, member, 0, added) <= self._max_points:
            return
        ids = _ids(connection, job, member, kept=0)
        gone = ids[1 : len(ids) // 2 : 2]
        _delete(connection, gone)
        self._counts[job, member, 0] = len(ids) - len(gone)

    def _thin_held_out(
        self, connection: sqlite3.Connection, job: str, member: str, added: int
    ) -> None:
        """Keep held-out points of every second round, the same for all members (writer thread)."""
        if self._count(connection, job, member, 1, added) <= MAX_HELD_OUT:
            return
        rows = connection.execute(
            "SELECT id, round FROM points WHERE job = ? AND member = ? AND kept = 1 ORDER BY id",
            (job, member),
        ).fetchall()
        stride, highest = 2, max(abs(round_) for _, round_ in rows)
        while stride <= highest and (
            sum(round_ % stride == 0 for _, round_ in rows) > MAX_HELD_OUT // 2
        ):
            stride *= 2
        gone = [id_ for id_, round_ in rows[:-1] if round_ % stride]
        if len(rows) - len(gone) > MAX_HELD_OUT:  # of a member that takes part in no rounds
            gone = [id_ for id_, _ in rows[1 : len(rows) // 2 : 2]]
        _delete(connection, gone)
        self._counts[job, member, 1] = len(rows) - len(gone)

    def _count(
        self, connection: sqlite3.Connection, job: str, member: str, kept: int, added: int
    ) -> int:
        key = (job, member, kept)
        if key not in self._counts:
            (self._counts[key],) = connection.execute(
                "SELECT count(*) FROM points WHERE job = ? AND member = ? AND kept = ?", key
            ).fetchone()
        else:
            self._counts[key] += added
        return self._counts[key]


def _read_names(connection: sqlite3.Connection, job: str) -> set[str]:
    rows = connection.execute("SELECT name FROM metric_names WHERE job = ?", (job,))
    return {name for (name,) in rows}


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
    """Delete every second point until at most `most` are left; the last one is kept."""
    ids = _ids(connection, job, member, kept=kept)
    gone: list[int] = []
    while len(ids) > most:
        gone += ids[-2::-2]
        ids = ids[::-1][::2][::-1]
    _delete(connection, gone)


def _is_held_out(point: Point) -> bool:
    return not HELD_OUT.isdisjoint(point.values)


def _point(
    id_: int, member: str, time: float, step: int, round_: int, values: str
) -> dict[str, Any]:
    return {
        "id": id_, "member": member, "time": time, "step": step, "round": round_,
        "values": msgspec.json.decode(values),
    }  # fmt: skip


def _row(job: str, member: str, point: Point, names: set[str]) -> tuple[object, ...]:
    kept = int(_is_held_out(point))
    values = _encoder.encode(_values(point, names)).decode()
    return job, member, point.time, point.step, point.round, kept, values


def _kept(points: Sequence[Point], names: set[str]) -> list[Point]:
    return [msgspec.structs.replace(point, values=_values(point, names)) for point in points]


def _values(point: Point, names: set[str]) -> dict[str, float]:
    return {name: value for name, value in point.values.items() if name in names}


def _line(member: str, incarnation: str, seq: int, point: Point) -> dict[str, Any]:
    return {
        "time": point.time, "member": member, "incarnation": incarnation, "seq": seq,
        "step": point.step, "round": point.round, "values": point.values,
    }  # fmt: skip
