"""Jobs: their files, members, state and result; durable.

All records are mirrored in memory, so reads are free. A change is made in memory at the call and is
on disk when the call returns, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time as calendar
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from atoll.clock import Clock
from atoll.config import JobSpec, dump_spec, parse_spec
from atoll.config.island_checks import check_encryption, not_encrypted
from atoll.config.redaction import secrets_of, secrets_of_copies
from atoll.errors import AtollError, ConfigError, HubError
from atoll.hub.db.database import Database
from atoll.hub.jobs.fields import change_fields, restored_on_error
from atoll.hub.jobs.members import Members
from atoll.hub.jobs.people import describe_nodes
from atoll.hub.jobs.record import Job as Job
from atoll.hub.jobs.record import Member as Member
from atoll.hub.jobs.record import (
    blobs_of,
    check_files,
    check_labels,
    check_spec_change,
)
from atoll.hub.jobs.times import TIMES, note_time
from atoll.hub.observability.events import Events
from atoll.hub.security.secrets import Secrets
from atoll.hub.storage.blobs import Blobs
from atoll.hub.storage.copy_places import NO_FOLDERS, CopyPlaces
from atoll.wire.states import JobState

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job TEXT PRIMARY KEY, created REAL NOT NULL, spec TEXT NOT NULL, files TEXT NOT NULL,
    record TEXT NOT NULL
) WITHOUT ROWID;
"""

RETRY_S = 1.0
"""Pause between two tries to write on a full disk."""

JobList = list[Job]
Write = Callable[[sqlite3.Connection], None]

_encode = msgspec.json.Encoder().encode
_FILE = ("spec", "text", "trouble", "without_room")
_JOB_FIELDS = frozenset(Job.__struct_fields__) - {"job", "created", "files", "members", *_FILE}


class Jobs:
    """All jobs of this hub."""

    def __init__(
        self,
        database: Database,
        *,
        events: Events,
        jobs_dir: Path,
        clock: Clock,
        blobs: Blobs | None = None,
        copies: CopyPlaces = NO_FOLDERS,
        secrets: Secrets | None = None,
    ) -> None:
        """Read all records; without `blobs` jobs cannot include code."""
        self._copies = copies
        self._secrets = secrets
        self._database = database
        self._blobs = blobs
        self._creating = asyncio.Lock()
        self._events = events
        self._jobs_dir = jobs_dir
        self._clock = clock
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT record, spec FROM jobs ORDER BY created, job"
            ).fetchall()
        )
        self._jobs: dict[str, Job] = {}
        for record, spec in rows:
            job = _load(record, spec)
            self._jobs[job.job] = job
        self._names = set(self._jobs)
        self.members = Members(job=self.get, save=self._save_when_room, events=events)
        self.reviving = asyncio.Lock()
        """Held while an ended job is resumed or deleted."""

    async def create(
        self, spec_text: str, *, files: dict[str, str], batch: str = "", key: str = "", by: str = ""
    ) -> Job:
        """Store a new waiting job with its folder and its `job.toml`.

        Args:
            spec_text: The job file.
            files: Texts that are sent with it.
            batch: Label of the jobs that are submitted together.
            key: Idempotency key of this submission: a repeated key creates no second job.
            by: Name of the login that submits it.

        Raises:
            ConfigError: the TOML, a file name or a secret is wrong, or the key is another job's.
            HubError: its code, or the assignment of its paths, is not at the hub.
            StorageFull: no room is left.
        """
        spec = parse_spec(spec_text)
        check_encryption(spec)
        self._copies.check(spec.checkpoint.to)
        await self._check_secrets(spec)
        check_files(files)
        check_labels(batch=batch, key=key)
        blobs = blobs_of(spec)
        async with self._creating:
            known = next((job for job in self._jobs.values() if key and job.key == key), None)
            if known is None:
                job = Job(job="", created=0.0, spec=spec, batch=batch, key=key, by=by)
                return await self._create(job, files=files, blobs=blobs)
        if (known.spec, known.files) != (spec, sorted(files)):
            raise ConfigError(
                "this key belongs to another submission",
                given=f"{key!r}, under which {known.job} was submitted",
                expected="a different key for every job",
            )
        return known

    async def _check_secrets(self, spec: JobSpec) -> None:
        """Raise ConfigError if the job wants a secret that the hub does not have."""
        names = secrets_of(spec)
        if names and self._secrets is not None:
            await self._secrets.check(names)

    async def secrets_of_copies(self, job: str) -> dict[str, str]:
        """Return the secrets with which a job's checkpoints are copied, by name.

        Raises:
            ConfigError: one was deleted.
            HubError: one cannot be decrypted.
        """
        names = secrets_of_copies(self.get(job).spec.checkpoint)
        return await self._secrets.values(names) if names and self._secrets is not None else {}

    async def _create(self, job: Job, *, files: dict[str, str], blobs: list[str]) -> Job:
        job.created = self._clock.wall()
        job.job = self._new_name(job.spec.job.name, job.created)
        job.text, job.files = dump_spec(job.spec), sorted(files)
        self._names.add(job.job)  # before anything is awaited
        try:
            await asyncio.to_thread(self._make_folder, job, files)
            await self._database.write(
                lambda connection: self._insert(connection, job, files, blobs)
            )
        except BaseException:
            self._names.discard(job.job)
            raise
        self._jobs[job.job] = job
        await self._events.add(job.job, "submitted", f"submitted for {describe_nodes(job)}")
        if plain := not_encrypted(job.spec):
            await self._events.add(job.job, "not-encrypted", plain)
        return job

    def _insert(
        self, connection: sqlite3.Connection, job: Job, files: dict[str, str], blobs: list[str]
    ) -> None:
        connection.execute(
            "INSERT INTO jobs (job, created, spec, files, record) VALUES (?, ?, ?, ?, ?)",
            (job.job, job.created, job.text, _encode(files).decode(), _record(job)),
        )
        if self._blobs is not None:
            for sha256 in blobs:
                self._blobs.hold(connection, sha256, f"job/{job.job}")

    def get(self, job: str) -> Job:
        """Return a job's record.

        Raises:
            HubError: there is no such job.
        """
        record = self._jobs.get(job)
        if record is None:
            raise HubError(
                "there is no such job", given=repr(job), remedy="`atoll status` lists all jobs"
            )
        return record

    def find(self, job: str) -> Job | None:
        """Return a job's record; None if it does not exist."""
        return self._jobs.get(job)

    def knows(self, job: str) -> bool:
        """Return whether there is such a job."""
        return job in self._jobs

    def submitter(self, job: str) -> tuple[str, str]:
        """Return role and name of the login that submitted a job; empty if it is not known."""
        record = self._jobs.get(job)
        return ("operator", record.by) if record is not None and record.by else ("", "")

    def list(self) -> JobList:
        """Return all jobs, newest first."""
        return list(self._jobs.values())[::-1]

    def folder(self, job: str) -> Path:
        """Return the folder of a job's files."""
        return self._jobs_dir / self.get(job).job

    async def files_of(self, job: str) -> dict[str, str]:
        """Return the texts sent with a job: name to content."""
        self.get(job)
        (files,) = await self._database.read(
            lambda connection: connection.execute(
                "SELECT files FROM jobs WHERE job = ?", (job,)
            ).fetchone()
        )
        return msgspec.json.decode(files, type=dict[str, str])

    async def set_state(
        self,
        job: str,
        state: JobState,
        *,
        reason: str = "",
        error: dict[str, str] | None = None,
    ) -> Job:
        """Change a job's state, record when it started or ended, and add an event."""
        record = self.get(job)
        before, now = (record.state, record.reason), self._clock.wall()
        with restored_on_error(record, ("state", "reason", "error", "started", "ended", *TIMES)):
            record.state, record.reason, record.error = state, reason, error
            record.ended = now if state.ended else None
            if state == JobState.RUNNING and record.started is None:
                record.started = now
            note_time(record, now)
            await self._save(record)
        if before != (state, reason):
            await self._events.add(
                job, state, reason or ("started" if state == JobState.RUNNING else state)
            )
        return record

    async def update(self, job: str, **changes: Any) -> Job:
        """Change fields of a job other than its state and its members."""
        record = self.get(job)
        with restored_on_error(record, (*(changes.keys() & _JOB_FIELDS), *TIMES)):
            change_fields(record, changes, _JOB_FIELDS)
            note_time(record, self._clock.wall())
            await self._save(record)
        return record

    async def replace_spec(self, job: str, text: str) -> Job:
        """Let an ended job continue with a changed job file.

        Raises:
            ConfigError: the text is wrong, or changes what its state is made of.
        """
        record = self.get(job)
        spec = check_spec_change(record.spec, text)
        check_encryption(spec)
        self._copies.check(spec.checkpoint.to)
        await self._check_secrets(spec)
        anew = spec.job.nodes != record.nodes_wanted  # the data is sharded anew
        return await self._store_spec(record, spec, data_slots=0 if anew else record.data_slots)

    async def scale(self, job: str, *, least: int, most: int, data_slots: int) -> Job:
        """Change how many members a job has; its data is split into `data_slots`."""
        record = self.get(job)
        table = dataclasses.replace(record.spec.job, nodes=most, min_nodes=least)
        spec = dataclasses.replace(record.spec, job=table)
        slots = 0 if data_slots == most else data_slots
        return await self._store_spec(record, spec, data_slots=slots)

    async def _store_spec(self, record: Job, spec: JobSpec, *, data_slots: int) -> Job:
        """Store a changed job file."""
        job, written = record.job, dump_spec(spec)
        with restored_on_error(record, ("spec", "text", "data_slots")):
            record.spec, record.text, record.data_slots = spec, written, data_slots
            encoded = _record(record)

            def write(connection: sqlite3.Connection) -> None:
                connection.execute("UPDATE jobs SET spec = ? WHERE job = ?", (written, job))
                _update(connection, job, encoded)

            await self._database.write(write)
        path = self.folder(job) / "job.toml"
        await asyncio.to_thread(path.write_text, written, encoding="utf-8", newline="\n")
        return record

    async def delete(self, job: str, *, also: Callable[[sqlite3.Connection], object]) -> None:
        """Delete a job and release its code, in one transaction with `also`; its name stays used.

        Raises:
            HubError: there is no such job, or it has not ended.
        """
        record = self.get(job)
        if not record.over:
            raise HubError("the job has not ended", given=f"{job} ({record.state})")
        del self._jobs[job]

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM jobs WHERE job = ?", (job,))
            if self._blobs is not None:
                self._blobs.drop(connection, f"job/{job}")
            also(connection)

        try:
            await self._database.write(write)
        except BaseException:
            both = [*self._jobs.values(), record]
            self._jobs = {one.job: one for one in sorted(both, key=lambda j: (j.created, j.job))}
            raise

    def storing(self, job: str) -> Callable[[sqlite3.Connection], None]:
        """Return a function that writes a job's current record inside another transaction."""
        text = _record(self.get(job))
        return lambda connection: _update(connection, job, text)

    async def write_when_room(self, job: str, prepare: Callable[[], Write]) -> None:
        """Write what has happened in a job; retry until it is durable.

        A full disk must not undo what has happened. Meanwhile the job's view shows the error.

        Args:
            job: The job; it waits with this write.
            prepare: Returns the write; called anew for every try.
        """
        while True:
            write = prepare()
            try:
                await self._database.write(write)
            except (AtollError, sqlite3.OperationalError) as error:
                log.error("%s waits for the hub's storage: %s", job, error)
                if found := self.find(job):
                    found.trouble = f"it waits for the hub's storage: {error}"
                await asyncio.sleep(RETRY_S)
            else:
                if (found := self.find(job)) and found.trouble:
                    log.info("%s is stored again", job)
                    found.trouble = ""
                return

    async def _save_when_room(self, record: Job) -> None:
        await self.write_when_room(record.job, lambda: self.storing(record.job))

    async def _save(self, record: Job) -> None:
        # Encoded now, not in the writer thread: later changes belong to later writes.
        text = _record(record)
        await self._database.write(lambda connection: _update(connection, record.job, text))

    def _new_name(self, name: str, now: float) -> str:
        """Return a job id that no job and no folder has."""
        stamp = calendar.strftime("%Y%m%d-%H%M%S", calendar.localtime(now))
        base = f"{name[:40]}-{stamp}"
        candidate, number = base, 2
        while candidate in self._names or (self._jobs_dir / candidate).exists():
            candidate, number = f"{base}-{number}", number + 1
        return candidate

    def _make_folder(self, job: Job, files: dict[str, str]) -> None:
        folder = self._jobs_dir / job.job
        folder.mkdir(parents=True, mode=0o700)  # the job file may hold secrets
        (folder / "job.toml").write_text(job.text, encoding="utf-8", newline="\n")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _load(record: str, text: str) -> Job:
    """Return a stored job; a job file that this version cannot read makes it failed."""
    job = msgspec.json.decode(record, type=Job)
    job.text = text
    try:
        job.spec = parse_spec(text)
    except ConfigError as error:
        log.error("the job file of %s cannot be read: %s", job.job, error)
        if not job.over:
            job.state, job.reason = JobState.FAILED, "its job file cannot be read"
            job.error = error.to_dict()
    return job


def _record(job: Job) -> str:
    """Return all changeable fields as JSON; the job file has its own column."""
    fields = {name: getattr(job, name) for name in Job.__struct_fields__ if name not in _FILE}
    return _encode(fields).decode()


def _update(connection: sqlite3.Connection, job: str, record: str) -> None:
    connection.execute("UPDATE jobs SET record = ? WHERE job = ?", (record, job))
