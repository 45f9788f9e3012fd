"""TLS: by default off loopback, version 1.3 alone, with a pinned authority and keys of nodes."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from atoll.clock import VirtualClock
from atoll.errors import AuthError, ConfigError, HubUnreachable, Revoked
from atoll.hub.security.certificates import NODE_DAYS, Authority
from atoll.hub.security.tls import choose
from atoll.hub.server import HubServer
from atoll.net import pinned
from atoll.net.endpoint import HubEndpoint, Ticket, parse_ticket
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.link import Link
from atoll.net.sync_link import open_link
from atoll.node.identity import join, tls_identity
from atoll.node.identity.identity import Identity
from atoll.wire.messages import QueueClaim, QueueItems
from tests.patience import PATIENCE_S
from tests.security.conftest import INFO, joined, operator, raw, serving, stores_of, web

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("wish", "host", "mode"),
    [("auto", "127.0.0.1", "off"), ("auto", "localhost", "off"), ("auto", "::1", "off"),
     ("auto", "0.0.0.0", "own"), ("auto", "192.168.1.4", "own"), ("auto", "::", "own"),
     ("on", "127.0.0.1", "own"), ("off", "0.0.0.0", "off")],
)  # fmt: skip
def test_every_address_but_loopback_gets_tls(wish: str, host: str, mode: str) -> None:
    assert choose(wish, host=host).mode == mode


@pytest.mark.parametrize("wish", ["yes", "/nowhere/cert.pem:/nowhere/key.pem"])
def test_a_wrong_wish_is_told(wish: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        choose(wish, host="0.0.0.0")


def test_public_hub_speaks_tls_only_and_pins_it_in_tickets(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, host="0.0.0.0") as hub:
        ticket = parse_ticket(hub.ticket)
        assert ticket.url.startswith("https://")
        assert [ticket.fingerprint] == pinned.fingerprints(Path(hub.ca))
        told = httpx.get(
            f"http://127.0.0.1:{hub.port}/healthz", trust_env=False, timeout=PATIENCE_S
        )
        assert told.status_code == 400
        assert told.json()["error"]["what"] == "this hub requires TLS"
        short = Ticket("127.0.0.1", hub.port, ticket.secret)
        with pytest.raises(ConfigError, match=r"requires TLS.*a whole ticket"):
            join.enter_cluster(short, home=tmp_path / "short", name="box", info=INFO)
        with operator(hub) as client:
            assert client.jobs() == []
        me = joined(hub, tmp_path / "home")
        assert me.hub.startswith("https://")


def test_hub_on_loopback_needs_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        assert hub.url.startswith("http://127.0.0.1:")
        assert "~" not in hub.ticket
        assert not (tmp_path / "data" / "tls").exists()


def test_only_tls_1_3_is_spoken(secure: HubServer) -> None:
    context = ssl.create_default_context(cafile=secure.ca)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", secure.port)) as opened,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(opened)
    with raw(secure, tls=True) as opened:
        assert isinstance(opened, ssl.SSLSocket)
        assert opened.version() == "TLSv1.3"


def test_ca_of_the_hub_is_open_to_strangers_and_its_key_is_not(secure: HubServer) -> None:
    with web(secure) as stranger:
        answer = stranger.get("/ca.pem")
        assert answer.text == Path(secure.ca).read_text()
        assert "PRIVATE" not in answer.text
    keys = [path for path in Path(secure.ca).parent.iterdir() if b"PRIVATE" in path.read_bytes()]
    assert len(keys) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)


def test_wrong_hub_is_refused_before_a_secret_is_sent(secure: HubServer, tmp_path: Path) -> None:
    told = parse_ticket(secure.ticket)
    wrong = Ticket(told.host, told.port, told.secret, mark="0" * 40)
    with pytest.raises(AuthError, match="not the hub of this ticket"):
        join.enter_cluster(wrong, home=tmp_path, name="box", info=INFO)
    with operator(secure) as client:
        assert "box" not in [row for ticket in client.tickets() for row in ticket["used_by"]]
    assert not list(tmp_path.rglob("*.pem"))


def test_what_another_authority_signed_is_not_spoken_to(secure: HubServer, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", clock=VirtualClock())
    with (
        HubClient(
            secure.url, secure.operator_token, endpoint=HubEndpoint(ca=str(other.ca))
        ) as client,
        pytest.raises(HubUnreachable, match=r"(?i)certificate"),
    ):
        client.jobs()


def test_certificate_of_a_node_cannot_stand_in_for_the_hub(
    secure: HubServer, tmp_path: Path
) -> None:
    me = joined(secure, tmp_path, name="impostor")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(me.certificate, me.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = (
            "import sys\nfrom atoll.net.http.client import HubClient\n"
            "from atoll.net.endpoint import HubEndpoint\n"
            "from atoll.errors import HubUnreachable\n"
            "endpoint = HubEndpoint(ca=sys.argv[2])\n"
            "try:\n    HubClient(sys.argv[1], 'token', endpoint=endpoint).jobs()\n"
            "except HubUnreachable as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", code, f"https://127.0.0.1:{port}", me.ca]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        accepted, _ = listening.accept()
        with accepted, pytest.raises(ssl.SSLError):
            context.wrap_socket(accepted, server_side=True).recv(1)
        out, _ = client.communicate(timeout=PATIENCE_S)
    assert "purpose" in out


# --------------------------------------------------------------------------- nodes


def test_a_node_gets_a_key_of_its_own_that_nobody_else_can_read(
    secure: HubServer, tmp_path: Path
) -> None:
    me = joined(secure, tmp_path, name="keyed")
    assert Path(me.key).stat().st_mode & 0o777 == 0o600
    assert "PRIVATE KEY" in Path(me.key).read_text()
    assert "CERTIFICATE" in Path(me.certificate).read_text()
    assert tls_identity.life_left(me.certificate)[0] > 0.9 * NODE_DAYS * DAY_S
    with HubClient(me.hub, me.token, endpoint=me.endpoint) as client:
        assert client.hub()["role"] == "node"


def test_token_of_a_node_opens_nothing_without_its_certificate(
    secure: HubServer, tmp_path: Path
) -> None:
    me = joined(secure, tmp_path / "a", name="first")
    other = joined(secure, tmp_path / "b", name="second")
    for endpoint in (HubEndpoint(ca=me.ca), other.endpoint):
        with (
            HubClient(me.hub, me.token, endpoint=endpoint) as client,
            pytest.raises(AuthError, match="its own certificate"),
        ):
            client.hub()
        with pytest.raises(AuthError, match="its own certificate"):
            asyncio.run(say_hello(me, endpoint))
    asyncio.run(say_hello(me, me.endpoint))


async def say_hello(me: Identity, endpoint: HubEndpoint) -> None:
    """Open a node's session, look into its queue, and close it."""
    link: Link = await open_link(
        me.hub, make_hello(me.node, me.token, info=INFO), endpoint=endpoint, timeout_s=PATIENCE_S
    )
    answer = await link.request(QueueClaim(f"node/{me.node}", lease_s=1.0), timeout_s=PATIENCE_S)
    assert isinstance(answer, QueueItems)
    await link.close(timeout_s=1.0)


@pytest.mark.parametrize("number", [0, 0xABCDEF, 0x0F << 150])
def test_revoked_certificate_fails_with_a_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    if number:  # TLS libraries write some numbers with a zero before them, and some without
        numbers = itertools.count(number)
        monkeypatch.setattr("cryptography.x509.random_serial_number", lambda: next(numbers))
    with serving(tmp_path / "hub", tls="on") as hub:
        old = joined(hub, tmp_path / "old")
        with operator(hub) as client:
            client.revoke_node(old.node)
        with (
            HubClient(old.hub, old.token, endpoint=old.endpoint) as client,
            pytest.raises(Revoked, match="revoked the access"),
        ):
            client.hub()
        new = joined(hub, tmp_path / "new")
        assert new.node.startswith(f"{old.node}-"), "people know the other machine by its name"
        with (
            HubClient(new.hub, new.token, endpoint=old.endpoint) as client,
            pytest.raises(Revoked, match="revoked this certificate"),
        ):
            client.hub()
        asyncio.run(say_hello(new, new.endpoint))


def test_workers_need_no_certificate(secure: HubServer) -> None:
    with operator(secure) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")
    assert secure.hub is not None
    token = secure.call(stores_of(secure).auth.issue_job_token(job))
    with HubClient(secure.url, token, endpoint=HubEndpoint(ca=secure.ca)) as worker:
        assert worker.job(job)["job"] == job


def test_join_without_a_signing_request_uses_no_ticket_up(secure: HubServer) -> None:
    with operator(secure) as client:
        ticket = parse_ticket(client.create_ticket(uses=1))
        with pytest.raises(ConfigError, match="requires a signing request"):
            client.join(ticket.secret, name="old", info=INFO)
        (row,) = [row for row in client.tickets() if row["uses_left"] == 1]
        assert row["used_by"] == []


@pytest.mark.parametrize("request_pem", ["nonsense", "x" * 5000, "rsa"])
def test_wrong_signing_requests_are_refused(secure: HubServer, request_pem: str) -> None:
    with operator(secure) as client:
        ticket = parse_ticket(client.create_ticket(uses=5))
        pem = rsa_request() if request_pem == "rsa" else request_pem
        with pytest.raises(ConfigError, match="P-256"):
            client.join(ticket.secret, name="odd", info=INFO, request=pem)
        assert "odd" not in stores_of(secure).auth.names("node")


def rsa_request() -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def test_certificate_of_a_node_is_renewed_by_itself(
    secure: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = joined(secure, tmp_path, name="lasting")
    before, key = Path(me.certificate).read_text(), Path(me.key).read_text()
    assert not join.renew_if_due(me)
    monkeypatch.setattr(tls_identity, "RENEW_AT", 1.0)
    assert join.renew_if_due(me)
    assert Path(me.certificate).read_text() != before
    assert Path(me.key).read_text() == key
    asyncio.run(say_hello(me, me.endpoint))


def test_renewal_needs_the_certificate_that_ends(secure: HubServer, tmp_path: Path) -> None:
    me = joined(secure, tmp_path, name="careless")
    request = tls_identity.signing_request(Path(me.key))
    with (
        HubClient(me.hub, me.token, endpoint=HubEndpoint(ca=me.ca)) as client,
        pytest.raises(AuthError),
    ):
        client.renew(request)


def test_identity_ends_with_its_authority_or_certificate(
    secure: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = joined(secure, tmp_path, name="known")
    ticket = parse_ticket(secure.ticket)
    assert join.known_hub(ticket, home=tmp_path) == me
    other = Ticket(ticket.host, ticket.port, ticket.secret, mark="1" * 40)
    assert join.known_hub(other, home=tmp_path) is None
    monkeypatch.setattr(tls_identity, "life_left", lambda _: (0.0, 0.0))
    assert join.known_hub(ticket, home=tmp_path) is None


# ---------------------------------------------------------------------------- connections


def test_peer_certificate_reaches_the_application(secure: HubServer, tmp_path: Path) -> None:
    """The one thing that is relied on of uvicorn's inside: a state per connection."""
    seen: list[object] = []
    assert secure.hub is not None
    me = joined(secure, tmp_path, name="seen")
    ask, hello = secure.hub._web, secure.hub.sessions.serve

    async def web_spy(scope: dict[str, object], receive: object, send: object) -> None:
        seen.append(scope["state"]["connection_slot"].certificate)  # type: ignore[index]
        await ask(scope, receive, send)  # type: ignore[misc, arg-type]

    async def hello_spy(scope: dict[str, object], receive: object, send: object) -> None:
        seen.append(scope["state"]["connection_slot"].certificate)  # type: ignore[index]
        await hello(scope, receive, send)  # type: ignore[arg-type]

    secure.hub._web, secure.hub.sessions.serve = web_spy, hello_spy  # type: ignore
    try:
        with HubClient(me.hub, me.token, endpoint=me.endpoint) as client:
            client.hub()
        asyncio.run(say_hello(me, me.endpoint))
        context = ssl.create_default_context(cafile=secure.ca)
        context.check_hostname = False
        with connect(f"wss://127.0.0.1:{secure.port}/ws", ssl=context):
            pass
    finally:
        secure.hub._web, secure.hub.sessions.serve = ask, hello  # type: ignore
    names = [getattr(one, "name", None) for one in seen]
    assert names == ["seen", "seen", None]


def test_bytes_of_many_connections_do_not_mix(secure: HubServer) -> None:
    """All TLS connections of a hub read into one buffer."""
    with operator(secure) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")

    def upload(number: int) -> None:
        with operator(secure) as client:  # the hub compares the hash that is sent along
            for turn in range(5):
                client.put_file(job, f"{number}-{turn}", random.Random(number).randbytes(700_000))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upload, range(4)))
    with operator(secure) as client:
        assert len([file for file in client.files(job) if "-" in file.name]) == 20
        assert client.read_file(job, "3-4") == random.Random(3).randbytes(700_000)
