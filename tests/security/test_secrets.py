"""Where secrets are: hashed in the database, in files of the owner alone, and nowhere else."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from atoll.cli.jobs.embedded import Embedded
from atoll.cli.jobs.interrupts import Interrupts
from atoll.clock import RealClock
from atoll.hub.server import HubServer
from atoll.hub.storage.backup import take
from atoll.hub.storage.restore import restore
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity.join import known_hub
from atoll.train.report.report import write_report
from atoll.wire.messages import Drain, Failure
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S
from tests.security.conftest import SPEC, joined, login, operator, serving, stores_of, until, web


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with serving(tmp_path / "hub", tls="on") as server:
        yield server


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_secret_lies_where_others_can_read_it(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    me = joined(hub, tmp_path / "home")
    with operator(hub) as client:
        ticket = parse_ticket(client.create_ticket(uses=3)).secret
        job = client.submit(SPEC)
        viewer = login(hub, "viewer")
        worker = hub.call(stores_of(hub).auth.issue_job_token(job, member="w0", attempt=1))
        with web(hub, "a-wrong-token-that-somebody-typed") as stranger:
            stranger.get("/api/jobs", params={"token": hub.operator_token})
        events = str(client.hub_events()) + str(client.events(job)) + str(client.audit())
    secrets = {
        "operator": hub.operator_token, "standing ticket": parse_ticket(hub.ticket).secret,
        "ticket": ticket, "viewer": viewer, "node": me.token, "worker": worker,
    }  # fmt: skip
    logged = "\n".join(  # what the test's own client says of its addresses is no matter
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    )
    folder = tmp_path / "hub"
    for path, content in everything_in(folder).items():
        for name, secret in secrets.items():
            if secret.encode() in content:
                assert path.name == "secrets.json", f"{name} in {path}"
                assert name in ("operator", "standing ticket")
    private = [folder / "data" / "secrets.json", folder / "data" / "tls" / "ca.key"]
    private += [folder / "data" / "tls" / "hub.pem", tmp_path / "home" / "node.json", Path(me.key)]
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((folder / "data" / "tls").stat().st_mode) == 0o700
    for name, secret in secrets.items():
        assert secret not in logged, name
        assert secret not in events, name
    assert "a-wrong-token" not in logged


def test_database_of_the_hub_is_for_its_owner_alone(hub: HubServer, tmp_path: Path) -> None:
    database = tmp_path / "hub" / "data" / "hub.sqlite"
    folder = tmp_path / "hub" / "data"
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077, "what is inside is nobody else's"
    assert database.exists()


def test_backup_keeps_keys_private_and_the_hubs_identity(hub: HubServer, tmp_path: Path) -> None:
    me = joined(hub, tmp_path / "home")
    ticket = parse_ticket(hub.ticket)
    taken = take(
        tmp_path / "copies", data=tmp_path / "hub" / "data", jobs=tmp_path / "hub" / "jobs",
        clock=RealClock(),
    )  # fmt: skip
    for path in taken.path.rglob("*"):
        if b"PRIVATE" in path.read_bytes() if path.is_file() else False:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert ticket.secret not in str(path)
    again = tmp_path / "again"
    restore(taken.path, data=again / "data", jobs=again / "jobs", clock=RealClock())
    assert stat.S_IMODE((again / "data" / "tls" / "ca.key").stat().st_mode) == 0o600
    hub.__exit__(None, None, None)
    with serving(again, tls="on", port=hub.port) as second:
        assert parse_ticket(second.ticket) == ticket
        assert known_hub(ticket, home=tmp_path / "home") == me
        with HubClient(me.hub, me.token, endpoint=me.endpoint) as client:
            assert client.hub()["role"] == "node"


def test_variables_of_a_job_are_for_operators_alone(hub: HubServer, tmp_path: Path) -> None:
    spec = SPEC + '\n[launch]\nenv = ["HF_TOKEN=hf_guess"]\n'
    with operator(hub) as client:
        job = client.submit(spec)
        assert "HF_TOKEN=hf_guess" in client.job(job)["spec"]
    with web(hub, login(hub, "viewer")) as viewer:
        for address in ("/api/jobs", f"/api/jobs/{job}", f"/api/jobs/{job}/files/job.toml"):
            seen = viewer.get(address).text
            assert "hf_guess" not in seen
            assert "HF_TOKEN=(hidden)" in seen
    folder = next(tmp_path.rglob(job))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    write_report(folder)
    assert "hf_guess" not in (folder / "report.html").read_text("utf-8")


def command_lines_of_the_family() -> list[str]:
    lines = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # what a node measures with ends at once
            lines.append(" ".join(process.cmdline()))
    return lines


def test_no_secret_stands_in_a_command_line(tmp_path: Path) -> None:
    """Every user of a machine can read the command lines of all processes."""
    embedded = Embedded(folder=tmp_path / "hub", jobs=tmp_path / "runs", nodes=1)
    with Interrupts() as interrupts:
        try:
            ready = embedded.start(interrupts)
            with ready.hub.client() as client:
                until(lambda: client.nodes(), timeout_s=PATIENCE_S)
            until(lambda: any("atoll.node" in line for line in command_lines_of_the_family()))
            lines = command_lines_of_the_family()
            for secret in (ready.hub.token, parse_ticket(ready.ticket).secret):
                assert not any(secret in line for line in lines)
        finally:
            embedded.close()


def test_processes_of_a_job_do_not_inherit_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os\nfrom atoll import config\nassert config.take_ticket() == 'atoll://h:1/s'\n"
        "assert 'ATOLL_TICKET' not in os.environ\nassert config.take_ticket() == ''\n"
    )
    monkeypatch.setenv("ATOLL_TICKET", "atoll://h:1/s")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_revoked_standing_ticket_differs_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        old = parse_ticket(hub.ticket).secret
        with operator(hub) as client:
            (row,) = client.tickets()
            client.revoke_ticket(row["id"])
            assert client.tickets()[0]["state"] == "revoked"
    with serving(tmp_path) as hub:
        assert parse_ticket(hub.ticket).secret != old
        joined(hub, tmp_path / "home")


def test_the_last_use_of_a_ticket_is_given_once_however_many_ask(hub: HubServer) -> None:
    with operator(hub) as client:
        secret = parse_ticket(client.create_ticket(role="viewer", uses=1)).secret
    auth = stores_of(hub).auth

    async def race() -> list[object]:
        import asyncio

        asks = [auth.redeem(secret, name=f"n{n}", roles=("viewer",)) for n in range(20)]
        return await asyncio.gather(*asks, return_exceptions=True)

    came_in = [one for one in hub.call(race()) if not isinstance(one, Exception)]
    assert len(came_in) == 1


def test_a_cut_off_login_loses_its_open_connections_at_once(hub: HubServer) -> None:
    with operator(hub) as client:
        ticket = client.create_ticket(role="viewer", uses=1)
        token = client.log_in(parse_ticket(ticket).secret, name="vera").token
        (row,) = [row for row in client.tickets() if row["used_by"] == ["vera"]]
        with web(hub, token) as viewer, viewer.stream("GET", "/api/stream") as stream:
            lines = stream.iter_lines()
            next(lines)
            client.revoke_ticket(row["id"])
            with pytest.raises(httpx.TransportError):
                read_until(lines, deadline=time.monotonic() + PATIENCE_S)


def read_until(lines: Iterator[str], *, deadline: float) -> None:
    """Read lines to their end; fail when they go on beyond the deadline."""
    for _ in lines:
        assert time.monotonic() < deadline


def test_a_process_of_a_node_that_is_shut_out_loses_its_session(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        me = joined(hub, tmp_path / "home", name="box")
        with Peer(hub, "box", token=me.token) as peer, operator(hub) as client:
            client.revoke_node("box")
            with pytest.raises(ConnectionClosed):
                peer.notice(Drain, timeout_s=PATIENCE_S)
        with Peer(hub, "box", token=me.token) as again:
            assert isinstance(again.welcome, Failure)
            assert again.welcome.error["kind"] == "Revoked"
