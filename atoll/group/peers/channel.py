"""The interface of a channel between members, and one inside a process.

A message is a small head and some bytes. It counts as sent once the receiver has all of it in its
queue; otherwise sending ends with an error in bounded time. Queues are bounded: a receiver without
room refuses a message at once, and a sender with too much under way waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded, PeerLost, PeerRefused
from atoll.wire.frames import Buffer

QUEUE_BYTES = 256 * 2**20
"""Bytes of messages that wait to be received, above which further ones are refused."""


@dataclass(frozen=True, slots=True)
class PeerMail:
    """A message as it arrived."""

    source: str
    """The member that sent it."""
    head: bytes
    data: memoryview


class SentBytes(NamedTuple):
    """What other members have taken of a channel's messages."""

    direct: int = 0
    """Over connections of their own."""
    relayed: int = 0
    """Through the hub."""


class PeerChannel(Protocol):
    """One member's messages to and from the others."""

    @property
    def sent(self) -> SentBytes:
        """Bytes that others have taken so far."""
        ...

    @property
    def dial(self) -> list[str]:
        """host:port at which this member accepts connections of others; empty: none."""
        ...

    def reach(self, dials: Mapping[str, Sequence[str]]) -> None:
        """Set the addresses at which other members accept connections; replaces earlier ones."""
        ...

    def send(
        self, to: str, head: bytes, data: Sequence[Buffer] = (), *, timeout_s: float
    ) -> Future[None]:
        """Start to send a message; the future ends when the member has it, or with an error.

        Blocks while too much is under way. Callbacks of the future run on threads of the channel
        and MUST NOT block. The buffers must not change until the future has ended.

        Errors of the future:
            PeerLost: the member is not connected.
            PeerRefused: it has no room.
            DeadlineExceeded: it did not take all in `timeout_s`.
        """
        ...

    def receive(self, *, timeout_s: float) -> PeerMail | None:
        """Return the oldest message; None if none arrives in time.

        Raises:
            AtollError: the channel has failed or is closed.
        """
        ...

    def close(self) -> None:
        """End the channel: every send that is under way fails."""
        ...


@dataclass(slots=True)
class MailQueue:
    """Messages that have arrived, up to a number of bytes. Thread-safe."""

    most_bytes: int = QUEUE_BYTES
    nbytes: int = 0
    failure: Exception | None = None
    _mail: deque[PeerMail] = field(default_factory=deque)
    _condition: threading.Condition = field(default_factory=threading.Condition)

    def fits(self, nbytes: int) -> bool:
        """Return whether a message of so many bytes may come; an empty queue takes any."""
        return not self.nbytes or self.nbytes + nbytes <= self.most_bytes

    def put(self, mail: PeerMail) -> None:
        """Add a message."""
        with self._condition:
            self._mail.append(mail)
            self.nbytes += len(mail.head) + len(mail.data)
            self._condition.notify()

    def offer(self, mail: PeerMail) -> bool:
        """Add a message if there is room; return whether there was."""
        with self._condition:
            if not self.fits(len(mail.data)):
                return False
            self.put(mail)
            return True

    def get(self, *, timeout_s: float) -> PeerMail | None:
        """See :meth:`PeerChannel.receive`."""
        with self._condition:
            self._condition.wait_for(lambda: self._mail or self.failure is not None, timeout_s)
            if self._mail:
                mail = self._mail.popleft()
                self.nbytes -= len(mail.head) + len(mail.data)
                return mail
            if self.failure is not None:
                raise self.failure
            return None

    def fail(self, error: Exception) -> None:
        """Raise an error in readers after the messages that are there."""
        with self._condition:
            self.failure = self.failure or error
            self._condition.notify_all()


class LocalNetwork:
    """Channels between members that are threads of one process."""

    def __init__(self) -> None:
        self._queues: dict[str, MailQueue] = {}
        self._lock = threading.Lock()
        self.sent_bytes = 0
        """Of the data of all messages."""

    def channel(self, member: str, *, most_bytes: int = QUEUE_BYTES) -> LocalChannel:
        """Return the channel of a member, which takes the place of an earlier one."""
        queue = MailQueue(most_bytes)
        with self._lock:
            self._queues[member] = queue
        return LocalChannel(self, member, queue)

    def remove(self, member: str) -> None:
        """Remove a member, as if its process had been killed."""
        with self._lock:
            queue = self._queues.pop(member, None)
        if queue is not None:
            queue.fail(PeerLost("this member was removed", given=member))

    def deliver(self, mail: PeerMail, to: str) -> None:
        """Put a message into a queue; raises PeerLost or PeerRefused."""
        with self._lock:
            if mail.source not in self._queues:
                raise PeerLost("this member was removed", given=mail.source)
            queue = self._queues.get(to)
            if queue is None:
                raise PeerLost("the member is not connected", given=to)
            if not queue.fits(len(mail.data)):
                raise no_room(to)
            queue.put(mail)
            self.sent_bytes += len(mail.data)


@dataclass(frozen=True, slots=True)
class LocalChannel:
    """See :class:`LocalNetwork`."""

    network: LocalNetwork
    me: str
    queue: MailQueue

    @property
    def sent(self) -> SentBytes:
        """See :meth:`PeerChannel.sent`; that of all members together."""
        return SentBytes(direct=self.network.sent_bytes)

    @property
    def dial(self) -> list[str]:
        """See :meth:`PeerChannel.dial`; none is needed."""
        return []

    def reach(self, dials: Mapping[str, Sequence[str]]) -> None:
        """See :meth:`PeerChannel.reach`."""

    def send(
        self, to: str, head: bytes, data: Sequence[Buffer] = (), *, timeout_s: float
    ) -> Future[None]:
        """See :meth:`PeerChannel.send`; a copy is delivered at once."""
        done: Future[None] = Future()
        mail = PeerMail(self.me, head, memoryview(b"".join(bytes(part) for part in data)))
        try:
            self.network.deliver(mail, to)
        except (PeerLost, PeerRefused) as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def receive(self, *, timeout_s: float) -> PeerMail | None:
        """See :meth:`PeerChannel.receive`."""
        return self.queue.get(timeout_s=timeout_s)

    def close(self) -> None:
        """See :meth:`PeerChannel.close`."""
        self.network.remove(self.me)


def no_room(member: str) -> PeerRefused:
    """Return the error for a receiver whose queue is full."""
    return PeerRefused(
        "the member has no room for another message", given=member,
        remedy="send it to another member, or later",
    )  # fmt: skip


def too_late(to: str, deadline: float, timeout_s: float) -> DeadlineExceeded | None:
    """Return the error of a send whose monotonic deadline has passed."""
    if RealClock().monotonic() < deadline:
        return None
    return DeadlineExceeded(f"{to} did not take a message in time", given=f"{timeout_s:.3g} s")
