"""A connection of two members of one job, on which others can neither write, change nor replay.

Both sides know the job's key. The listening side greets with a random challenge; every message
carries a MAC (HMAC-SHA-256, 16 bytes) of the challenge, its direction, its number and its body, so
that a message of another connection, place or direction is refused. Bodies are not encrypted: this
is used with `encryption = "off"`; :class:`atoll.net.member_tls.SecureLine` is the default.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct

from atoll.errors import AuthError, WireError
from atoll.net.member_tls import readable

CHALLENGE_BYTES = 16
MAC_BYTES = 16
PART_BYTES = 1 << 18
"""The socket's time-out holds for each part of so many bytes, so that a slow line may be used."""

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!BQ")


class AuthenticatedLine:
    """One side of a connection; not for use by several threads at once."""

    def __init__(self, line: socket.socket, challenge: bytes, *, key: bytes, dials: bool) -> None:
        self._line, self._challenge, self._key = line, challenge, key
        self._dials = dials
        self._sent = self._received = 0

    @classmethod
    def listening(cls, line: socket.socket, *, key: bytes) -> AuthenticatedLine:
        """Greet a member that has connected; raises OSError."""
        challenge = os.urandom(CHALLENGE_BYTES)
        line.sendall(challenge)
        return cls(line, challenge, key=key, dials=False)

    @classmethod
    def dialling(cls, line: socket.socket, *, key: bytes) -> AuthenticatedLine:
        """Read the greeting of the member to which this one connected; raises OSError."""
        return cls(line, _exactly(line, CHALLENGE_BYTES), key=key, dials=True)

    def send(self, body: bytes) -> None:
        """Send one message; raises OSError, also if a part of it takes longer than the time-out."""
        mac = self._mac(body, self._sent, ours=True)
        self._sent += 1
        start = _LENGTH.pack(len(body)) + mac
        if len(body) <= PART_BYTES:
            self._line.sendall(start + body)
            return
        self._line.sendall(start)
        for at in range(0, len(body), PART_BYTES):
            self._line.sendall(memoryview(body)[at : at + PART_BYTES])

    def receive(self, *, most: int) -> bytes:
        """Return one message.

        Raises:
            OSError: the connection ended.
            WireError: it is longer than `most` bytes.
            AuthError: its sender does not know the key.
        """
        (length,) = _LENGTH.unpack(_exactly(self._line, _LENGTH.size))
        if length > most:
            raise WireError("a message is too long", given=f"{length} bytes", expected=f"<= {most}")
        mac = _exactly(self._line, MAC_BYTES)
        body = _exactly(self._line, length)
        if not hmac.compare_digest(mac, self._mac(body, self._received, ours=False)):
            raise AuthError(
                "the other side of a direct connection does not know the job's key",
                expected="a member of the same job",
            )
        self._received += 1
        return body

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether data has arrived."""
        return readable(self._line, timeout_s)

    def _mac(self, body: bytes, number: int, *, ours: bool) -> bytes:
        from_dialler = self._dials == ours
        mac = hmac.new(self._key, self._challenge + _NUMBER.pack(from_dialler, number), "sha256")
        mac.update(body)
        return mac.digest()[:MAC_BYTES]


def _exactly(line: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = line.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return bytes(data)
