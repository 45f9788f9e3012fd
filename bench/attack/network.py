"""Between machines: clear text, other versions of TLS, men in the middle, stolen tokens."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from atoll.clock import RealClock
from atoll.hub.security.certificates import Authority
from atoll.net.endpoint import parse_ticket
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.session import Session, until
from bench.attack.site import Site
from bench.chaos.proxy import Proxy
from bench.kit.cluster import ROOT

suite = Suite()

MIDDLE = "a man in the middle gets no secret"
TLS = "TLS 1.3 only, with the pinned authority"
BOUND = "a node's token is useless without its certificate"
REVOKED = "a revoked machine is out at once"

JOIN_S = 60.0
"""How long a program may take to find that it speaks with the wrong hub."""


@dataclass
class Middle:
    """A server in the place of the hub, that keeps what it receives."""

    port: int
    received: bytearray


@contextlib.contextmanager
def in_the_middle(context: ssl.SSLContext, answer: bytes) -> Iterator[Middle]:
    """Speak TLS with a certificate of one's own, and give every request the same answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        middle = Middle(listening.getsockname()[1], bytearray())

        def talk(plain: socket.socket) -> None:
            with contextlib.suppress(OSError), plain:
                plain.settimeout(JOIN_S)
                with context.wrap_socket(plain, server_side=True) as opened:
                    while block := opened.recv(65_536):
                        middle.received += block
                        opened.sendall(answer)

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listening.accept()
                    threading.Thread(target=talk, args=(plain,), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        yield middle


def _own_certificate(folder: Path) -> tuple[ssl.SSLContext, str]:
    """Return a server's settings with a certificate that the attacker signed, and its authority."""
    authority = Authority(folder, clock=RealClock())
    authority.refresh(["localhost", "127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate)
    return context, authority.ca.read_text(encoding="ascii")


def _http(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def _run(site: Site, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the product with a home of its own."""
    own = {"PYTHONPATH": str(ROOT), "ATOLL_HOME": str(site.folder / name)}
    return subprocess.run(
        [sys.executable, "-m", *words], env={**os.environ, **own}, capture_output=True, text=True,
        timeout=2 * JOIN_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@suite.attack(MIDDLE)
def stand_between_a_new_machine_and_the_hub(site: Site) -> str:
    """With an authority of one's own, and with the hub's, whose key the attacker lacks."""
    if not site.secure:
        raise NotTried("this hub speaks no TLS")
    context, ca = _own_certificate(site.folder / "middle")
    right = Path(site.cluster.ca).read_text(encoding="ascii")
    for shown in (ca, right):
        with in_the_middle(context, _http(shown)) as middle:
            for role, words in (
                ("node", ("atoll.node", "--no-measure", "--ticket")),
                ("operator", ("atoll.cli", "login")),
            ):
                ticket = parse_ticket(site.operator.create_ticket(role=role, uses=1))
                wrong = replace(ticket, host="127.0.0.1", port=middle.port)
                done = _run(site, f"victim-{role}", *words, str(wrong))
                hold(done.returncode != 0, f"{words[0]} joined what stands in the middle")
                hold(
                    ticket.secret.encode() not in middle.received, "the middle received the secret"
                )
            hold(middle.received, "no process spoke with the middle: nothing was tried")
    return "join and login refused it twice; the secret was not sent"


@suite.attack(MIDDLE)
def stand_between_a_known_machine_and_the_hub(site: Site) -> str:
    if not site.secure:
        raise NotTried("this hub speaks no TLS")
    me = site.node()
    context, ca = _own_certificate(site.folder / "middle2")
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.load_cert_chain(me.certificate, me.key)  # signed by the hub's authority, for a node
    for shown in (context, other):
        with in_the_middle(shown, _http(ca)) as middle:
            endpoint = me.endpoint.context(secure=True)
            assert endpoint is not None
            with httpx.Client(verify=endpoint, trust_env=False) as web:
                try:
                    web.get(
                        f"https://127.0.0.1:{middle.port}/api/hub",
                        headers={"authorization": f"Bearer {me.token}"},
                    )
                    refused = False
                except httpx.TransportError:
                    refused = True
            hold(refused and not middle.received, "what stands in the middle was spoken to")
    return "neither an own authority nor a node's certificate passes for the hub"


@suite.attack(TLS)
def speak_older_or_no_tls(site: Site) -> str:
    if not site.secure:
        raise NotTried("this hub speaks no TLS")
    with site.raw(tls=False) as opened:
        opened.sendall(b"GET /ca.pem HTTP/1.1\r\nHost: h\r\n\r\n")
        opened.settimeout(JOIN_S)
        answer = opened.recv(65_536)
    hold(b"BEGIN CERTIFICATE" not in answer and b"200 OK" not in answer, f"it answers {answer!r}")
    context = site.context()
    assert context is not None
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        plain = socket.create_connection(site.address, timeout=JOIN_S)
        with plain, context.wrap_socket(plain) as old:
            hold(False, f"{old.version()} was spoken")
    except (ssl.SSLError, ConnectionError):
        pass
    return "plain HTTP and TLS 1.2 are refused"


@suite.attack(BOUND)
def use_a_stolen_node_token(site: Site) -> str:
    if not site.secure:
        raise NotTried("this hub speaks no TLS: a token is all that a node has")
    victim, thief = site.node(), site.node()
    for shown in (None, thief):
        with site.web(victim.token, me=shown) as web:
            status = web.get("/api/hub").status_code
        hold(status == 401, f"the token of another machine opened /api/hub: {status}")
        with site.session(victim.node, victim.token, me=shown) as session:
            hold(not session.welcome, "the token of another machine opened its session")
    with site.web(victim.token, me=victim) as web:
        hold(web.get("/api/hub").status_code == 200, "the right certificate is refused")
    return "refused without and with another machine's certificate"


@suite.attack(REVOKED)
def go_on_after_being_revoked(site: Site) -> str:
    ticket = site.operator.create_ticket(role="node", uses=2)
    me = site.node(ticket=ticket)
    with site.session(me.node, me.token, me=me) as session:
        hold(session.welcome, f"the machine was not let in: {session.answer}")
        site.operator.revoke_node(me.node)
        with contextlib.suppress(Exception):
            for _ in range(100):
                session.opened.recv(timeout=1.0)
        hold(session.opened.close_code is not None, "its open session goes on")
    again = replace(me, token=site.node().token)
    tries = {"its token": me, "another token, its certificate": again}
    for name, shown in tries.items():
        with site.web(shown.token, me=me if site.secure else None) as web:
            status = web.get("/api/hub").status_code
        hold(status in (401, 403) or not site.secure, f"{name}: {status}")
    named = site.node(ticket=ticket, name=me.node)
    hold(named.node != me.node, "a newcomer got the name of the revoked machine")
    return "session cut, token and certificate refused, its name goes to no other machine"


@suite.attack("sessions that say nothing are given up", quick=False)
def leave_sockets_half_open(site: Site) -> str:
    """Behind a line that falls silent without an end: no FIN, no RST ever comes."""
    me = site.node()
    before = site.rss_mb()
    near = site.cluster.url.rpartition(":")[0]
    with Proxy(site.cluster.port) as line, site.socket(me=me, url=f"{near}:{line.port}") as opened:
        session = Session(opened, me.node, me.token)
        hold(session.welcome, f"the machine was not let in: {session.answer}")
        line.silence()
        until(lambda: site.node_state(me.node) != "online", "the hub gives the silent machine up")
        line.cut()
    return f"given up; hub {site.rss_mb() - before:+.0f} MB"
