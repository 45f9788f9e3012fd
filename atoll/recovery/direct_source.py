"""Fetch from a donor's own port, in large ranges, into one reused buffer."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Sequence

from atoll.clock import RealClock
from atoll.errors import AuthError, WireError
from atoll.net.member_tls import check_server, client_context
from atoll.recovery.source import (
    LEAST_BYTES_S,
    SILENT_S,
    SLOW_S,
    ConnectionBroken,
    SourceAdvanced,
    SourceCorrupt,
    SourceFailed,
    Take,
    donor_refused,
)
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import (
    CHUNK,
    GONE,
    MAX_RANGE,
    OK,
    WAIT,
    StateAnswer,
    StateAsk,
    decode_answer,
    path_of,
)

DIAL_S = 1.5
"""Connect timeout: one lost packet and its retransmission."""

MAX_ANSWER_BYTES = 64 * 2**10
_BODY, _ANSWERED = 200, {203, 409}


class DirectSource:
    """One connection to a donor; reopened once if it breaks between two requests."""

    def __init__(self, dial: str, *, key: str, fingerprint: str = "") -> None:
        """Connect.

        Args:
            dial: host:port, from the hub.
            key: The donor's key, from its offer.
            fingerprint: Of the key of its certificate, from there; empty: it does not encrypt.

        Raises:
            ConnectionBroken: the donor does not answer there.
        """
        host, _, port = dial.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise ConnectionBroken("this is not an address", given=dial[:100], expected="HOST:PORT")
        self._fingerprint = fingerprint
        self._headers = {"Authorization": f"Bearer {key}"}
        self._connection = http.client.HTTPConnection(
            host.strip("[]"), int(port), timeout=DIAL_S, blocksize=CHUNK_BYTES
        )
        self._closed = False
        self._buffer = memoryview(bytearray(MAX_RANGE * CHUNK_BYTES))
        self._clock = RealClock()
        self._connect()

    def _connect(self) -> None:
        try:
            self._connection.connect()
            if self._fingerprint:
                line = client_context().wrap_socket(self._connection.sock)
                self._connection.sock = line
                check_server(line, self._fingerprint)
            self._socket: socket.socket = self._connection.sock
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(SILENT_S)
        except (OSError, AuthError) as error:
            self._connection.close()
            raise ConnectionBroken("it is not reachable", given=str(error)) from error

    def ask(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        """Return the answer to one request; see :class:`Source`."""
        expected = ask.count * CHUNK_BYTES
        try:
            status, size = self._request(ask, expected)
            if status == _BODY:
                self._receive(self._response, self._buffer[:size])
                answer = StateAnswer(ask.number, OK, ask.round, image=ask.image, index=ask.first)
                return answer, self._buffer[:size]
            return decode_answer(self._response.read(size)), self._buffer[:0]
        except TimeoutError as error:
            raise SourceFailed("it is silent", given=f"nothing for {SILENT_S:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionBroken("the connection broke", given=repr(error)[:200]) from error
        except WireError as error:
            raise SourceCorrupt(error.message()) from error

    def fetch(self, round_: int, image: str, indices: Sequence[int], take: Take) -> None:
        """Fetch consecutive chunks; see :class:`Source`."""
        for first in range(0, len(indices), MAX_RANGE):
            run = indices[first : first + MAX_RANGE]
            answer, body = self.ask(StateAsk(0, CHUNK, round_, image, run[0], len(run)))
            if answer.status in (GONE, WAIT):
                raise SourceAdvanced(answer.round)
            if answer.status != OK:
                raise donor_refused(answer)
            for place, index in enumerate(run):
                take(index, body[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES])

    def close(self) -> None:
        """Cut the connection; waiting threads wake."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS stays readable to its end

    def release(self) -> None:
        """Close the connection; called by the thread that uses it."""
        self._connection.close()

    def _request(self, ask: StateAsk, most: int) -> tuple[int, int]:
        """Send a request; return status and length of the response."""
        if self._closed:
            raise ConnectionAbortedError("closed here")
        if self._connection.sock is None:
            self._connect()
        self._connection.request("GET", path_of(ask), headers=self._headers)
        self._response = self._connection.getresponse()
        status, size = self._response.status, self._response.length
        if status not in _ANSWERED and status != _BODY:
            raise ConnectionBroken("its port refused the key", given=f"status {status}")
        most = most if status == _BODY else MAX_ANSWER_BYTES
        if size is None or size > most:
            raise SourceCorrupt("it sends more than was requested", given=f"{size} of {most} bytes")
        return status, size

    def _receive(self, response: http.client.HTTPResponse, target: memoryview) -> None:
        """Fill the buffer chunk by chunk, to detect a donor that sends too slowly."""
        began, done = self._clock.monotonic(), 0
        while done < len(target):
            received = response.readinto(target[done : done + CHUNK_BYTES])
            if not received:
                raise ConnectionResetError("it ended in the middle")
            done += received
            took_s = self._clock.monotonic() - began
            if took_s > SLOW_S and done < LEAST_BYTES_S * took_s:
                raise SourceFailed("it is too slow", given=f"{done} bytes in {took_s:.1f} s")
