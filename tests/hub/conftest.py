"""A real hub and a group of members at it; files with other wishes have fixtures of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.server import HubServer
from tests.hub.alarms.notify_targets import web as web
from tests.hub.nodes.test_membership import Running, options


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def running(hub: HubServer) -> Iterator[Running]:
    group = Running(hub)
    yield group
    group.close()
