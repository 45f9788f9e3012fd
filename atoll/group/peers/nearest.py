"""A channel that sends each message directly if the member can be reached, else through the hub.

The first messages to a member are relayed while a connection to it is made. One that breaks is
tried again after a while; what was under way on it is sent again through the hub, under its
number, by which the receiver knows what it already has.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress

from atoll.clock import RealClock
from atoll.errors import HubError, PeerLost, WireError
from atoll.group.peers.channel import QUEUE_BYTES, PeerMail, SentBytes, too_late
from atoll.group.peers.direct import DirectLine, DirectListener
from atoll.group.peers.relayed import RelayedChannel
from atoll.group.routes.member_lines import MemberLines
from atoll.net.sync_link import SyncLink
from atoll.wire.frames import Buffer

AGAIN_S, MAX_AGAIN_S = 5.0, 60.0
"""Pause before a member that could not be reached is tried again; it doubles."""
REMEMBERED = 8192
"""Numbers of messages that a receiver remembers."""

_NUMBER = struct.Struct("!Q")


class NearestChannel:
    """See the module's docstring, and :class:`PeerChannel`."""

    def __init__(
        self, link: SyncLink, *, job: str, me: str, lines: MemberLines | None = None,
        address: str = "",
        most_bytes: int = QUEUE_BYTES,
    ) -> None:  # fmt: skip
        """Use a member's session, which stays open when the channel is closed.

        `address` is the own numeric address at which other members can connect, and `lines` make
        the connections. Without either this member offers and makes no connections: a
        limit of its bandwidth holds at the relay only. At most `most_bytes` are under way on each
        of the two ways, and as many wait to be received.
        """
        self._job, self._me, self._members, self._most_bytes = job, me, lines, most_bytes
        self._relayed = RelayedChannel(link, job=job, most_bytes=most_bytes)
        self._listener: DirectListener | None = None
        if lines is not None and address:
            queue = self._relayed.queue
            self._listener = DirectListener(queue, address=address, lines=lines, job=job, me=me)
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._dials: dict[str, tuple[str, ...]] = {}
        self._lines: dict[str, DirectLine] = {}
        self._pauses: dict[str, float] = {}
        self._again = ThreadPoolExecutor(1, "peers-again")
        self._received: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._direct_bytes = 0

    @property
    def sent(self) -> SentBytes:
        """See :meth:`PeerChannel.sent`."""
        return SentBytes(self._direct_bytes, self._relayed.sent.relayed)

    @property
    def dial(self) -> list[str]:
        """See :meth:`PeerChannel.dial`."""
        return [self._listener.dial] if self._listener is not None else []

    def reach(self, dials: Mapping[str, Sequence[str]]) -> None:
        """See :meth:`PeerChannel.reach`."""
        if self._listener is None:
            return
        with self._changed:
            self._dials = {member: tuple(at) for member, at in dials.items() if at}
            ended = [
                self._lines.pop(member)
                for member, line in list(self._lines.items())
                if line.dials != self._dials.get(member)
            ]
            for line in ended:
                self._pauses.pop(line.to, None)
        for line in ended:
            line.close()

    def send(
        self, to: str, head: bytes, data: Sequence[Buffer] = (), *, timeout_s: float
    ) -> Future[None]:
        """See :meth:`PeerChannel.send`."""
        head = _NUMBER.pack(next(self._numbers)) + head
        deadline = RealClock().monotonic() + timeout_s
        line = self._line(to)
        if line is None:
            return self._relayed.send(to, head, data, timeout_s=timeout_s)
        done, nbytes = Future[None](), len(head) + sum(memoryview(part).nbytes for part in data)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(nbytes), timeout_s)
            failure = self._failure() or too_late(to, deadline, timeout_s)
            if failure is None:
                self._under_way += nbytes
        if failure is not None:
            done.set_exception(failure)
            return done

        def relay() -> None:
            left_s = max(0.0, deadline - RealClock().monotonic())
            relayed = self._relayed.send(to, head, data, timeout_s=left_s)
            relayed.add_done_callback(lambda sent: _pass_on(sent.exception(), done))

        def given_up(again: Future[None]) -> None:
            if again.cancelled():  # the channel was closed first
                _pass_on(self._failure(), done)

        def ended(sent: Future[None]) -> None:
            error = sent.exception()
            with self._changed:
                self._under_way -= nbytes
                self._direct_bytes += nbytes if error is None else 0
                self._changed.notify_all()
            if isinstance(error, PeerLost) and not self._closed:
                with suppress(RuntimeError):  # closed at this moment
                    self._again.submit(relay).add_done_callback(given_up)
                    return
            _pass_on(error, done)

        line.send(head, data, timeout_s=timeout_s).add_done_callback(ended)
        return done

    def receive(self, *, timeout_s: float) -> PeerMail | None:
        """See :meth:`PeerChannel.receive`."""
        clock = RealClock()
        until = clock.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - clock.monotonic())
            mail = self._relayed.receive(timeout_s=left_s)
            if mail is None:
                return None
            if len(mail.head) < _NUMBER.size:
                raise WireError("a message of a member has no number", given=mail.source)
            key = mail.source, _NUMBER.unpack_from(mail.head)[0]
            if key not in self._received:
                self._received[key] = None
                while len(self._received) > REMEMBERED:
                    self._received.popitem(last=False)
                return PeerMail(mail.source, mail.head[_NUMBER.size :], mail.data)

    def close(self) -> None:
        """See :meth:`PeerChannel.close`."""
        with self._changed:
            self._closed = True
            lines = list(self._lines.values())
            self._changed.notify_all()
        self._again.shutdown(wait=False, cancel_futures=True)
        for line in lines:
            line.close(HubError("this channel to other members is closed"))
        if self._listener is not None:
            self._listener.close()
        self._relayed.close()

    # ---------------------------------------------------------------------- connections

    def _line(self, to: str) -> DirectLine | None:
        """Return the open connection to a member; otherwise see that one is tried."""
        with self._changed:
            line, dials = self._lines.get(to), self._dials.get(to)
            if line is not None and line.open:
                self._pauses.pop(to, None)
                return line
            if dials is None or self._members is None or self._closed:
                return None
            if line is not None:
                if line.failed_at is None:
                    return None  # connecting
                pause_s = self._pauses.get(to, AGAIN_S)
                if RealClock().monotonic() < line.failed_at + pause_s:
                    return None
                self._pauses[to] = min(MAX_AGAIN_S, 2 * pause_s)
            self._lines[to] = DirectLine(to, dials, lines=self._members, job=self._job, me=self._me)
            return None

    def _has_room(self, nbytes: int) -> bool:
        """Return whether another message may start; called with the lock held."""
        room = not self._under_way or self._under_way + nbytes <= self._most_bytes
        return room or self._failure() is not None

    def _failure(self) -> HubError | None:
        return HubError("this channel to other members is closed") if self._closed else None


def _pass_on(error: BaseException | None, done: Future[None]) -> None:
    with suppress(InvalidStateError):
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
