"""A hub for all tests of a module, and a job of four members for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.hub_world import NodeInName
from tests.recovery.world import World, members_on, node_of_a_hub


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    with node_of_a_hub(tmp_path_factory.mktemp("hub")) as node:
        yield node


@pytest.fixture
def world(node: NodeInName) -> Iterator[World]:
    with members_on(node, nodes=4) as world:
        yield world
