"""Real processes that are killed, frozen, cut off and slowed down, one after the other, in one job.

What the simulation proves of the rules, this shows of sockets, files and signals: after every fault
all members meet again, no round is committed twice or left out, and the replicas are equal.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.cli.hub_access import KnownHub, find
from atoll.net.http.client import HubClient
from bench.kit.ports import free_port
from tests.e2e.conftest import ENDLESS, Atoll, Running, shared_cache, ticket_of, until
from tests.group.proxy import Proxy
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

MEMBERS = 3
FROZEN_S = 2.0


class HostLine(Proxy):
    """One host's way to the hub; it stays when the hub does not answer."""

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            self.pass_on(near, far)

    def pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._open += [near, far]
        for source, target, down in ((near, far, False), (far, near, True)):
            threading.Thread(
                target=self._pump, args=(source, target), kwargs={"down": down}, daemon=True
            ).start()


class Cluster:
    """A hub and three hosts, each behind a line of its own."""

    def __init__(self, folder: Path, *, cache: Path) -> None:
        self.atoll = Atoll(folder, cache=cache)
        self.port = free_port()
        self.hub_process = self.start_hub()
        until(lambda: (self.atoll.home / "hubs.json").exists())
        self.hub: KnownHub = find(home=self.atoll.home)
        self.ticket = ticket_of(self.hub)
        self.lines = [HostLine(self.port) for _ in range(MEMBERS)]
        self.agents = [self.start_agent(index) for index in range(MEMBERS)]
        self.client: HubClient = self.hub.client()
        self.job = ""
        self.told = 0

    def start_hub(self) -> Running:
        return self.atoll.start("hub", "--host", "127.0.0.1", "--port", str(self.port))

    def start_agent(self, index: int) -> Running:
        own = self.lines[index].url.rpartition(":")[2]
        ticket = self.ticket.replace(f":{self.port}/", f":{own}/")
        assert ticket != self.ticket
        return self.atoll.join(ticket, name=f"host{index}")

    def end(self) -> None:
        self.client.close()
        self.atoll.end()
        for line in self.lines:
            line.close()

    # ------------------------------------------------------------------------ looking

    def ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer, or nothing while the hub is away."""
        with contextlib.suppress(Exception):
            return question()
        return None

    def committed(self) -> list[dict[str, Any]]:
        told = self.ask(lambda: self.client.rounds(self.job, after=self.told))
        return [row for row in told["rounds"] if row["committed"]] if told else []

    def look_ahead(self) -> None:
        """Count only rounds that are planned from now on."""
        told = until(lambda: self.ask(lambda: self.client.rounds(self.job, after=self.told)))
        self.told = max([self.told, *(row["epoch"] for row in told["rounds"])])

    def wait_for_rounds(self, count: int, *, members: int = 1) -> None:
        """Wait for so many more committed rounds with at least so many contributors."""
        self.look_ahead()
        until(
            lambda: sum(len(r["contributors"]) >= members for r in self.committed()) >= count,
            timeout_s=PATIENCE_S,
        )

    def wait_for_round_without(self, member: str) -> None:
        self.look_ahead()
        until(
            lambda: any(member not in r["contributors"] for r in self.committed()),
            timeout_s=PATIENCE_S,
        )

    def view(self, member: str) -> dict[str, Any]:
        found = self.ask(lambda: self.client.job(self.job)["members"]) or []
        return next((view for view in found if view["member"] == member), {})

    def host_of(self, member: str) -> int:
        node = str(until(lambda: self.view(member))["node"])
        return next(i for i in range(MEMBERS) if node.startswith(f"host{i}"))

    def worker(self, member: str) -> psutil.Process:
        def look() -> psutil.Process | None:
            for process in self.atoll.workers():
                with contextlib.suppress(psutil.Error):
                    same = process.environ().get("ATOLL_JOB") in (None, self.job)
                    if same and process.environ()["ATOLL_MEMBER"] == member:
                        return process
            return None

        found: psutil.Process = until(look)
        return found

    def reducer(self) -> psutil.Process:
        found: psutil.Process = until(
            lambda: next((p for p in self.atoll.processes() if "atoll.reducer" in _words(p)), None)
        )
        return found

    # ----------------------------------------------------------------------- the faults

    def freeze_worker(self) -> None:
        with frozen(self.worker("w2")):
            self.wait_for_round_without("w2")

    def cut_worker(self) -> None:
        line = self.lines[self.host_of("w0")]
        line.cut_after(1)
        until(line.was_cut.is_set)

    def slow_line(self) -> None:
        line = self.lines[self.host_of("w1")]
        line.down_bps = 1e6
        self.wait_for_rounds(2)
        line.down_bps = 0.0

    def kill_donor(self) -> None:
        """Kill a second member while the first one's successor takes over the state."""
        attempt = self.view("w2").get("attempt", 1)
        self.worker("w2").kill()
        until(
            lambda: (v := self.view("w2")).get("attempt", 0) > attempt and v["connected"],
            timeout_s=PATIENCE_S,
        )
        self.worker("w0").kill()

    def kill_reducer(self) -> None:
        self.reducer().kill()

    def freeze_reducer(self) -> None:
        with frozen(self.reducer()):
            time.sleep(FROZEN_S)  # the length of the break is what is tested

    def freeze_hub(self) -> None:
        with frozen(psutil.Process(self.hub_process.popen.pid)):
            time.sleep(FROZEN_S)

    def kill_hub(self) -> None:
        self.hub_process.interrupt(signal.SIGKILL)
        self.hub_process.popen.wait()
        self.hub_process = self.start_hub()

    def freeze_agent(self) -> None:
        with frozen(psutil.Process(self.agents[0].popen.pid)):
            self.wait_for_rounds(2)

    def kill_agent(self) -> None:
        self.agents[1].interrupt(signal.SIGKILL)
        self.agents[1].popen.wait()
        self.agents[1] = self.start_agent(1)


RELAY = (
    "freeze_worker", "cut_worker", "slow_line", "kill_reducer", "freeze_reducer",
    "freeze_hub", "kill_hub", "freeze_agent", "kill_agent", "kill_donor",
)  # fmt: skip
DIRECT = ("cut_worker", "kill_hub", "kill_donor")
"""What the route changes; silence on it is in tests/group/test_lost_processes.py."""


@contextlib.contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Stop a process as SIGSTOP does, and let it go on."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("faults"), cache=shared_cache(tmp_path_factory))
    yield made
    made.end()


@pytest.mark.long("tests/faults/test_matrix.py::test_no_promise_is_broken_wherever_it_strikes")
@pytest.mark.parametrize(("route", "faults"), [("relay", RELAY), ("direct", DIRECT)])
def test_members_meet_again_after_every_fault_and_end_equal(
    cluster: Cluster, route: str, faults: tuple[str, ...]
) -> None:
    nodes = str(MEMBERS)
    spec = cluster.atoll.job(steps=ENDLESS, every=20, paced=True, route=f'"{route}"', nodes=nodes)
    cluster.job, cluster.told = cluster.client.submit(spec.read_text()), 0
    cluster.wait_for_rounds(3, members=MEMBERS)
    for fault in faults:
        getattr(cluster, fault)()
        try:
            cluster.wait_for_rounds(2, members=MEMBERS)
        except AssertionError:
            events = cluster.client.events(cluster.job)["events"][-12:]
            texts = "\n".join(f"{event['kind']}: {event['text']}" for event in events)
            pytest.fail(f"{route}: the members did not meet again after {fault}:\n{texts}")
    cluster.client.stop(cluster.job, grace_s=PATIENCE_S)
    view: dict[str, Any] = until(
        lambda: (v := cluster.client.job(cluster.job))["state"] != "running" and v,
        timeout_s=PATIENCE_S,
    )
    assert view["state"] in ("stopped", "done"), view["reason"]
    check(cluster, view)


def check(cluster: Cluster, view: dict[str, Any]) -> None:
    """No round twice, none left out, no alarm, and one digest."""
    digests = {m["member"]: m["result"]["digest"] for m in view["members"] if m.get("result")}
    # Who just takes over the state when all others have finished is ended without a result.
    ended = [m["member"] for m in view["members"] if m["state"] == "stopped"]
    assert len(digests) >= 2, view["members"]
    assert len({*digests, *ended}) == MEMBERS, view["members"]
    assert len(set(digests.values())) == 1, digests
    rows, after = [], 0
    while more := cluster.client.rounds(cluster.job, after=after)["rounds"]:
        rows += more
        after = max(row["epoch"] for row in more)
    rounds = [row["round"] for row in rows if row["committed"]]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))
    events = cluster.client.events(cluster.job)["events"]
    alarms = [e["text"] for e in events if e["kind"].startswith("alarm")]
    assert not alarms, alarms
