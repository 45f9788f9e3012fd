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
from atoll.hub.security import auth
from atoll.hub.security.auth import Auth
from atoll.hub.storage import blobs, files
from atoll.hub.storage.blobs import Blobs
from atoll.hub.storage.copy_places import NO_FOLDERS, CopyPlaces
from atoll.hub.storage.files import Files


def open_queues(
    database: Database, *, clock: Clock, blobs: HeldBlobs | None = None, server: str = ""
) -> Queues:
    """Return the queues of a hub, users' ones on `server` unless it is empty.

    `server` is `nats://HOST:PORT[/NAMESPACE]`; raises ConfigError. Commands to nodes (`node/...`)
    are always in the database.
    """
    own = SqliteBackend(database, clock=clock, blobs=blobs)
    if not server:
        return Queues(own, clock=clock, blobs=blobs)
    from atoll.hub.queues.nats import NatsBackend
    from atoll.hub.queues.nats_client import NatsClient

    users = NatsBackend(NatsClient(server), database, clock=clock, blobs=blobs)
    return Queues(users, clock=clock, blobs=blobs, internal=own)


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
) -> Stores:
    """Open or create the data of a hub; `queue` is the server of users' queues.

    Raises:
        HubError: the database is damaged, of a newer version, or used by another hub.
        StorageFull: no space is left.
    """
    return await asyncio.to_thread(_open, data, jobs_dir, clock, schemas, queue, copies)


def _open(
    data: Path,
    jobs_dir: Path,
    clock: Clock,
    schemas: Sequence[str],
    queue: str,
    copies: CopyPlaces,
) -> Stores:
    database = Database(data / "hub.sqlite", schemas=[*SCHEMAS, *schemas])
    try:
        event_log = Events(database, jobs_dir=jobs_dir, clock=clock)
        history_store = History(database, clock=clock)
        blob_store = Blobs(database, folder=data / blobs.FOLDER, clock=clock)
        return Stores(
            database=database,
            queue=open_queues(database, clock=clock, blobs=blob_store, server=queue),
            auth=Auth(database, clock=clock),
            jobs=Jobs(
                database,
                events=event_log,
                jobs_dir=jobs_dir,
                clock=clock,
                blobs=blob_store,
                copies=copies,
            ),
            logs=Logs(database, clock=clock),
            history=history_store,
            metrics=Metrics(database, jobs_dir=jobs_dir, history=history_store, events=event_log),
            events=event_log,
            files=Files(database, jobs_dir=jobs_dir),
            blobs=blob_store,
            alarms=Alarms(database),
        )
    except BaseException:
        database.close()
        raise
