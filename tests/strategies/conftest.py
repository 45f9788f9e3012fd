"""A real hub whose members train by strategies, over both routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from atoll.hub.rounds import service
from atoll.hub.server import HubServer
from atoll.rounds import timing
from tests.group.hub_world import HubWorld, NodeInName, start_hub
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
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds wait for a member that is slow or silent; one that is killed is lost at once."""
    monkeypatch.setattr(timing, "MIN_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(service, "SILENT_S", PATIENCE_S)


@pytest.fixture
def world(node: NodeInName) -> Iterator[Callable[..., HubWorld]]:
    worlds: list[HubWorld] = []

    def make(n: int, *, route: str) -> HubWorld:
        worlds.append(HubWorld(node, n, route=route))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()
