"""An agent in its own process against a real hub: commands, states, lines, leaving."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.config import JobSpec, JobTable, dump_spec
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.api import HubClient


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


class Node:
    """`python -m atoll.node` as a child of the test."""

    def __init__(self, ticket: str, home: Path, *options: str) -> None:
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.node", "--no-measure"),
                *("--ticket", ticket, "--home", str(home), *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        assert self.popen.stdout is not None
        return str(json.loads(self.popen.stdout.readline())["node"])

    def leave(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        self.popen.communicate(timeout=15)
        return self.popen.returncode


@pytest.fixture
def start(hub: HubServer, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def begin(name: str = "n", *options: str, ticket: str = "") -> Node:
        nodes.append(Node(ticket or hub.ticket, tmp_path / name, "--name", name, *options))
        return nodes[-1]

    yield begin
    for node in nodes:
        if node.popen.poll() is None:
            node.popen.kill()
        node.popen.communicate()


def until(condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def submit(client: HubClient, script: str, *, nodes: int = 1) -> str:
    spec = JobSpec(job=JobTable(name="job", script="s.py", nodes=nodes))
    return client.submit(dump_spec(spec), files={"s.py": script})


def wait_for(client: HubClient, job: str, state: str) -> dict[str, Any]:
    view: dict[str, Any] = until(lambda: (v := client.job(job))["state"] == state and v)
    return view


def lines_of(client: HubClient, job: str) -> list[str]:
    return [line["text"] for line in client.logs(job)["lines"]]


def test_agent_runs_a_script_and_ships_every_line_once_in_order(
    client: HubClient, start: Callable[..., Node]
) -> None:
    assert start("kitchen").ready() == "kitchen"
    job = submit(client, "for i in range(3000): print('line', i)\n")
    wait_for(client, job, "done")
    lines, after = [], 0
    while batch := client.logs(job, after=after)["lines"]:
        lines += [line["text"] for line in batch]
        after = batch[-1]["id"]
    assert lines == [f"line {i}" for i in range(3000)]


def test_failing_script_fails_the_job_with_its_line_and_its_traceback_in_the_log(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start().ready()
    job = submit(client, "import os\nraise KeyError('gone')\n")
    view = wait_for(client, job, "failed")
    assert view["error"]["kind"] == "ScriptError"
    assert "KeyError" in view["error"]["what"]
    assert "line 2" in view["error"]["given"]
    assert "Traceback (most recent call last):" in lines_of(client, job)


def test_stop_ends_a_script_that_does_not_listen(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start().ready()
    job = submit(client, "print('up', flush=True)\nimport time\ntime.sleep(60)\n")
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
def test_leaving_ends_the_workers_and_exits_cleanly(
    client: HubClient, start: Callable[..., Node], number: int
) -> None:
    node = start()
    node.ready()
    job = submit(client, "print('up', flush=True)\nimport time\ntime.sleep(60)\n")
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    assert workers
    begun = time.monotonic()
    assert node.leave(number) == 0
    assert time.monotonic() - begun < 5
    until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_killed_agent_leaves_no_worker_behind(
    client: HubClient, start: Callable[..., Node]
) -> None:
    node = start()
    node.ready()
    job = submit(client, "print('up', flush=True)\nimport time\ntime.sleep(60)\n")
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
    _, errors = node.popen.communicate(timeout=20)
    assert node.popen.returncode == 1
    assert "ticket is unknown" in errors
    assert "what to do" in errors


def test_hub_that_is_not_there_is_named(start: Callable[..., Node]) -> None:
    node = start(ticket="atoll://127.0.0.1:9/" + "x" * 32)
    _, errors = node.popen.communicate(timeout=40)
    assert node.popen.returncode == 1
    assert "127.0.0.1" in errors
