"""The donor's own port: HTTP/1.1 with GET, for members that can dial it.

It uses plain sockets, since a chunk should cost one `sendall` and little else under the interpreter
lock. Requests need the key; heads are limited in size and time, and connections in number, so that
an unauthenticated peer can take neither memory nor threads.
"""

from __future__ import annotations

import hmac
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable
from typing import Any

from atoll.clock import RealClock
from atoll.errors import WireError
from atoll.net.accepting import serve_on_thread
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import OK, StateAnswer, StateAsk, ask_of, encode_answer

log = logging.getLogger(__name__)

Answerer = Callable[[StateAsk], tuple[StateAnswer, memoryview]]

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 4096
FIRST_HEAD_S = 5.0
"""Time in which a new connection must send a valid key."""

IDLE_S = 30.0
"""Timeout of later request heads, and of sending each chunk."""


class HttpStateServer:
    """A server with its own threads, from its construction until `close`."""

    def __init__(
        self,
        answer: Answerer,
        *,
        address: str,
        keys: tuple[str, ...],
        max_connections: int = MAX_CONNECTIONS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listen on a free port of `address`.

        Args:
            answer: Called for every request, from several threads.
            address: An address of this machine.
            keys: Accepted bearer tokens.
            max_connections: Further connections are closed at once.
            tls: TLS context of a server; None: connections are not encrypted.

        Raises:
            OSError: this machine does not have that address.
        """
        self._server = _Server(address, answer, keys=keys, max_connections=max_connections)
        self._server.tls = tls
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="state-http",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(
        self, address: str, answer: Answerer, *, keys: tuple[str, ...], max_connections: int
    ) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
        self.answer = answer
        self.tls: ssl.SSLContext | None = None
        self.keys = tuple(key.encode() for key in keys)
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False
        super().__init__((address, 0), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection slot is free."""
        return self._slots.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own; without one, close it and free its slot."""
        serve_on_thread(
            request, self.process_request_thread, client_address, name="state-http-connection",
            refused=self._slots.release,
        )  # fmt: skip

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection and free its slot."""
        try:
            if self.tls is not None:
                request.settimeout(FIRST_HEAD_S)
                request = self.tls.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            with self._lock:
                self._open.add(request)
                if self._is_cut:
                    raise ConnectionAbortedError("this server was closed")
            if self.tls is not None:
                request.do_handshake()  # `cut` ends it
            super().process_request_thread(request, client_address)
        except OSError:  # the TLS handshake failed, or the server was closed
            self.shutdown_request(request)
        finally:
            with self._lock:
                self._open.discard(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection; its peer reconnects or uses another donor."""
        log.debug("a connection of %s ended", client_address, exc_info=True)

    def cut(self) -> None:
        """Cut all connections, also those whose thread is about to begin."""
        with self._lock:
            self._is_cut = True
            for request in self._open:
                try:
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # also below TLS
                except OSError:
                    continue


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        """Answer requests until the connection ends or a request is invalid."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rest, time_s = b"", FIRST_HEAD_S
        while True:
            head, rest = self._head(rest, time_s)
            if not head or not self._reply(head):
                return
            time_s = IDLE_S

    def _head(self, data: bytes, time_s: float) -> tuple[bytes, bytes]:
        """Return the next request head, and the bytes after it."""
        deadline = RealClock().monotonic() + time_s
        while (end := data.find(b"\r\n\r\n")) < 0:
            left_s = deadline - RealClock().monotonic()
            if len(data) > MAX_HEAD_BYTES or left_s <= 0:
                return b"", b""
            self.request.settimeout(left_s)
            try:
                more = self.request.recv(MAX_HEAD_BYTES)
            except OSError:
                return b"", b""
            if not more:
                return b"", b""
            data += more
        return data[:end], data[end + 4 :]

    def _reply(self, head: bytes) -> bool:
        """Answer one request; return whether the connection stays open."""
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ")
        if not self._is_authorized(lines[1:]):
            self._send(b"401 Unauthorized", b"")
            return False
        if len(words) != 3 or words[0] != b"GET":
            self._send(b"405 Method Not Allowed", b"")
            return False
        try:
            answer, body = self.server.answer(ask_of(words[1].decode("ascii", "replace")))
        except WireError:
            self._send(b"400 Bad Request", b"")
            return False
        if body:
            self._send(b"200 OK", body)
        else:
            status = b"203 Offer" if answer.status == OK else b"409 Conflict"
            self._send(status, encode_answer(answer))
        return True

    def _is_authorized(self, lines: list[bytes]) -> bool:
        """Return whether a header has a valid key; compares in constant time."""
        for line in lines:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"authorization":
                given = value.strip().removeprefix(b"Bearer ")
                found = [hmac.compare_digest(given, key) for key in self.server.keys if key]
                return any(found)
        return False

    def _send(self, status: bytes, body: bytes | memoryview) -> None:
        """Send head and body; the timeout applies to each piece."""
        self.request.settimeout(IDLE_S)
        head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.request.sendall(head)
        view = memoryview(body)
        for start in range(0, len(view), CHUNK_BYTES):
            self.request.sendall(view[start : start + CHUNK_BYTES])
