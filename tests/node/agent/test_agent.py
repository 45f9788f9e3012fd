"""An agent in its own process against a real hub: commands, states, lines, leaving."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from atoll.config import JobSpec, JobTable, dump_spec
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import Launch, Stop, pack_command
from tests.node.running import Node, all_lines, lines_of, submit, until, wait_for
from tests.patience import PATIENCE_S, PROMPT_S

# Longer than tests wait, so that it does not end by itself.
SLEEPER = f"print('up', flush=True)\nimport time\ntime.sleep({2 * PATIENCE_S})\n"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


@pytest.fixture
def start(hub: HubServer, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def begin(name: str = "n", *options: str, ticket: str = "") -> Node:
        nodes.append(Node(ticket or hub.ticket, tmp_path / name, "--name", name, *options))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.end()


def test_agent_runs_a_script_and_ships_every_line_once_in_order(
    client: HubClient, start: Callable[..., Node]
) -> None:
    assert start("kitchen").ready() == "kitchen"
    job = submit(client, "for i in range(3000): print('line', i)\n")
    wait_for(client, job, "done")
    lines = all_lines(client, job, last="line 2999")
    assert lines == [f"line {i}" for i in range(3000)]


def test_failing_script_shows_line_and_traceback(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start().ready()
    job = submit(client, "import os\nraise KeyError('gone')\n")
    view = wait_for(client, job, "failed")
    assert view["error"]["kind"] == "ScriptError"
    assert "KeyError" in view["error"]["what"]
    assert "line 2" in view["error"]["given"]
    until(lambda: "Traceback (most recent call last):" in lines_of(client, job))


def test_stop_ends_a_script_that_does_not_listen(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start().ready()
    job = submit(client, SLEEPER)
    until(lambda: lines_of(client, job))
    client.stop(job, grace_s=0.2)
    wait_for(client, job, "stopped")


def test_two_jobs_queue_for_one_slot(client: HubClient, start: Callable[..., Node]) -> None:
    start().ready()
    first = submit(client, "import time\ntime.sleep(0.5)\n")
    second = submit(client, "print('second')\n")
    wait_for(client, second, "done")
    assert client.job(first)["state"] == "done"


def test_slots_let_one_machine_take_several_members(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start("big", "--slots", "3").ready()
    job = submit(client, "print('hello')\n", nodes=3)
    view = wait_for(client, job, "done")
    assert {member["node"] for member in view["members"]} == {"big"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.every(2)
def test_leaving_ends_the_workers_and_exits_cleanly(
    client: HubClient, start: Callable[..., Node], number: int
) -> None:
    node = start()
    node.ready()
    job = submit(client, SLEEPER)
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    assert workers
    begun = time.monotonic()
    assert node.leave(number) == 0
    assert time.monotonic() - begun < PROMPT_S
    until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_killed_agent_leaves_no_worker_behind(
    client: HubClient, start: Callable[..., Node]
) -> None:
    node = start()
    node.ready()
    job = submit(client, SLEEPER)
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    node.popen.kill()
    until(lambda: not any(worker.is_running() for worker in workers))


def test_restarted_agent_is_the_same_node_again(
    client: HubClient, start: Callable[..., Node]
) -> None:
    first = start("n")
    name = first.ready()
    first.leave()
    assert start("n").ready() == name
    assert [node["node"] for node in client.nodes()] == [name]


def test_wrong_ticket_is_refused_in_words(hub: HubServer, start: Callable[..., Node]) -> None:
    node = start(ticket=hub.ticket.rpartition("/")[0] + "/" + "x" * 32)
    _, errors = node.popen.communicate(timeout=PATIENCE_S)
    assert node.popen.returncode == 1
    assert "ticket is unknown" in errors
    assert "what to do" in errors


def test_hub_that_is_not_there_is_named(start: Callable[..., Node]) -> None:
    node = start(ticket="atoll://127.0.0.1:9/" + "x" * 32)
    _, errors = node.popen.communicate(timeout=PATIENCE_S)
    assert node.popen.returncode == 1
    assert "127.0.0.1" in errors


# ------------------------------------------------------------- commands that come again, late

PRINTER = "import os, time\nprint('pid', os.getpid(), {}, flush=True)\ntime.sleep(600)\n"


class Commands:
    """Puts commands into a node's queue as the hub would, for a job that needs no placing."""

    def __init__(self, hub: HubServer, job: str, *, home: Path) -> None:
        self._hub, self._job = hub, job
        self._output = home / "jobs" / job / "w7" / "output.log"
        self._count = 0

    def put(self, command: Launch | Stop) -> None:
        assert self._hub.hub is not None
        self._count += 1
        queue, payload = self._hub.hub.stores.queue, pack_command(command)
        self._hub.call(queue.put("node/n", key=f"test/{self._count}", payload=payload))

    def launch(self, attempt: int, *, token: str) -> None:
        spec = dump_spec(JobSpec(job=JobTable(name="job", script="s.py")))
        script = PRINTER.format(attempt)
        self.put(Launch(self._job, "w7", 7, token, spec, files={"s.py": script}, attempt=attempt))

    def stop(self, attempt: int) -> None:
        self.put(Stop(self._job, "w7", grace_s=0.1, attempt=attempt))

    def running(self) -> dict[int, psutil.Process]:
        """Return the process of each attempt that has printed its line and lives."""
        text = self._output.read_text() if self._output.exists() else ""
        words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        found = {int(w[2]): int(w[1]) for w in words if w[:1] == ["pid"]}
        processes = {attempt: living(pid) for attempt, pid in found.items()}
        return {attempt: process for attempt, process in processes.items() if process}


def living(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@pytest.fixture
def commands(
    hub: HubServer, client: HubClient, start: Callable[..., Node], tmp_path: Path
) -> Commands:
    start("n").ready()
    waiting = submit(client, "pass", nodes=99)
    return Commands(hub, waiting, home=tmp_path / "n")


def test_launch_that_comes_again_starts_nothing(commands: Commands) -> None:
    commands.launch(1, token="one")
    first = until(lambda: commands.running().get(1))
    commands.launch(1, token="one")
    commands.launch(2, token="two")
    until(lambda: commands.running().get(2))
    assert not first.is_running()
    commands.launch(1, token="one")
    commands.stop(1)
    commands.launch(3, token="three")
    until(lambda: commands.running().get(3))
    assert list(commands.running()) == [3]


@pytest.mark.skipif(os.name != "posix", reason="SIGSTOP is a signal of POSIX")
def test_frozen_process_is_killed_before_a_newer_attempt_starts(commands: Commands) -> None:
    commands.launch(1, token="one")
    frozen = until(lambda: commands.running().get(1))
    frozen.send_signal(signal.SIGSTOP)  # it would never end
    commands.launch(2, token="two")
    until(lambda: commands.running().get(2))
    assert not frozen.is_running()


def test_stop_for_an_older_attempt_leaves_the_newer_one_alone(commands: Commands) -> None:
    commands.launch(2, token="two")
    second = until(lambda: commands.running().get(2))
    commands.stop(1)
    commands.launch(9, token="two")  # said before: only to see that the queue has been worked off
    commands.stop(2)
    until(lambda: not second.is_running())


# ----------------------------------------------------------------------- a hub that is away


def test_events_during_a_hub_outage_are_reported_later(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")
    gone = tmp_path / "hub-is-gone"
    script = (
        "import os, time\nprint('up', flush=True)\n"
        f"while not os.path.exists({str(gone)!r}): time.sleep(0.05)\n"
        "for i in range(5000): print('line', i)\n"
    )
    with HubServer(options) as hub, HubClient(hub.url, hub.operator_token) as client:
        node = Node(hub.ticket, tmp_path / "n", "--name", "n")
        node.ready()
        job = submit(client, script)
        until(lambda: lines_of(client, job))
        worker = psutil.Process(node.popen.pid).children()[0]
    try:
        gone.touch()
        until(lambda: not worker.is_running())
        again = HubOptions(data=options.data, jobs=options.jobs, port=hub.port)
        with HubServer(again) as hub, HubClient(hub.url, hub.operator_token) as client:
            wait_for(client, job, "done")
            lines = all_lines(client, job, last="line 4999")
            assert lines == ["up", *(f"line {i}" for i in range(5000))]
            assert node.leave() == 0
    finally:
        node.end()


def test_node_that_the_hub_has_forgotten_joins_again(tmp_path: Path) -> None:
    async def forget(hub: HubServer) -> None:
        assert hub.hub is not None
        await hub.hub.stores.auth.revoke_node("n", tell=False)
        hub.hub.sessions.end("n")

    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as hub:
        node = Node(hub.ticket, tmp_path / "n", "--name", "n")
        try:
            assert node.ready() == "n"
            hub.call(forget(hub))
            assert node.ready() == "n", "it used the ticket again"
        finally:
            node.end()
