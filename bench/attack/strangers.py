"""A client that reaches the port and has no token: guesses, floods, slow and malformed bytes."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from websockets.exceptions import ConnectionClosed

from atoll.net.endpoint import parse_ticket
from atoll.wire.frames import HEADER
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Failure, Hello, QueueClaim, Welcome, pack
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.session import INFO, said_and_closed
from bench.attack.site import Site, own_address

suite = Suite()

GUESSES = "guessing is slowed, right secrets pass"
CONNECTIONS = "connections without a token are limited"
SLOW = "slow clients are cut off"
SIZE = "sizes without a token are limited"
FRAMES = "malformed input ends its own connection"

CLOSED_S = 60.0
"""By when a connection must be closed that is allowed 10 s; the machine may be busy."""

GROWTH_MB = 120.0
"""What the hub may keep of memory after a flood."""


@suite.attack(GUESSES)
def guess_tokens_and_tickets(site: Site) -> str:
    with site.web() as web:
        seen = [
            web.get("/api/jobs", headers={"authorization": f"Bearer guess{n}"}).status_code
            for n in range(15)
        ]
        body = {"name": "x", "request": "x"}
        joins = [
            web.post("/api/join", json=body | {"secret": f"guess{n}"}).status_code for n in range(5)
        ]
    hold(not {*seen, *joins} - {401, 429}, f"answers {seen} {joins}")
    hold(429 in seen, "fifteen wrong tokens were answered as the first was")
    with site.web(site.cluster.token) as web:
        hold(web.get("/api/jobs").status_code == 200, "a right token is refused meanwhile")
    me = site.node()
    hold(me.token, "a right ticket is refused meanwhile")
    return f"{seen.count(401)} x 401, then {seen.count(429)} x 429; right ticket and token pass"


@suite.attack(GUESSES)
def use_up_a_ticket_at_the_same_time(site: Site) -> str:
    ticket = parse_ticket(site.operator.create_ticket(role="viewer", uses=1))

    def log_in(number: int) -> int:
        with site.web() as web:
            body = {"secret": ticket.secret, "name": f"v{number}"}
            return web.post("/api/login", json=body).status_code

    with ThreadPoolExecutor(16) as pool:
        seen = list(pool.map(log_in, range(16)))
    hold(seen.count(201) == 1, f"a ticket for one use gave {seen.count(201)} logins")
    return "16 at once: one login"


def _flood(site: Site, count: int, first: bytes) -> tuple[int, float, float]:
    """Open many connections; return how many stay open, the growth in MB, and the answer's s."""
    before = site.rss_mb()
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                one = socket.create_connection(site.address, timeout=20.0)
                opened.append(one)
                one.sendall(first)
        answered_s = site.healthy_s()
        time.sleep(1.0)  # what is refused is closed meanwhile
        stay = sum(_is_open(one) for one in opened)
        return stay, site.rss_mb() - before, answered_s
    finally:
        for one in opened:
            one.close()


def _is_open(opened: socket.socket) -> bool:
    opened.setblocking(False)
    try:
        return opened.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@suite.attack(CONNECTIONS)
def open_1000_connections(site: Site) -> str:
    stay, growth_mb, answered_s = _flood(site, 1_000, b"\x16\x03\x01" if site.secure else b"G")
    far = not site.address[0].startswith("127.")
    hold(stay <= (256 if far else 2_048), f"{stay} of 1,000 stay open")
    hold(growth_mb < GROWTH_MB, f"the hub keeps {growth_mb:.0f} MB")
    return f"{stay} stay open, {growth_mb:+.0f} MB, /healthz after {answered_s:.2f} s"


@suite.attack(CONNECTIONS, quick=False)
def finish_3000_handshakes(site: Site) -> str:
    """Connections with TLS cost memory, that has to come back when they end."""
    if not site.secure:
        raise NotTried("this hub speaks no TLS")
    before = site.rss_mb()
    context = site.context()
    assert context is not None
    for _ in range(30):
        held = []
        for _ in range(100):
            with contextlib.suppress(OSError):
                plain = socket.create_connection(site.address, timeout=20.0)
                held.append(context.wrap_socket(plain))
        for one in held:
            one.close()
    growth_mb = site.rss_mb() - before
    hold(growth_mb < GROWTH_MB, f"the hub keeps {growth_mb:.0f} MB of 3,000 connections")
    return f"{growth_mb:+.0f} MB after 3,000 connections"


SLOW_WAYS: dict[str, tuple[bytes, bytes]] = {
    "silence": (b"", b""),
    "a head byte by byte": (b"", b"a"),
    "a body byte by byte": (
        b"POST /api/login HTTP/1.1\r\nHost: h\r\nContent-Length: 500\r\n\r\n", b"{",
    ),
    "the second head of a connection": (b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\nGET /", b"a"),
    "a chunk byte by byte": (
        b"POST /api/login HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1ff\r\n", b"a",
    ),
}  # fmt: skip
"""What is sent at once, and what is then sent again and again."""


@suite.attack(SLOW)
def be_slow_in_every_way(site: Site) -> str:
    def closed_after(first: bytes, drop: bytes, tls: bool | None) -> float:
        began = time.monotonic()
        with site.raw(tls=tls) as opened, contextlib.suppress(OSError):
            opened.sendall(first)
            opened.settimeout(0.5)
            while time.monotonic() - began < CLOSED_S:
                with contextlib.suppress(TimeoutError):
                    if not opened.recv(65_536):
                        break
                if drop:
                    opened.sendall(drop)
        return time.monotonic() - began

    def silent_websocket() -> float:
        began = time.monotonic()
        with site.socket() as opened:
            said_and_closed(opened, wait_s=CLOSED_S)
        return time.monotonic() - began

    ways: dict[str, Callable[[], float]] = {
        name: (lambda first=first, drop=drop: closed_after(first, drop, None))  # type: ignore[misc]
        for name, (first, drop) in SLOW_WAYS.items()
    }
    ways["a WebSocket without Hello"] = silent_websocket
    if site.secure:
        ways["half a TLS handshake"] = lambda: closed_after(b"\x16\x03\x01", b"", False)
    with ThreadPoolExecutor(len(ways)) as pool:
        times = dict(zip(ways, pool.map(lambda way: way(), ways.values()), strict=True))
    late = {name: round(s) for name, s in times.items() if s >= CLOSED_S}
    hold(not late, f"still open after {CLOSED_S:.0f} s: {', '.join(late)}")
    return (
        f"{len(ways)} ways, closed after {min(times.values()):.0f} to {max(times.values()):.0f} s"
    )


@suite.attack(SIZE)
def send_large_bodies_and_heads(site: Site) -> str:
    before = site.rss_mb()
    seen = []
    for path in ("/api/login", "/api/join", "/login", "/api/pair"):
        with site.web() as web:
            seen.append(web.post(path, content=b"x" * 300_000).status_code)
    hold(not set(seen) - {400, 403, 413, 429}, f"bodies of 300 kB are answered with {seen}")
    answer = site.request(b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 4_000_000)
    hold(b" 200 " not in answer[:20], "a head of 4 MB was taken")
    with site.socket() as opened:
        with contextlib.suppress(ConnectionClosed):
            opened.send(bytes(2_000_000))
        said = said_and_closed(opened)
    hold(not any(isinstance(body, Welcome) for body in said), "a first message of 2 MB was taken")
    growth_mb = site.rss_mb() - before
    hold(growth_mb < GROWTH_MB, f"the hub keeps {growth_mb:.0f} MB")
    return f"bodies {sorted(set(seen))}, head and first message refused, {growth_mb:+.0f} MB"


SMUGGLED = b"GET /api/jobs HTTP/1.1\r\nHost: h\r\nX-Smuggled: 1\r\n\r\n"


@suite.attack("one request has one length")
def smuggle_a_second_request(site: Site) -> str:
    """Two lengths, or two ways to state the length: only one answer may come, and no 200."""
    heads = [
        b"Content-Length: %d\r\nTransfer-Encoding: chunked" % len(SMUGGLED),
        b"Content-Length: 0\r\nContent-Length: %d" % len(SMUGGLED),
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b"Content-Length: +%d" % len(SMUGGLED),
        b"Content-Length: 0x10",
    ]
    accepted = []
    for head in heads:
        text = b"POST /api/login HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n0\r\n\r\n" % head
        answer = site.request(text + SMUGGLED)
        if answer.count(b"HTTP/1.1 ") > 1 and not answer.startswith(b"HTTP/1.1 4"):
            accepted.append(head.decode())
    hold(not accepted, f"two answers to {accepted}")
    return f"{len(heads)} ambiguous heads: refused"


@suite.attack(FRAMES)
def send_malformed_first_frames(site: Site) -> str:
    rng = random.Random(7)
    whole = pack(Hello(PROTOCOL, "t", "job/w0", "guess", "i1", INFO), id=1)
    tries = [rng.randbytes(rng.randrange(200)) for _ in range(60)]
    tries += [whole[: rng.randrange(len(whole))] for _ in range(30)]
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        tries.append(bytes(damaged))
    body = b"\xdd\xff\xff\xff\xff"
    tries += [
        struct.pack("!2sBBII", b"AT", PROTOCOL, kind, len(body), 0) + body for kind in range(4)
    ]
    tries.append(HEADER.pack(b"AT", PROTOCOL, 1, 2**32 - 1, 0))
    for data in tries:
        with site.socket() as opened:
            with contextlib.suppress(ConnectionClosed):
                opened.send(data)
            said = said_and_closed(opened)
        hold(all(isinstance(body, Failure) for body in said), f"{data[:40]!r} got {said}")
    with site.socket() as opened:
        opened.send("text instead of bytes")
        said_and_closed(opened)
    hold(site.healthy_s() < CLOSED_S, "the hub does not answer")
    return f"{len(tries)} frames: refused, the hub answers"


@suite.attack(FRAMES)
def flood_with_claims_without_a_number(site: Site) -> str:
    me = site.node()
    before = site.rss_mb()
    with site.socket(me=me) as opened:
        opened.send(pack(Hello(PROTOCOL, "t", me.node, me.token, "flood", INFO), id=1))
        claim = pack(QueueClaim(f"node/{me.node}", lease_s=1.0, wait_s=600.0))
        with contextlib.suppress(ConnectionClosed):
            for _ in range(20_000):
                opened.send(claim)
        refused = [b for b in said_and_closed(opened) if isinstance(b, Failure)]
    growth_mb = site.rss_mb() - before
    hold(refused, "20,000 claims with id 0 were not refused")
    hold(growth_mb < GROWTH_MB, f"the hub keeps {growth_mb:.0f} MB")
    return f"'{refused[0].error['what']}', {growth_mb:+.0f} MB, /healthz {site.healthy_s():.2f} s"


@suite.attack("a token gives no more than its role, also by plain bytes")
def read_what_is_not_for_strangers(site: Site) -> str:
    paths = (
        "/api/jobs", "/api/nodes", "/api/hub", "/metrics", "/api/audit", "/api/secrets",
        "/api/stream", "/api/tickets", "/api/pairing", "/api/history", "/.git/config", "/secrets",
        "/api/jobs/../tickets", "//api/jobs", "/API/JOBS", "/api/jobs/", "/static/../secrets.json",
    )  # fmt: skip
    for path in paths:
        for method in (b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"):
            head = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            answer = site.request(head + b"Content-Length: 0\r\n\r\n")
            status = answer[9:12]
            hold(status[:1] == b"4", f"{method.decode()} {path} without a token: {status.decode()}")
    return f"{len(paths)} addresses, 7 methods: refused"


@suite.attack("120 joins and logins of one address a minute", quick=False)
def join_without_end(site: Site) -> str:
    if site.address[0].startswith("127."):
        raise NotTried("this machine has no address but loopback, which is not limited")
    with site.web() as web:
        body = {"secret": parse_ticket(site.cluster.ticket).secret, "name": "m", "request": "x"}
        seen = [web.post("/api/join", json=body).status_code for _ in range(150)]
    hold(429 in seen, f"150 joins were answered with {sorted(set(seen))}")
    return f"refused from the {seen.index(429) + 1}th on"


def far_address() -> str:
    """Return the address on which the attacked hub is to listen."""
    return own_address() or "127.0.0.1"
