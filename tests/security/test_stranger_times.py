"""How long strangers may take for a request: whoever is too slow is cut off, and nobody else.

No limit of the hub but the one that is tested would end the connection: a test that waits for its
end in vain fails.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

from atoll.hub.security.connection_limits import Limits
from atoll.hub.server import HubServer
from atoll.wire.frames import decode
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Event, Hello, pack, unpack
from tests.patience import PATIENCE_S
from tests.security.conftest import (
    STRICT,
    close_code,
    limiter_of,
    operator,
    raw,
    read_to_end,
    serving,
    until,
    web,
)  # fmt: skip

HEAD = b"POST /api/login HTTP/1.1\r\nHost: hub\r\n"


def drip(opened: socket.socket, byte: bytes) -> bytes:
    """Send byte by byte until the other side closes; return what it said."""
    found, deadline = b"", time.monotonic() + PATIENCE_S
    opened.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            opened.sendall(byte)
            try:
                block = opened.recv(65_536)
            except TimeoutError:
                continue
            if not block:
                return found
            found += block
        pytest.fail("the connection was not closed")
    return found


def test_a_connection_that_says_nothing_is_closed(plain: HubServer) -> None:
    with raw(plain) as opened:
        assert read_to_end(opened) == b""


def test_a_head_that_comes_byte_by_byte_is_cut_off(plain: HubServer) -> None:
    with raw(plain) as opened:
        drip(opened, b"a")


def test_the_second_head_of_a_connection_has_no_more_time(plain: HubServer) -> None:
    with raw(plain) as opened:
        opened.sendall(b"GET /healthz HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert b"200 OK" in opened.recv(65_536)
        opened.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        read_to_end(opened)


def test_a_body_that_comes_byte_by_byte_is_given_up(plain: HubServer) -> None:
    with raw(plain) as opened:
        opened.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
        assert b" 408 " in drip(opened, b"{")


def test_a_body_that_pauses_is_cut_off_also_of_somebody_known(plain: HubServer) -> None:
    with raw(plain) as opened:
        token = plain.operator_token.encode()
        opened.sendall(
            b"POST /api/jobs HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer " + token
            + b"\r\nContent-Length: 500\r\n\r\n{"
        )  # fmt: skip
        read_to_end(opened)


def test_a_long_upload_that_flows_is_not_cut_off(plain: HubServer) -> None:
    with operator(plain) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")

        def slowly() -> object:
            began = time.monotonic()
            while time.monotonic() - began < 3 * STRICT.body_pause_s:
                yield b"x" * 1000
                time.sleep(STRICT.body_pause_s / 15)  # the pace of the upload is what is tested

    with web(plain, plain.operator_token) as opened:
        put = opened.put(f"/api/jobs/{job}/files/slow.bin", content=slowly())  # type: ignore
        assert put.status_code == 201


def test_a_websocket_without_a_hello_is_closed(tmp_path: Path) -> None:
    with (
        serving(tmp_path, hello_timeout_s=0.3) as hub,
        connect(f"ws://127.0.0.1:{hub.port}/ws") as opened,
    ):
        assert close_code(opened) == 1008


def test_a_tls_handshake_that_does_not_go_on_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on", limits=STRICT) as hub:
        for first in (b"", b"\x16\x03\x01"):
            with raw(hub) as opened:
                opened.sendall(first)
                read_to_end(opened)
        assert until(lambda: len(limiter_of(hub)) == 0, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.every(2)
def test_times_for_requests_do_not_end_sessions_and_streams(tmp_path: Path, tls: str) -> None:
    limits = Limits(head_s=0.4, body_pause_s=0.4, open_body_s=0.4)
    with serving(tmp_path, tls=tls, limits=limits) as hub, operator(hub) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 1\n")
        with (
            web(hub, hub.operator_token) as viewer,
            viewer.stream("GET", "/api/stream", params={"job": job}) as stream,
            session(hub, f"{job}/w0") as opened,
        ):
            lines = stream.iter_lines()
            time.sleep(4 * limits.body_pause_s)  # longer than any time that a request has
            opened.send(pack(Event("note", "x"), id=2))
            assert unpack(decode(opened.recv(timeout=PATIENCE_S, decode=False))).id == 2
            assert sum(1 for line in itertools.islice(lines, 20) if line.startswith("id: ")) > 1


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
