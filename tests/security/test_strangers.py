"""What strangers may take of a hub before they have shown a token: connections, time, memory."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from atoll.clock import VirtualClock
from atoll.hub.http.middleware import MAX_OPEN_BODY_BYTES
from atoll.hub.security.auth import Identity
from atoll.hub.security.connection_limits import (
    DEFAULT_LIMITS,
    ConnectionLimiter,
    Limits,
    RateLimit,
    is_loopback,
)
from atoll.hub.server import FILES, HubServer
from atoll.hub.sessions.uvicorn_protocols import FIRST_FRAME_BYTES
from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Event, Hello, pack
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S
from tests.security.conftest import (
    INFO,
    SHORT_S,
    STRICT,
    close_code,
    hurried,
    joined,
    limiter_of,
    operator,
    raw,
    read_to_end,
    serving,
    stores_of,
    until,
    web,
)

# ------------------------------------------------------------------------------ connections


def test_connections_are_limited_by_address(
    plain: HubServer,
) -> None:
    until(lambda: len(limiter_of(plain)) == 0)
    most = STRICT.strangers_per_address
    with contextlib.ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(raw(plain))
        until(lambda: len(limiter_of(plain)) == most)
        with raw(plain) as one_more:
            assert read_to_end(one_more) == b""
        assert limiter_of(plain).refused > 0
    until(lambda: len(limiter_of(plain)) == 0)
    with web(plain) as client:
        assert client.get("/healthz").status_code == 200


def test_flood_drops_its_own_oldest_connections(tmp_path: Path) -> None:
    limits = Limits(strangers=30, head_s=PATIENCE_S)
    with serving(tmp_path, limits=limits) as hub, contextlib.ExitStack() as stack:
        flood = [stack.enter_context(raw(hub)) for _ in range(100)]
        until(lambda: limiter_of(hub).refused >= 70)
        assert len(limiter_of(hub)) <= 30
        with operator(hub) as client:
            assert client.jobs() == []
        assert read_to_end(flood[0]) == b""
        with Peer(hub, "job/w0") as peer:
            assert len(limiter_of(hub)) <= 30
            peer.request(Event("note", "x"))


def test_who_has_shown_a_token_is_no_stranger(plain: HubServer) -> None:
    until(lambda: len(limiter_of(plain)) == 0)
    with contextlib.ExitStack() as stack:
        for number in range(STRICT.strangers_per_address + 5):
            stack.enter_context(Peer(plain, f"known/w{number}"))
        assert len(limiter_of(plain)) == 0


def test_bounds_of_the_gate() -> None:
    limiter = ConnectionLimiter(Limits(strangers=3, strangers_per_address=2, exempt_loopback=False))
    dropped: list[str] = []
    first = limiter.enter("1.1.1.1", lambda: dropped.append("first"))
    assert first is not None
    assert limiter.enter("1.1.1.1", lambda: None) is not None
    assert limiter.enter("1.1.1.1", lambda: None) is None
    first.authenticated(Identity("node", "a"))
    assert limiter.enter("1.1.1.1", lambda: None) is not None
    assert limiter.enter("2.2.2.2", lambda: None) is not None
    assert limiter.enter("3.3.3.3", lambda: None) is not None
    assert len(limiter) == 3
    assert dropped == []
    assert limiter.cut("node", "a") == 1
    assert dropped == ["first"]
    first.leave()
    assert limiter.cut("node", "a") == 0


def test_rates_are_counted_in_bounded_memory() -> None:
    clock = VirtualClock()
    limit = RateLimit(clock, most=2, window_s=10.0, sources=100)
    for _ in range(2):
        assert not limit.reached("a")
        limit.note("a")
    assert limit.reached("a")
    clock.advance(11.0)
    assert not limit.reached("a")
    for number in range(1_000):
        limit.note(str(number))
    assert len(limit) <= 100


def test_hub_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    proc = Path("/proc/self/limits")
    if not proc.exists():
        pytest.skip("this system has no /proc")
    words = ["-m", "atoll.hub", "--no-reducers", "--port", "0", "--data", str(tmp_path / "d")]
    words += ["--jobs", str(tmp_path / "j")]
    command = f"ulimit -Sn 256; exec {shlex.join([sys.executable, *words])}"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        process.terminate()
    (line,) = [line for line in lines if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert soft == (str(FILES) if hard == "unlimited" else str(min(int(hard), FILES)))


def test_memory_stays_bounded_under_a_flood(tmp_path: Path) -> None:
    """Ten times as many connections as may be, each with as much of a head as is taken."""
    limits = Limits(strangers=50, head_s=PATIENCE_S)
    with serving(tmp_path, limits=limits) as hub, contextlib.ExitStack() as stack:
        before = resident_bytes()
        for number in range(500):
            opened = stack.enter_context(raw(hub))
            with contextlib.suppress(OSError):
                opened.sendall(b"GET /" + b"a" * 14_000)
            if number % 50 == 0:
                until(lambda: len(limiter_of(hub)) <= 50)
        until(lambda: limiter_of(hub).refused >= 440)
        assert resident_bytes() - before < 30e6


@pytest.mark.long("tests/security/test_strangers.py::test_memory_stays_bounded_under_a_flood")
def test_memory_of_many_tls_connections_comes_back(tmp_path: Path) -> None:
    """More than may be open, half of them sessions without a Hello; others get in meanwhile."""
    if not sys.platform.startswith("linux"):
        pytest.skip("other allocators are not asked")
    words = ["-m", "atoll.hub", "--no-reducers", "--tls", "on", "--data", str(tmp_path / "d")]
    words += ["--jobs", str(tmp_path / "j")]
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        context = ssl._create_unverified_context()
        endpoint = HubEndpoint(ca=told["ca"])
        with HubClient(told["url"], told["operator_token"], endpoint=endpoint) as client:
            assert client.jobs() == []
            before = resident_bytes(process.pid)
            with contextlib.ExitStack() as stack:
                for number in range(int(1.5 * DEFAULT_LIMITS.strangers)):
                    line = socket.create_connection(("127.0.0.1", told["port"]), PATIENCE_S)
                    secure = stack.enter_context(context.wrap_socket(line))
                    if number % 2:
                        with contextlib.suppress(OSError):
                            secure.sendall(UPGRADE)
                assert client.jobs() == [], "somebody with a token is served"
                assert resident_bytes(process.pid) - before < 80e6
            settled = until(lambda: resident_bytes(process.pid) - before < 30e6)
            assert settled, f"{(resident_bytes(process.pid) - before) / 1e6:.0f} MB are kept"
        assert (tmp_path / "log").read_text(encoding="utf-8").count("was refused") < 500
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def resident_bytes(process: int | str = "self") -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096


# ------------------------------------------------------------------------------------- size


def test_a_head_without_end_is_refused(plain: HubServer) -> None:
    with raw(plain) as opened:
        with contextlib.suppress(OSError):
            opened.sendall(b"GET / HTTP/1.1\r\nHost: hub\r\nX: " + b"a" * 200_000)
        assert read_to_end(opened)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("path", ["/api/login", "/api/join", "/login"])
@pytest.mark.every(2)
def test_strangers_send_small_bodies_only(tmp_path: Path, path: str) -> None:
    with serving(tmp_path) as hub, web(hub) as stranger:
        large = stranger.post(path, content=b"x" * (MAX_OPEN_BODY_BYTES + 1))
        assert large.status_code == 413

        def undeclared() -> object:
            for _ in range(80):
                yield b"x" * 1000

        assert stranger.post(path, content=undeclared()).status_code == 413  # type: ignore


def test_a_first_message_is_small_and_later_ones_may_be_large(plain: HubServer) -> None:
    with connect(f"ws://127.0.0.1:{plain.port}/ws", max_size=None, compression=None) as opened:
        with contextlib.suppress(ConnectionClosed):
            opened.send(bytes(FIRST_FRAME_BYTES + 1))
        assert close_code(opened) == 1009
    with Peer(plain, "large/w0") as peer:
        peer.request(Event("note", "x" * (4 * FIRST_FRAME_BYTES)))


def test_fragments_before_a_hello_do_not_add_up(plain: HubServer) -> None:
    with connect(f"ws://127.0.0.1:{plain.port}/ws", compression=None) as opened:
        with contextlib.suppress(ConnectionClosed):
            opened.send(bytes(4096) for _ in range(1_000))
        # Bytes still under way may meet a closed socket: its reset can overtake the close frame.
        assert close_code(opened) in (1009, 1006)


# ------------------------------------------------------------------------------------- rate


def test_joins_of_one_address_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, limits=STRICT) as hub, web(hub) as stranger:
        secret = parse_ticket(hub.ticket).secret
        statuses = [
            stranger.post("/api/join", json={"secret": secret, "name": f"n{n}"}).status_code
            for n in range(STRICT.joins_per_minute + 2)
        ]
        assert statuses == [201] * STRICT.joins_per_minute + [429, 429]


def test_guessing_is_slowed_but_right_secrets_pass(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        with web(hub, "guess") as guesser:
            statuses = {guesser.get("/api/jobs").status_code for _ in range(12)}
            assert statuses == {401, 429}
        with operator(hub) as client:
            assert client.jobs() == []


def test_this_machine_itself_may_start_many_nodes_at_once(tmp_path: Path) -> None:
    assert DEFAULT_LIMITS.exempt_loopback
    assert is_loopback("127.0.0.1")
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("10.0.0.1")
    with serving(tmp_path, tls="on") as hub:
        joined(hub, tmp_path / "a", name="a")
        assert stores_of(hub).auth.names("node") == ["a"]


def test_hello_of_a_stranger_tells_nothing_about_who_exists(plain: HubServer) -> None:
    answers = set()
    for session in ("nobody", "known/w1"):
        hello = Hello(PROTOCOL, "test", session, "guess", "i1", INFO)
        with connect(f"ws://127.0.0.1:{plain.port}/ws", compression=None) as opened:
            opened.send(pack(hello, id=1))
            answers.add(opened.recv(timeout=PATIENCE_S))
    assert len(answers) == 1


def test_tls_does_not_change_the_bounds(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on", limits=STRICT) as hub:
        context = ssl.create_default_context(cafile=hub.ca)
        context.check_hostname = False
        with raw(hub) as line:
            until(lambda: len(limiter_of(hub)) == 1)  # its handshake has the time of before
            with hurried(hub, head_s=SHORT_S), context.wrap_socket(line) as opened:
                with contextlib.suppress(OSError):  # closed already, where this test was stalled
                    opened.sendall(b"GET /healthz HTTP/1.1\r\n")
                read_to_end(opened)
        with web(hub) as client:
            assert json.loads(client.get("/healthz").text) == {"ok": True}
