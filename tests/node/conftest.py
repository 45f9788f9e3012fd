"""A real hub, and a machine that prepares processes for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from tests.node.agent.preparing_machine import Machine


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)
