"""Two islands of two machines each: fsdp inside, DiLoCo between; machines die or are cut off."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.net.http.client import HubClient
from atoll.netlab.lab import Lab
from atoll.node.launchers import landlock
from atoll.plan.pipelines import PLANS_FILE, read_plans, write_plans
from tests.e2e.conftest import Atoll, shared_cache, ticket_of, until, wait_for
from tests.e2e.test_islands import (
    START_S,
    await_rounds,
    contributors,
    islands,
    kinds,
    plan_of,
    ranks,
    stop,
)
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


@pytest.mark.long(
    "tests/hub/scheduler/test_follower_hosts.py"
    "::test_follower_whose_node_goes_away_is_launched_on_another"
)
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


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.long(
    "tests/node/islands/test_changing_islands.py"
    "::test_elastic_islands_are_planned_anew_with_a_new_machine"
)
def test_elastic_island_heeds_a_preemption_notice(atoll: Atoll, members: int) -> None:
    """A machine gives notice: its island goes on without it, with its state; then it is back."""
    path = islands(atoll, every=20, elastic="true", machines="2")
    text = path.read_text().replace('inner = "fsdp"', 'inner = "pipeline"')
    text = text.replace("nodes = 2", f"nodes = {members}").replace("every = 5", "every = 1")
    hub, member = atoll.hub(), f"w{members - 1}"
    ticket = ticket_of(hub)
    notices = {f"n{n}": atoll.folder / f"n{n}-notice" for n in range(2 * members)}
    for node, notice in notices.items():
        home = atoll.folder / node
        atoll.start("join", ticket, "--name", node, "--preempt-file", str(notice), home=home)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2 * members, timeout_s=START_S)
        name = client.submit(text)
        until(lambda: kinds(client, name).count("checkpoint") > 0, timeout_s=2 * START_S)
        until(lambda: ranks(atoll, member), timeout_s=START_S)
        where = placed(client, name)
        leader = atoll.folder / where[member]
        (plans,) = leader.rglob(PLANS_FILE)
        assert set(read_plans(plans.parent)) == {1, 2}
        write_plans({2: plan_of(stages=2), 1: plan_of(stages=1)}, plans.parent)
        ranks(atoll, member)[0].kill()  # what was fastest may not have needed the second machine
        until(lambda: sorted(ranks(atoll, member)) == [0, 1], timeout_s=START_S)
        await_all(client, name, members)
        before, led = kinds(client, name), ranks(atoll, member)[0]
        begun = time.monotonic()
        notices[where[f"{member}.1"]].touch()
        until(lambda: sorted(ranks(atoll, member)) == [0], timeout_s=START_S)
        await_all(client, name, members)
        print(f"notice: {time.monotonic() - begun:.1f} s to the third round without the machine")
        assert ranks(atoll, member)[0].pid == led.pid, "rank 0 keeps its process, and its state"
        notices[where[f"{member}.1"]].unlink()
        until(lambda: sorted(ranks(atoll, member)) == [0, 1], timeout_s=START_S)
        # Rank 0 trains on while the other one loads.
        until(
            lambda: kinds(client, name)[len(before) :].count("morphed") == 2, timeout_s=2 * START_S
        )
        await_all(client, name, members)
        assert ranks(atoll, member)[0].pid == led.pid
        since = kinds(client, name)[len(before) :]
        assert "member-failed" not in since, "nobody was lost"
        assert "alarm:rewound" not in since, "no round is done again"
        results = stop(client, name)
        assert len({result["digest"] for result in results}) == 1
        until(lambda: not atoll.workers())


@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
@pytest.mark.long(
    "tests/node/launchers/test_sandbox.py::test_a_program_sees_its_own_and_nothing_else"
)
def test_islands_train_on_sandboxed_machines(atoll: Atoll) -> None:
    """By the direct route between them."""
    hub = atoll.hub()
    ticket = ticket_of(hub)
    job = islands(atoll, every=5)
    text = job.read_text().replace("steps = 1000000", "steps = 30")
    for name in ("n0", "n1"):
        words = ["--name", name, "--sandbox", "on", "--readable", str(atoll.folder)]
        words += ["--network", "open"]
        atoll.start("join", ticket, *words, home=atoll.folder.parent / name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
        until(lambda: str(client.nodes()).count("a sandbox for processes of jobs") == 2)
        name = client.submit(text)
        view = wait_for(client, name, "done", "failed")
        assert view["state"] == "done", (view["error"], client.logs(name))
        assert len({member["result"]["digest"] for member in view["members"]}) == 1


def await_all(client: HubClient, job: str, members: int) -> None:
    """Wait for three more rounds, the last of them of all members."""
    await_rounds(client, job, since=client.rounds(job)["last"])
    seen = client.rounds(job)["last"]
    everyone = [f"w{n}" for n in range(members)]
    until(lambda: everyone in contributors(client, job, since=seen), timeout_s=2 * START_S)


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
@pytest.mark.long(
    "tests/node/islands/test_followers.py::test_a_killed_process_ends_all_ranks_and_they_start_anew"
)
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
