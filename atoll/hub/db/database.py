"""One SQLite file, one writer thread, many writes per commit.

`synchronous=FULL` makes every commit wait for the disk (milliseconds), so that what was
acknowledged survives a power cut. Writes that arrive while a commit is under way share the next
one: alone a write costs one flush, a thousand together cost one flush too. Each write runs in its
own savepoint, so one that fails takes nothing of the others with it; `write_each` goes further and
makes one call, and few statements, of many neighbours. This is the hub's only batching of writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import HubError
from atoll.hub.db.opening import NO_ROOM, explain, full, hold_lock, open_reader, open_writer

A = TypeVar("A")
T = TypeVar("T")
V = TypeVar("V")

log = logging.getLogger(__name__)

MAX_BATCH = 2_000
"""Writes in one transaction; bounds how long the first of them waits."""

_CALLERS = (sqlite3.IntegrityError, sqlite3.ProgrammingError)
"""Errors of SQLite that are about the statement, not about the file."""


class _Write:
    """A function that waits for the writer thread, and where its outcome goes.

    With `each`, the function takes a sequence of arguments; neighbours that have the same function
    are one call.
    """

    __slots__ = ("argument", "each", "fn", "future", "loop", "on_commit", "outcome")

    def __init__(
        self,
        fn: Callable[..., Any],
        future: asyncio.Future[Any] | Future[Any],
        loop: asyncio.AbstractEventLoop | None,
        *,
        on_commit: Callable[[Any], Any] | None = None,
    ) -> None:
        self.fn = fn
        self.future = future
        self.loop = loop
        self.on_commit = on_commit
        self.each = False
        self.argument: Any = None
        self.outcome: tuple[Any, BaseException | None] = (None, None)

    def run(self, connection: sqlite3.Connection) -> Any:
        """Run the function without its neighbours."""
        if self.each:
            return self.fn(connection, [self.argument])[0]
        return self.fn(connection)


class Database:
    """The hub's SQLite database.

    Args:
        path: The file; its folder is made.
        schemas: `CREATE TABLE IF NOT EXISTS ...` scripts of the modules that keep tables here.

    Raises:
        HubError: the file is damaged, of a newer version, or used by another hub.
        StorageFull: no room is left on its disk.
    """

    def __init__(self, path: Path, *, schemas: Sequence[str] = ()) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = hold_lock(path)
        try:
            self._connection = open_writer(path, schemas)
            self._reader, self._searcher = open_reader(path), open_reader(path)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, sqlite3.Error):
                raise explain(error, path) from error
            raise
        self._writes: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._gathered: list[_Write] = []
        """Requested while a commit is under way."""
        self._calling: asyncio.AbstractEventLoop | None = None
        """The event loop in which `_hand_over` is going to be called."""
        self._closing = threading.Lock()
        self._closed = False
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="hub-read")
        self._searchers = ThreadPoolExecutor(1, thread_name_prefix="hub-search")
        self._writer = threading.Thread(target=self._run, name="hub-write", daemon=True)
        self._writer.start()

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` in the writer thread; return its value once the commit is on disk.

        Writes happen in the order in which they were requested. `fn` MUST NOT commit or roll back.

        Raises:
            StorageFull: no room is left; nothing of `fn` was kept.
            HubError: the database is closed or damaged.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(_Write(fn, future, loop))
        return await future

    def write_later(
        self, fn: Callable[[sqlite3.Connection], V], on_commit: Callable[[V], T]
    ) -> asyncio.Future[T]:
        """Begin a write without a task of its own; return the future of its value.

        Args:
            fn: As for `write`.
            on_commit: Turns the value of `fn` into the future's value. Called in the event loop
                once the commit is on disk, even if the future was cancelled, and before any
                future of the same commit is seen to be done. The future gets what it raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(_Write(fn, future, loop, on_commit=on_commit))
        return future

    def write_each(
        self,
        fn: Callable[[sqlite3.Connection, Sequence[A]], Sequence[V]],
        argument: A,
        on_commit: Callable[[V], T],
    ) -> asyncio.Future[T]:
        """Begin a write like `write_later`, in one call with its neighbours of the same `fn`.

        `fn` returns one value per argument. If it raises for many, it is called again for each
        alone, so the error reaches only those that cause it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        write = _Write(fn, future, loop, on_commit=on_commit)
        write.each, write.argument = True, argument
        self._put(write)
        return future

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` with a read-only connection in another thread; it sees every finished write."""
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._read, fn, self._reader)

    async def search(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Like `read`, for queries over many rows: other reads do not wait for them."""
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._searchers, self._read, fn, self._searcher)

    def write_now(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Blocking twin of `write`, for start-up and for other threads."""
        future: Future[T] = Future()
        self._put(_Write(fn, future, None))
        return future.result()

    def read_now(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Blocking twin of `read`."""
        self._check_open()
        return self._readers.submit(self._read, fn, self._reader).result()

    def close(self) -> None:
        """Finish every write that was requested, then close the file. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._queue_gathered()
            self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._searchers.shutdown(cancel_futures=True)
        self._reader.close()
        self._searcher.close()
        self._connection.close()
        self._lock.close()

    def _check_open(self) -> None:
        if self._closed:
            raise HubError("the hub's database is closed", given=str(self.path))

    def _put(self, write: _Write) -> None:
        """Gather a write until the commit before it is delivered.

        A writer thread that took each write at once would make more and smaller commits, and
        compete with the event loop for the interpreter lock: with a thousand producers, one message
        each, that cost 40 % of the throughput (bench/queue.py).
        """
        with self._closing:
            self._check_open()
            self._gathered.append(write)
            if write.loop is None:
                self._queue_gathered()
            elif self._calling is not write.loop:
                self._calling = write.loop
                write.loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """Give the writer thread what was gathered; called again when that is delivered."""
        with self._closing:
            if not self._queue_gathered():
                self._calling = None

    def _queue_gathered(self) -> bool:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._writes.put(gathered)
        return bool(gathered)

    def _deliver(self, batch: Iterable[_Write]) -> None:
        """Deliver the outcomes with one wake-up per event loop, not one per write."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
        for write in batch:
            if write.loop is None:
                _resolve([write])
            else:
                by_loop.setdefault(write.loop, []).append(write)
        for loop, writes in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
                loop.call_soon_threadsafe(self._resolve_and_go_on, writes)

    def _resolve_and_go_on(self, writes: list[_Write]) -> None:
        _resolve(writes)
        self._hand_over()

    def _read(self, fn: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T:
        try:
            return fn(connection)
        except sqlite3.DatabaseError as error:
            raise explain(error, self.path) from error

    def _run(self) -> None:
        """Take what waits and write it, one transaction after the other, until closed."""
        while (some := self._writes.get()) is not None:
            batch, ending = list(some), False
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_BATCH and not ending:
                    more = self._writes.get_nowait()
                    ending = more is None
                    batch += more or []
            for start in range(0, len(batch), MAX_BATCH):
                part = batch[start : start + MAX_BATCH]
                self._transact(part)
                self._deliver(part)
            if ending:
                return

    def _transact(self, batch: list[_Write]) -> None:
        """Run a batch in one transaction and note each outcome."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for neighbours in _neighbours(batch):
                if len(neighbours) == 1 or not _run_together(connection, neighbours):
                    for write in neighbours:
                        _run_alone(connection, write, self.path)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            log.error("a commit of %d writes failed: %s", len(batch), error)
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            for write in batch:
                write.outcome = (None, explain(error, self.path))


def span(prefix: str) -> tuple[str, str]:
    """Return the bounds, the second one excluded, of the texts that begin so."""
    return prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _neighbours(batch: Sequence[_Write]) -> Iterator[list[_Write]]:
    """Yield the writes of a batch in order; those that may be one call come together."""
    together: list[_Write] = []
    for write in batch:
        if together and not (write.each and together[0].each and write.fn == together[0].fn):
            yield together
            together = []
        together.append(write)
    if together:
        yield together


def _run_together(connection: sqlite3.Connection, writes: Sequence[_Write]) -> bool:
    """Run neighbours in one call and savepoint; return False, with nothing kept, if it raised."""
    connection.execute("SAVEPOINT one")
    try:
        values = writes[0].fn(connection, [write.argument for write in writes])
    except Exception as error:
        if isinstance(error, sqlite3.Error) and not connection.in_transaction:
            raise  # SQLite rolled all of the transaction back (disk full): the batch fails
        connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")
        return False
    connection.execute("RELEASE one")
    for write, value in zip(writes, values, strict=True):
        write.outcome = (value, None)
    return True


def _run_alone(connection: sqlite3.Connection, write: _Write, path: Path) -> None:
    """Run one write in its savepoint; only errors of the storage itself leave this function."""
    connection.execute("SAVEPOINT one")
    try:
        write.outcome = (write.run(connection), None)
    except BaseException as error:
        if isinstance(error, sqlite3.Error) and not connection.in_transaction:
            raise  # SQLite rolled all of the transaction back (disk full): the batch fails
        connection.execute("ROLLBACK TO one")
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, _CALLERS):
            error = explain(error, path)
        elif isinstance(error, OSError) and error.errno in NO_ROOM:  # a file beside the database
            error = full(path)
        write.outcome = (None, error)
    connection.execute("RELEASE one")


def _resolve(writes: list[_Write]) -> None:
    for write in writes:
        value, error = write.outcome
        try:
            if error is None and write.on_commit is not None:
                value = write.on_commit(value)
        except Exception as raised:  # must not hold up the other writes, nor those that follow
            error = raised
        if write.future.cancelled():
            continue
        if error is not None:
            write.future.set_exception(error)
        else:
            write.future.set_result(value)
