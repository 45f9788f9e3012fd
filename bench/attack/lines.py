"""Who reaches the ports that members and the supervisors of islands open to each other."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable

import psutil

from atoll.errors import AtollError
from atoll.net.member_tls import MemberTls
from bench.attack.attacks import Suite, hold
from bench.attack.members import member_of
from bench.attack.session import WAIT_S, until
from bench.attack.site import Site, trainer_job

suite = Suite()

DIRECT = "who is no member of a job reaches none of its members"
GATE = "an island's rendezvous admits its own machines only"

NEAR = ("near1", "near2")
"""Machines whose members connect to each other."""
SILENT = 48
"""Connections that say nothing, held open meanwhile."""
ANSWER_S = 10.0
"""A listener gives a stranger five seconds; the machine may be busy."""


def _more_machines(site: Site) -> None:
    if NEAR[0] not in site.cluster.nodes:
        for name in NEAR:
            site.cluster.start_node(name)
        until(lambda: all(site.node_state(name) == "online" for name in NEAR), "two machines")


def _ports(site: Site, job: str) -> list[tuple[str, int]]:
    """Return where the processes of a job listen, as who scans the ports of a machine finds."""
    found = set()
    for process in site.cluster.processes():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("ATOLL_JOB") != job
                or "ATOLL_DIRECTORY" not in process.environ()
            ):
                continue
            for line in process.net_connections(kind="tcp"):
                if line.status == psutil.CONN_LISTEN:
                    host = line.laddr.ip
                    found.add(("127.0.0.1" if host in ("0.0.0.0", "::") else host, line.laddr.port))
    return sorted(found)


def _said(sent: Callable[[socket.socket], bytes], place: tuple[str, int]) -> bytes:
    """Return what a listener says to somebody; empty: nothing, or it closes."""
    with contextlib.suppress(OSError), socket.create_connection(place, ANSWER_S) as line:
        return sent(line)
    return b""


def _garbage(line: socket.socket) -> bytes:
    line.sendall(os.urandom(64))
    return line.recv(256)


def _http(line: socket.socket) -> bytes:
    line.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    return line.recv(256)


def _any_tls(line: socket.socket) -> bytes:
    """Speak TLS without a certificate, as a browser would, and then ask."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(line) as opened:
        opened.sendall(b"GET /offer/0/-/0/1 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\n\r\n")
        return opened.recv(256)


def _as_member(key: bytes, name: str) -> Callable[[socket.socket], bytes]:
    """Return what somebody does who knows some key: the handshake, and a greeting."""

    def meet(line: socket.socket) -> bytes:
        try:
            met = MemberTls(key, name=name).dialling(line)
            line.settimeout(ANSWER_S)
            met.send(f"job/{name}".encode())
            return met.receive(most=1 << 20) or b"welcome"
        except AtollError:
            return b""

    return meet


def _knock(site: Site, job: str) -> str:
    """Try all ports of a job's processes in every way; return what was tried."""
    other = bytes(member_of(site).registered.key)  # of the job that this attacker is a member of
    ways = {
        "garbage": _garbage, "HTTP": _http, "TLS without a certificate": _any_tls,
        "a guessed key": _as_member(b"guessed", "w0"),
        "another job's key": _as_member(other, "w0"),
        "another job's key, a follower's name": _as_member(other, "w0.1"),
    }  # fmt: skip
    ports = until(lambda: _ports(site, job), f"{job} opens ports")
    tried = 0
    for place in ports:
        with contextlib.ExitStack() as held:
            for _ in range(SILENT):
                with contextlib.suppress(OSError):
                    held.enter_context(socket.create_connection(place, ANSWER_S))
            for name, way in ways.items():
                said = _said(way, place)
                let_in = said and said[:1] != b"\x15" and b" 40" not in said[:16]
                hold(not let_in, f"{name} at port {place[1]} was answered with {said[:60]!r}")
                tried += 1
    return f"{tried} tries at {len(ports)} ports, {SILENT} silent lines at each: nothing"


def _ends(site: Site, job: str) -> None:
    def ended() -> str:
        view = site.operator.job(job)
        return str(view["state"]) if view["ended"] else ""

    state = until(ended, f"{job} ends", wait_s=3 * WAIT_S)
    hold(state == "done", f"the job under attack ended {state}")


@suite.attack(DIRECT, quick=False)
def knock_at_members_with_a_direct_route(site: Site) -> str:
    _more_machines(site)
    spec = trainer_job(site, "direct", on=[*NEAR], steps=300, nodes="2")
    job = site.operator.submit(spec.replace('route = "relay"', 'route = "direct"'))
    until(lambda: int(site.operator.job(job)["committed_round"]) > 0, "the job commits rounds")
    tried = _knock(site, job)
    _ends(site, job)
    return f"{tried}; the job ended well"


@suite.attack(GATE, quick=False)
def knock_at_the_gate_of_an_island(site: Site) -> str:
    """Also as who has a token of the hub, but not of this island."""
    _more_machines(site)
    spec = trainer_job(site, "island", on=[*NEAR], steps=300)
    spec = spec.replace("[strategy]\n", '[strategy]\ninner = "ddp"\n')
    spec += '[island]\nranks = 2\nmachines = 2\nencryption = "off"\n'
    job = site.operator.submit(spec)
    until(lambda: _ports(site, job), "the island opens its gate", wait_s=2 * WAIT_S)
    mine = member_of(site)
    shown = {"viewer": (site.token("viewer"), None), "another job": (mine.launch.token, None),
             "another machine": (mine.me.token, mine.me)}  # fmt: skip
    for name, (token, me) in shown.items():
        with site.web(token, me=me) as web:
            answer = web.get(f"/api/jobs/{job}/rendezvous/w0")
        hold(answer.status_code >= 400, f"{name} received the gate: {answer.text[:80]}")
    gates = [
        place for place in _ports(site, job)
        if _said(_as_member(b"guessed", "w0.1"), place) == b""
    ]  # fmt: skip
    hold(gates, "the island has no port: nothing was tried")
    other = bytes(mine.registered.key)
    for place in gates:
        for key in (b"guessed", other, job.encode()):
            for name in ("w0.1", "w0", "w0.2"):
                said = _said(_as_member(key, name), place)
                hold(not said, f"{name} with a wrong key was let in: {said[:60]!r}")
        for way in (_garbage, _http):
            hold(b"start" not in _said(way, place), "a stranger received what to start")
    _ends(site, job)
    return f"{len(shown)} tokens refused, {len(gates)} ports, 3 wrong keys, 3 names: none let in"
