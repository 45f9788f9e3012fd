"""What one token, or one stranger, sends over all its connections has one limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from websockets.sync.client import connect

from atoll.clock import VirtualClock
from atoll.hub.nodes.token_meters import MOST, STRANGERS_PER_S, TokenMeters
from atoll.hub.quotas.ledger import Ledger
from atoll.hub.quotas.limits import Quotas
from atoll.hub.security.roles import Identity
from atoll.hub.server import HubServer
from atoll.hub.sessions.session import Sessions
from atoll.hub.tasks import Tasks
from atoll.wire.messages import LogLines
from tests.hub.peer import Peer
from tests.hub.quotas.test_quotas import alarm_about, limited, row_of
from tests.patience import PATIENCE_S
from tests.security.conftest import SPEC, login, operator, until, web


def meters(**quotas: int) -> tuple[TokenMeters, VirtualClock]:
    clock, unused = VirtualClock(), None
    sessions = Sessions(auth=unused, clock=clock, tasks=Tasks())  # type: ignore[arg-type]
    return TokenMeters(Ledger(Quotas(**quotas), clock=clock), sessions, clock=clock), clock


def test_connections_of_a_token_share_and_others_do_not_wait() -> None:
    found, _ = meters(requests_per_s=100)
    program, member = Identity("program", "p"), Identity("job", "j", "w0")
    assert [found.pause_s(program, 50.0) for _ in range(2)] == [0.0, 0.0]
    pauses = [found.pause_s(program, 100.0) for _ in range(5)]
    assert pauses == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.pause_s(member, 100.0) == 0.0
    assert found.pause_s(Identity("job", "j", "w1"), 100.0) == 0.0


def test_operators_do_not_wait_and_zero_is_no_limit() -> None:
    found, _ = meters(requests_per_s=100)
    assert not any(found.pause_s(Identity("operator", "o"), 1e6) for _ in range(5))
    unlimited, _ = meters(requests_per_s=0)
    assert not any(unlimited.pause_s(Identity("program", "p"), 1e6) for _ in range(5))


def test_meters_of_many_addresses_are_bounded() -> None:
    found, clock = meters()
    for number in range(3 * MOST):
        found.stranger_pause_s(str(number))
        found.pause_s(Identity("program", str(number)), 1.0)
        clock.advance(1e-3)
    assert len(found) <= 2 * MOST
    assert sum(found.stranger_pause_s("one") for _ in range(int(3 * STRANGERS_PER_S))) > 0


def by_http(hub: HubServer, token: str) -> None:
    with web(hub, token) as client:
        body = {"queue": "pool/a", "key": "k", "value": 1}
        assert client.post("/api/queues/put", json=body).status_code == 200


def by_json_socket(hub: HubServer, token: str) -> None:
    url = hub.url.replace("http", "ws", 1) + "/api/queues/socket"
    with connect(url, proxy=None) as socket:
        socket.send(json.dumps({"token": token}))
        socket.recv(timeout=PATIENCE_S)
        socket.send(json.dumps({"id": 1, "do": "put", "queue": "pool/a", "key": "k", "value": 1}))
        assert "done" in json.loads(socket.recv(timeout=PATIENCE_S))


@pytest.mark.parametrize(("way", "limit"), [(by_http, 12), (by_json_socket, 4)])
def test_a_program_is_slowed_however_it_sends_and_named(
    tmp_path: Path, way: Callable[[HubServer, str], None], limit: int
) -> None:
    with limited(tmp_path, requests_per_s=limit) as hub:
        way(hub, login(hub, "program", name="producer"))  # one alone is above the limit
        row = row_of(hub, "requests_per_s", "program producer")
        assert (row["limit"], row["reached"]) == (limit, True)
        assert "program producer" in alarm_about(hub, "program producer")["cause"]


def test_sessions_of_a_member_are_counted_together(tmp_path: Path) -> None:
    """However often a process connects anew, its token has sent what it has sent."""
    with limited(tmp_path, requests_per_s=25) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        assert hub.hub is not None
        issued = hub.call(hub.hub.stores.auth.issue_job_token(job, member="w0", attempt=1))
        for number in range(3):
            with Peer(hub, f"{job}/w0", token=issued, incarnation=f"i{number}") as member:
                member.request(LogLines(job, "w0", 1, ["x"] * 10))
        (meter,) = until(lambda: list(hub.hub.meters._meters.values()))  # type: ignore[union-attr]
        assert until(lambda: meter.frames == 6), "three times a Hello, and lines"
        assert row_of(hub, "requests_per_s", f"job {job}/w0")["reached"]


def test_requests_without_a_token_wait_and_healthz_does_not(tmp_path: Path) -> None:
    with limited(tmp_path) as hub, web(hub) as stranger:
        assert hub.hub is not None
        counted = hub.hub.meters._strangers
        assert stranger.get("/healthz").status_code == 200
        assert not counted
        for number in range(3):
            guess = {"secret": f"guess{number}", "name": "x"}
            assert stranger.post("/api/join", json=guess).status_code == 401
        assert stranger.get("/api/jobs").status_code == 401
        (meter,) = counted.values()
        assert meter.frames == 4
