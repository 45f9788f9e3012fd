from __future__ import annotations

import errno
import hashlib
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import (
    AuthError,
    CheckpointCorrupt,
    CheckpointMissing,
    ConfigError,
    HubError,
    HubUnreachable,
    StorageFull,
)
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.net.http.streams import write_verified
from atoll.wire.messages import NodeInfo

SPEC = '[job]\nname = "letters"\nnodes = 2\n'
INFO = NodeInfo("kitchen", "Linux", "3.11", "0.1.0")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as opened:
        yield opened


def test_a_ticket_is_traded_for_a_node_and_its_token(hub: HubServer) -> None:
    ticket = parse_ticket(hub.ticket)
    with HubClient(ticket.url) as stranger:
        node, token, _ = stranger.join(ticket.secret, name="kitchen", info=INFO)
        assert node.startswith("kitchen")
        with pytest.raises(AuthError):
            stranger.join("guessed", name="thief", info=INFO)
    with HubClient(hub.url, token) as member:
        assert member.hub()["role"] == "node"
        with pytest.raises(AuthError, match="does not permit"):
            member.jobs()


def test_a_ticket_for_people_is_traded_for_a_login_that_ends(
    hub: HubServer, client: HubClient
) -> None:
    ticket = parse_ticket(client.create_ticket(role="viewer", uses=1, name="for anna"))
    with HubClient(ticket.url) as stranger:
        with pytest.raises(AuthError, match="not for a machine"):
            stranger.join(ticket.secret, name="box", info=INFO)
        login = stranger.log_in(ticket.secret, name="anna")
    assert (login.name, login.role) == ("anna", "viewer")
    with HubClient(hub.url, login.token) as viewer:
        assert viewer.jobs() == []
        with pytest.raises(AuthError):
            viewer.submit(SPEC)
        viewer.log_out()
        with pytest.raises(AuthError):
            viewer.jobs()
    (row,) = [row for row in client.tickets() if row["name"] == "for anna"]
    assert (row["role"], row["uses_left"], row["used_by"]) == ("viewer", 0, ["anna"])
    assert ticket.secret not in str(client.tickets())


def test_a_limited_ticket_is_used_up(hub: HubServer, client: HubClient) -> None:
    ticket = parse_ticket(client.create_ticket(uses=1))
    client.join(ticket.secret, name="first", info=INFO)
    with pytest.raises(AuthError):
        client.join(ticket.secret, name="second", info=INFO)


def test_a_job_is_submitted_seen_and_stopped(client: HubClient) -> None:
    job = client.submit(SPEC, files={"train.py": "print(1)"})
    assert job.startswith("letters-")
    assert [view["job"] for view in client.jobs()] == [job]
    assert client.job(job)["nodes_wanted"] == 2
    assert client.metrics(job)["points"] == []
    assert client.logs(job, wait_s=0.05)["lines"] == []
    assert client.logs(job, tail=5, member="w0")["lines"] == []
    assert client.rounds(job)["rounds"] == []
    first = client.events(job)
    assert first["events"]
    assert client.events(job, after=first["last"])["events"] == []
    client.stop(job, grace_s=0.1)
    assert client.job(job)["state"] == "stopped"


def test_errors_of_the_hub_come_back_as_they_are(hub: HubServer, client: HubClient) -> None:
    with pytest.raises(ConfigError, match="nodse"):
        client.submit("[job]\nnodse = 2\n")
    with pytest.raises(HubError, match="no-such-job"):
        client.job("no-such-job")
    with HubClient(hub.url) as stranger, pytest.raises(AuthError):
        stranger.jobs()
    with HubClient(hub.url, "wrong") as stranger, pytest.raises(AuthError):
        stranger.stat_file("job", "x")


def test_a_file_goes_up_and_comes_down_the_same(client: HubClient, tmp_path: Path) -> None:
    job = client.submit(SPEC)
    content = bytes(range(256)) * 12_000
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.write_bytes(content)
    up: list[tuple[int, int]] = []
    down: list[tuple[int, int]] = []
    name = "checkpoints/round-000001/shared.safetensors"
    sha256 = client.put_file(job, name, source, progress=lambda *done: up.append(done))
    assert sha256 == hashlib.sha256(content).hexdigest()
    assert client.get_file(job, name, target, progress=lambda *done: down.append(done)) == sha256
    assert target.read_bytes() == content
    assert up[-1] == down[-1] == (len(content), len(content))
    assert up == sorted(up)
    found = client.stat_file(job, name)
    assert found is not None
    assert (found.nbytes, found.sha256) == (len(content), sha256)
    listed = {file.name: file.nbytes for file in client.files(job)}
    assert listed[name] == len(content)


def test_small_and_empty_files_from_memory(client: HubClient) -> None:
    job = client.submit(SPEC)
    for content in (b"", b"{}"):
        client.put_file(job, "result.json", content)
        assert client.read_file(job, "result.json") == content


def test_a_missing_file_is_missing_and_nothing_is_left_behind(
    client: HubClient, tmp_path: Path
) -> None:
    job = client.submit(SPEC)
    assert client.stat_file(job, "model.safetensors") is None
    for call in (
        lambda: client.read_file(job, "model.safetensors"),
        lambda: client.get_file(job, "model.safetensors", tmp_path / "here" / "model"),
    ):
        with pytest.raises(CheckpointMissing):
            call()
    assert not (tmp_path / "here").exists()


def test_a_file_with_another_hash_does_not_replace_the_old_one(
    client: HubClient, tmp_path: Path
) -> None:
    job = client.submit(SPEC)
    client.put_file(job, "part", b"what the hub has")
    target = tmp_path / "part"
    target.write_bytes(b"old")
    with pytest.raises(CheckpointCorrupt, match="part arrived damaged"):
        client.get_file(job, "part", target, sha256="0" * 64)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.glob(".part.*")) == []


def test_a_file_that_cannot_be_read_is_named(client: HubClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-file"):
        client.put_file("job", "x", tmp_path / "no-such-file")


def test_queues_keep_items_until_they_are_acknowledged(client: HubClient) -> None:
    assert not client.queue_put("work", key="a", payload=b"\x00\xff").duplicate
    assert client.queue_put("work", key="a", payload=b"\x00\xff").duplicate
    (item,) = client.queue_claim("work", lease_s=30.0, limit=5)
    assert (item.key, item.payload, item.attempt) == ("a", b"\x00\xff", 1)
    client.queue_extend("work", lease=item.lease, lease_s=30.0)
    client.queue_release("work", lease=item.lease, reason="test")
    (again,) = client.queue_claim("work", lease_s=30.0)
    client.queue_ack("work", lease=again.lease)
    assert client.queue_claim("work", lease_s=1.0, wait_s=0.05) == []
    with pytest.raises(HubError):
        client.queue_ack("work", lease=item.lease)
    assert [row["leased"] for row in client.queues() if row["queue"] == "work"] in ([], [0])
    assert client.dead_letters("work") == []


def test_the_hub_tells_of_itself_and_its_speed(client: HubClient) -> None:
    client.health()
    assert client.hub()["version"]
    assert client.nodes() == []
    assert "events" in client.hub_events()
    assert client.download_bps(300_000) > 1e5
    assert client.upload_bps(300_000) > 1e5


def test_nobody_there_and_somebody_else_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with (
            HubClient(f"http://127.0.0.1:{port}") as client,
            pytest.raises(
                HubUnreachable, match=rf"127.0.0.1:{port}.*connection refused.*atoll hub"
            ),
        ):
            client.jobs()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        with HubClient(f"http://127.0.0.1:{server.server_address[1]}") as client:
            with pytest.raises(HubUnreachable, match="not a hub"):
                client.jobs()
            with pytest.raises(HubUnreachable):
                client.get_file("job", "cut", Path("never-written"))
            assert not Path("never-written").exists()
        server.shutdown()
        thread.join()


def test_a_hub_that_says_nothing_is_timed_out() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with HubClient(url, timeout_s=0.1) as client, pytest.raises(HubUnreachable, match="timed"):
            client.health()


class _Stranger(http.server.BaseHTTPRequestHandler):
    """A web server that is no hub: pages for everything, and one file cut in the middle."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"<html>".ljust(200 if self.path.endswith("cut") else 1000))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_download_without_room_says_so(tmp_path: Path, number: int) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageFull, match=os.strerror(number)):
        write_verified(tmp_path / "file", blocks(), sha256="")
    assert not list(tmp_path.iterdir())
