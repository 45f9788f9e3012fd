"""Accepts the encrypted lines of members, for the process groups of :mod:`.line_group`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from atoll.errors import AuthError, PeerLost, WireError
from atoll.group.routes.rendezvous_store import join_host_port
from atoll.net.member_tls import MemberTls, SecureLine

GREETING_BYTES = 16 * 1024
MOST_STRANGERS = 64
"""Concurrent handshakes; further connections are closed."""
MOST_WAITING = 1024
"""Lines of members that no meeting has taken; the oldest are cut."""


@dataclass(frozen=True, slots=True)
class LineMeeting:
    """Who connects, and until when."""

    name: str
    """The same on all members, and of this meeting only."""
    members: tuple[str, ...]
    me: str
    deadline: float
    """Monotonic."""
    identities: Mapping[str, str] | None = None
    """Fingerprints of the members' keys, from the hub; None: each is believed its name."""
    is_over: Callable[[], bool] = lambda: False

    def left_s(self) -> float:
        """Return the seconds that are left, above 0."""
        return max(0.001, self.deadline - time.monotonic())

    def is_known(self, line: SecureLine) -> bool:
        """Return whether the other side is the member that the hub knows."""
        known = self.identities
        return known is None or known.get(line.peer) == line.fingerprint


class GroupListener:
    """Accepts lines of other members, and keeps each until its meeting takes it."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of one numeric address; members are accepted after `trust`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._tls: MemberTls | None = None
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self._address = self._listener.getsockname()[:2]
        self.dial = join_host_port(address, self._address[1])
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str, str], tuple[socket.socket, SecureLine]] = {}
        """By meeting, name and fingerprint, so that none takes the place of another one."""
        self._closed = False
        threading.Thread(target=self._accept, name="lines", daemon=True).start()

    def trust(self, tls: MemberTls) -> None:
        """Accept those that know its secret."""
        self._tls = tls

    def take(self, meeting: LineMeeting, member: str) -> tuple[socket.socket, SecureLine]:
        """Return the line of a member for a meeting.

        Raises:
            PeerLost: it has not come in time, or the meeting is over.
        """
        with self._changed:
            while True:
                for key, (_, line) in self._waiting.items():
                    if key[:2] == (meeting.name, member) and meeting.is_known(line):
                        return self._waiting.pop(key)
                if time.monotonic() >= meeting.deadline or self._closed or meeting.is_over():
                    raise PeerLost("a member has not connected", given=member)
                self._changed.wait(min(meeting.left_s(), 0.5))

    def begin(self, meeting: str) -> None:
        """Cut what waits for any other meeting: it is over."""
        with self._changed:
            for key in [key for key in self._waiting if key[0] != meeting]:
                cut(self._waiting.pop(key)[0])

    def close(self) -> None:
        """Stop listening, and cut what nobody has taken."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for line, _ in waiting:
            cut(line)
        with suppress(OSError):  # wakes the accepting thread
            socket.create_connection(self._address, timeout=1.0).close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                if self._closed:
                    line.close()
                    return
                if self._tls is None or not self._strangers.acquire(blocking=False):
                    line.close()
                    continue
                threading.Thread(
                    target=self._greet, args=(line, self._tls), name="lines-greet", daemon=True
                ).start()

    def _greet(self, line: socket.socket, tls: MemberTls) -> None:
        try:
            tune(line)
            member = tls.listening(line)
            line.settimeout(5.0)
            meeting = member.receive(most=GREETING_BYTES).decode()
            member.send(b"")
            line.settimeout(None)
            with self._changed:
                if self._closed:
                    raise ConnectionAbortedError
                key = meeting, member.peer, member.fingerprint
                superseded = [self._waiting.pop(key, None)]
                self._waiting[key] = line, member
                while len(self._waiting) > MOST_WAITING:
                    superseded.append(self._waiting.pop(next(iter(self._waiting))))
                self._changed.notify_all()
            for old in filter(None, superseded):
                cut(old[0])
        except (OSError, AuthError, WireError, UnicodeDecodeError):
            cut(line)
        finally:
            self._strangers.release()


def tune(line: socket.socket, *, silent_s: float = 10.0) -> None:
    """Send at once, and notice a machine that is gone."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", int(silent_s)), ("TCP_KEEPINTVL", int(silent_s) // 3),
        ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", int(1000 * silent_s)),
    ):  # fmt: skip
        option = getattr(socket, name, None)
        if option is not None:
            line.setsockopt(socket.IPPROTO_TCP, option, value)


def cut(line: socket.socket) -> None:
    """End a connection, so that threads that use it wake."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
