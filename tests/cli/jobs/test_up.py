"""`atoll up` on one machine and `atoll join` on another, from the first start to the second."""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.cli.hub_access import find
from tests.e2e.conftest import Atoll, Running, shared_cache, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e


def follow_output(running: Running) -> Callable[[str], re.Match[str]]:
    """Read what a command prints; return a function that waits for a pattern in it."""
    read: list[str] = []
    stdout = running.popen.stdout
    assert stdout is not None

    def follow() -> None:
        for line in stdout:
            read.append(line)

    threading.Thread(target=follow, daemon=True).start()

    def look(pattern: str) -> re.Match[str] | None:
        found = re.search(pattern, "".join(read))
        if found is None and running.popen.poll():
            assert running.popen.stderr is not None
            pytest.fail(running.popen.stderr.read())
        return found

    def wait_for(pattern: str) -> re.Match[str]:
        found = until(lambda: look(pattern))
        assert isinstance(found, re.Match)
        return found

    return wait_for


@pytest.fixture
def atoll(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atoll]:
    made = Atoll(tmp_path, cache=shared_cache(tmp_path_factory))
    yield made
    made.end()


def stop(atoll: Atoll, running: Running) -> None:
    running.interrupt()
    assert running.popen.wait(PATIENCE_S) == 0
    atoll.assert_ended()


def nodes_of(atoll: Atoll) -> dict[str, Any]:
    with find(home=atoll.home).client() as client:
        return {node["node"]: node["state"] for node in client.nodes()}


def test_two_machines_find_together_and_go_on_later(
    atoll: Atoll, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = atoll.folder / "opened"
    opener = atoll.folder / "browser.py"
    opener.write_text(f"import sys; open({str(opened)!r}, 'w').write(sys.argv[1])")
    monkeypatch.setenv("BROWSER", f"{sys.executable} {opener} %s")
    first = atoll.start("up", "--port", "0")
    says = follow_output(first)
    code = says(r"the code (\d{3}-\d{3})")[1]
    assert says(r'uvx --from "atoll\[train\]" atoll join atoll://\S+~[0-9a-f]{40}')
    says("is online")
    hub = find(home=atoll.home)

    until(opened.exists)
    address = until(opened.read_text)  # with a ticket for one login, not the owner's token
    assert hub.token not in address
    with httpx.Client(verify=False, trust_env=False, timeout=PATIENCE_S) as browser:
        assert browser.get(address).status_code == 303
        assert "used up" in browser.get(address).text
        assert 'id="views"' in browser.get(hub.url).text

    again = atoll.run("up")
    assert again.code == 0, again.both
    assert "already" in again.out
    assert hub.url in again.out

    port = hub.url.rpartition(":")[2]
    second = atoll.start(
        "join", "--hub", f"127.0.0.1:{port}", "--code", code, "--name", "sofa",
        home=atoll.folder / "sofa",
    )  # fmt: skip
    says("sofa is online")
    assert says(r"pairing code (\d{3}-\d{3})")[1] != code
    second.interrupt()
    assert second.wait().code == 0
    before = nodes_of(atoll)
    stop(atoll, first)

    first = atoll.start("up", "--port", port, "--no-browser")
    says = follow_output(first)
    (own,) = set(before) - {"sofa"}
    says(f"{own} is online")
    assert set(nodes_of(atoll)) <= set(before)  # the same machine, not a second one of its name
    stop(atoll, first)


def test_a_taken_port_is_named(atoll: Atoll) -> None:
    with socket.socket() as occupied:
        occupied.bind(("0.0.0.0", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        done = atoll.run("up", "--port", port, "--no-browser")
    assert done.code != 0
    assert "cannot listen on this port" in done.both
    assert "--port" in done.both
    atoll.assert_ended()
