"""Finding hubs: a real announcement on the loopback, and a person at a terminal of the test's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.choose_hub import ticket_for
from atoll.errors import AuthError, ConfigError
from atoll.net.endpoint import parse_ticket
from atoll.node.identity.discovery import (
    SERVICE,
    FoundHub,
    find_hubs,
    first_reachable,
    read_service,
)
from tests.patience import PATIENCE_S

needs_zeroconf = pytest.mark.skipif(
    importlib.util.find_spec("zeroconf") is None, reason="zeroconf is not installed"
)

PRINT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


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
    """Return the hub that announces this port; it may take a moment to be heard of."""
    for _ in range(4):
        for hub in find_hubs(timeout_s=1.5):
            if hub.port == port:
                return hub
    return None


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

    def wait_for_silence(self) -> None:
        """Wait until the terminal does not show what is typed."""
        deadline = time.monotonic() + PATIENCE_S
        while termios.tcgetattr(self.descriptor)[3] & termios.ECHO:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def type(self, line: str) -> None:
        os.write(self.descriptor, f"{line}\n".encode())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@needs_zeroconf
@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_user_finds_a_hub_and_joins_with_its_secret(hub: dict[str, str], tmp_path: Path) -> None:
    ticket = parse_ticket(hub["ticket"])
    found = found_at(int(hub["port"]))
    assert found is not None
    assert found.fingerprint == ticket.fingerprint
    assert found.secure
    environment = {**os.environ, "ATOLL_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    terminal = Terminal("-m", "atoll.cli", "join", "--name", "sofa", environment=environment)
    try:
        line = terminal.wait_for(rf"(\d+)  [^\n]*:{ticket.port}[^\n]*{ticket.fingerprint}")
        asked = terminal.wait_for(r"Which one|Join this hub")
        terminal.type(line[1] if "Which" in asked[0] else "y")
        terminal.wait_for("input is hidden")
        terminal.wait_for_silence()
        terminal.type(ticket.secret)
        terminal.wait_for("joined")
        assert ticket.secret not in terminal.shown
        os.kill(terminal.pid, signal.SIGINT)
        terminal.wait_for("left the hub")
    finally:
        terminal.end()


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
    assert "needs a ticket" in done.stderr
    assert "ATOLL_TICKET" in done.stderr


HUB = FoundHub(
    name="den", host="192.0.2.7", port=7700, prefix="/atoll", secure=True, fingerprint=PRINT
)


@pytest.mark.parametrize(
    "given",
    ["SECRET", f"SECRET~{PRINT}", f"atoll://elsewhere:1/SECRET~{PRINT}"],
)
def test_a_secret_or_a_ticket_of_the_same_hub_is_good(given: str) -> None:
    ticket = ticket_for(HUB, given)
    assert str(ticket) == f"atoll://192.0.2.7:7700/atoll/SECRET~{PRINT}"


@pytest.mark.parametrize(
    "given", [f"atoll://h:1/SECRET~{OTHER}", "atoll://h:1/SECRET", f"SECRET~{OTHER}"]
)
def test_wrong_fingerprint_never_gets_the_secret(
    given: str,
) -> None:
    with pytest.raises(AuthError, match="not the hub of that ticket"):
        ticket_for(HUB, given)


def test_what_is_no_secret_is_refused() -> None:
    with pytest.raises(ConfigError):
        ticket_for(HUB, "no secret at all")


@needs_zeroconf
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


@needs_zeroconf
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
