"""Actors of a Ray cluster are nodes of a hub: they join, come back after a loss, and leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.e2e.conftest import until

ray: Any = pytest.importorskip("ray", reason="pip install ray")
ours: Any = pytest.importorskip("atoll.integrations.ray")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray about itself


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_without_a_cluster_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no Ray cluster"):
        ours.Nodes("atoll://hub:1/secret", count=1)


def test_actors_join_come_back_and_leave(cluster: None, tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as hub, HubClient(hub.url, hub.operator_token) as client:
        ticket = client.create_ticket(role="node", uses=9, valid_s=600.0, name="", quotas={})

        def online() -> list[str]:
            return [str(each["node"]) for each in client.nodes() if each["state"] == "online"]

        with ours.Nodes(ticket, count=2) as nodes:
            until(lambda: len(online()) == 2)
            before = set(online())
            assert all(name.startswith("ray-") for name in before)
            ray.kill(nodes._actors[0], no_restart=False)  # as if its machine were lost
            until(lambda: len(set(online()) - before) == 1 and len(online()) == 2)
        until(lambda: not online())
        ends = nodes.wait(timeout_s=60)
        assert [status for status, _ in ends] == [0, 0]
        with pytest.raises(ConfigError, match="out of range"):
            ours.Nodes(ticket, count=0)


def test_a_wrong_ticket_ends_a_node_with_its_reason(cluster: None) -> None:
    with ours.Nodes("atoll://127.0.0.1:9/nothing", count=1) as nodes:
        ((status, lines),) = nodes.wait(timeout_s=180)
    assert status != 0
    assert any("hub" in line for line in lines)


def test_a_node_that_ended_leaves_no_ticket_behind() -> None:
    node = ours._Node("atoll://127.0.0.1:9/nothing", "one")
    folder = Path(node._folder.name)
    assert (folder / "ticket").exists()
    status, _ = node.wait()
    assert status != 0
    assert not folder.exists()
