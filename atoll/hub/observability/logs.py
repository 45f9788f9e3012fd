"""Output lines of workers: bounded per job, deduplicated, readable live."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from atoll.clock import Clock
from atoll.hub.db.database import Database
from atoll.hub.db.last_ids import LastIdCache
from atoll.wire.limits import MAX_LOG_LINE

SCHEMA = """
CREATE TABLE IF NOT EXISTS logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, member TEXT NOT NULL, time REAL NOT NULL, text TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS logs_of_job ON logs (job, id);
CREATE TABLE IF NOT EXISTS log_cursors (
    job TEXT NOT NULL, member TEXT NOT NULL, source TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (job, member, source)
) WITHOUT ROWID;
"""

MAX_LINES = 20_000

MAX_WAIT_S = 60.0
_TRIM_EVERY = 500


class Logs:
    """The output of all jobs."""

    def __init__(self, database: Database, *, clock: Clock, max_lines: int = MAX_LINES) -> None:
        self._database = database
        self._clock = clock
        self._max_lines = max_lines
        self._news: dict[str, asyncio.Event] = {}
        self._untrimmed: dict[str, int] = {}
        self._newest = LastIdCache()

    async def add(
        self, job: str, member: str, *, source: str, seq: int, lines: Sequence[str]
    ) -> int:
        """Store lines numbered from `seq`; return the last durable number.

        Repeated lines, by `source` (session incarnation) and number, are dropped.
        """
        now = self._clock.wall()
        last = seq + len(lines) - 1

        def write(connection: sqlite3.Connection) -> int:
            row = connection.execute(
                "SELECT seq FROM log_cursors WHERE job = ? AND member = ? AND source = ?",
                (job, member, source),
            ).fetchone()
            known = row[0] if row else 0
            fresh = lines[max(0, known - seq + 1) :]
            if not fresh:
                return max(known, last)
            connection.executemany(
                "INSERT INTO logs (job, member, time, text) VALUES (?, ?, ?, ?)",
                [(job, member, now, line[:MAX_LOG_LINE]) for line in fresh],
            )
            connection.execute(
                "INSERT OR REPLACE INTO log_cursors VALUES (?, ?, ?, ?)",
                (job, member, source, last),
            )
            (newest,) = connection.execute("SELECT last_insert_rowid()").fetchone()
            self._newest.stored(job, newest)
            self._trim(connection, job, len(fresh))
            return last

        done = await self._database.write(write)
        news = self._news.pop(job, None)
        if news is not None:
            news.set()
        return done

    def forget(self, job: str) -> None:
        """Drop the cached state of a deleted job and wake waiting readers."""
        self._newest.forget(job)
        self._untrimmed.pop(job, None)
        news = self._news.pop(job, None)
        if news is not None:
            news.set()

    def _trim(self, connection: sqlite3.Connection, job: str, added: int) -> None:
        """Delete the oldest lines above the bound (writer thread)."""
        self._untrimmed[job] = self._untrimmed.get(job, _TRIM_EVERY) + added
        if self._untrimmed[job] < _TRIM_EVERY:
            return
        self._untrimmed[job] = 0
        connection.execute(
            "DELETE FROM logs WHERE job = ? AND id <= (SELECT id FROM logs WHERE job = ?"
            " ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (job, job, self._max_lines),
        )

    async def read(
        self,
        job: str,
        *,
        after: int = 0,
        member: str = "",
        search: str = "",
        limit: int = 1000,
        wait_s: float = 0.0,
    ) -> list[dict[str, Any]]:
        """Return lines after an id, oldest first; wait up to `wait_s` for some.

        `search` selects lines that contain this text, ignoring case.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MAX_WAIT_S)
        while True:
            # Before reading, so that lines stored in between wake the wait below.
            news = self._news.setdefault(job, asyncio.Event())
            lines = []
            if not self._newest.is_all(job, after):
                lines = await self._select(job, after, member, search, limit, "ASC")
                if not lines and not member and not search:
                    self._newest.nothing_after(job, after)
            left_s = deadline - loop.time()
            if lines or left_s <= 0:
                return lines
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), left_s)

    async def tail(
        self, job: str, *, member: str = "", search: str = "", limit: int = 50
    ) -> list[dict[str, Any]]:
        """Return the last lines, oldest first; `search` as in :meth:`read`."""
        lines = await self._select(job, 0, member, search, limit, "DESC")
        return lines[::-1]

    async def _select(
        self, job: str, after: int, member: str, search: str, limit: int, order: str
    ) -> list[dict[str, Any]]:
        where = "job = ? AND id > ?"
        values: list[object] = [job, after]
        if member:
            where += " AND member = ?"
            values.append(member)
        if search:
            where += " AND text LIKE ? ESCAPE '\\'"
            values.append(_containing(search))
        read = self._database.search if search else self._database.read
        rows = await read(
            lambda connection: connection.execute(
                f"SELECT id, member, time, text FROM logs WHERE {where}"
                f" ORDER BY id {order} LIMIT ?",
                (*values, limit),
            ).fetchall()
        )
        return [
            {"id": id_, "member": name, "time": time, "text": text}
            for id_, name, time, text in rows
        ]


def _containing(text: str) -> str:
    return "%" + re.sub(r"([%_\\])", r"\\\1", text) + "%"
