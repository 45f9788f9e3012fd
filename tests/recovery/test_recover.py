"""A member takes over the state of others that live, die, lie and move on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group.hub_world import NodeInName, start_hub
from tests.recovery.world import World, assert_same


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    folder: Path = tmp_path_factory.mktemp("hub")
    with start_hub(folder) as hub:
        node = NodeInName(hub)
        yield node
        node.link.close()


@pytest.fixture()
def world(node: NodeInName) -> Iterator[World]:
    world = World(node, nodes=4)
    yield world
    world.close()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_the_state_comes_whole_from_several_sources(world: World, direct: bool) -> None:
    models = [world.donor(f"w{slot}", direct=direct, numel=1_500_000) for slot in range(3)]
    found = world.recover()
    assert_same(found.shared, models[0].shared())
    assert found.inner is not None
    assert any(found.inner.tensors["a"].equal(m.inner().tensors["a"]) for m in models)
    assert (found.round, found.base) == (3, "base-3")
    assert len(found.sources) >= 2
    assert world.events == []
