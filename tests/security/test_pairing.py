"""Pairing with a real hub: wrong codes, a liar, and a man in the middle who relays everything."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.clock import RealClock
from atoll.errors import AuthError, ConfigError, HubUnreachable, WireError, WrongCode
from atoll.hub.security.certificates import Authority
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from atoll.node.identity.discovery import FoundHub, hub_at
from atoll.node.identity.join import enter_cluster
from atoll.node.identity.pairing import pair
from atoll.wire.pairing import PairShare, PairStart, PairTicket, seal, side
from atoll.wire.spake2 import Password
from tests.security.conftest import INFO, operator, serving, web

Answer = Callable[[str, str, bytes], tuple[int, bytes]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with serving(tmp_path / "hub", tls="on") as server:
        yield server


def code_of(hub: HubServer, *, renew: bool = False) -> str:
    with operator(hub) as client:
        return str(client.pairing(renew=renew)["code"])


def wrong(code: str) -> str:
    return code[:-1] + str((int(code[-1]) + 1) % 10)


def at(hub: HubServer) -> FoundHub:
    return hub_at(f"127.0.0.1:{hub.port}")


def test_code_gives_the_usual_ticket_and_identity(hub: HubServer, tmp_path: Path) -> None:
    code = code_of(hub)
    ticket = pair(at(hub), code)
    assert ticket.fingerprint == parse_ticket(hub.ticket).fingerprint
    me = enter_cluster(ticket, home=tmp_path / "box", name="box", info=INFO)
    assert me.node == "box"
    assert me.certificate
    with pytest.raises(AuthError, match="used up"):
        enter_cluster(ticket, home=tmp_path / "other", name="other", info=INFO)
    with pytest.raises(AuthError, match="no open pairing code"):
        pair(at(hub), code)
    assert code_of(hub) != code


def test_wrong_codes_say_how_many_tries_are_left(hub: HubServer) -> None:
    code = code_of(hub)
    for left in ("2 tries left", "1 try left", "0 tries left"):
        with pytest.raises(WrongCode, match=left):
            pair(at(hub), wrong(code))
    with pytest.raises(AuthError, match="ended after wrong tries") as caught:
        pair(at(hub), code)
    assert "atoll ticket code" in str(caught.value)
    assert code_of(hub) == ""
    with operator(hub) as client:
        events = client.hub_events()["events"]
    assert [e["kind"] for e in events].count("pairing-refused") == 3
    assert code_of(hub, renew=True)


def test_hub_without_tls_has_no_codes(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "plain") as server,
        operator(server) as client,
        pytest.raises(ConfigError, match="no pairing codes"),
    ):
        client.pairing()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/pair", {"share": "AAAA"}),
        ("/api/pair", {"share": 7}),
        ("/api/pair", {}),
        ("/api/pair/finish", {"exchange": "none", "proof": "AAAA"}),
        ("/api/pair/finish", {"exchange": "none", "proof": "!"}),
    ],
)
def test_messages_that_are_wrong_cost_no_try(
    hub: HubServer, path: str, body: dict[str, Any]
) -> None:
    code = code_of(hub)
    with web(hub) as client:
        assert client.post(path, json=body).status_code in (400, 401)
    with operator(hub) as asking:
        assert asking.pairing()["tries_left"] == 3
    assert code_of(hub) == code


# ---------------------------------------------------------------------------- in the middle


@contextlib.contextmanager
def between(folder: Path, answer: Answer) -> Iterator[FoundHub]:
    """Serve HTTPS with a certificate of its own; yield where a joiner would find it."""
    authority = Authority(folder / "liar", clock=RealClock())
    authority.refresh(["127.0.0.1"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*answer("GET", self.path, b""))

        def do_POST(self) -> None:
            nbytes = int(self.headers["content-length"])
            self._reply(*answer("POST", self.path, self.rfile.read(nbytes)))

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub_at(f"127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_who_relays_everything_gets_no_ticket_and_is_noticed(
    hub: HubServer, tmp_path: Path
) -> None:
    seen: list[bytes] = []
    with web(hub) as client:

        def relay(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            headers = {"content-type": "application/json"}
            answer = client.request(method, path, content=body, headers=headers)
            seen.extend((body, answer.content))
            return answer.status_code, answer.content

        with between(tmp_path, relay) as found:
            ticket = pair(found, code_of(hub))
            assert ticket.fingerprint == parse_ticket(hub.ticket).fingerprint
            with pytest.raises(HubUnreachable, match="not signed by the authority"):
                enter_cluster(ticket, home=tmp_path / "box", name="box", info=INFO)
    assert seen
    assert not any(ticket.secret.encode() in message for message in seen)
    with operator(hub) as asking:
        assert "box" not in [node["node"] for node in asking.nodes()]


def test_who_does_not_know_the_code_cannot_pass_for_the_hub(tmp_path: Path) -> None:
    """The liar guesses a code, runs the protocol and offers a ticket of its own hub."""
    secret = side(Password.of_code("000-000"), is_joiner=False)
    kept: dict[str, Any] = {}

    def lie(_method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/api/pair":
            mine = secret.share()
            kept["keys"] = secret.keys(mine, msgspec.json.decode(body, type=PairStart).share)
            return 200, msgspec.json.encode(PairShare("x", mine))
        keys = kept["keys"]
        made = PairTicket(keys.mac_b, seal("atoll://127.0.0.1:1/SECRET", keys))
        return 201, msgspec.json.encode(made)

    with (
        between(tmp_path, lie) as found,
        pytest.raises(AuthError, match="does not know the pairing code"),
    ):
        pair(found, "111-111")


def test_answers_that_are_wrong_are_refused(tmp_path: Path) -> None:
    def babble(_method: str, _path: str, _body: bytes) -> tuple[int, bytes]:
        return 200, json.dumps({"exchange": 7}).encode()

    with between(tmp_path, babble) as found, pytest.raises(WireError, match="pairing is wrong"):
        pair(found, "111-111")
