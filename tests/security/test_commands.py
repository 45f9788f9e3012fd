"""The commands about tickets, logins, machines and the audit log, as a person types them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from atoll.cli.access.ticket import duration_s
from atoll.errors import ConfigError
from atoll.hub.server import HubServer
from tests.commands import run_here
from tests.node.running import Node, submit, wait_for
from tests.patience import PATIENCE_S
from tests.security.conftest import operator, serving, until

Command = Callable[..., str]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with serving(tmp_path, tls="on") as server:
        yield server


def command(home: Path, *words: str, status: int = 0, more: dict[str, str] | None = None) -> str:
    """Run `atoll WORDS` as somebody; return what it printed, errors too."""
    environment = {**os.environ, "ATOLL_HOME": str(home), "COLUMNS": "250", **(more or {})}
    done = run_here(*words, environment=environment, folder=home.parent)
    assert done.code == status, done.both
    return done.both


def operators_home(hub: HubServer, home: Path) -> Path:
    """Make a home where the operator is logged in."""
    with operator(hub) as client:
        ticket = client.create_ticket(role="operator", uses=1)
    command(home, "login", ticket, "--name", "olga")
    return home


def test_user_logs_in_and_is_logged_out_by_the_operator(hub: HubServer, tmp_path: Path) -> None:
    olga = operators_home(hub, tmp_path / "olga")
    made = command(
        olga, "ticket", "new", "--role", "viewer", "--valid", "30m", "--name", "connection_slot"
    )
    file = tmp_path / "ticket"
    file.write_text(made)
    vera = tmp_path / "vera"
    assert "as viewer" in command(vera, "login", f"@{file}", "--name", "vera")
    command(vera, "status")
    assert "does not permit this request" in command(vera, "ticket", "new", status=1)
    assert "used up" in command(tmp_path / "late", "login", made.strip(), status=1)
    listed = command(olga, "ticket", "list")
    (row,) = [line for line in listed.splitlines() if "connection_slot" in line]
    assert "vera" in row
    assert "used up" in row
    assert made.strip().rpartition("/")[2].partition("~")[0] not in listed
    assert "vera" in command(olga, "ticket", "revoke", row.split()[0])
    assert "revoked the access of this machine" in command(vera, "status", status=1)
    rows = [json.loads(line) for line in command(olga, "audit", "--json").splitlines()]
    done = [(row["name"], row["action"], row["outcome"]) for row in rows]
    assert ("olga", "make ticket", "201") in done
    assert ("vera", "log in", "201") in done
    assert ("vera", "make ticket", "403") in done
    assert ("olga", "revoke ticket", "200") in done
    told = command(olga, "audit", "--last", "5")
    assert "viewer vera tried to make a ticket: refused, not allowed" in told
    assert "tried to make a request: refused, not logged in" in told


def test_a_login_ends_at_the_hub_and_here(hub: HubServer, tmp_path: Path) -> None:
    home = operators_home(hub, tmp_path / "olga")
    known = json.loads((home / "hubs.json").read_text())
    command(home, "logout")
    assert json.loads((home / "hubs.json").read_text()) == []
    (home / "hubs.json").write_text(json.dumps(known))
    assert "not valid at this hub" in command(home, "status", status=1)


def test_commands_say_how_to_log_in(hub: HubServer, tmp_path: Path) -> None:
    assert "--role operator" in command(tmp_path / "new", "status", "--hub", hub.ticket, status=1)
    assert "a person" in command(
        tmp_path / "node", "join", person_ticket(hub), "--name", "box", status=1
    )


def person_ticket(hub: HubServer) -> str:
    with operator(hub) as client:
        return client.create_ticket(role="viewer")


def test_hub_writes_its_ticket_for_unattended_machines(tmp_path: Path) -> None:
    file = tmp_path / "shared" / "ticket"
    words = ["hub", "--host", "127.0.0.1", "--port", "0", "--ticket-file", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", *words],
        env={**os.environ, "ATOLL_HOME": str(tmp_path / "home")},
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        until(file.exists)
        assert file.read_text().startswith("atoll://127.0.0.1:")
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_evicted_machine_ends_its_work_and_stays_out(hub: HubServer, tmp_path: Path) -> None:
    olga = operators_home(hub, tmp_path / "olga")
    node = Node(hub.ticket, tmp_path / "box", "--name", "box")
    other: Node | None = None
    try:
        assert node.ready() == "box"
        with operator(hub) as client:
            slow = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
            job = submit(client, slow)
            wait_for(client, job, "running")
            until(lambda: client.logs(job)["lines"])
            # What it has just forked has the same command line until it begins its own program.
            worker, *_ = until(lambda: workers_of(node.popen.pid))
            told = command(olga, "node", "revoke", "box")
            assert "box: access revoked" in told
            assert "atoll ticket revoke" in told, "the ticket would let it in again"
            until(lambda: client.job(job)["members"][0]["state"] == "lost")
            assert node.popen.wait(timeout=PATIENCE_S) != 0
            assert not psutil.pid_exists(worker) or ended(worker)
            assert client.nodes()[0]["state"] == "lost"
            other = Node(hub.ticket, tmp_path / "box", "--name", "box")
            assert other.popen.wait(timeout=PATIENCE_S) != 0, "its token is known to be revoked"
            events = [event["kind"] for event in client.hub_events()["events"]]
            assert "node-revoked" in events
    finally:
        node.end()
        if other is not None:
            other.end()


def workers_of(pid: int) -> list[int]:
    """Return the processes of jobs below an agent."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended in between
            if "atoll.node.worker" in child.cmdline():
                found.append(child.pid)
    return found


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600), ("0", 0)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1h", "2 years"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid duration"):
        duration_s(text)
