"""A hub for all tests of a module, and a job of four members for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.hub_world import NodeInName
from tests.patience import PATIENCE_S
from tests.recovery.world import World, members_on, node_of_a_hub

FOR_EVER_S = 10 * PATIENCE_S

LIMITS = (
    "chunk_scheduler.CLAIM_S", "direct_source.DIAL_S", "direct_source.SILENT_S",
    "direct_source.SLOW_S", "donor_session.BEHIND_S", "fetch.COMPARE_S", "http_server.FIRST_HEAD_S",
    "relay_source.SILENT_S",
)  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nobody up who is slow on a busy machine; tests in which somebody is have own limits."""
    for limit in LIMITS:
        monkeypatch.setattr(f"atoll.recovery.{limit}", FOR_EVER_S)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    with node_of_a_hub(tmp_path_factory.mktemp("hub")) as node:
        yield node


@pytest.fixture
def world(node: NodeInName) -> Iterator[World]:
    with members_on(node, nodes=4) as world:
        yield world
