"""Messages between members over connections of their own, where they reach each other.

A member listens at a free port (:class:`DirectListener`); another one that wants to send connects
(:class:`DirectLine`), and both prove that they know the job's key. Each connection carries the
messages of one direction; answers come back on it, so that several messages are under way at once.

  dialler: greeting (its name), then messages: 8 bytes number, 4 bytes length, head, data
  listener: an empty answer to the greeting, then one answer per message: number, refusal or nothing
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.clock import RealClock
from atoll.errors import AtollError, AuthError, PeerLost, PeerRefused, WireError
from atoll.group.peers.channel import MailQueue, PeerMail, no_room, too_late
from atoll.group.routes.line_listener import cut, tune
from atoll.group.routes.member_lines import Line, MemberLines
from atoll.group.routes.rendezvous_store import join_host_port, split_host_port
from atoll.net.accepting import accepted, serve_on_thread, stop_listening
from atoll.wire.frames import Buffer
from atoll.wire.peer_pieces import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Time limit of connecting to one address, and of the greeting."""
STALLED_S = 10.0
"""A connection on which nothing moves for this long while there is something to send is given up.
Where the system can tell (Linux), the same holds for bytes that the other machine does not
acknowledge."""
POLL_S = 0.5
"""Interval at which deadlines are checked."""
MOST_LINES = 256
"""Members that may be connected to one listener."""
GREETING_BYTES = 1024
ANSWER_BYTES = 4096

_HEAD = struct.Struct("!QI")
_NUMBER = struct.Struct("!Q")


class DirectListener:
    """Puts the messages of members that connect into a queue."""

    def __init__(
        self, queue: MailQueue, *, address: str, lines: MemberLines, job: str, me: str
    ) -> None:
        """Listen at a free port of the own numeric address."""
        self._queue, self._members, self._job, self._me = queue, lines, job, me
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.dial = join_host_port(address, self._listener.getsockname()[1])
        """host:port at which it listens."""
        self._lock = threading.Lock()
        self._lines: set[socket.socket] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="peers-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and cut all connections."""
        stop_listening(self._listener, self._closed)
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            cut(line)
        self._thread.join(1.0)

    def _accept(self) -> None:
        for line, _ in accepted(self._listener, self._closed):
            with self._lock:
                if self._closed.is_set() or len(self._lines) >= MOST_LINES:
                    line.close()
                    continue
                self._lines.add(line)
            forget = partial(self._forget, line)
            serve_on_thread(line, self._serve, name="peers-line", refused=forget)

    def _forget(self, line: socket.socket) -> None:
        with self._lock:
            self._lines.discard(line)

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, suppress(OSError, WireError, AuthError):
                tune(line, silent_s=STALLED_S)
                line.settimeout(CONNECT_S)
                member = self._members.listening(line)
                job, _, source = member.receive(most=GREETING_BYTES).decode().rpartition("/")
                if job != self._job or self._members.is_other(member, source):
                    return
                member.send(b"")
                line.settimeout(None)
                while True:
                    self._take(member, source)
        except UnicodeDecodeError:
            log.warning("the greeting of a direct connection is not usable")
        finally:
            self._forget(line)

    def _take(self, member: Line, source: str) -> None:
        body = memoryview(member.receive(most=MAX_MESSAGE_BYTES + _HEAD.size))
        if len(body) < _HEAD.size:
            raise WireError("a direct message is cut off", given=f"{len(body)} bytes")
        number, head_bytes = _HEAD.unpack_from(body)
        if _HEAD.size + head_bytes > len(body):
            raise WireError("the head of a direct message is cut off", given=f"{head_bytes} bytes")
        whole = body[_HEAD.size :]
        mail = PeerMail(source, bytes(whole[:head_bytes]), whole[head_bytes:])
        accepted = self._queue.offer(mail)
        refusal = b"" if accepted else no_room(self._me).message().encode()[: ANSWER_BYTES // 2]
        member.send(_NUMBER.pack(number) + refusal)


@dataclass(slots=True)
class _Sending:
    number: int
    head: bytes
    data: Sequence[Buffer]
    deadline: float
    timeout_s: float
    done: Future[None] = field(default_factory=Future)

    def body(self) -> bytes:
        start = _HEAD.pack(self.number, len(self.head))
        return b"".join((start, self.head, *(memoryview(part).cast("B") for part in self.data)))


class DirectLine:
    """A connection to one member, made on a thread of its own; used from any thread."""

    def __init__(
        self, to: str, dials: Sequence[str], *, lines: MemberLines, job: str, me: str
    ) -> None:
        """Start to connect to the first of these host:port that answers."""
        self.to, self.dials = to, tuple(dials)
        self._members, self._greeting = lines, f"{job}/{me}".encode()
        self._changed = threading.Condition()
        self._queued: deque[_Sending] = deque()
        self._unanswered: dict[int, _Sending] = {}
        self._line: socket.socket | None = None
        self._next = 0
        self.open = False
        """Whether messages can be sent at present."""
        self.failed_at: float | None = None
        """When it ended, in monotonic seconds."""
        threading.Thread(target=self._write, name=f"peers-to-{to}", daemon=True).start()

    def send(self, head: bytes, data: Sequence[Buffer], *, timeout_s: float) -> Future[None]:
        """Queue a message; errors of the future as in :meth:`PeerChannel.send`.

        PeerLost says that the connection broke: the member may or may not have the message.
        """
        sending = _Sending(0, head, data, RealClock().monotonic() + timeout_s, timeout_s)
        with self._changed:
            ended = self.failed_at is not None
            if not ended:
                self._next += 1
                sending.number = self._next
                self._queued.append(sending)
                self._changed.notify_all()
        if ended:
            sending.done.set_exception(PeerLost("the direct connection broke", given=self.to))
        return sending.done

    def close(self, error: AtollError | None = None) -> None:
        """End the connection; what is under way ends with PeerLost."""
        with self._changed:
            if self.failed_at is not None:
                return
            self.open, self.failed_at = False, RealClock().monotonic()
            line, self._line = self._line, None
            ended = [*self._unanswered.values(), *self._queued]
            self._unanswered, self._queued = {}, deque()
            self._changed.notify_all()
        if line is not None:
            cut(line)
        lost = error or PeerLost("the direct connection was closed", given=self.to)
        for sending in ended:
            _end(sending, too_late(self.to, sending.deadline, sending.timeout_s) or lost)

    # ----------------------------------------------------------------------- threads

    def _write(self) -> None:
        try:
            member = self._connect()
            log.info("connected directly to %s", self.to)
            while (sending := self._take()) is not None:
                member.send(sending.body())
        except (OSError, AtollError) as error:
            self.close(PeerLost("the direct connection broke", given=f"{self.to}: {error}"))

    def _connect(self) -> Line:
        failure: Exception = PeerLost("the member offers no address", given=self.to)
        for dial in self.dials:
            try:
                line = socket.create_connection(split_host_port(dial), timeout=CONNECT_S)
            except (OSError, AtollError) as error:
                failure = error
                continue
            try:
                tune(line, silent_s=STALLED_S)
                member = self._members.dialling(line, to=self.to)
                member.send(self._greeting)
                member.receive(most=0)
            except (OSError, AtollError) as error:
                line.close()
                failure = error
                continue
            line.settimeout(STALLED_S)
            with self._changed:
                if self.failed_at is not None:
                    line.close()
                    raise PeerLost("the direct connection was closed", given=self.to)
                self._line, self.open = line, True
            threading.Thread(
                target=self._read, args=(member,), name=f"peers-of-{self.to}", daemon=True
            ).start()
            return member
        raise failure

    def _take(self) -> _Sending | None:
        """Return the next message to send; None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self.failed_at is not None)
            if not self._queued:
                return None
            sending = self._queued.popleft()
            self._unanswered[sending.number] = sending
            return sending

    def _read(self, member: Line) -> None:
        clock = RealClock()
        try:
            while self.failed_at is None:
                if not member.wait(POLL_S):
                    self._check(clock.monotonic())
                    continue
                answer = member.receive(most=ANSWER_BYTES)
                (number,) = _NUMBER.unpack_from(answer)
                with self._changed:
                    sending = self._unanswered.pop(number, None)
                reason = answer[_NUMBER.size :].decode(errors="replace")
                if sending is not None:
                    _end(sending, PeerRefused(reason) if reason else None)
        except (OSError, ValueError, struct.error, AtollError) as error:
            self.close(PeerLost("the direct connection broke", given=f"{self.to}: {error}"))

    def _check(self, now: float) -> None:
        """Give the connection up if a message on it was not taken in time."""
        with self._changed:
            waiting = [*self._unanswered.values(), *self._queued]
        if any(now >= sending.deadline for sending in waiting):
            self.close()


def _end(sending: _Sending, error: BaseException | None) -> None:
    with suppress(InvalidStateError):
        if error is None:
            sending.done.set_result(None)
        else:
            sending.done.set_exception(error)
