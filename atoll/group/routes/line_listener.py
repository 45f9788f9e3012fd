"""Accepts the encrypted lines of members, for the process groups of :mod:`.line_group`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from atoll.errors import AuthError, PeerLost, WireError
from atoll.group.routes.rendezvous_store import join_host_port
from atoll.net.accepting import accepted, serve_on_thread, stop_listening
from atoll.net.member_tls import MemberTls, SecureLine

GREETING_BYTES = 16 * 1024
MOST_STRANGERS = 64
"""Concurrent handshakes; further connections are closed."""
MOST_WAITING = 1024
"""Lines of members that no meeting has taken; the oldest are cut."""

_Key = tuple[str, str, str, int]


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
    """Fingerprints of the members' keys, from the hub; None: names are not verified."""
    is_over: Callable[[], bool] = lambda: False

    def left_s(self) -> float:
        """Return the seconds that are left, above 0."""
        return max(0.001, self.deadline - time.monotonic())

    def is_known(self, line: SecureLine) -> bool:
        """Return whether the other side is the member that the hub knows."""
        known = self.identities
        return known is None or known.get(line.peer) == line.fingerprint


@dataclass(frozen=True, slots=True)
class MetLine:
    """A connection with a member, one of those that a pair of a meeting shares."""

    plain: socket.socket
    secure: SecureLine
    part: tuple[int, int] = (0, 1)
    """Its number, and how many there are."""
    attempt: int = 0
    """Number of the dialler's attempt, the same for all parts; larger in a later one."""

    @classmethod
    def dialled(
        cls, line: socket.socket, tls: MemberTls, meeting: LineMeeting, *, to: str,
        part: tuple[int, int], attempt: int,
    ) -> MetLine:  # fmt: skip
        """Greet the member `to` on a new connection; raises OSError, AuthError and WireError."""
        try:
            tune(line)
            member = tls.dialling(line, to=to)
            if not meeting.is_known(member):
                raise AuthError("it has not the key that the hub knows", given=to)
            line.settimeout(meeting.left_s())
            member.send(_encoder.encode(_Greeting(meeting.name, *part, attempt)))
            member.receive(most=0)
            line.settimeout(None)
        except BaseException:
            line.close()
            raise
        return cls(line, member, part, attempt)


class _Greeting(msgspec.Struct, frozen=True, array_like=True):
    """First message of a member on a connection that it has dialled."""

    meeting: str
    number: int
    count: int
    attempt: int


_encoder = msgspec.msgpack.Encoder()
_greetings = msgspec.msgpack.Decoder(_Greeting)


class GroupListener:
    """Accepts lines of other members, and keeps each until its meeting takes it."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of one numeric address; members are accepted after `trust`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._tls: MemberTls | None = None
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.dial = join_host_port(address, self._listener.getsockname()[1])
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._changed = threading.Condition()
        self._waiting: dict[_Key, MetLine] = {}
        """By meeting, name, fingerprint and number, so that no line replaces another member's."""
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="lines", daemon=True).start()

    def trust(self, tls: MemberTls) -> None:
        """Accept those that know its secret."""
        self._tls = tls

    def take(self, meeting: LineMeeting, member: str) -> list[MetLine]:
        """Return the lines of a member for a meeting, all that it has dialled, in their order.

        Raises:
            PeerLost: it has not come in time, or the meeting is over.
        """
        with self._changed:
            while True:
                found = {
                    line.part[0]: key for key, line in self._waiting.items()
                    if key[:2] == (meeting.name, member) and meeting.is_known(line.secure)
                }  # fmt: skip
                if found and len(found) == self._waiting[next(iter(found.values()))].part[1]:
                    return [self._waiting.pop(found[number]) for number in sorted(found)]
                over = self._closed.is_set() or meeting.is_over()
                if over or time.monotonic() >= meeting.deadline:
                    raise PeerLost("a member has not connected", given=member)
                self._changed.wait(min(meeting.left_s(), 0.5))

    def begin(self, meeting: str) -> None:
        """Cut what waits for any other meeting: it is over."""
        with self._changed:
            for key in [key for key in self._waiting if key[0] != meeting]:
                cut(self._waiting.pop(key).plain)

    def close(self) -> None:
        """Stop listening, and cut the lines that no meeting has taken."""
        with self._changed:
            self._closed.set()
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        cut_all(waiting)
        stop_listening(self._listener, self._closed)

    def _accept(self) -> None:
        for line, _ in accepted(self._listener, self._closed):
            tls = self._tls
            if tls is None or not self._strangers.acquire(blocking=False):
                line.close()
                continue
            release = self._strangers.release
            serve_on_thread(line, self._greet, tls, name="lines-greet", refused=release)

    def _greet(self, line: socket.socket, tls: MemberTls) -> None:
        try:
            tune(line)
            member = tls.listening(line)
            line.settimeout(5.0)
            greeting = _greetings.decode(member.receive(most=GREETING_BYTES))
            member.send(b"")
            line.settimeout(None)
            with self._changed:
                if self._closed.is_set():
                    raise ConnectionAbortedError
                key = greeting.meeting, member.peer, member.fingerprint, greeting.number
                # Parts come in any order. A later attempt ends what is left of an earlier one.
                others = [k for k in self._waiting if k[:3] == key[:3]]
                if any(self._waiting[k].attempt > greeting.attempt for k in others):
                    raise ConnectionAbortedError
                old = [k for k in others if self._waiting[k].attempt < greeting.attempt or k == key]
                superseded = [self._waiting.pop(k) for k in old]
                part = greeting.number, greeting.count
                self._waiting[key] = MetLine(line, member, part, greeting.attempt)
                while len(self._waiting) > MOST_WAITING:
                    superseded.append(self._waiting.pop(next(iter(self._waiting))))
                self._changed.notify_all()
            cut_all(superseded)
        except (OSError, AuthError, WireError, msgspec.MsgspecError):
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


def cut_all(lines: Iterable[MetLine]) -> None:
    """End connections with members."""
    for line in lines:
        cut(line.plain)


def cut(line: socket.socket) -> None:
    """End a connection, so that threads that use it wake."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
