"""Bytes on disk of each job: what lies in its folder, and its output in the database.

A folder is measured once, and the sizes of files that arrive are added. It is measured again before
anything is refused, as files may have been deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from atoll.clock import Clock
from atoll.hub.db.database import Database
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import Kind

FRESH_S = 30.0
"""How old a measurement of a running job may be, where nothing depends on it."""
MANY_FRESH_S = 1.0
"""The same before a login is refused; before a job is refused it is always measured again."""
LOOK_S = 0.25
"""Time limit for measuring the folders of many jobs; the next call measures the others."""
LOOKS = 3
"""Looks at a job's folder for one measurement, if files arrive during each."""

REMEDY = (
    "delete what is not needed (`atoll rm JOB`, fewer checkpoints by `keep` in [checkpoint]), or "
    "let the hub's owner raise the limit"
)


class DiskMeter:
    """How many bytes each job has on the hub's disk. Methods without `async` are thread-safe."""

    def __init__(self, ledger: Ledger, *, jobs_dir: Path, database: Database, clock: Clock) -> None:
        self._ledger = ledger
        self._jobs_dir = jobs_dir
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        self._looked_at: dict[str, float] = {}
        """Monotonic times of the measurements in `_used`."""
        self._arriving: collections.Counter[str] = collections.Counter()
        self._stored: collections.Counter[str] = collections.Counter()
        """Files that have arrived whole."""
        self._looking: dict[str, asyncio.Future[int]] = {}
        self.jobs: Callable[[], Iterable[tuple[str, bool]]] = tuple
        """Returns every job, and whether it is over."""
        ledger.sources.append(self._uses)

    def used(self, job: str) -> int:
        """Return the bytes of a job as far as they are known."""
        return self._used.get(job, 0)

    def full(self, job: str) -> bool:
        """Return whether nothing more is to be appended to the files of a job."""
        limit = self._ledger.limit(Kind.JOB_DISK, Holder("job", job))
        return 0 < limit <= self.used(job)

    def grew(self, job: str, nbytes: int) -> None:
        """Count bytes that were appended to a file of a job, or taken away."""
        with self._lock:
            if job in self._used:
                self._used[job] = max(0, self._used[job] + nbytes)

    def came(self, job: str, nbytes: int) -> None:
        """Count a file that has arrived whole."""
        self.grew(job, nbytes)
        with self._lock:
            self._stored[job] += 1

    def forget(self, job: str) -> None:
        """Forget a deleted job."""
        with self._lock:
            self._used.pop(job, None)
            self._looked_at.pop(job, None)
            self._stored.pop(job, None)
            self._looking.pop(job, None)  # what it finds is not kept

    async def measure(self, job: str) -> int:
        """Measure the bytes of a job; calls at the same time share one measurement."""
        looking = self._looking.get(job)
        if looking is None:
            looking = self._looking[job] = asyncio.ensure_future(self._look(job))
            looking.add_done_callback(lambda done: self._looked(job, done))
        return await asyncio.shield(looking)

    def _looked(self, job: str, done: asyncio.Future[int]) -> None:
        with self._lock:
            if self._looking.get(job) is done:
                del self._looking[job]

    async def _look(self, job: str) -> int:
        for _ in range(LOOKS):
            stored = self._stored[job]
            nbytes = await asyncio.to_thread(folder_bytes, self._jobs_dir / job)
            if self._stored[job] == stored:  # else a file came that may be counted or not
                break
        nbytes += await self._database.read(lambda connection: _output_bytes(connection, job))
        with self._lock:
            if self._looking.get(job) is asyncio.current_task():  # else it was deleted meanwhile
                self._used[job], self._looked_at[job] = nbytes, self._clock.monotonic()
        return nbytes

    @contextlib.asynccontextmanager
    async def arriving(
        self, job: str, *, replaces: int = 0, announced: int = 0
    ) -> AsyncIterator[Arrival]:
        """Count a file while it arrives; `replaces` are the bytes that it takes the place of.

        Raises:
            LimitReached: the job, or the login that submitted it, would have too many.
        """
        if job not in self._used:
            await self.measure(job)
        arrival = Arrival(self, job, replaces=replaces)
        try:
            await arrival.reserve(announced)
            yield arrival
        finally:
            with self._lock:
                self._arriving[job] -= arrival.reserved
                if not self._arriving[job]:
                    del self._arriving[job]

    async def check(self, job: str, more: int) -> None:
        """Raise LimitReached if a job may not have so many bytes more."""
        await self._check(Kind.JOB_DISK, Holder("job", job), [job], more)
        role, name = self._ledger.submitter(job)
        if name and self._ledger.limit(Kind.DISK, holder := Holder(role, name)):
            theirs = [one for one, _ in self.jobs() if self._ledger.submitter(one) == (role, name)]
            for one in theirs:
                if one not in self._used:
                    await self.measure(one)
            await self._check(Kind.DISK, holder, theirs, more)

    async def _check(self, kind: Kind, holder: Holder, jobs: list[str], more: int) -> None:
        limit = self._ledger.limit(kind, holder)
        if not limit or self._sum(jobs) + more <= limit:
            return
        now = self._clock.monotonic()
        for job in jobs:
            if len(jobs) == 1 or now - self._looked_at.get(job, -1e9) > MANY_FRESH_S:
                await self.measure(job)
        if (used := self._sum(jobs)) + more > limit:
            raise self._ledger.refuse(kind, holder, used=used, wanted=max(0, more), remedy=REMEDY)

    def _sum(self, jobs: list[str]) -> int:
        return sum(self._used.get(job, 0) + self._arriving[job] for job in jobs)

    def _take(self, job: str, nbytes: int) -> None:
        with self._lock:
            self._arriving[job] += nbytes

    async def _uses(self) -> list[tuple[Kind, Holder, int]]:
        jobs = dict(self.jobs())
        began, now = time.monotonic(), self._clock.monotonic()
        for job, over in jobs.items():
            age = now - self._looked_at.get(job, -1e9)
            if age > FRESH_S and (not over or job not in self._used):
                await self.measure(job)
                if time.monotonic() - began > LOOK_S:
                    break
        sums: collections.Counter[Holder] = collections.Counter()
        for job in jobs:
            role, name = self._ledger.submitter(job)
            if name:
                sums[Holder(role, name)] += self.used(job)
        return [
            *((Kind.JOB_DISK, Holder("job", job), self.used(job)) for job in jobs),
            *((Kind.DISK, holder, used) for holder, used in sums.items()),
        ]


class Arrival:
    """One file that arrives."""

    def __init__(self, meter: DiskMeter, job: str, *, replaces: int) -> None:
        self._meter, self._job, self._replaces = meter, job, replaces
        self.nbytes = 0
        """Bytes so far."""
        self.reserved = 0
        """Bytes for which there is room."""

    async def reserve(self, more: int) -> None:
        """Reserve room for so many bytes more; raises LimitReached if there is none."""
        await self._meter.check(self._job, more - self._replaces)
        self._meter._take(self._job, more)
        self.reserved += more

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass the chunks on; raises LimitReached at the first that does not fit."""
        async for chunk in chunks:
            self.nbytes += len(chunk)
            if self.nbytes > self.reserved:
                await self.reserve(self.nbytes - self.reserved)
            yield chunk

    def stored(self) -> None:
        """Count the whole file: it is in its place."""
        self._meter.came(self._job, self.nbytes - self._replaces)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 if it does not exist."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(at, name)).st_size
    return total


def _output_bytes(connection: sqlite3.Connection, job: str) -> int:
    """Return the characters of a job's output that the database keeps."""
    (found,) = connection.execute(
        "SELECT total(length(text)) FROM logs WHERE job = ?", (job,)
    ).fetchone()
    return int(found)
