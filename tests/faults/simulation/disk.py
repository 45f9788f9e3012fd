"""The hub's durable memory: what survives its kill, and when a write is durable but not told."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from atoll.config import dump_spec, parse_spec
from atoll.errors import StorageFull
from atoll.hub.jobs.jobs import Job
from atoll.hub.queues import sqlite
from atoll.hub.queues.queues import Queues
from atoll.hub.queues.sqlite import SqliteBackend
from atoll.hub.rounds import checkpoints as checkpoints_module
from atoll.hub.rounds import store as round_book_module
from atoll.hub.security import tickets as tickets_module
from atoll.hub.storage.files import FileInfo
from atoll.hub.stores import SCHEMAS
from atoll.simulate.scheduler import Process, Scheduler
from tests.faults.simulation.loop import VirtualLoop

if TYPE_CHECKING:
    from atoll.wire.messages import QueuePutDone

T = TypeVar("T")
JOB = "job"


@functools.cache
def _empty() -> bytes:
    """Return a database with all tables, made once per process."""
    connection = sqlite3.connect(":memory:")
    for schema in (
        *SCHEMAS, round_book_module.SCHEMA, checkpoints_module.SCHEMA, tickets_module.SCHEMA,
    ):  # fmt: skip
        connection.executescript(schema)
    connection.commit()
    return connection.serialize()


@functools.cache
def _job_row(spec: str) -> tuple[str, int, str, str, str]:
    parsed = parse_spec(spec)
    fields = msgspec.to_builtins(Job(job=JOB, created=0.0))
    del fields["spec"], fields["text"]
    return JOB, 0, dump_spec(parsed), "{}", msgspec.json.encode(fields).decode()


class Disk:
    """What is on the hub's disk."""

    def __init__(self, scheduler: Scheduler, *, spec: str) -> None:
        self.scheduler = scheduler
        self.full_until = 0.0
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.deserialize(_empty())
        self.connection.execute(
            "INSERT INTO jobs (job, created, spec, files, record) VALUES (?, ?, ?, ?, ?)",
            _job_row(spec),
        )
        self._items = sqlite3.connect(":memory:", isolation_level=None)
        self.queue = DurableQueue(scheduler, self._items)
        self.files: dict[str, bytes] = {}
        self.parts: dict[int, dict[str, str]] = {}
        """Of checkpoints: round -> name of the part -> who sent it."""
        self.published: set[int] = set()
        self.events: list[tuple[float, str, str, str]] = []
        """(time, kind, text, member)."""
        self.on_event: Callable[[str, str], None] = lambda kind, text: None

    @property
    def full(self) -> bool:
        return self.scheduler.now < self.full_until

    def close(self) -> None:
        self.connection.close()
        self._items.close()


class DurableQueue(Queues):
    """The queue in memory, with its promise of durability kept across lives of the hub."""

    def __init__(self, scheduler: Scheduler, connection: sqlite3.Connection) -> None:
        database: Any = InstantDatabase(connection)
        super().__init__(SqliteBackend(database, clock=scheduler), clock=scheduler)
        self.keys: list[str] = []

    async def put(
        self, queue: str, *, key: str, payload: bytes, blob: str = "", wait_s: float = 0.0
    ) -> QueuePutDone:
        self.keys.append(key)
        return await super().put(queue, key=key, payload=payload, blob=blob, wait_s=wait_s)


class InstantDatabase:
    """Stands in for `Database`: each write is a transaction of its own and takes no time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.executescript(sqlite.SCHEMA)

    def write_now(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            self._connection.execute("BEGIN")
            return fn(self._connection)

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        return self.write_now(fn)

    async def write_later(
        self, fn: Callable[[sqlite3.Connection], Any], on_commit: Callable[[Any], T]
    ) -> T:
        return on_commit(self.write_now(fn))

    async def write_each(
        self,
        fn: Callable[[sqlite3.Connection, Sequence[Any]], Sequence[Any]],
        argument: object,
        on_commit: Callable[[Any], T],
    ) -> T:
        return on_commit(self.write_now(lambda connection: fn(connection, [argument])[0]))

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        return fn(self._connection)


class SimulatedDatabase:
    """Stands in for `Database`: writes take time, and are durable a moment before that is told."""

    def __init__(self, disk: Disk, loop: VirtualLoop, process: Process) -> None:
        self._disk, self._loop, self._process = disk, loop, process
        self._scheduler = disk.scheduler
        self._last = 0.0
        self.stored: Callable[[], None] = lambda: None

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        future = self._loop.create_future()
        random = self._scheduler.random.random
        when = self._last = max(self._last, self._scheduler.now) + 0.0005 + 0.004 * random()

        def transact() -> None:
            outcome: tuple[Any, BaseException | None]
            if self._disk.full:
                outcome = (None, StorageFull("no room is left for the hub's database"))
            else:
                outcome = self._run(fn)
            self._scheduler.after(0.001 * random(), lambda: tell(*outcome), self._process)

        def tell(value: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._scheduler.at(when, transact, self._process)
        result: T = await future
        return result

    def _run(self, fn: Callable[[sqlite3.Connection], Any]) -> tuple[Any, BaseException | None]:
        connection = self._disk.connection
        connection.execute("BEGIN")
        try:
            value = fn(connection)
        except Exception as error:
            connection.execute("ROLLBACK")
            return None, error
        connection.execute("COMMIT")
        return value, None

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        return fn(self._disk.connection)

    def write_now(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        value, error = self._run(fn)
        if error is not None:
            raise error
        result: T = value
        return result

    def read_now(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        return fn(self._disk.connection)

    def close(self) -> None:
        """Leave the disk as it is."""


class SimulatedEvents:
    """Stands in for `Events`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    async def add(
        self,
        job: str,
        kind: str,
        text: str,
        *,
        member: str = "",
        fields: dict[str, str] | None = None,
    ) -> int:
        self._disk.events.append((self._disk.scheduler.now, kind, text, member))
        self._disk.on_event(kind, text)
        return len(self._disk.events)

    async def read(self, job: str, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return []


class SimulatedFiles:
    """Stands in for `Files`: whole files or none."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    async def stat(self, job: str, name: str) -> FileInfo | None:
        data = self._disk.files.get(name)
        return None if data is None else FileInfo(name, len(data), str(hash_of(data)), 0.0)

    async def write(self, job: str, name: str, data: bytes) -> FileInfo:
        if self._disk.full:
            raise StorageFull("no room is left for a file")
        self._disk.files[name] = data
        return FileInfo(name, len(data), str(hash_of(data)), 0.0)

    async def list(self, job: str) -> Sequence[FileInfo]:
        return []


class SimulatedBlobs:
    """Stands in for `Blobs`: simulated jobs bring no code, so there is nothing to keep."""

    async def sweep(self) -> int:
        return 0

    def drop(self, connection: sqlite3.Connection, owner: str) -> None:
        """Nobody holds anything."""


def hash_of(data: bytes) -> str:
    """Return what stands in for the SHA-256 of a file."""
    import hashlib

    return hashlib.blake2b(data, digest_size=16).hexdigest()
