"""Time series of nodes and members in buckets of increasing width and retention.

A month of 100 nodes stays below 1 GB, and a spike of one second is visible after a year. All widths
are written as figures arrive, so that late figures are stored correctly. A row holds all figures of
one owner in one bucket, 18 bytes each: number of the name, count, three 32-bit floats.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.db.database import Database, span

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS history_names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS history_owners (id INTEGER PRIMARY KEY, owner TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS history (
    owner INTEGER NOT NULL, bucket_s INTEGER NOT NULL, start INTEGER NOT NULL,
    "values" BLOB NOT NULL,
    PRIMARY KEY (owner, bucket_s, start)
) WITHOUT ROWID;
"""

HOUR_S, DAY_S = 3_600, 86_400

KEPT_S = {10: 2 * HOUR_S, 60: 2 * DAY_S, 600: 14 * DAY_S, 3_600: 400 * DAY_S}
"""Bucket width to retention in seconds. Members start at 60 s, as their points are stored too."""

FINEST_S = min(KEPT_S)
MAX_NAMES = 4_000
"""Distinct names of figures over all owners; further ones are not kept."""
MAX_NEW_NAMES = 512
"""Names that one owner may add until the next hub process."""
MAX_VALUES = 256
"""Figures of one owner in one bucket; the same limit as for a job's metrics."""
MAX_PENDING = 100_000
"""Buckets waiting for the disk; beyond it the oldest are dropped."""

_ENTRY = struct.Struct("<HIfff")
_OWNERS_PER_TRIM = 500
_FLOAT_MAX = 3.4e38

_FREE_OWNER = "SELECT coalesce(max(id), 0) + 1 FROM history_owners"
_FREE_NAME = """
SELECT min(id) + 1 FROM (SELECT 0 AS id UNION SELECT id FROM history_names) AS taken
WHERE NOT EXISTS (SELECT 1 FROM history_names WHERE id = taken.id + 1)
"""
"""The lowest number that is free, as names are deleted in any order."""

Figures = dict[str, "Summary"]
Place = tuple[str, int, int]
"""Owner, width and start of a bucket."""


@dataclass(slots=True)
class Summary:
    """The values of one name in one bucket."""

    count: int
    low: float
    mean: float
    high: float

    def take(self, other: Summary) -> None:
        """Merge another summary."""
        count = self.count + other.count
        self.mean += (other.mean - self.mean) * other.count / count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count = count


class History:
    """Writes figures into buckets and reads them for charts."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._pending: dict[tuple[str, int], Figures] = {}
        self._names_at = 0.0
        """When unused names may be deleted again."""
        # Both belong to the writer thread; cleared after a failed write, then read again.
        self._names: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._added: Counter[str] = Counter()
        """Names that each owner added; belongs to the writer thread."""

    # ------------------------------------------------------------------------------ writing

    def note(self, owner: str, time: float, values: Mapping[str, float | None]) -> None:
        """Record figures of one moment; durable after the next :meth:`flush`.

        `owner` is `node/NAME` or `JOB/MEMBER`; `time` is clamped to the retention period; values
        that are not finite are skipped.
        """
        now = self._clock.wall()
        time = min(max(time, now - KEPT_S[HOUR_S]), now + HOUR_S)
        key = (owner, int(time) // FINEST_S * FINEST_S)
        figures = self._pending.setdefault(key, {})
        for name, value in values.items():
            if value is None or not abs(value) < _FLOAT_MAX:
                continue
            value = float(value)
            known = figures.get(name)
            if known is not None:
                known.take(Summary(1, value, value, value))
            elif len(figures) < MAX_VALUES:
                figures[name] = Summary(1, value, value, value)
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    async def flush(self) -> None:
        """Write the recorded figures; after a failure the next call retries."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        rows: dict[Place, Figures] = {}
        for (owner, start), figures in pending.items():
            for width in _widths(owner):
                place = (owner, width, start // width * width)
                _merge(rows.setdefault(place, {}), figures)

        def write(connection: sqlite3.Connection) -> None:
            for place, figures in rows.items():
                self._write_row(connection, place, figures)

        try:
            await self._database.write(write)
        except (AtollError, sqlite3.Error) as error:
            logger.warning("history waits for the disk: %s", error)
            self._names, self._owners, self._added = {}, {}, Counter()
            for key, figures in self._pending.items():
                _merge(pending.setdefault(key, {}), figures)
            self._pending = pending

    def _write_row(self, connection: sqlite3.Connection, place: Place, figures: Figures) -> None:
        owner = self._number(connection, "owner", place[0], self._owners, 2**62)
        key = (owner, *place[1:])
        found = connection.execute(
            'SELECT "values" FROM history WHERE owner = ? AND bucket_s = ? AND start = ?', key
        ).fetchone()
        numbered = {
            self._name(connection, name, owner=place[0]): summary
            for name, summary in figures.items()
        }
        both = _unpack(found[0]) if found else {}
        _merge(both, {number: one for number, one in numbered.items() if number})
        connection.execute(
            "INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", (*key, _pack(both))
        )

    def _name(self, connection: sqlite3.Connection, name: str, *, owner: str) -> int:
        """Return the id of a name; 0: it is new, and the table or the owner's share is full."""
        changes = connection.total_changes
        most = MAX_NAMES if self._added[owner] < MAX_NEW_NAMES else 0
        number = self._number(connection, "name", name, self._names, most)
        self._added[owner] += connection.total_changes - changes
        return number

    @staticmethod
    def _number(
        connection: sqlite3.Connection, kind: str, text: str, known: dict[str, int], most: int
    ) -> int:
        """Return the id of an owner or a name, creating it if needed; 0: the table is full."""
        if text in known:
            return known[text]
        table = f"history_{kind}s"
        row = connection.execute(f"SELECT id FROM {table} WHERE {kind} = ?", (text,)).fetchone()
        if row is None:
            row = connection.execute(_FREE_NAME if kind == "name" else _FREE_OWNER).fetchone()
            if row[0] > most:
                return 0
            connection.execute(f"INSERT INTO {table} VALUES (?, ?)", (*row, text))
        known[text] = int(row[0])
        return known[text]

    async def trim(self) -> None:
        """Delete expired buckets, for a bounded number of owners per transaction."""
        now = int(self._clock.wall())
        owners = await self._database.read(
            lambda connection: connection.execute("SELECT id FROM history_owners").fetchall()
        )
        for first in range(0, len(owners), _OWNERS_PER_TRIM):
            some = owners[first : first + _OWNERS_PER_TRIM]
            await self._database.write(partial(_trim, owners=some, now=now))
        if now >= self._names_at:
            self._names_at = now + DAY_S
            await self._trim_names([owner for (owner,) in owners])

    async def _trim_names(self, owners: list[int]) -> None:
        """Delete names that no bucket has; all buckets are read, so only when most are taken."""

        def begin(connection: sqlite3.Connection) -> tuple[dict[str, int], set[int]]:
            ids = {row[0] for row in connection.execute("SELECT id FROM history_names")}
            if 4 * len(ids) >= 3 * MAX_NAMES:
                self._names = {}  # so that it has all names that are used from now on
            return self._names, ids

        known, unused = await self._database.write(begin)
        if 4 * len(unused) < 3 * MAX_NAMES:
            return
        for owner in owners:
            unused -= await self._database.search(partial(_names_of, owner=owner))

        def write(connection: sqlite3.Connection) -> None:
            if self._names is known:  # else a failed write has cleared it
                gone = [(number,) for number in unused.difference(known.values())]
                connection.executemany("DELETE FROM history_names WHERE id = ?", gone)

        await self._database.write(write)

    async def forget(self, prefix: str) -> None:
        """Delete the history of every owner with this prefix."""
        self._pending = {k: v for k, v in self._pending.items() if not k[0].startswith(prefix)}

        def work(connection: sqlite3.Connection) -> bool:
            row = connection.execute(
                "SELECT id, owner FROM history_owners WHERE owner >= ? AND owner < ? LIMIT 1",
                span(prefix),
            ).fetchone()
            if row is not None:
                connection.execute("DELETE FROM history WHERE owner = ?", row[:1])
                connection.execute("DELETE FROM history_owners WHERE id = ?", row[:1])
                self._owners.pop(row[1], None)
            return row is not None

        while await self._database.write(work):
            continue

    # ------------------------------------------------------------------------------ reading

    async def read(self, owner: str, *, since: float, until: float, points: int) -> dict[str, Any]:
        """Return the buckets of a time range, as wide as needed for at most `points`.

        Keys: `bucket_s`, `times` (starts), and `series`: by name, lists `mean`, `min`, `max` and
        `count` as long as `times`, null for empty buckets.
        """
        width = self._width(owner, since=since, until=until, points=points)

        def find(connection: sqlite3.Connection) -> tuple[list[tuple[int, bytes]], dict[int, str]]:
            rows = connection.execute(
                'SELECT start, "values" FROM history WHERE owner ='
                " (SELECT id FROM history_owners WHERE owner = ?)"
                " AND bucket_s = ? AND start > ? AND start <= ? ORDER BY start",
                (owner, width, since - width, until),
            ).fetchall()
            names = connection.execute("SELECT id, name FROM history_names").fetchall()
            return rows, dict(names)

        rows, names = await self._database.read(find)
        times, buckets = [row[0] for row in rows], [_unpack(row[1]) for row in rows]
        numbers = sorted({number for bucket in buckets for number in bucket})
        series = {names[number]: _columns(buckets, number) for number in numbers}
        return {"owner": owner, "bucket_s": width, "times": times, "series": series}

    def _width(self, owner: str, *, since: float, until: float, points: int) -> int:
        """Return the finest width that is still kept at `since` and gives at most `points`."""
        now, span = self._clock.wall(), max(0.0, until - since)
        widths = _widths(owner)
        for width in widths:
            if span / width <= points and since >= now - KEPT_S[width] - width:
                return width
        return widths[-1]


def _widths(owner: str) -> list[int]:
    return [width for width in KEPT_S if width != FINEST_S or owner.startswith("node/")]


def _trim(connection: sqlite3.Connection, *, owners: Iterable[tuple[int]], now: int) -> None:
    for (owner,) in owners:
        for width, kept_s in KEPT_S.items():
            connection.execute(
                "DELETE FROM history WHERE owner = ? AND bucket_s = ? AND start < ?",
                (owner, width, now - kept_s - width),
            )


def _names_of(connection: sqlite3.Connection, *, owner: int) -> set[int]:
    rows = connection.execute('SELECT "values" FROM history WHERE owner = ?', (owner,))
    return {entry[0] for (data,) in rows for entry in _ENTRY.iter_unpack(data)}


def _merge(into: dict[Any, Summary], more: Mapping[Any, Summary]) -> None:
    for name, summary in more.items():
        known = into.get(name)
        if known is not None:
            known.take(summary)
        elif len(into) < MAX_VALUES:
            into[name] = Summary(summary.count, summary.low, summary.mean, summary.high)


def _pack(figures: Mapping[int, Summary]) -> bytes:
    return b"".join(
        _ENTRY.pack(number, min(s.count, 2**32 - 1), s.low, s.mean, s.high)
        for number, s in figures.items()
    )


def _unpack(data: bytes) -> dict[int, Summary]:
    return {
        number: Summary(count, low, mean, high)
        for number, count, low, mean, high in _ENTRY.iter_unpack(data)
    }


def _columns(buckets: list[dict[int, Summary]], number: int) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {"mean": [], "min": [], "max": [], "count": []}
    for bucket in buckets:
        one = bucket.get(number)
        columns["mean"].append(_short(one.mean) if one else None)
        columns["min"].append(_short(one.low) if one else None)
        columns["max"].append(_short(one.high) if one else None)
        columns["count"].append(one.count if one else None)
    return columns


def _short(value: float) -> float:
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.7g}")
