"""The durable state of a hub, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.clock import Clock
from atoll.hub.alarms import store as alarms
from atoll.hub.alarms.store import Alarms
from atoll.hub.db.database import Database
from atoll.hub.jobs import jobs
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.nodes import store
from atoll.hub.observability import events, history, logs, metrics
from atoll.hub.observability.events import Events
from atoll.hub.observability.history import History
from atoll.hub.observability.logs import Logs
from atoll.hub.observability.metrics import Metrics
from atoll.hub.queues import sqlite
from atoll.hub.queues.backend import HeldBlobs
from atoll.hub.queues.queues import Queues
from atoll.hub.queues.sqlite import SqliteBackend
from atoll.hub.quotas.disk import DiskMeter
from atoll.hub.quotas.ledger import Ledger
from atoll.hub.quotas.limits import FILE as QUOTAS_FILE
from atoll.hub.quotas.limits import Quotas, read_quotas
from atoll.hub.quotas.overrides import Overrides
from atoll.hub.security import auth, secrets
from atoll.hub.security.auth import Auth
from atoll.hub.security.secrets import Secrets
from atoll.hub.storage import blobs, files
from atoll.hub.storage.blobs import Blobs
from atoll.hub.storage.copy_places import NO_FOLDERS, CopyPlaces
from atoll.hub.storage.files import Files


def open_queues(
    database: Database, *, clock: Clock, blobs: HeldBlobs | None = None, server: str = "",
    ledger: Ledger | None = None,
) -> Queues:  # fmt: skip
    """Return the queues of a hub, users' ones on `server` unless it is empty.

    `server` is `nats://HOST:PORT[/NAMESPACE]`; raises ConfigError. Commands to nodes (`node/...`)
    are always in the database.
    """
    own = SqliteBackend(database, clock=clock, blobs=blobs)
    if not server:
        return Queues(own, clock=clock, blobs=blobs, ledger=ledger)
    from atoll.hub.queues.nats import NatsBackend
    from atoll.hub.queues.nats_client import NatsClient

    users = NatsBackend(NatsClient(server), database, clock=clock, blobs=blobs)
    return Queues(users, clock=clock, blobs=blobs, internal=own, ledger=ledger)


SCHEMAS = (
    alarms.SCHEMA,
    auth.SCHEMA,
    blobs.SCHEMA,
    events.SCHEMA,
    files.SCHEMA,
    history.SCHEMA,
    jobs.SCHEMA,
    logs.SCHEMA,
    metrics.SCHEMA,
    secrets.SCHEMA,
    store.SCHEMA,
    sqlite.SCHEMA,
)


@dataclass(frozen=True, slots=True)
class Stores:
    """The durable state of a hub."""

    database: Database
    queue: Queues
    auth: Auth
    jobs: Jobs
    logs: Logs
    history: History
    metrics: Metrics
    events: Events
    files: Files
    blobs: Blobs
    alarms: Alarms
    secrets: Secrets
    ledger: Ledger
    """The quotas, and who uses how much."""

    async def close(self) -> None:
        """Finish all writes, then close the database; may be called again."""
        await self.queue.close()
        await asyncio.to_thread(self.database.close)


async def open_stores(
    data: Path,
    *,
    jobs_dir: Path,
    clock: Clock,
    schemas: Sequence[str] = (),
    queue: str = "",
    copies: CopyPlaces = NO_FOLDERS,
    quotas: Quotas | None = None,
) -> Stores:
    """Open or create the data of a hub; `queue` is the server of users' queues.

    `quotas` None: those of `quotas.toml` in the folder.

    Raises:
        ConfigError: that file is wrong.
        HubError: the database is damaged, of a newer version, or used by another hub.
        StorageFull: no space is left.
    """
    return await asyncio.to_thread(_open, data, jobs_dir, clock, schemas, queue, copies, quotas)


def _open(
    data: Path,
    jobs_dir: Path,
    clock: Clock,
    schemas: Sequence[str],
    queue: str,
    copies: CopyPlaces,
    quotas: Quotas | None,
) -> Stores:
    limits = quotas if quotas is not None else read_quotas(data / QUOTAS_FILE)
    database = Database(data / "hub.sqlite", schemas=[*SCHEMAS, *schemas])
    try:
        ledger = Ledger(limits, clock=clock)
        ledger.overrides = of_tokens = Overrides(database)
        ledger.renew = of_tokens.forget
        disk = DiskMeter(ledger, jobs_dir=jobs_dir, database=database, clock=clock)
        event_log = Events(database, jobs_dir=jobs_dir, clock=clock, disk=disk)
        history_store = History(database, clock=clock)
        secret_store = Secrets(database, folder=data, clock=clock)
        blob_store = Blobs(database, folder=data / blobs.FOLDER, clock=clock, ledger=ledger)
        queues = open_queues(database, clock=clock, blobs=blob_store, server=queue, ledger=ledger)
        all_jobs = Jobs(
            database, events=event_log, jobs_dir=jobs_dir, clock=clock, blobs=blob_store,
            copies=copies, secrets=secret_store,
        )  # fmt: skip
        ledger.submitter, queues.room.is_job = all_jobs.submitter, all_jobs.knows
        disk.jobs = lambda: [(job.job, job.over) for job in all_jobs.list()]
        return Stores(
            database=database,
            queue=queues,
            auth=Auth(database, clock=clock),
            jobs=all_jobs,
            logs=Logs(database, clock=clock),
            history=history_store,
            metrics=Metrics(
                database, jobs_dir=jobs_dir, history=history_store, events=event_log, disk=disk
            ),
            events=event_log,
            files=Files(database, jobs_dir=jobs_dir, disk=disk),
            blobs=blob_store,
            alarms=Alarms(database),
            secrets=secret_store,
            ledger=ledger,
        )
    except BaseException:
        database.close()
        raise
