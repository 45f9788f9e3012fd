"""A real hub for groups, and no limits that hurry on members whom a busy machine delays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.group.routes import direct
from atoll.hub.rounds import service
from atoll.hub.server import HubServer
from atoll.net import member_tls
from atoll.rounds import timing
from tests.group.hub_world import NodeInName, start_hub
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with start_hub(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(scope="module")
def node(hub: HubServer) -> Iterator[NodeInName]:
    node = NodeInName(hub)
    yield node
    node.link.close()


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds wait for members that are late, silent or cut off, and members for each other.

    One whose session has ended, e.g. because it was killed, is lost at once all the same.
    """
    for name in ("MIN_GRACE_S", "MIN_TIMEOUT_S", "BROKEN_S", "MAX_BROKEN_S"):
        monkeypatch.setattr(timing, name, PATIENCE_S)
    monkeypatch.setattr(service, "SILENT_S", PATIENCE_S)
    for name in ("FIRST_CONNECT_S", "CONNECT_FLOOR_S"):
        monkeypatch.setattr(direct, name, PATIENCE_S)
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", PATIENCE_S)
