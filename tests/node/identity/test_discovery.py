"""Finding hubs: a real announcement on the loopback, and a person at a terminal of the test's."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.choose_hub import Wanted, choose_hub
from atoll.errors import ConfigError
from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity import discovery
from atoll.node.identity.discovery import (
    SERVICE,
    FoundHub,
    find_hubs,
    first_reachable,
    hub_at,
    read_service,
)
from atoll.node.identity.pairing import already_joined
from tests.patience import PATIENCE_S

PRINT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a hub that announces itself and speaks TLS; yield what it says."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "atoll.hub", "--announce", "--tls", "on", "--no-reducers"),
            *("--data", str(tmp_path / "hub"), "--jobs", str(tmp_path / "runs")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def found_at(port: int) -> FoundHub | None:
    """Return the hub that announces this port; it may take a while to be heard of."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for hub in find_hubs(timeout_s=1.5):
            if hub.port == port:
                return hub
    return None


# Another test's hub may answer sooner: the list is complete once this port is in it.
JOIN = """
import sys
from atoll.cli.main import main
from atoll.node.identity import discovery
find, port = discovery.find_hubs, int(sys.argv.pop(1))

def complete():
    found = []
    while all(hub.port != port for hub in found):
        found = find()
    return found

discovery.find_hubs = complete
main()
"""


class Terminal:
    """A program at a terminal: what it shows, and what a person types."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        self.pid, self.descriptor = os.forkpty()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *words], environment)
        self.shown = ""

    def wait_for(self, pattern: str, *, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.shown, re.DOTALL)
            if found:
                return found
            left = deadline - time.monotonic()
            assert left > 0, self.shown
            if select.select([self.descriptor], [], [], min(left, 0.2))[0]:
                try:
                    self.shown += os.read(self.descriptor, 65536).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(self.shown) from None

    def type(self, line: str) -> None:
        os.write(self.descriptor, f"{line}\n".encode())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


def new_code(hub: dict[str, str], **options: bool) -> str:
    """Return the code that the hub's owner sees."""
    endpoint = HubEndpoint(ca=hub["ca"])
    with HubClient(hub["url"], hub["operator_token"], endpoint=endpoint) as client:
        return str(client.pairing(**options)["code"])


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_user_finds_a_hub_and_joins_with_its_code(hub: dict[str, str], tmp_path: Path) -> None:
    ticket = parse_ticket(hub["ticket"])
    found = found_at(int(hub["port"]))
    assert found is not None
    assert found.fingerprint == ticket.fingerprint
    assert found.secure
    code = new_code(hub)
    other = code[:-1] + str((int(code[-1]) + 1) % 10)
    environment = {**os.environ, "ATOLL_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    command = ("-m", "atoll.cli", "join", "--name", "sofa")
    looking = ("-c", JOIN, str(hub["port"]), *command[2:])
    terminal = Terminal(*looking, environment=environment)
    try:
        line = terminal.wait_for(rf"(\d+)  [^\n]*:{ticket.port}[^\n]*{ticket.fingerprint[:16]}")
        if "Which" in terminal.wait_for(r"Which one|Pairing code")[0]:
            terminal.type(line[1])
        terminal.wait_for("Pairing code")
        terminal.type("not a code")
        terminal.wait_for("six digits.*Pairing code")
        terminal.type(other)
        terminal.wait_for("wrong.*2 tries left.*Pairing code")
        terminal.type(code)
        terminal.wait_for("joined")
        os.kill(terminal.pid, signal.SIGINT)
        terminal.wait_for("left the hub")
    finally:
        terminal.end()
    again = Terminal(*command, "--hub", f"127.0.0.1:{ticket.port}", environment=environment)
    try:  # an address alone says nothing of who is there
        again.wait_for("Pairing code")
    finally:
        again.end()
    home = tmp_path / "home"
    moved = dataclasses.replace(found, host="127.0.0.9")
    assert already_joined(moved, home=home) == moved.ticket("joined-before", mark=found.fingerprint)
    assert already_joined(dataclasses.replace(found, fingerprint=PRINT), home=home) is None


def test_without_a_terminal_the_error_names_the_option(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "join"],
        env={**os.environ, "ATOLL_HOME": str(tmp_path), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "needs a ticket or a pairing code" in done.stderr
    assert "--code 123-456" in done.stderr


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("192.0.2.7", "https://192.0.2.7:7700"),
        ("den.local:80", "https://den.local:80"),
        ("[fe80::1]:7", "https://[fe80::1]:7"),
        ("a b", None),
        ("den:99999", None),
        ("http://den", None),
    ],
)
def test_an_address_of_a_hub_is_read_or_refused(text: str, url: str | None) -> None:
    if url is None:
        with pytest.raises(ConfigError, match="not the address of a hub"):
            hub_at(text)
    else:
        assert hub_at(text).url == url


def test_an_empty_network_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.identity.discovery.find_hubs", list)
    with pytest.raises(ConfigError, match="no hub answers") as caught:
        choose_hub(Console(), Wanted(home=Path(), code="123-456"))
    assert "guest Wi-Fi" in str(caught.value)
    assert "7700" in str(caught.value)


def test_a_hub_that_answers_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[], [], [hub_at("192.0.2.1")]])
    monkeypatch.setattr(discovery, "_resolved", lambda *_: next(answers))
    monkeypatch.setattr(discovery, "LATE_S", PATIENCE_S)
    assert find_hubs(timeout_s=0.0) == [hub_at("192.0.2.1")]
    monkeypatch.setattr(discovery, "_resolved", lambda *_: [])
    monkeypatch.setattr(discovery, "LATE_S", 0.0)
    assert find_hubs(timeout_s=0.0) == []


def test_several_hubs_without_a_terminal_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = [hub_at("192.0.2.1"), hub_at("192.0.2.2")]
    monkeypatch.setattr("atoll.node.identity.discovery.find_hubs", lambda: hubs)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ConfigError, match="several hubs") as caught:
        choose_hub(Console(), Wanted(home=Path(), code="123-456"))
    assert "192.0.2.2:7700" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"name": "den", "tls": "1", "fingerprint": PRINT, "prefix": "/a"}, True),
        ({"fingerprint": "short"}, False),
        ({"prefix": "/../x y"}, False),
    ],
)
def test_announcements_of_strangers_are_checked(fields: dict[str, str], good: bool) -> None:
    from zeroconf import ServiceInfo

    info = ServiceInfo(
        SERVICE, f"x.{SERVICE}", port=7700, parsed_addresses=["192.0.2.1"], properties=fields
    )
    assert (read_service(info) is not None) is good


def test_names_of_strangers_cannot_write_on_the_terminal() -> None:
    from zeroconf import ServiceInfo

    info = ServiceInfo(
        SERVICE, f"x.{SERVICE}", port=7700, parsed_addresses=["192.0.2.1"],
        properties={"name": "den\x1b[2J\n" + "x" * 150},
    )  # fmt: skip
    hub = read_service(info)
    assert hub is not None
    assert hub.name.startswith("den?[2J?x")
    assert len(hub.name) <= 60


def test_of_several_addresses_the_one_that_answers_is_taken() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert first_reachable(["127.0.0.9", "127.0.0.1"], port) == "127.0.0.1"
    assert first_reachable(["127.0.0.9", "not an address"], port) == ""
