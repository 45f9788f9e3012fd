from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.api import HubClient
from atoll.net.sync_link import connect
from atoll.queues import AloneChannel, Channel, HubChannel, Shelf


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@contextlib.contextmanager
def channel_to(hub: HubServer, session: str, scratch: Path) -> Iterator[Channel]:
    """Open a session with the operator's token, which may use any queue."""
    token = hub.operator_token
    with connect(hub.url, session=session, token=token) as link:
        channel = HubChannel(link, client=lambda: HubClient(hub.url, token), scratch=scratch)
        try:
            yield channel
        finally:
            channel.close()


@pytest.fixture(params=["alone", "hub"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """Queues without and with a hub: both have to do the same."""
    with contextlib.ExitStack() as stack:
        channel: Channel = AloneChannel()
        if request.param == "hub":
            hub = request.getfixturevalue("hub")
            channel = stack.enter_context(channel_to(hub, "job/w0", tmp_path))
        name = request.node.name.replace("[", "-").replace("]", "")[:60]
        yield Shelf(channel, prefix=f"job/{name}", reader="w0")
