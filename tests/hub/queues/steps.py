"""A life of a queue in steps, each told when it is acknowledged; a process that a test kills.

`python -m tests.hub.queues.steps FOLDER SERVER` runs them (SERVER `-`: none) and prints a line of
JSON per step. What was told must hold after the process, or the server, was killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.clock import VirtualClock
from atoll.hub.db.database import Database
from atoll.hub.db.stores import open_queues
from atoll.hub.queues import sqlite
from atoll.hub.queues.queues import Queues
from atoll.wire.messages import QueueEntry, QueueOptions

LEASE_S = 100.0
OPTIONS = QueueOptions(max_attempts=2)


@dataclass
class Told:
    """What has been acknowledged so far."""

    put: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    """Key -> lease."""
    done: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    position: int = 0


@contextlib.asynccontextmanager
async def opened(folder: Path, server: str, clock: VirtualClock) -> AsyncIterator[Queues]:
    """Open the queues of a hub."""
    database = Database(folder / "hub.sqlite", schemas=[sqlite.SCHEMA])
    queues = open_queues(database, clock=clock, server=server)
    try:
        await queues.start()
        yield queues
    finally:
        await queues.close()
        database.close()


def steps(queue: Queues, told: Told) -> list[Callable[[], Awaitable[None]]]:
    """Return the steps in their order."""

    async def put(*keys: str) -> None:
        await queue.put_many("q", [QueueEntry(key, key.encode()) for key in keys])
        told.put += keys

    async def claim(limit: int) -> None:
        for item in await queue.claim("q", lease_s=LEASE_S, limit=limit):
            told.held[item.key] = item.lease

    async def ack(*keys: str) -> None:
        assert await queue.ack_many("q", [told.held[key] for key in keys]) == []
        for key in keys:
            del told.held[key]
        told.done += keys

    async def release(key: str) -> None:
        await queue.release("q", lease=told.held.pop(key), reason="no")

    async def extend(key: str) -> None:
        await queue.extend("q", lease=told.held[key], lease_s=2 * LEASE_S)

    async def die(key: str) -> None:
        await claim(1)
        assert key in told.held
        await release(key)
        told.dead.append(key)

    async def revive(key: str) -> None:
        assert await queue.requeue("q") == 1
        told.dead.remove(key)

    async def publish(*keys: str) -> None:
        done = await queue.topics.publish("t", [QueueEntry(key) for key in keys])
        told.published += keys
        await queue.topics.read("t", "s", limit=0, start="oldest")
        await queue.topics.ack("t", "s", seq=done.seqs[0])
        told.position = done.seqs[0]

    return [
        lambda: queue.declare("q", OPTIONS),
        lambda: put("a", "b", "c"),
        lambda: claim(2),
        lambda: put("d"),
        lambda: ack("a"),
        lambda: extend("b"),
        lambda: claim(1),
        lambda: release("c"),
        lambda: die("c"),
        lambda: put("e", "f"),
        lambda: revive("c"),
        lambda: claim(2),
        lambda: ack("b", "c"),
        lambda: publish("x", "y"),
        lambda: put("g"),
    ]


async def check(queue: Queues, told: Told, clock: VirtualClock) -> None:
    """Hold a queue against what was told; the step after it may have happened or not."""
    ready = [item.key for item in await queue.claim("q", lease_s=LEASE_S, limit=100)]
    dead = [letter.key for letter in await queue.dead_letters("q")]
    assert not set(ready) & set(told.done), "what was done is given out again"
    # Who was told that both are held may be about to give c back: that step may have happened.
    given_back = {"c"} if told.held.keys() == {"b", "c"} else set()
    twice = set(ready) & (set(told.held) - given_back)
    assert not twice, "an item is given to two at the same time"
    first = [key for key in ready if key != "c"]  # c may have come back later, and is first then
    assert first == sorted(first), "the order is lost"
    clock.advance(3 * LEASE_S)
    late = [item.key for item in await queue.claim("q", lease_s=LEASE_S, limit=100)]
    dead += [letter.key for letter in await queue.dead_letters("q")]
    assert not set(late) & set(told.done)
    known = {*told.put} - {*told.done}
    # The step under way was not told: its acknowledgement may have been durable all the same.
    assert known - {*late} - {*dead} <= {"a", "b", "c"}
    if told.done or len(told.put) < 4:
        assert known - {*late} - {*dead} <= {*told.held}
    if told.published:
        found = await queue.topics.read("t", "s", limit=9)
        assert [item.key for item in found.items] == told.published[1:]


async def main(folder: Path, server: str) -> None:
    """Run every step and tell of each."""
    told = Told()
    async with opened(folder, server, VirtualClock()) as queue:
        for number, step in enumerate(steps(queue, told)):
            await step()
            sys.stdout.write(json.dumps({"step": number, **vars(told)}) + "\n")
            sys.stdout.flush()
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), "" if sys.argv[2] == "-" else sys.argv[2]))
