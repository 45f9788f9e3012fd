"""Notices that a machine is about to be taken away: files, addresses, signals; real processes."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.node.availability import preemption
from atoll.node.availability.preemption import PreemptionNotices, check_url
from tests.node.running import Node, lines_of, submit, until, wait_for
from tests.patience import PATIENCE_S, PROMPT_S

# Longer than tests wait, so that nothing ends by itself.
SLEEPER = f"print('up', flush=True)\nimport time\ntime.sleep({2 * PATIENCE_S})\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER


@contextmanager
def answering(status: int, body: bytes = b"") -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    """Yield an address and the answer it gives, which may be changed."""
    answer = [(status, body)]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer[0][0])
            self.end_headers()
            self.wfile.write(answer[0][1])

        def log_message(self, format: str, *args: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/notice", answer
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, b"", True),
        (200, b'{"action": "terminate"}', True),
        (200, b"FALSE\n", False),
        (200, b"NONE", False),
        (404, b"", False),
        (503, b"", None),
    ],
)
def test_address_gives_notice_by_200(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, found: bool | None
) -> None:
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", PATIENCE_S)  # the test's own server
    with answering(status, body) as (url, _):
        notice = PreemptionNotices(url=url).read()
    assert notice is None if found is None else bool(notice) is found


def test_address_that_does_not_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", 0.2)
    assert PreemptionNotices(url="http://127.0.0.1:9/").read() is None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", PATIENCE_S)  # this one does answer
    with answering(200) as (url, _):
        assert PreemptionNotices(url=url).read(), (
            "the machine's own address is not asked of a proxy"
        )


def test_answer_that_is_not_http_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(4096)
                line.sendall(b"not HTTP\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert PreemptionNotices(url=url).read() is None


def test_file_gives_notice_while_it_is_there(tmp_path: Path) -> None:
    notices = PreemptionNotices(file=tmp_path / "gone")
    assert notices
    assert notices.read() == ""
    (tmp_path / "gone").touch()
    assert "gone" in (notices.read() or "")
    assert not PreemptionNotices()


def test_address_that_cannot_be_asked_is_refused() -> None:
    assert check_url("") == ""
    with pytest.raises(ConfigError, match="http://"):
        check_url("file:///etc/passwd")


# ------------------------------------------------------------------------- with processes


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

    def begin(name: str = "n", *options: str, before: str = "") -> Node:
        words = ("--name", name, *options)
        nodes.append(Node(hub.ticket, tmp_path / name, *words, before=before))
        nodes[-1].ready()
        return nodes[-1]

    yield begin
    for node in nodes:
        node.end()


def test_file_drains_the_machine_while_it_is_there(
    client: HubClient, start: Callable[..., Node], tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    node = start("n", "--preempt-file", str(notice))
    job = submit(client, SLEEPER)
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    notice.touch()
    begun = time.monotonic()
    until(lambda: not any(worker.is_running() for worker in workers))
    assert time.monotonic() - begun < PROMPT_S
    until(lambda: _events(client, "node-draining"))
    assert node.popen.poll() is None, "the machine stays; the notice may be taken back"
    client.stop(job, grace_s=0.0)
    notice.unlink()
    wait_for(client, submit(client, "print('again')\n"), "done")


def test_preemption_address_drains_the_machine(
    client: HubClient, start: Callable[..., Node]
) -> None:
    with answering(404) as (url, answer):
        node = start("n", "--preempt-url", url)
        job = submit(client, SLEEPER)
        until(lambda: lines_of(client, job))
        workers = psutil.Process(node.popen.pid).children(recursive=True)
        answer[0] = (503, b"")
        time.sleep(2 * preemption.POLL_S)
        assert all(worker.is_running() for worker in workers)
        answer[0] = (200, b"soon")
        until(lambda: not any(worker.is_running() for worker in workers))


def test_person_drains_a_machine_and_lets_it_work_again(
    client: HubClient, start: Callable[..., Node]
) -> None:
    node = start()
    job = submit(client, SLEEPER)
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    client.drain("n", reason="new memory")
    until(lambda: not any(worker.is_running() for worker in workers))
    assert "new memory" in until(lambda: _events(client, "node-draining"))[0]
    client.stop(job, grace_s=0.0)
    client.drain("n", draining=False)
    wait_for(client, submit(client, "print('again')\n"), "done")


def test_draining_an_unknown_machine_names_the_known_ones(
    client: HubClient, start: Callable[..., Node]
) -> None:
    start("kitchen")
    with pytest.raises(ConfigError, match="kitchen"):
        client.drain("kitchin")


def test_stubborn_worker_is_killed_after_its_grace(
    client: HubClient, start: Callable[..., Node]
) -> None:
    node = start()
    job = submit(client, STUBBORN)
    until(lambda: lines_of(client, job))
    workers = psutil.Process(node.popen.pid).children(recursive=True)
    begun = time.monotonic()
    assert node.leave() == 0
    assert 4 < time.monotonic() - begun < PROMPT_S
    until(lambda: not any(worker.is_running() for worker in workers))


ENDLESS_GRACE = f"from atoll.node.agent import agent; agent.LEAVE_GRACE_S = {2 * PATIENCE_S}"
"""Workers have longer than tests wait: a machine that leaves in time has killed them."""


def test_second_signal_hurries(client: HubClient, start: Callable[..., Node]) -> None:
    node = start(before=ENDLESS_GRACE)
    job = submit(client, STUBBORN)
    until(lambda: lines_of(client, job))
    node.popen.send_signal(signal.SIGTERM)
    until(lambda: _events(client, "node-draining"))
    assert node.leave(signal.SIGINT) == 0, "it has not waited for the end of its grace"


def _events(client: HubClient, kind: str) -> list[str]:
    return [e["text"] for e in client.hub_events()["events"] if e["kind"] == kind]


NAMESPACES = shutil.which("unshare") is not None and hasattr(os, "geteuid") and os.geteuid() == 0

ORPHANS = """
import subprocess, sys, time
# The child of this child outlives it and is inherited by process 1.
wait = 'import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)'
inner = [sys.executable, '-c', wait, {end!r}]
child = f"import subprocess; subprocess.Popen({{inner!r}}, start_new_session=True)"
for _ in range(3):
    subprocess.run([sys.executable, '-c', child])
print('up', flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not NAMESPACES, reason="needs root and unshare")
def test_container_init_forwards_signals_and_reaps_orphans(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "atoll.node", "--no-measure", "--ticket", hub.ticket]
    popen = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", *words, "--home", str(tmp_path / "n")],
        stdout=subprocess.PIPE,
    )
    try:
        assert popen.stdout is not None
        assert popen.stdout.readline()
        agent = until(lambda: psutil.Process(popen.pid).children())[0]
        end = tmp_path / "end"
        job = submit(client, ORPHANS.format(end=str(end)))
        until(lambda: len(agent.children()) == 4)
        until(lambda: lines_of(client, job))
        end.touch()
        until(lambda: len(agent.children()) == 1)  # the worker alone
        workers = agent.children(recursive=True)
        agent.send_signal(signal.SIGTERM)
        assert popen.wait(PATIENCE_S) == 0
        assert not any(worker.is_running() for worker in workers)
    finally:
        popen.kill()
        popen.communicate()
