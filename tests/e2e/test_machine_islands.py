"""Two islands of two machines each: fsdp inside, DiLoCo between; a machine dies and is replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.net.api import HubClient
from tests.e2e.conftest import Atoll, Running, ticket_of, until
from tests.e2e.test_islands import START_S, contributors, islands, kinds, ranks, stop

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def placed(client: HubClient, job: str) -> dict[str, str]:
    """Return the node of every process of a job, by its name."""
    view: dict[str, Any] = client.job(job)
    return {one["member"]: one["node"] for one in [*view["members"], *view["hands"]]}


def test_islands_of_two_machines_survive_the_death_of_one_of_them(atoll: Atoll) -> None:
    # Far more steps than are needed: it is stopped when everything was seen.
    job = islands(atoll, steps=1_000_000, every=20, machines="2")
    hub = atoll.hub()
    ticket = ticket_of(hub)
    nodes: dict[str, Running] = {}
    for number in range(5):  # one is to spare
        nodes[f"n{number}"] = atoll.join(ticket, name=f"n{number}")
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 5, timeout_s=START_S)
        name = client.submit(job.read_text())
        until(lambda: ["w0", "w1"] in contributors(client, name, since=-1), timeout_s=START_S)
        before = placed(client, name)
        assert sorted(before) == ["w0", "w0.1", "w1", "w1.1"]
        assert len(set(before.values())) == 4
        assert sorted(ranks(atoll, "w1")) == [0, 1]
        back, seen = kinds(client, name).count("recovered"), client.rounds(name)["last"]
        dead = before["w1.1"]
        nodes[dead].popen.kill()
        until(lambda: ["w0"] in contributors(client, name, since=seen), timeout_s=START_S)
        until(lambda: kinds(client, name).count("recovered") > back, timeout_s=START_S)
        seen = client.rounds(name)["last"]
        until(lambda: ["w0", "w1"] in contributors(client, name, since=seen), timeout_s=START_S)
        after = placed(client, name)
        assert sorted(after) == sorted(before)
        assert set(after.values()) == set(nodes) - {dead}
        told = [line["text"] for line in client.logs(name)["lines"]]
        assert any("a machine of an island is gone" in line for line in told)
        results = stop(client, name)
        until(lambda: not atoll.workers())
    assert len({result["digest"] for result in results}) == 1
    assert json.dumps(results[0]["digests"]) == json.dumps(results[1]["digests"])
