"""The examples of other languages, run against a hub: curl, JavaScript, Go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import atoll
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from tests.patience import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "anywhere"


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*words: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "queue.sh", "worker.mjs", "socket.mjs", "main.go",
    }  # fmt: skip


@needs("curl")
def test_shell(hub: HubServer, ticket: str) -> None:
    out = run("sh", EXAMPLES / "queue.sh", hub.url, parse_ticket(ticket).secret)
    first, second, claimed, done = [json.loads(line) for line in out.splitlines()]
    assert (first["duplicate"], second["duplicate"]) == (False, True)
    assert first["seq"] == second["seq"]
    assert claimed["items"][0]["value"] == {"seed": 7}
    assert done == {"type": "Done"}


@needs("node")
def test_javascript_over_http(hub: HubServer, ticket: str, home: Path) -> None:
    out = run("node", EXAMPLES / "worker.mjs", hub.url, parse_ticket(ticket).secret)
    assert out == "sum of squares: 29\n"


@needs("node")
def test_javascript_over_a_websocket(hub: HubServer, ticket: str, home: Path) -> None:
    major = int(run("node", "--version").lstrip("v").partition(".")[0])
    if major < 20:
        pytest.skip("this Node has no WebSocket")
    flags = ["--experimental-websocket"] if major < 22 else []
    with atoll.connect(ticket, home=home) as client:
        address = hub.url.replace("http://", "ws://")
        out = run("node", *flags, EXAMPLES / "socket.mjs", address, client.token)
    assert out == "hello, round 1\n"


@needs("go")
def test_go(hub: HubServer, ticket: str, tmp_path: Path) -> None:
    folder = {
        "GOCACHE": str(tmp_path / "cache"),
        "GOPATH": str(tmp_path / "go"),
        "HOME": str(tmp_path),
    }
    secret = parse_ticket(ticket).secret
    out = run("go", "run", EXAMPLES / "main.go", hub.url, secret, **folder)
    assert sorted(out.split()) == sorted(["seed", "1", "seed", "2", "seed", "3"])


def test_python_and_other_languages_read_each_others_values(
    hub: HubServer, ticket: str, home: Path
) -> None:
    import httpx

    with atoll.connect(ticket, home=home) as client:
        queue = client.queue("pool/mixed")
        queue.put({"from": "python"})
        headers = {"authorization": f"Bearer {client.token}"}
        with httpx.Client(base_url=hub.url, headers=headers, timeout=PATIENCE_S) as rest:
            put = {"queue": "pool/mixed", "value": {"from": "elsewhere"}}
            assert rest.post("/api/queues/put", json=put).status_code == 200
            found = rest.post("/api/queues/claim", json={"queue": "pool/mixed"}).json()
            assert found["items"][0]["value"] == {"from": "python"}
            wrong = {"queue": "pool/mixed", "value": 1, "payload": "aGk="}
            refused = rest.post("/api/queues/put", json=wrong)
            assert refused.status_code == 400
            assert "not both" in refused.text
        (item,) = queue.claim()
        assert item.value == {"from": "elsewhere"}
