from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def ticket(hub: HubServer) -> str:
    """A program's ticket, for one use."""
    with HubClient(hub.url, hub.operator_token) as client:
        return client.create_ticket(role="program", uses=1, valid_s=3600.0, name="", quotas={})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
