"""Brings what is asked of queues into transactions: whatever waits shares the next one.

While a commit is under way the disk is busy, and what is asked for meanwhile collects here. It is
written in the order in which it was asked for. Who asked may be gone by then: that is counted all
the same.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atoll.hub.db.database import Database
from atoll.hub.queues.backend import NOTHING, Amount, Listener, Move, Stored
from atoll.wire.messages import QueueEntry

T = TypeVar("T")
Work = Callable[[sqlite3.Connection, list[Move]], Any]

_MAX_BATCH = 2_000
"""Operations in one transaction."""


@dataclass(slots=True, eq=False)
class Put:
    """A put that waits for the next transaction."""

    queue: str
    entries: Sequence[QueueEntry]
    drop: Amount
    future: asyncio.Future[Any]

    @property
    def plain(self) -> bool:
        """Whether it may share a statement with others."""
        return self.drop == NOTHING and not any(entry.blob for entry in self.entries)


@dataclass(slots=True, eq=False)
class _Other:
    """Anything else that waits for the next transaction."""

    work: Work
    future: asyncio.Future[Any]


@dataclass(slots=True)
class _Outcome:
    """What a transaction brought: an answer or error per operation, and every move."""

    answers: list[Any] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


Store = Callable[[sqlite3.Connection, Sequence[Put], list[Move]], list[Stored]]


class WriteBatcher:
    """One line of operations before a database.

    Args:
        database: Where they are run.
        store: Stores the items of puts that follow each other.
        moved: Is told every move that is durable, before its answer goes out.
    """

    def __init__(self, database: Database, *, store: Store, moved: Listener) -> None:
        self._database = database
        self._store = store
        self._moved = moved
        self._waiting: list[Put | _Other] = []
        self._task: asyncio.Task[None] | None = None

    def put(
        self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount
    ) -> asyncio.Future[Stored]:
        """Store items in the next transaction."""
        future: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._submit(Put(queue, entries, drop, future))
        return future

    def do(self, work: Callable[[sqlite3.Connection, list[Move]], T]) -> asyncio.Future[T]:
        """Return what `work` will return, run in the next transaction and then durable."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(_Other(work, future))
        return future

    async def close(self) -> None:
        """Wait until what was begun is done."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _submit(self, operation: Put | _Other) -> None:
        self._waiting.append(operation)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="queue pump")

    async def _run(self) -> None:
        """Write what waits, again and again."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            try:
                outcome = await self._write(batch)
            except Exception as error:
                outcome = _Outcome([error] * len(batch))
            self._moved(outcome.moves)
            for operation, answer in zip(batch, outcome.answers, strict=True):
                if operation.future.done():
                    continue
                if isinstance(answer, Exception):
                    operation.future.set_exception(answer)
                else:
                    operation.future.set_result(answer)

    async def _write(self, batch: Sequence[Put | _Other]) -> _Outcome:
        return await self._database.write(lambda connection: self._transact(connection, batch))

    def _transact(self, connection: sqlite3.Connection, batch: Sequence[Put | _Other]) -> _Outcome:
        """Work a batch off in order; puts that follow each other are stored together."""
        outcome, puts = _Outcome(), list[Put]()

        def store() -> None:
            if puts:
                outcome.answers += self._store(connection, puts, outcome.moves)
                puts.clear()

        for operation in batch:
            if isinstance(operation, Put) and operation.plain:
                puts.append(operation)
                continue
            store()
            outcome.answers.append(self._alone(connection, operation, outcome.moves))
        store()
        return outcome

    def _alone(
        self, connection: sqlite3.Connection, operation: Put | _Other, moves: list[Move]
    ) -> Any:
        """Run one operation in a savepoint; return what it returned or raised."""
        own: list[Move] = []
        connection.execute("SAVEPOINT operation")
        try:
            if isinstance(operation, _Other):
                answer = operation.work(connection, own)
            else:
                (answer,) = self._store(connection, [operation], own)
        except sqlite3.Error:
            raise
        except Exception as error:
            connection.execute("ROLLBACK TO operation")
            answer, own = error, []
        connection.execute("RELEASE operation")
        moves += own
        return answer
