"""The TCP connection between two supervisors of one island.

Both know a secret that the hub sends only to processes of their job. Each proves it to the other
first; every later message carries an HMAC over its content and number, so that it cannot be
changed, repeated or added. Messages are not encrypted: they only say which ranks to start and how
they ended. The job itself comes from the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from atoll.errors import AuthError, FrameTooLarge, WireError
from atoll.island.start_phase import RankPhase
from atoll.plan.pipelines import PipelinePlan
from atoll.wire.limits import DEAD_AFTER_S, HEARTBEAT_S, MAX_CONTROL_BYTES

HANDSHAKE_S = 5.0
"""Time for the other side to prove that it knows the secret."""
STRANGER_BYTES = 1024
"""Largest frame before that."""
CODE_BYTES = hashlib.sha256().digest_size

T = TypeVar("T")


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a follower host: connected, no ranks running."""

    machine: str
    """Host name, for people."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """From the leader: start these ranks."""

    number: int
    """Of this start: late messages of an earlier start carry another number."""
    mesh: tuple[int, int, int, int]
    """Ranks along each axis at this start."""
    first: int
    count: int
    machine: int
    machines: int
    address: str
    """Where rank 0 will listen."""
    port: int
    plan: PipelinePlan | None = None
    """Of an elastic island that has been measured."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """From the leader: rank 0 has finished; let the other ranks end by themselves."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """From the leader: kill the ranks."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """From a follower host: one of its ranks has ended."""

    number: int
    rank: int
    code: int
    error: dict[str, str] | None = None
    oom_kills: int = 0


class Phases(msgspec.Struct, frozen=True, kw_only=True, tag="phases"):
    """From a follower host: startup progress of its ranks."""

    number: int
    ranks: dict[int, RankPhase]


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """From a follower host: it was asked to leave; its ranks run until the leader ends them."""


Word = Beat | Ready | Start | Finish | Kill | Ended | Phases | Leaving


class _Hello(msgspec.Struct, frozen=True):
    name: str
    nonce: str


class _Challenge(msgspec.Struct, frozen=True):
    nonce: str
    proof: str


class _Proof(msgspec.Struct, frozen=True):
    proof: str


class SupervisorLink:
    """One authenticated connection. `send` and `close` are thread-safe."""

    def __init__(self, sock: socket.socket, *, key: bytes, leads: bool) -> None:
        """Take ownership of a socket; see `greet` and `receive`.

        `key` belongs to this connection alone; `leads` is True on the leader's side.
        """
        self._sock = sock
        self._key = key
        self._mine, self._theirs = (b"leader", b"follower") if leads else (b"follower", b"leader")
        self._sent = self._received = 0
        # Number, code and frame MUST go together: heartbeats are sent by another thread.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        sock.settimeout(DEAD_AFTER_S)

    @property
    def own_address(self) -> str:
        """The local address."""
        return str(self._sock.getsockname()[0])

    def run(self, on_word: Callable[[Word], None], on_gone: Callable[[str], None]) -> None:
        """Start the threads that read and that send heartbeats.

        `on_word` gets every message; `on_gone` is called once with the reason of a lost connection,
        but not after `close`.
        """
        for work in (self._beat, lambda: self._read(on_word, on_gone)):
            threading.Thread(target=work, name="supervisor-link", daemon=True).start()

    def send(self, word: Word) -> None:
        """Send a message; a broken connection is reported by the reading thread."""
        body = msgspec.json.encode(word)
        with self._lock, contextlib.suppress(OSError):
            code = self._code(self._mine, self._sent, body)
            self._sent += 1
            _write(self._sock, code + body)

    def receive(self) -> Word:
        """Return the next message; only before `run`.

        Raises:
            WireError: it is not authentic, or malformed.
            OSError: the connection is broken, or silent for too long.
        """
        frame = _read_frame(self._sock, most_bytes=MAX_CONTROL_BYTES)
        code, body = frame[:CODE_BYTES], frame[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(self._theirs, self._received, body)):
            raise WireError("a message between supervisors has a wrong code")
        self._received += 1
        return _decoded(body, Word)  # type: ignore[arg-type]  # a union is no class for mypy

    def close(self) -> None:
        """Close the connection, without a call of `on_gone`."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _code(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + body, "sha256")

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send(Beat())

    def _read(self, on_word: Callable[[Word], None], on_gone: Callable[[str], None]) -> None:
        try:
            while True:
                word = self.receive()
                if not isinstance(word, Beat):
                    on_word(word)
        except TimeoutError:
            why = f"no message for {DEAD_AFTER_S:.0f} s"
        except (OSError, WireError) as error:
            why = str(error)
        if not self._closed.is_set():
            self.close()
            on_gone(why)


def greet(sock: socket.socket, *, secret: str, name: str) -> SupervisorLink:
    """Authenticate to the leader as follower host `name`, e.g. `w0.1`; return the connection.

    Raises:
        AuthError: the listening process does not know the secret.
        WireError: its answer is malformed.
        OSError: it does not answer, or the connection is broken.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    hello = _Hello(name, secrets.token_hex(16))
    _write_message(sock, hello)
    challenge = _read_message(sock, _Challenge, deadline=deadline)
    transcript = f"{name} {hello.nonce} {challenge.nonce}"
    if not hmac.compare_digest(challenge.proof, _proof(secret, "leader", transcript)):
        raise AuthError("the process that listens there is not the first machine of this island")
    _write_message(sock, _Proof(_proof(secret, "follower", transcript)))
    return SupervisorLink(sock, key=bytes.fromhex(_proof(secret, "words", transcript)), leads=False)


def receive(sock: socket.socket, *, secret: str) -> tuple[str, str, SupervisorLink]:
    """Authenticate a connecting process; return its name, host and connection.

    Raises:
        AuthError: it does not know the secret.
        WireError: its messages are malformed.
        OSError: it does not answer, or the connection is broken.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    hello = _read_message(sock, _Hello, deadline=deadline)
    nonce = secrets.token_hex(16)
    transcript = f"{hello.name} {hello.nonce} {nonce}"
    _write_message(sock, _Challenge(nonce, _proof(secret, "leader", transcript)))
    proof = _read_message(sock, _Proof, deadline=deadline)
    if not hmac.compare_digest(proof.proof, _proof(secret, "follower", transcript)):
        raise AuthError("a process that dialled is not a follower host of this island")
    link = SupervisorLink(sock, key=bytes.fromhex(_proof(secret, "words", transcript)), leads=True)
    here = link.receive()
    if not isinstance(here, Ready):
        raise WireError(
            "a follower host begins with the name of its machine", given=type(here).__name__
        )
    return hello.name, here.machine, link


def _proof(secret: str, side: str, transcript: str) -> str:
    return hmac.new(
        secret.encode(), f"atoll island {side} {transcript}".encode(), "sha256"
    ).hexdigest()


def _write_message(sock: socket.socket, message: msgspec.Struct) -> None:
    _write(sock, msgspec.json.encode(message))


def _read_message(sock: socket.socket, kind: type[T], *, deadline: float) -> T:
    return _decoded(_read_frame(sock, most_bytes=STRANGER_BYTES, deadline=deadline), kind)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError("a message between supervisors is malformed", given=str(error)) from error


def _write(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(4, "big") + body)


def _read_frame(sock: socket.socket, *, most_bytes: int, deadline: float | None = None) -> bytes:
    size = int.from_bytes(_read_exactly(sock, 4, deadline), "big")
    if size > most_bytes:
        raise FrameTooLarge("a frame between supervisors is too large", given=size)
    return _read_exactly(sock, size, deadline)


def _read_exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        block = sock.recv(size - len(data))
        if not block:
            raise ConnectionResetError("the other side has closed the connection")
        data += block
    return bytes(data)
