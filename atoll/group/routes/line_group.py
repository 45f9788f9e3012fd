"""A process group over encrypted lines, with those methods of torch.distributed's that are used.

Gloo, as it comes with torch, cannot encrypt. Here every pair of members shares an encrypted
connection, on which a thread sends and another one receives; collectives are made of sends and
receives. Members find each other as those of Gloo do: each puts its address on the store of the
first one.

On a long way one connection carries no more than its window in a round trip. There a pair shares
several, and a large tensor goes in as many parts, as PCCL (Prime Intellect 2025) does.
"""

from __future__ import annotations

import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, AuthError, ConfigError, PeerLost, PeerRefused, WireError
from atoll.group.base import Work
from atoll.group.collectives.adding import ring
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.routes.line_listener import GroupListener, LineMeeting, MetLine, cut, cut_all
from atoll.group.routes.rendezvous_store import RendezvousStore, split_host_port
from atoll.net.member_tls import MemberTls, SecureLine

RETRY_S = 0.05
"""Pause before another try to connect: the other side may not have the newest keys yet."""
WINDOW_BYTES = 4 << 20
"""What one connection has under way at most: Linux's limit for send buffers (`tcp_wmem`)."""
FILLED_BYTES_PER_S = 125_000_000
"""Connections of a pair suffice for this rate: 1 Gbit/s."""
MOST_LINES = 8
STRIPED_BYTES = 256 * 1024
"""Smaller tensors go over the first connection."""
RENEW_BYTES = 64 << 30
"""A line that has carried more is made anew, far below the limit of AES-GCM for one key."""

_SIZE = struct.Struct("!Q")
_Job = tuple[memoryview, "Future[None]"]
_Jobs = queue.SimpleQueue[_Job | None]


class Transfer:
    """What was begun on a group; done once `wait` returns."""

    def __init__(self, *parts: Future[None]) -> None:
        """Wait for these parts."""
        self._parts = parts

    def wait(self, timeout: timedelta) -> None:
        """Wait for the end, or for the first error.

        Raises:
            TimeoutError: not within the time-out.
            OSError: a connection broke.
            PeerRefused: the other side sent another number of bytes.
        """
        ended, open_ = wait(self._parts, timeout.total_seconds(), FIRST_EXCEPTION)
        for part in ended:
            part.result()
        if open_:
            raise TimeoutError("a transfer between members takes too long")


class LineGroup:
    """See the module's docstring. Collectives are called by one thread, in one order everywhere."""

    def __init__(
        self, members: Sequence[str], rank: int, lines: Mapping[int, Sequence[MetLine]]
    ) -> None:
        """Take over connections with all other members, by rank."""
        self._members, self._rank = tuple(members), rank
        self._sockets = [line.plain for many in lines.values() for line in many]
        self._timeout = timedelta(seconds=60)
        self._lock = threading.Lock()
        self._closed = False
        self._sends: dict[int, list[_Jobs]] = {}
        self._receives: dict[int, list[_Jobs]] = {}
        self._moved = dict.fromkeys(lines, 0)
        for other, many in lines.items():
            for queues, work in ((self._sends, self._write), (self._receives, self._read)):
                queues[other] = [queue.SimpleQueue() for _ in many]
                for line, jobs in zip(many, queues[other], strict=True):
                    threading.Thread(
                        target=self._serve, args=(other, line.secure, jobs, work),
                        name=f"line-{members[other]}", daemon=True,
                    ).start()  # fmt: skip

    @property
    def worn(self) -> bool:
        """Whether a connection has carried so much that it should be made anew."""
        return any(moved > RENEW_BYTES for moved in self._moved.values())

    def close(self) -> None:
        """Cut all connections; what is under way ends with an error."""
        for line in self._sockets:
            cut(line)
        with self._lock:
            self._closed = True
            for many in (*self._sends.values(), *self._receives.values()):
                for jobs in many:
                    jobs.put(None)

    # ---------------------------------------------------- interface of torch's process groups

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Start to send one contiguous tensor; the bytes must not change until it has ended."""
        return Transfer(*self._begin(self._sends[to], tensors[0]))

    def recv(self, tensors: Sequence[Tensor], of: int, tag: int = 0) -> Transfer:
        """Start to receive into one contiguous tensor."""
        return Transfer(*self._begin(self._receives[of], tensors[0]))

    def allreduce(self, tensors: Sequence[Tensor]) -> Transfer:
        """Replace a float tensor by the sum over all members; blocks."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        ring(BoundedProcessGroup(self, self._members, self._rank, deadline), tensors[0])
        return Transfer()

    def broadcast(self, tensor: Tensor, root: int) -> Transfer:
        """Hand down one member's tensor on a binomial tree; blocks."""
        n = len(self._members)
        place = (self._rank - root) % n
        step = 1
        while step < n and not place & step:
            step *= 2
        if place:
            self.recv([tensor], (place - step + root) % n).wait(self._timeout)
        sent = []
        while step > 1:
            step //= 2
            if place + step < n:
                sent.append(self.send([tensor], (place + step + root) % n))
        for each in sent:
            each.wait(self._timeout)
        return Transfer()

    def alltoall_base(
        self, incoming: Tensor, outgoing: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Transfer:
        """Exchange parts with all others, whose sizes are in elements, by rank."""
        gets = torch.split(incoming, list(received))
        gives = torch.split(outgoing, list(sent))
        gets[self._rank].copy_(gives[self._rank])
        return self._exchange(lambda other: gives[other], gets)

    def _allgather_base(self, gathered: Tensor, own: Tensor) -> Transfer:
        rows = torch.split(gathered, own.numel())
        rows[self._rank].copy_(own)
        return self._exchange(lambda other: own, rows)

    def _exchange(self, give: Callable[[int], Tensor], gets: Sequence[Tensor]) -> Transfer:
        begun = []
        for step in range(1, len(self._members)):  # each begins with another partner
            to, of = ((self._rank + way * step) % len(self._members) for way in (1, -1))
            if give(to).numel():
                begun += self._begin(self._sends[to], give(to))
            if gets[of].numel():
                begun += self._begin(self._receives[of], gets[of])
        return Transfer(*begun)

    # --------------------------------------------------------------------------- threads

    def _begin(self, lines: Sequence[_Jobs], tensor: Tensor) -> list[Future[None]]:
        """Queue a tensor's bytes on the connections of a pair, the same parts on both sides."""
        parts, found = _striped(_bytes_of(tensor), len(lines)), list[Future[None]]()
        with self._lock:
            for jobs, part in zip(lines, parts, strict=False):
                found.append(Future())
                if self._closed:
                    found[-1].set_exception(ConnectionAbortedError("this group is closed"))
                else:
                    jobs.put((part, found[-1]))
        return found

    def _serve(
        self, other: int, line: SecureLine, jobs: _Jobs,
        work: Callable[[int, SecureLine, memoryview], None],
    ) -> None:  # fmt: skip
        failure: Exception | None = None
        while (job := jobs.get()) is not None:
            data, done = job
            if failure is None:
                try:
                    work(other, line, data)
                    self._moved[other] += len(data)
                except (OSError, AtollError) as error:
                    failure = error
            with suppress(InvalidStateError):
                done.set_exception(failure) if failure is not None else done.set_result(None)

    def _write(self, other: int, line: SecureLine, data: memoryview) -> None:
        line.write(_SIZE.pack(len(data)), data)

    def _read(self, other: int, line: SecureLine, data: memoryview) -> None:
        head = bytearray(_SIZE.size)
        line.read_into(memoryview(head))
        (size,) = _SIZE.unpack(head)
        if size != len(data):
            raise PeerRefused(
                "a member sent another number of bytes than the exchange needs",
                given=f"{size} bytes from {self._members[other]}", expected=f"{len(data)}",
            )  # fmt: skip
        line.read_into(data)


def connect_lines(
    store: RendezvousStore, listener: GroupListener, tls: MemberTls, meeting: LineMeeting
) -> LineGroup:
    """Connect the members of a meeting, each with every other one.

    Raises:
        PeerLost: a member does not answer, or is not the one that the hub knows.
    """
    members = meeting.members
    rank, lines = members.index(meeting.me), dict[int, list[MetLine]]()
    listener.begin(meeting.name)
    names = [f"line/{member}" for member in members[:rank]]
    own = {f"line/{meeting.me}": listener.dial.encode()}
    addresses = [dial.decode(errors="replace") for dial in store.swap(own, names)]
    asking, lock, given_up = threading.Lock(), threading.Lock(), False

    def dial(other: int) -> None:
        def address() -> str:  # e.g. it has restarted at a new address
            with asking:  # a store answers one request at a time
                return store.get(names[other]).decode(errors="replace")

        found = _dial(addresses[other], address, members[other], tls, meeting)
        with lock:
            if given_up:
                cut_all(found)
            else:
                lines[other] = found

    # Members before this one are dialled, all at once; the others dial this one.
    dialled = [
        Work.start(
            partial(dial, other), name=f"dial-{members[other]}", deadline=meeting.deadline + 1.0
        )
        for other in range(rank)
    ]
    try:
        for other in range(rank + 1, len(members)):
            accepted = listener.take(meeting, members[other])
            with lock:
                lines[other] = accepted
        for work in dialled:
            work.wait()
    except BaseException:
        with lock:
            given_up = True
        for many in lines.values():
            cut_all(many)
        raise
    return LineGroup(members, rank, lines)


def _dial(
    address: str, newest: Callable[[], str], other: str, tls: MemberTls, meeting: LineMeeting
) -> list[MetLine]:
    """Connect to a member at its address, and after a failure at the newest one on the store."""
    while True:
        try:
            return _all_lines(address, other, tls, meeting)
        except (OSError, AuthError, WireError, ConfigError) as error:
            if time.monotonic() + RETRY_S >= meeting.deadline or meeting.is_over():
                raise PeerLost("a member is not reached", given=f"{other}: {error}") from error
            time.sleep(RETRY_S)
            address = newest()


def _all_lines(address: str, other: str, tls: MemberTls, meeting: LineMeeting) -> list[MetLine]:
    """Connect as often as it needs to fill the way: once, which measures it, then all at once."""
    began = time.monotonic()
    first, attempt = _connected(address, meeting), time.monotonic_ns()
    count = lines_for(time.monotonic() - began)

    def connect(number: int) -> MetLine:
        line = _connected(address, meeting) if number else first
        part = number, count
        return MetLine.dialled(line, tls, meeting, to=other, part=part, attempt=attempt)

    if count == 1:
        return [connect(0)]
    until = meeting.deadline + 1.0  # each ends before that by itself
    tries = [
        Work.start(partial(connect, number), name=f"dial-{other}", deadline=until)
        for number in range(count)
    ]
    found, failed = list[MetLine](), list[Exception]()
    for one in tries:
        try:
            found.append(one.wait())
        except Exception as error:
            failed.append(error)
    if failed:
        cut_all(found)
        raise failed[0]
    return found


def _connected(dial: str, meeting: LineMeeting) -> socket.socket:
    return socket.create_connection(split_host_port(dial), timeout=meeting.left_s())


def lines_for(trip_s: float) -> int:
    """Return the connections that fill a line with this round trip."""
    return min(MOST_LINES, max(1, math.ceil(trip_s * FILLED_BYTES_PER_S / WINDOW_BYTES)))


def _striped(data: memoryview, count: int) -> list[memoryview]:
    """Return one part for each connection, or all in one if it is small."""
    if count == 1 or len(data) < STRIPED_BYTES:
        return [data]
    size = -(-len(data) // count)
    return [data[start : start + size] for start in range(0, len(data), size)]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory, without a copy."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
