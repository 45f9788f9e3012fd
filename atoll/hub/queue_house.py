"""Which backend a hub's queues have: its own database, or beside it a NATS server."""

from __future__ import annotations

from atoll.clock import Clock
from atoll.hub.database import Database
from atoll.hub.queue import Queues
from atoll.hub.queue_backend import Holds
from atoll.hub.queue_sqlite import SqliteBackend


def open_queues(
    database: Database, *, clock: Clock, blobs: Holds | None = None, server: str = ""
) -> Queues:
    """Return the queues of a hub; commands to machines (`node/...`) never leave its database.

    Args:
        database: Of the hub.
        clock: Whence leases are told.
        blobs: Where large payloads are.
        server: `nats://HOST:PORT[/NAMESPACE]` for users' queues; empty: in the database, too.

    Raises:
        ConfigError: that is no such address.
    """
    own = SqliteBackend(database, clock=clock, blobs=blobs)
    if not server:
        return Queues(own, clock=clock, blobs=blobs)
    from atoll.hub.nats_store import NatsStore
    from atoll.hub.queue_nats import NatsBackend

    there = NatsBackend(NatsStore(server), database, beside=own, clock=clock, blobs=blobs)
    return Queues(there, clock=clock, blobs=blobs, internal=own)
