"""Events: one line of text each, durable, also appended to `events.jsonl`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from atoll.clock import Clock
from atoll.errors import StorageFull
from atoll.hub.db.database import Database
from atoll.hub.db.last_ids import LastIdCache
from atoll.hub.quotas.disk import DiskMeter

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    member TEXT NOT NULL, fields TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job, id);
"""

EVERYWHERE = "*"
"""Selects the events of all jobs and of the hub; not a valid job id."""

MAX_EVENTS = 5_000
"""Events kept in the database per job. `events.jsonl` keeps all."""

LOOK_S = 0.02
"""Polling interval for new events; a poll costs microseconds."""

_MAX_TEXT = 4_096
_encoder = msgspec.json.Encoder()


class Events:
    """The events of all jobs; job `""` is the hub and its nodes."""

    def __init__(
        self, database: Database, *, jobs_dir: Path, clock: Clock, disk: DiskMeter | None = None
    ) -> None:
        """Append to files below `jobs_dir`, but not to those of a job for which `disk` is full."""
        self._database = database
        self._disk = disk
        self._jobs_dir = jobs_dir
        self._clock = clock
        self._newest = LastIdCache()
        self._waiting: dict[str, tuple[asyncio.Event, int]] = {}
        """Job -> what wakes its readers, and the id of its newest event when they began to wait."""
        self._looking: asyncio.Task[None] | None = None
        self._gone: set[str] = set()
        """Deleted jobs: a late event must not recreate their folder."""

    async def add(
        self,
        job: str,
        kind: str,
        text: str,
        *,
        member: str = "",
        fields: dict[str, str] | None = None,
    ) -> int:
        """Store one event and return its id.

        On a full disk it is only logged, and 0 returned, so that the caller can go on.
        """
        write = self.storing(job, kind, text, member=member, fields=fields)
        try:
            return await self._database.write(write)
        except StorageFull as error:
            log.error("%s: this event is not stored: %s; %s", job or "hub", text, error)
            return 0

    def storing(
        self,
        job: str,
        kind: str,
        text: str,
        *,
        member: str = "",
        fields: dict[str, str] | None = None,
    ) -> Callable[[sqlite3.Connection], int]:
        """Return a function that stores one event in a transaction and returns its id."""
        event = {
            "time": self._clock.wall(),
            "kind": kind[:64],
            "text": text[:_MAX_TEXT],
            "member": member,
            "fields": {k[:64]: v[:_MAX_TEXT] for k, v in list((fields or {}).items())[:32]},
        }

        def write(connection: sqlite3.Connection) -> int:
            if job in self._gone:
                return 0
            (id_,) = connection.execute(
                "INSERT INTO events (job, time, kind, text, member, fields)"
                " VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
                (job, event["time"], event["kind"], event["text"], member,
                 _encoder.encode(event["fields"]).decode()),
            ).fetchone()  # fmt: skip
            self._newest.stored(job, id_)
            self._newest.stored(EVERYWHERE, id_)
            if id_ % 100 == 0:
                connection.execute(
                    "DELETE FROM events WHERE job = ? AND id <= (SELECT id FROM events"
                    " WHERE job = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                    (job, job, MAX_EVENTS),
                )
            if job and (self._disk is None or not self._disk.full(job)):
                path = self._jobs_dir / job / "events.jsonl"
                nbytes = append_lines(path, [{"id": id_, **event}])
                if self._disk is not None:
                    self._disk.grew(job, nbytes)
            return int(id_)

        return write

    def forget(self, job: str) -> None:
        """Drop the cached state of a deleted job and ignore further events of it."""
        self._newest.forget(job)
        self._gone.add(job)

    async def read(
        self, job: str, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return events after an id, oldest first (`*`: all jobs); wait up to `wait_s` for some."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            if not self._newest.is_all(job, after):
                if events := await self._select(job, after, limit, "ASC"):
                    return events
                self._newest.nothing_after(job, after)
            if loop.time() >= deadline:
                return []
            if self._newest.is_all(job, after):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news(job).wait(), deadline - loop.time())
            else:
                await asyncio.sleep(LOOK_S)  # one is being written

    def _news(self, job: str) -> asyncio.Event:
        """Return an asyncio event that is set when a job has a new entry.

        Entries are stored by the writer thread, inside transactions of any caller, which does not
        wake readers. So one task polls for all of them.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="look for events")
        news, _ = self._waiting.setdefault(job, (asyncio.Event(), self._newest.newest(job)))
        return news

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            for job, (news, known) in list(self._waiting.items()):
                if self._newest.newest(job) != known:
                    del self._waiting[job]
                    news.set()

    async def tail(self, job: str, *, limit: int) -> list[dict[str, Any]]:
        """Return the last events, oldest first."""
        events = await self._select(job, 0, limit, "DESC")
        return events[::-1]

    async def _select(self, job: str, after: int, limit: int, order: str) -> list[dict[str, Any]]:
        where = ":job = :job" if job == EVERYWHERE else "job = :job"
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT id, job, time, kind, text, member, fields FROM events"
                f" WHERE {where} AND id > :after ORDER BY id {order} LIMIT :limit",
                {"job": job, "after": after, "limit": limit},
            ).fetchall()
        )
        return [
            {"id": id_, "job": of, "time": time, "kind": kind, "text": text, "member": member,
             "fields": msgspec.json.decode(fields)}
            for id_, of, time, kind, text, member, fields in rows
        ]  # fmt: skip


def append_lines(path: Path, objects: list[dict[str, Any]]) -> int:
    """Append objects to a JSON-lines file, in the writer thread before the commit; return bytes.

    After a crash a line may be duplicated (with the same id or number) but is never missing. On a
    full disk nothing is kept: part of a line would spoil the line after it.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = memoryview(b"".join(_encoder.encode(item) + b"\n" for item in objects))
    nbytes = len(lines)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(before)
            raise
    return nbytes
