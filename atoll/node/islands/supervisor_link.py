"""The encrypted connection between two supervisors of one island.

Both know a secret that the hub sends only to processes of their member. From it they make keys and
certificates as members do (:mod:`atoll.net.member_tls`): without it a process can neither connect
nor read, change, repeat or add a message. Messages say which ranks to start and how they ended.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from atoll.errors import AuthError, WireError
from atoll.island.start_phase import RankPhase
from atoll.net.member_tls import MemberTls, SecureLine
from atoll.plan.pipelines import PipelinePlan
from atoll.wire.limits import DEAD_AFTER_S, HEARTBEAT_S, MAX_CONTROL_BYTES


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
    planned: bool = False
    """Ranks that live stay, and move after a round; see `MorphOrder`."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """From the leader: rank 0 has finished; let the other ranks end by themselves."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """From the leader: kill the ranks."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """From the leader: the ranks have no place in the next mesh and end after the round."""


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


Word = Beat | Ready | Start | Finish | Kill | Release | Ended | Phases | Leaving


class SupervisorLink:
    """One connection. `send` and `close` are thread-safe."""

    def __init__(self, sock: socket.socket, line: SecureLine) -> None:
        """Take ownership of a socket and its encrypted line; see `greet` and `receive`."""
        self._sock, self._line = sock, line
        self._sending = threading.Lock()  # heartbeats are sent by another thread
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
        with self._sending, contextlib.suppress(OSError):
            self._line.send(msgspec.json.encode(word))

    def receive(self) -> Word:
        """Return the next message; only before `run`.

        Raises:
            WireError: it is malformed.
            OSError: the connection is broken, a byte was changed, or it is silent for too long.
        """
        return decoded(self._line.receive(most=MAX_CONTROL_BYTES))

    def close(self) -> None:
        """Close the connection, without a call of `on_gone`."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

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


def greet(sock: socket.socket, *, tls: MemberTls, leader: str) -> SupervisorLink:
    """Return the connection with the first host of member `leader`, which this one has dialled.

    Raises:
        AuthError: the listening process does not know the secret.
        OSError: it does not answer, or the connection is broken.
    """
    try:
        return SupervisorLink(sock, tls.dialling(sock, to=leader))
    except AuthError as error:
        raise AuthError(
            "the process that listens there is not the first machine of this island",
            given=error.given, expected=error.expected,
        ) from error  # fmt: skip


def receive(sock: socket.socket, *, tls: MemberTls) -> tuple[str, str, SupervisorLink]:
    """Return name, host and connection of a process that has dialled.

    Raises:
        AuthError: it does not know the secret.
        WireError: its messages are malformed.
        OSError: it does not answer, or the connection is broken.
    """
    line = tls.listening(sock)
    link = SupervisorLink(sock, line)
    here = link.receive()
    if not isinstance(here, Ready):
        raise WireError(
            "a follower host begins with the name of its machine", given=type(here).__name__
        )
    return line.peer, here.machine, link


def decoded(body: bytes) -> Word:
    """Return a message; raises WireError if it is malformed."""
    try:
        word: Word = msgspec.json.decode(body, type=Word)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError("a message between supervisors is malformed", given=str(error)) from error
    return word
