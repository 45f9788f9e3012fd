"""Programs in the sandbox: what they may do, tried by programs that should not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.config import IslandTable, JobSpec, JobTable
from atoll.errors import NotAllowed
from atoll.node.launchers import hub_network, landlock
from atoll.node.launchers.launcher import Exit, Sandbox
from atoll.node.launchers.process import ProcessLauncher
from atoll.node.launchers.sandbox import check_possible, has_own_network, level
from tests.node.launchers.ordering import HUB, make_order, run, script_launch

needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")

ATTEMPTS = """
import json, os, pathlib, signal, socket, subprocess, sys, tempfile
home, victim = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"

def abstract():
    with socket.socket(socket.AF_UNIX) as made:
        made.connect("\\0" + sys.argv[3])

def reached(address):
    with socket.create_connection(address, 10.0) as made:
        made.sendall(b"ping")
        return made.recv(4)

def named(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(path)

def datagram(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect(address)
        made.send(b"x")

def listening():
    with socket.create_server((hub[0], 0)):
        pass

hub, other = (("127.0.0.1", int(port)) for port in sys.argv[4:6])

def environment():
    if not pathlib.Path(f"/proc/{victim}/environ").read_bytes():
        raise PermissionError("empty")  # as newer kernels refuse

print(json.dumps({
    "read a key": tried((home / "tls" / "node.key").read_bytes),
    "list the home": tried(lambda: list(home.iterdir())),
    "read another job": tried((home / "jobs" / "job-2" / "notes").read_text),
    "write beside": tried(lambda: (home / "evil").write_text("x")),
    "write for all": tried(lambda: pathlib.Path("/var/tmp/atoll-evil").write_text("x")),
    "link out": tried(lambda: os.link(home / "tls" / "node.key", "key")),
    "by a child": subprocess.run(["cat", home / "tls/node.key"], capture_output=True).returncode,
    "environment": tried(environment),
    "abstract socket": tried(abstract),
    "socket of a program": tried(lambda: named(sys.argv[6])),
    "hub": tried(lambda: reached(hub)),
    "another port": tried(lambda: reached(other)),
    "a far machine": tried(lambda: socket.create_connection(("192.0.2.1", 80), 0.5)),
    "datagram": tried(lambda: datagram(("192.0.2.1", 53))),
    "listen": tried(listening),
    "kill": tried(lambda: os.kill(victim, signal.SIGTERM)),
    "own file": tried(lambda: pathlib.Path("mine").write_text("x")),
    "temporary": tried(lambda: tempfile.NamedTemporaryFile().write(b"x")),
    "opened": tried((home / "data" / "text").read_text),
    "write opened": tried(lambda: (home / "data" / "text").write_text("x")),
    "shared memory": tried(lambda: pathlib.Path("/dev/shm/atoll-test").write_text("x")),
    "python": tried(lambda: __import__("sqlite3")),
    "program": subprocess.run(["true"]).returncode,
}))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A node's home, outside of what programs see."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        for path in ("tls/node.key", "jobs/job-2/notes", "data/text"):
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text("secret")
        yield folder


def ended(
    script: str, home: Path, *words: str, sandbox: Sandbox | None, hub: str = HUB
) -> tuple[Exit, list[str]]:
    lines: list[str] = []

    async def to_end() -> Exit:
        order = make_order(script_launch(script, args=list(words)), home / "jobs", hub=hub)
        order = dataclasses.replace(order, sandbox=sandbox)
        process = await ProcessLauncher().start(order, lines.append)
        return await process.wait()

    return run(to_end()), lines


@contextlib.contextmanager
def answering() -> Iterator[int]:
    """Answer every message at a port, which is given."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    with line:
                        line.sendall(line.recv(4))

        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def program_socket() -> Iterator[str]:
    """Listen as e.g. a session bus does, in a folder for temporary files; give the path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            yield path


def outcome(home: Path, sandbox: Sandbox | None) -> dict[str, str | int]:
    listening = f"atoll-{os.getpid()}"
    sleeper = subprocess.Popen([
        sys.executable, "-c",
        f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0{listening}'); "
        "s.listen(); print('up', flush=True); time.sleep(600)",
    ], stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == b"up\n"
        with answering() as hub, answering() as other, program_socket() as path:
            words = (str(home), str(sleeper.pid), listening, str(hub), str(other), path)
            end, lines = ended(
                ATTEMPTS, home, *words, sandbox=sandbox, hub=f"http://127.0.0.1:{hub}"
            )
    finally:
        sleeper.kill()
        sleeper.communicate()
        for path in ("/dev/shm/atoll-test", "/var/tmp/atoll-evil"):
            Path(path).unlink(missing_ok=True)
    assert end.code == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    return dict(found)


ALLOWED = ("own file", "temporary", "opened", "shared memory", "python")
REFUSED = ("read a key", "list the home", "read another job", "write beside", "write for all",
           "environment", "write opened")  # fmt: skip


@needs_landlock
def test_a_program_sees_its_own_and_nothing_else(home: Path) -> None:
    found = outcome(home, Sandbox(readable=(str(home / "data"),)))
    assert {name: found[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "done")
    assert {name: found[name] for name in REFUSED} == dict.fromkeys(REFUSED, "PermissionError")
    assert found["link out"] in ("PermissionError", "OSError")
    assert found["by a child"] != 0
    assert found["program"] == 0
    if landlock.keeps_signals():
        assert found["kill"] == "PermissionError"
        # No host has that name in a network of its own.
        assert found["abstract socket"] in ("PermissionError", "ConnectionRefusedError")
    assert (home / "data" / "text").read_text() == "secret"
    assert found["hub"] == "done"
    if has_own_network():
        assert found["another port"] == "ConnectionRefusedError"
        assert found["a far machine"] == found["datagram"] == "OSError"  # no route
        assert found["socket of a program"] == "FileNotFoundError"


@needs_landlock
@pytest.mark.skipif(not landlock.keeps_ports(), reason="this kernel cannot restrict TCP")
def test_without_namespaces_tcp_goes_to_the_hubs_port_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_network, "is_possible", lambda folder: False)
    assert "UDP" in level()
    found = outcome(home, Sandbox())
    assert found["hub"] == "done"
    denied = (found[name] for name in ("another port", "a far machine", "listen"))
    assert set(denied) == {"PermissionError"}


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
def test_namespaces_are_used_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = subprocess.run(["unshare", "-Urnm", "true"], capture_output=True, check=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.chdir(folder)  # which the process does not see
        assert has_own_network() is (tried.returncode == 0)
        monkeypatch.undo()


@needs_landlock
def test_where_the_agent_was_started_is_not_opened(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `python -m atoll.node`, after which Python imports from there, too."""
    for folder in (home, home / "data"):
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        found = outcome(home, Sandbox())
        for what in ("read a key", "read another job", "opened"):
            assert found[what] == "PermissionError"


@needs_landlock
def test_an_owner_may_open_the_network(home: Path) -> None:
    found = outcome(home, Sandbox(network="open"))
    assert found["hub"] == found["another port"] == found["listen"] == "done"
    assert found["read a key"] == "PermissionError"
    assert "by the policy" in level("open")


def test_without_a_sandbox_the_same_program_does_it_all(home: Path) -> None:
    found = outcome(home, None)
    far = ("a far machine", "datagram")  # as the network of this machine is
    refused = [n for n, end in found.items() if n not in far and end not in ("done", 0)]
    assert refused == []


def test_what_is_not_possible_is_refused_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(job=JobTable(script="s.py"))
    packages = dataclasses.replace(spec, job=JobTable(code="sha256:0", requirements="r.txt"))
    with pytest.raises(NotAllowed, match="installs no packages"):
        check_possible(packages, Sandbox())
    direct = dataclasses.replace(spec, job=JobTable(script="s.py", route="direct"))
    far = dataclasses.replace(spec, island=IslandTable(machines=2))
    island = dataclasses.replace(spec, island=IslandTable(ranks=2))
    for more in (direct, far):
        with pytest.raises(NotAllowed, match="reach their hub only"):
            check_possible(more, Sandbox())
        check_possible(more, Sandbox(network="open"))
    monkeypatch.setattr(hub_network, "is_possible", lambda folder: False)
    monkeypatch.setattr(landlock, "version", lambda: 4)
    with pytest.raises(NotAllowed, match="an island off its network"):
        check_possible(island, Sandbox())
    check_possible(spec, Sandbox())
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(NotAllowed, match="cannot keep programs apart"):
        check_possible(spec, Sandbox())
    assert "not possible" in level()
    monkeypatch.setattr(landlock, "version", lambda: 3)
    assert "signals are not" in level()
    assert "the network cannot be" in level()
    with pytest.raises(NotAllowed, match="off its network"):
        check_possible(spec, Sandbox())
    check_possible(spec, Sandbox(network="open"))


@needs_landlock
def test_a_stop_still_ends_a_program_in_the_sandbox(home: Path) -> None:
    async def scenario() -> int:
        lines: list[str] = []
        script = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
        order = make_order(script_launch(script), home / "jobs")
        order = dataclasses.replace(order, sandbox=Sandbox())
        process = await ProcessLauncher().start(order, lines.append)
        await process.stop(grace_s=5.0)
        return (await process.wait()).code

    assert run(scenario()) == -signal.SIGTERM
