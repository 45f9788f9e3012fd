"""Two islands of two machines each: fsdp inside, DiLoCo between; machines die or are cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.net.http.client import HubClient
from bench.netlab.lab import Lab
from tests.e2e.conftest import Atoll, shared_cache, ticket_of, until
from tests.e2e.test_islands import START_S, contributors, islands, kinds, ranks, stop
from tests.e2e.test_two_machines import HUB, TwoMachines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NODES = 4

ASKED = """
import json, sys
from atoll.cli.hub_access import find
with find().client() as client:
    for line in sys.stdin:
        name, words, options = json.loads(line)
        print(json.dumps(getattr(client, name)(*words, **options)), flush=True)
"""


def placed(client: HubClient, job: str) -> dict[str, str]:
    """Return the node of every process of a job, by its name."""
    view: dict[str, Any] = client.job(job)
    return {one["member"]: one["node"] for one in [*view["members"], *view["followers"]]}


def begun(client: HubClient, atoll: Atoll, job: Path, *, nodes: int) -> str:
    """Start a job on so many nodes; return its name when both islands have trained together."""
    until(lambda: len(client.nodes()) == nodes, timeout_s=START_S)
    name = client.submit(job.read_text())
    until(lambda: ["w0", "w1"] in contributors(client, name, since=-1), timeout_s=START_S)
    where = placed(client, name)
    assert sorted(where) == ["w0", "w0.1", "w1", "w1.1"]
    assert len(set(where.values())) == 4, "every machine of an island is one of its own"
    assert sorted(ranks(atoll, "w1")) == [0, 1]
    return name


def lose(client: HubClient, job: str, do: Callable[[], None], back: Callable[[], None]) -> None:
    """Lose a machine of w1: w0 goes on alone; then w1 is back with the common state."""
    before, seen = kinds(client, job).count("recovered"), client.rounds(job)["last"]
    do()
    until(lambda: ["w0"] in contributors(client, job, since=seen), timeout_s=START_S)
    until(lambda: said(client, job, "a machine of an island is gone; given: w1.1 on"))
    back()  # not before: a machine that is away for less than 15 s is not missed
    until(lambda: kinds(client, job).count("recovered") > before, timeout_s=START_S)
    seen = client.rounds(job)["last"]
    until(lambda: ["w0", "w1"] in contributors(client, job, since=seen), timeout_s=START_S)


def said(client: HubClient, job: str, words: str) -> bool:
    """Return whether a process of a job has printed these words."""
    return any(words in line["text"] for line in client.logs(job)["lines"])


def ends_equal(client: HubClient, atoll: Atoll, job: str) -> None:
    results = stop(client, job)
    until(lambda: not atoll.workers())
    assert len(results) == 2
    assert len({result["digest"] for result in results}) == 1
    assert len({result["digests"] for result in results}) == 1


def test_island_replaces_a_dead_follower_machine(atoll: Atoll) -> None:
    job = islands(atoll, every=20, machines="2")
    hub = atoll.hub()
    ticket = ticket_of(hub)
    nodes = {name: atoll.join(ticket, name=name) for name in ("n0", "n1", "n2", "n3", "spare")}
    with hub.client() as client:
        name = begun(client, atoll, job, nodes=NODES + 1)
        dead = placed(client, name)["w1.1"]
        lose(client, name, nodes[dead].popen.kill, lambda: None)
        after = placed(client, name)
        assert sorted(after) == ["w0", "w0.1", "w1", "w1.1"]
        assert set(after.values()) == set(nodes) - {dead}
        ends_equal(client, atoll, name)


class Hosts(TwoMachines):
    """A hub and a node on the first host of a network lab, a node on each of the others."""

    def gather(self) -> None:
        hub = self.on(HUB, "hub", "--port", "7700", "--advertise", "h0")
        assert hub.popen.stdout is not None
        ticket = ""
        while not ticket:
            line = hub.popen.stdout.readline()
            assert line, hub.wait().both
            ticket = next((word for word in line.split() if word.startswith("atoll://h0:")), "")
        for host in range(NODES):
            self.on(host, "join", ticket, "--name", f"n{host}")

    def client(self) -> HubClient:
        """Return what asks the hub, from its own host, as a client here would."""
        return cast(HubClient, Asking(self))


class Asking:
    """Calls the methods of a client of the hub on another host."""

    def __init__(self, hosts: Hosts) -> None:
        self._popen = hosts.lab.popen(
            HUB,
            [sys.executable, "-c", ASKED],
            cwd=hosts.folder,
            env=hosts.environment(hosts.folder / f"home{HUB}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        hosts.started.append(self._popen)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            assert self._popen.stdin is not None
            assert self._popen.stdout is not None
            self._popen.stdin.write(json.dumps([name, words, options]) + "\n")
            self._popen.stdin.flush()
            return json.loads(self._popen.stdout.readline())

        return call


@pytest.fixture
def hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=NODES, rate="1gbit", rtt="0.5ms") as lab:
        made = Hosts(tmp_path, lab, cache=shared_cache(tmp_path_factory))
        try:
            yield made
        finally:
            made.end()


@pytest.mark.netlab
def test_island_forms_anew_after_its_cable_is_pulled(
    hosts: Hosts,
) -> None:
    job = islands(hosts, every=20, machines="2")
    hosts.gather()
    client = hosts.client()
    name = begun(client, hosts, job, nodes=NODES)
    for process in ranks(hosts, "w1").values():
        assert process.environ()["GLOO_SOCKET_IFNAME"] == "eth0"
    cut = int(placed(client, name)["w1.1"].removeprefix("n"))
    lose(client, name, lambda: hosts.lab.cut(cut), lambda: hosts.lab.heal(cut))
    ends_equal(client, hosts, name)
