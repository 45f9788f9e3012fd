"""A life of a queue in steps, each reported when it is acknowledged; a process that a test kills.

`python -m tests.hub.queues.steps FOLDER SERVER` (SERVER `-`: none) runs a step for each line it
reads, and prints a line of JSON when the step is done. What was printed must hold after the
process, or the server, was killed at any moment. A step that was allowed and not printed may have
happened or not; `check` knows what one such step can change, so at most one may be allowed.
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
from atoll.hub.queues import sqlite
from atoll.hub.queues.queues import Queues
from atoll.hub.stores import open_queues
from atoll.wire.messages import QueueEntry, QueueOptions

LEASE_S = 100.0
OPTIONS = QueueOptions(max_attempts=2)


@dataclass
class Reported:
    """What was acknowledged so far."""

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


def steps(queue: Queues, reported: Reported) -> list[Callable[[], Awaitable[None]]]:
    """Return the steps in their order."""

    async def put(*keys: str) -> None:
        await queue.put_many("q", [QueueEntry(key, key.encode()) for key in keys])
        reported.put += keys

    async def claim(limit: int) -> None:
        for item in await queue.claim("q", lease_s=LEASE_S, limit=limit):
            reported.held[item.key] = item.lease

    async def ack(*keys: str) -> None:
        assert await queue.ack_many("q", [reported.held[key] for key in keys]) == []
        for key in keys:
            del reported.held[key]
        reported.done += keys

    async def release(key: str) -> None:
        await queue.release("q", lease=reported.held.pop(key), reason="no")

    async def extend(key: str) -> None:
        await queue.extend("q", lease=reported.held[key], lease_s=2 * LEASE_S)

    async def die(key: str) -> None:
        await claim(1)
        assert key in reported.held
        await release(key)
        reported.dead.append(key)

    async def revive(key: str) -> None:
        assert await queue.requeue("q") == 1
        reported.dead.remove(key)

    async def publish(*keys: str) -> None:
        done = await queue.topics.publish("t", [QueueEntry(key) for key in keys])
        reported.published += keys
        await queue.topics.read("t", "s", limit=0, start="oldest")
        await queue.topics.ack("t", "s", seq=done.seqs[0])
        reported.position = done.seqs[0]

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


ACKNOWLEDGED = {4: {"a"}, 12: {"b", "c"}}
"""Step -> what it makes done."""

CLAIMED = {2: {"a", "b"}, 6: {"c"}, 8: {"c"}, 11: {"c", "d"}}
"""Step -> what it leases."""


async def check(
    queue: Queues, reported: Reported, clock: VirtualClock, *, next_step: int = -1
) -> None:
    """Hold a queue against what was reported.

    Args:
        queue: Opened again after the process was killed, or the same one if the server was.
        reported: What was acknowledged.
        clock: Of the queue.
        next_step: The step that may have happened without a word of it; -1: none.
    """
    ready = [item.key for item in await queue.claim("q", lease_s=LEASE_S, limit=100)]
    dead = [letter.key for letter in await queue.dead_letters("q")]
    assert not set(ready) & set(reported.done), "what was done is given out again"
    # With b and c held, the next step gives c back; it may have happened.
    given_back = {"c"} if reported.held.keys() == {"b", "c"} else set()
    twice = set(ready) & (set(reported.held) - given_back)
    assert not twice, "an item is given to two at the same time"
    first = [key for key in ready if key != "c"]  # c may have come back later, and is first then
    assert first == sorted(first), "the order is lost"
    clock.advance(3 * LEASE_S)
    late = [item.key for item in await queue.claim("q", lease_s=LEASE_S, limit=100)]
    dead += [letter.key for letter in await queue.dead_letters("q")]
    assert not set(late) & set(reported.done)
    missing = {*reported.put} - {*reported.done} - {*late} - {*dead}
    may_miss = ACKNOWLEDGED.get(next_step, set())
    if next_step >= 0 and not queue.backend("q").capabilities.remembers_claims:
        # The server's clock ends these leases, and it is real. They are held all the same.
        may_miss = may_miss | CLAIMED.get(next_step, set()) | {*reported.held}
        held = [lease for key, lease in reported.held.items() if key in missing]
        assert await queue.ack_many("q", held) == [], "a lease was lost with the hub"
    assert missing <= may_miss, "an item was lost"
    if reported.published:
        found = await queue.topics.read("t", "s", limit=9)
        assert [item.key for item in found.items] == reported.published[1:]


async def main(folder: Path, server: str) -> None:
    """Run every step and tell of each."""
    reported = Reported()
    async with opened(folder, server, VirtualClock()) as queue:
        for number, step in enumerate(steps(queue, reported)):
            if not sys.stdin.readline():
                break
            await step()
            sys.stdout.write(json.dumps({"step": number, **vars(reported)}) + "\n")
            sys.stdout.flush()
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), "" if sys.argv[2] == "-" else sys.argv[2]))
