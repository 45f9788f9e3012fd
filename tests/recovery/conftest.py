"""A hub for all tests of a module, and a job of four members for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.hub_world import NodeInName, start_hub
from tests.recovery.world import World, threads_end


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    with start_hub(tmp_path_factory.mktemp("hub")) as hub:
        node = NodeInName(hub)
        yield node
        node.link.close()


@pytest.fixture
def world(node: NodeInName) -> Iterator[World]:
    world = World(node, nodes=4)
    try:
        with threads_end():
            yield world
    finally:
        world.close()
