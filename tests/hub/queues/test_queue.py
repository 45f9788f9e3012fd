"""Queues in SQLite keep the contract, also through kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.hub.db.database import Database
from atoll.hub.queues import sqlite
from atoll.hub.queues.backend import DONE_KEPT_S
from atoll.hub.queues.queues import QueueDepth, Queues
from atoll.hub.queues.sqlite import SqliteBackend
from atoll.hub.queues.sqlite_sql import OF_LEASES
from atoll.hub.queues.state import RATE_S
from tests.contracts.queue_base import LEASE_S, run
from tests.contracts.queue_limits_suite import LimitsContract
from tests.contracts.queue_suite import QueueContract
from tests.contracts.topic_suite import TopicContract
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


class TestSqliteQueue(QueueContract, LimitsContract, TopicContract):
    durable = True

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Queues]:
        database = Database(self.folder / "hub.sqlite", schemas=[sqlite.SCHEMA])
        try:
            yield Queues(SqliteBackend(database, clock=self.clock), clock=self.clock)
        finally:
            database.close()

    def test_everything_is_there_after_reopening(self) -> None:
        async def first_life() -> str:
            async with self.open() as queue:
                for key in "abc":
                    await queue.put("q", key=key, payload=key.encode())
                a, b = await queue.claim("q", lease_s=LEASE_S, limit=2)
                await queue.ack("q", lease=a.lease)
                return b.lease

        async def second_life(lease: str) -> None:
            async with self.open() as queue:
                assert await queue.depths() == {"q": QueueDepth(ready=1, leased=1)}
                assert (await queue.put("q", key="a", payload=b"")).duplicate
                await queue.ack("q", lease=lease)
                (item,) = await queue.claim("q", lease_s=LEASE_S, limit=10)
                assert item.key == "c"

        run(second_life(run(first_life())))

    def test_keys_of_done_items_are_forgotten_in_the_end(self) -> None:
        async def work() -> None:
            async with self.open() as queue:
                await queue.put("q", key="a", payload=b"")
                (item,) = await queue.claim("q", lease_s=LEASE_S)
                await queue.ack("q", lease=item.lease)
                self.clock.advance(DONE_KEPT_S + 1)
                await queue.expire()
                assert not (await queue.put("q", key="a", payload=b"")).duplicate

        run(work())

    def test_an_emptied_queue_is_shown_while_it_has_a_rate(self) -> None:
        async def work() -> None:
            async with self.open() as queue:
                await queue.put("q", key="a", payload=b"")
                (item,) = await queue.claim("q", lease_s=LEASE_S)
                await queue.ack("q", lease=item.lease)
                await queue.expire()
                assert [row["queue"] for row in await queue.rows()] == ["q"]
                self.clock.advance(RATE_S + 1)
                await queue.expire()
                assert await queue.rows() == []

        run(work())


PRODUCER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from atoll.clock import VirtualClock
    from atoll.hub.queues import sqlite as queue_sqlite
    from atoll.hub.db.database import Database
    from atoll.hub.queues.queues import Queues
    from atoll.hub.queues.sqlite import SqliteBackend

    async def main(path):
        clock, database = VirtualClock(), Database(path, schemas=[queue_sqlite.SCHEMA])
        queue = Queues(SqliteBackend(database, clock=clock), clock=clock)
        async def producer(name):
            for n in range(1_000_000):
                key = f"{name}-{n}"
                await queue.put("q", key=key, payload=key.encode())
                print("put", key, flush=True)
        async def consumer():
            while True:
                for item in await queue.claim("q", lease_s=10.0, limit=3, wait_s=5.0):
                    print("claimed", item.key, flush=True)
                    if not item.key.endswith("3"):
                        await queue.ack("q", lease=item.lease)
                        print("acked", item.key, flush=True)
        await asyncio.gather(*(producer(name) for name in "abcd"), consumer())

    asyncio.run(main(Path(sys.argv[1])))
    """
)


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
def test_sigkill_keeps_acknowledged_and_revives_no_done(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    seen: dict[str, set[str]] = {"put": set(), "claimed": set(), "acked": set()}
    for _ in range(2):  # twice: the second life starts from what a kill left
        with subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = 0
            for line in process.stdout:
                if not line.endswith("\n"):  # the kill cut it short
                    continue
                verb, key = line.split()
                seen[verb].add(key)
                lines += 1
                if lines == 300:
                    process.send_signal(signal.SIGKILL)
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert lines >= 300

    async def look() -> None:
        clock = VirtualClock()
        database = Database(path, schemas=[sqlite.SCHEMA])
        queue = Queues(SqliteBackend(database, clock=clock), clock=clock)
        try:
            before = (await queue.depths())["q"]
            assert before.leased > 0
            clock.advance(11.0)
            assert await queue.expire() == before.leased
            back: dict[str, int] = {}
            while items := await queue.claim("q", lease_s=1000.0, limit=1000):
                back |= {item.key: item.attempt for item in items}
            dead = {letter.key for letter in await queue.dead_letters("q", limit=10_000)}
            assert seen["put"] - seen["acked"] - _unknown(seen) <= set(back) | dead
            assert not seen["acked"] & (set(back) | dead)
            assert all(back[key] >= 2 for key in seen["claimed"] - seen["acked"] if key in back)
        finally:
            database.close()

    run(look())


def _unknown(seen: dict[str, set[str]]) -> set[str]:
    """Return keys whose ack may have been durable although the kill cut the word of it off."""
    return {key for key in seen["claimed"] - seen["acked"] if not key.endswith("3")}


def test_acknowledgements_look_at_their_own_items_only(tmp_path: Path) -> None:
    database = Database(tmp_path / "hub.sqlite", schemas=[sqlite.SCHEMA])
    try:
        SqliteBackend(database, clock=VirtualClock())
        plan = database.read_now(
            lambda c: c.execute(f"EXPLAIN QUERY PLAN {OF_LEASES}", ("q", "[1]")).fetchall()
        )
    finally:
        database.close()
    assert "PRIMARY KEY" in plan[0][3]
