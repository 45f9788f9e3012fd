"""Deletes jobs that have ended, with all their data.

The record is deleted first, in one transaction with a note about the remaining data and with the
event: from then on the job does not exist. Rows, history, queues, files and finally the note
follow; this may be interrupted at any point. A restarted hub finishes it, and what cannot be
deleted yet (the queue server is unavailable, a file is in use) is retried.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from atoll.clock import Clock
from atoll.errors import AtollError, HubError
from atoll.hub.db.database import Database
from atoll.hub.jobs.record import Job
from atoll.hub.stores import Stores
from atoll.hub.tasks import Tasks
from atoll.wire.states import JobState

SCHEMA = """
CREATE TABLE IF NOT EXISTS deletions (
    job TEXT PRIMARY KEY, keep_files INTEGER NOT NULL, asked REAL NOT NULL, queues TEXT NOT NULL
) WITHOUT ROWID;
"""
"""Jobs whose record is deleted and whose other data is being removed."""

OF_JOB = {
    "alarms": "id",
    "checkpoint_parts": "round",
    "events": "id",
    "files": "name",
    "latest_values": "member",
    "log_cursors": "member",
    "logs": "id",
    "open_joins": "epoch",
    "point_cursors": "member",
    "metric_names": "name",
    "points": "id",
    "round_leases": "round",
    "round_timelines": "epoch",
    "rounds": "epoch",
    "traffic": "member",
}
"""Tables with a column `job`, and the column by which their rows are deleted in order."""

ROWS_AT_ONCE = 2_000
"""Rows deleted in one write, so that other writes are not delayed."""

_OPEN_STAY = {"alarms": " AND ended IS NOT NULL"}
"""An alarm that is still open ends by itself, and is reported as ended."""


async def delete_rows(database: Database, job: str) -> None:
    """Delete the rows of a job; may be interrupted and repeated."""
    while await database.write(lambda connection: _delete_some(connection, job)):
        continue


def _delete_some(connection: sqlite3.Connection, job: str) -> bool:
    """Delete as many rows as one write may; return whether more may be left."""
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
class PendingDeletion:
    """The data to be removed after the record of a job."""

    keep_files: bool
    """Whether its folder is kept."""
    queues: list[str]
    """Prefixes of the names of its queues and topics."""


def begin(connection: sqlite3.Connection, job: str, rest: PendingDeletion, *, now: float) -> None:
    """Record that a job is being deleted, inside a write."""
    row = (job, int(rest.keep_files), now, json.dumps(rest.queues))
    connection.execute("INSERT INTO deletions VALUES (?, ?, ?, ?)", row)


def end(connection: sqlite3.Connection, job: str) -> None:
    """Record that no data of a job is left, inside a write."""
    connection.execute("DELETE FROM deletions WHERE job = ?", (job,))


def begun(connection: sqlite3.Connection) -> dict[str, PendingDeletion]:
    """Return the jobs with unfinished deletions, oldest first."""
    rows = connection.execute("SELECT job, keep_files, queues FROM deletions ORDER BY asked, job")
    return {
        job: PendingDeletion(keep_files=bool(keep), queues=json.loads(queues))
        for job, keep, queues in rows
    }


logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long a deletion request waits for the rest, which continues in the background."""

POOLED = ("answers", "experience", "policy")
"""Kinds of queues and topics in a pool that belong to one job's actors: `POOL/KIND.JOB.NAME`."""

AGAIN_S = 60.0
"""Pause before a failed deletion is retried."""


class Deletions:
    """Deletes jobs, and finishes deletions begun by an earlier hub process.

    Args:
        stores: What is durable.
        stop_work: Stops all work on the files of a job that has ended.
        settled: Waits until operations that end jobs are complete.
        tasks: Where the work runs.
        clock: Of the hub.
    """

    def __init__(
        self,
        *,
        stores: Stores,
        stop_work: Callable[[str], Awaitable[None]],
        settled: Callable[[], Awaitable[None]],
        tasks: Tasks,
        clock: Clock,
    ) -> None:
        self._stores = stores
        self._stop_work = stop_work
        self._settled = settled
        self._tasks = tasks
        self._clock = clock
        self._unfinished: dict[str, PendingDeletion] = {}
        """Jobs with remaining data, and what it is."""
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._again_at = 0.0

    async def restart(self) -> None:
        """Continue deletions that an earlier hub process did not finish."""
        self._unfinished = await self._stores.database.read(begun)
        for job in self._unfinished:
            self._run(job)

    async def size(self, job: str) -> dict[str, Any]:
        """Return what would be deleted with a job: numbers of files and items, and bytes."""
        stores = self._stores
        folder = await stores.files.size(job)
        code = await stores.blobs.held_alone(f"job/{job}")
        own = tuple(_queues_of(stores.jobs.get(job)))
        queues = [row for row in await stores.queue.rows() if row["queue"].startswith(own)]
        return {
            "job": job,
            "files": folder.files,
            "file_bytes": folder.nbytes,
            "checkpoint_bytes": folder.checkpoint_bytes,
            "code_bytes": await asyncio.to_thread(_sum_of, stores.blobs.nbytes, code),
            "queues": len(queues),
            "queue_items": sum(row["ready"] + row["leased"] + row["dead"] for row in queues),
            "queue_bytes": sum(row["bytes"] for row in queues),
        }

    async def delete(self, job: str, *, keep_files: bool = False, by: str) -> dict[str, Any]:
        """Delete a job that has ended; once this returns, its record is deleted durably.

        Args:
            job: Which.
            keep_files: Leave its folder as it is.
            by: Name of the requester, for the event, which is kept.

        Returns:
            What was removed, as :meth:`size` returns it, and `finished`: whether nothing is left;
            otherwise the rest is deleted in the background.

        Raises:
            HubError: it has not ended, or is not there any more.
        """
        self._check(job)
        await self._settled()
        async with self._stores.jobs.reviving:
            self._check(job)
            size = await self.size(job)
            await self._forget(job, size, keep_files=keep_files, by=by)
        task = self._run(job)
        await asyncio.wait([task], timeout=ANSWER_S)
        finished = task.done() and not task.cancelled() and task.result()
        return size | {"kept": keep_files, "finished": finished}

    def tick(self) -> None:
        """Retry failed deletions after a pause; called often."""
        now = self._clock.monotonic()
        if self._unfinished and now >= self._again_at:
            self._again_at = now + AGAIN_S
            for job in self._unfinished:
                self._run(job)

    def _check(self, job: str) -> Job:
        record = self._stores.jobs.get(job)
        if not record.over:
            verb = "waits" if record.state == JobState.WAITING else "runs"
            raise HubError(
                f"this job {verb}: only jobs that have ended can be deleted",
                given=f"{job} ({record.state})",
                expected="a job that is done, failed or stopped",
                remedy=f"end it first: atoll stop {job}",
            )
        return record

    async def _forget(self, job: str, size: dict[str, Any], *, keep_files: bool, by: str) -> None:
        """Delete the record: after this the job does not exist."""
        stores = self._stores
        nbytes = size["code_bytes"] + size["queue_bytes"] + (not keep_files) * size["file_bytes"]
        files = "its files stay" if keep_files else f"{size['files']} files"
        tell = stores.events.storing(
            "", "job-deleted", f"{job} was deleted by {by}: {files}, {nbytes} bytes",
            fields={"job": job, "by": by, "bytes": str(nbytes), "kept": str(keep_files).lower()},
        )  # fmt: skip
        now = self._clock.wall()
        rest = PendingDeletion(keep_files=keep_files, queues=_queues_of(stores.jobs.get(job)))

        def also(connection: sqlite3.Connection) -> None:
            begin(connection, job, rest, now=now)
            tell(connection)

        await stores.jobs.delete(job, also=also)
        self._unfinished[job] = rest

    def _run(self, job: str) -> asyncio.Task[bool]:
        """Remove the remaining data in the background, one task per job."""
        task = self._running.get(job)
        if task is None:
            task = self._tasks.start(self._finish(job), name=f"deletion of {job}")
            self._running[job] = task
            task.add_done_callback(lambda _: self._running.pop(job, None))
        return task

    async def _finish(self, job: str) -> bool:
        """Remove the remaining data of a job; return whether nothing is left."""
        try:
            await self._remove(job, self._unfinished[job])
        except AtollError as error:
            logger.warning("the deletion of %s is retried later: %s", job, error)
            return False
        self._unfinished.pop(job, None)
        await self._stores.blobs.sweep()
        return True

    async def _remove(self, job: str, rest: PendingDeletion) -> None:
        stores = self._stores
        stores.files.expect_none(job)
        for memory in (stores.events, stores.logs, stores.metrics):
            memory.forget(job)
        await self._stop_work(job)
        await stores.auth.revoke_job(job)
        await delete_rows(stores.database, job)
        await stores.history.forget(f"{job}/")
        for prefix in rest.queues:
            await stores.queue.remove(prefix)
        if not rest.keep_files:
            await stores.files.remove(job)
        await stores.database.write(lambda connection: end(connection, job))


def _queues_of(job: Job) -> list[str]:
    """Return the prefixes of a job's queues and topics, including those in a pool."""
    pool = job.spec.rl.pool
    kinds = POOLED if pool else ()
    return [f"{job.job}/", *(f"{pool}/{kind}.{job.job}." for kind in kinds)]


def _sum_of(nbytes: Callable[[str], int], blobs: list[str]) -> int:
    total = 0
    for sha256 in blobs:
        try:
            total += nbytes(sha256)
        except HubError:
            continue
    return total
