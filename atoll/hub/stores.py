"""Everything durable that a hub has, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.clock import Clock
from atoll.hub import (
    auth,
    blobs,
    events,
    files,
    history,
    jobs,
    logs,
    metrics,
    node_book,
    queue_sqlite,
)
from atoll.hub.alarms import store as alarms
from atoll.hub.alarms.store import Alarms
from atoll.hub.auth import Auth
from atoll.hub.blobs import Blobs
from atoll.hub.database import Database
from atoll.hub.events import Events
from atoll.hub.files import Files
from atoll.hub.history import History
from atoll.hub.jobs import Jobs
from atoll.hub.logs import Logs
from atoll.hub.metrics import Metrics
from atoll.hub.queue import Queues
from atoll.hub.queue_house import open_queues

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
    node_book.SCHEMA,
    queue_sqlite.SCHEMA,
)
"""Tables of the modules above."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The durable half of a hub."""

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
        """Finish every write, then close the database. May be called again."""
        await self.queue.close()
        await asyncio.to_thread(self.database.close)


async def open_stores(
    data: Path, *, jobs_dir: Path, clock: Clock, schemas: Sequence[str] = (), queue: str = ""
) -> Stores:
    """Open or make the data of a hub.

    Args:
        data: Folder of the database and the secrets.
        jobs_dir: Folder in which every job gets its own.
        clock: Whence times of records and leases come.
        schemas: Tables that further modules keep in the same database.
        queue: Server of users' queues, e.g. `nats://HOST:PORT`; empty: the same database.

    Raises:
        HubError: the database is damaged, of a newer version, or used by another hub.
        StorageFull: no room is left.
    """
    return await asyncio.to_thread(_open, data, jobs_dir, clock, schemas, queue)


def _open(data: Path, jobs_dir: Path, clock: Clock, schemas: Sequence[str], queue: str) -> Stores:
    database = Database(data / "hub.sqlite", schemas=[*SCHEMAS, *schemas])
    try:
        told = Events(database, jobs_dir=jobs_dir, clock=clock)
        past = History(database, clock=clock)
        held = Blobs(database, folder=data / blobs.FOLDER, clock=clock)
        return Stores(
            database=database,
            queue=open_queues(database, clock=clock, blobs=held, server=queue),
            auth=Auth(database, clock=clock),
            jobs=Jobs(database, events=told, jobs_dir=jobs_dir, clock=clock, blobs=held),
            logs=Logs(database, clock=clock),
            history=past,
            metrics=Metrics(database, jobs_dir=jobs_dir, history=past),
            events=told,
            files=Files(database, jobs_dir=jobs_dir),
            blobs=held,
            alarms=Alarms(database),
        )
    except BaseException:
        database.close()
        raise
