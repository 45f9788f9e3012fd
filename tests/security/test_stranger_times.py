"""How long strangers may take for a request: whoever is too slow is cut off, and nobody else.

No limit of the hub but the one that is tested would end the connection: a test that waits for its
end in vain fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from atoll.hub.security.connection_limits import DEFAULT_LIMITS
from atoll.hub.server import HubServer
from atoll.hub.sessions.uvicorn_protocols import HttpProtocol
from atoll.wire.frames import decode
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Event, Hello, pack, unpack
from tests.patience import PATIENCE_S
from tests.security.conftest import (
    SHORT_S,
    STRICT,
    close_code,
    hurried,
    limiter_of,
    operator,
    raw,
    read_to_end,
    serving,
    until,
    web,
)  # fmt: skip

HEAD = b"POST /api/login HTTP/1.1\r\nHost: hub\r\n"


class OwnTime:
    """The event loop as a hub's HTTP connections see it: time passes when the test says so.

    A machine that stalls makes nobody slow by it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop: Any = None
        self._now_s = 0.0
        self._timers: list[OwnTimer] = []
        made = HttpProtocol.connection_made

        def connected(protocol: HttpProtocol, transport: Any) -> None:
            self._loop, protocol.loop = protocol.loop, self  # type: ignore[assignment]
            made(protocol, transport)

        monkeypatch.setattr(HttpProtocol, "connection_made", connected)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *given: Any) -> OwnTimer:
        timer = OwnTimer(self._now_s + delay_s, lambda: callback(*given))
        self._timers.append(timer)
        return timer

    def pass_by(self, seconds: float) -> None:
        """Let time pass, on the hub's event loop: what is due by then happens."""
        end_s = self._now_s + seconds
        while due := [one for one in self._timers if one.due_s <= end_s]:
            first = min(due, key=lambda one: one.due_s)
            self._timers.remove(first)
            self._now_s = first.due_s
            if not first.cancelled:
                first.callback()
        self._now_s = end_s


@dataclasses.dataclass(eq=False)
class OwnTimer:
    due_s: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> OwnTime:
    """The time of hubs that are started after this."""
    return OwnTime(monkeypatch)


def drip(opened: socket.socket, byte: bytes) -> bytes:
    """Send byte by byte until the other side closes; return what it said."""
    found, deadline = b"", time.monotonic() + PATIENCE_S
    opened.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            opened.sendall(byte)
        except ConnectionError:  # what it said before is still there
            return found + read_to_end(opened)
        with contextlib.suppress(TimeoutError):
            try:
                block = opened.recv(65_536)
            except ConnectionError:
                return found
            if not block:
                return found
            found += block
    pytest.fail("the connection was not closed")


def test_a_connection_that_says_nothing_is_closed(plain: HubServer) -> None:
    with hurried(plain, head_s=SHORT_S), raw(plain) as opened:
        assert read_to_end(opened) == b""


def test_a_head_that_comes_byte_by_byte_is_cut_off(plain: HubServer) -> None:
    with hurried(plain, head_s=SHORT_S), raw(plain) as opened:
        drip(opened, b"a")


def test_the_second_head_of_a_connection_has_no_more_time(plain: HubServer) -> None:
    with raw(plain) as opened:
        opened.sendall(b"GET /healthz HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert b"200 OK" in opened.recv(65_536)
        with hurried(plain, head_s=SHORT_S):
            opened.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
            read_to_end(opened)


def test_a_body_that_comes_byte_by_byte_is_given_up(tmp_path: Path) -> None:
    limits = dataclasses.replace(STRICT, open_body_s=SHORT_S)
    with serving(tmp_path, limits=limits) as hub, raw(hub) as opened:
        opened.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
        assert b" 408 " in drip(opened, b"{")


def test_a_body_that_pauses_is_cut_off_also_of_somebody_known(plain: HubServer) -> None:
    with hurried(plain, body_pause_s=SHORT_S), raw(plain) as opened:
        token = plain.operator_token.encode()
        opened.sendall(
            b"POST /api/jobs HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer " + token
            + b"\r\nContent-Length: 500\r\n\r\n{"
        )  # fmt: skip
        read_to_end(opened)


def test_a_long_upload_that_flows_is_not_cut_off(
    tmp_path: Path, own_time: OwnTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_now = threading.Event()
    received = HttpProtocol.data_received

    def read(protocol: HttpProtocol, data: bytes) -> None:
        received(protocol, data)
        own_time.pass_by(0.7 * DEFAULT_LIMITS.body_pause_s)
        read_now.set()

    with serving(tmp_path) as hub:
        with operator(hub) as client:
            job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")

        def slowly() -> Iterator[bytes]:
            for _ in range(8):
                read_now.clear()
                yield b"x" * 1000
                assert read_now.wait(PATIENCE_S)

        monkeypatch.setattr(HttpProtocol, "data_received", read)
        with web(hub, hub.operator_token) as opened:
            put = opened.put(f"/api/jobs/{job}/files/slow.bin", content=slowly())
            assert put.status_code == 201


def test_a_websocket_without_a_hello_is_closed(tmp_path: Path) -> None:
    with (
        serving(tmp_path, hello_timeout_s=0.3) as hub,
        connect(f"ws://127.0.0.1:{hub.port}/ws") as opened,
    ):
        assert close_code(opened) == 1008


def test_a_tls_handshake_that_does_not_go_on_is_cut_off(tmp_path: Path) -> None:
    limits = dataclasses.replace(STRICT, head_s=SHORT_S)
    with serving(tmp_path, tls="on", limits=limits) as hub:
        for first in (b"", b"\x16\x03\x01"):
            with raw(hub) as opened:
                opened.sendall(first)
                read_to_end(opened)
        assert until(lambda: len(limiter_of(hub)) == 0, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.every(2)
def test_times_for_requests_do_not_end_sessions_and_streams(
    tmp_path: Path, tls: str, own_time: OwnTime
) -> None:
    options = {"tls": tls, "limits": STRICT, "dead_after_s": PATIENCE_S}
    with serving(tmp_path, **options) as hub, operator(hub) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")
        with (
            web(hub, hub.operator_token) as viewer,
            viewer.stream("GET", "/api/stream", params={"job": job}) as stream,
            session(hub, f"{job}/w0") as opened,
        ):
            lines = stream.iter_lines()
            # Longer than any time that a request has.
            hub.call(passing(own_time, 4 * PATIENCE_S))
            opened.send(pack(Event("note", "x"), id=2))
            assert unpack(decode(opened.recv(timeout=PATIENCE_S, decode=False))).id == 2
            assert any('"text":"x"' in line for line in itertools.islice(lines, 300))


async def passing(own_time: OwnTime, seconds: float) -> None:
    own_time.pass_by(seconds)


@contextlib.contextmanager
def session(hub: HubServer, address: str) -> Iterator[ClientConnection]:
    """Open a session and yield its WebSocket."""
    context = None
    if hub.ca:
        context = ssl.create_default_context(cafile=hub.ca)
        context.check_hostname = False
    url = f"ws{'s' if hub.ca else ''}://127.0.0.1:{hub.port}/ws"
    with connect(url, ssl=context, compression=None, ping_interval=None) as opened:
        opened.send(pack(Hello(PROTOCOL, "test", address, hub.operator_token, "i1", None), id=1))
        opened.recv(timeout=PATIENCE_S)
        yield opened
