"""A process group over encrypted lines, with those methods of torch.distributed's that are used.

Gloo, as it comes with torch, cannot encrypt. Here every pair of members shares one encrypted
connection, on which a thread sends and another one receives; collectives are made of sends and
receives. Members find each other as those of Gloo do: each puts its address on the board of the
first one.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, AuthError, ConfigError, PeerLost, PeerRefused, WireError
from atoll.group.collectives.adding import ring
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.routes.line_listener import GroupListener, LineMeeting, cut, tune
from atoll.group.routes.rendezvous_store import RendezvousStore, split_host_port
from atoll.net.member_tls import MemberTls, SecureLine

RETRY_S = 0.05
"""Pause before another try to connect: the other side may not have the newest keys yet."""
RENEW_BYTES = 64 << 30
"""A line that has carried more is made anew, far below the limit of AES-GCM for one key."""

_SIZE = struct.Struct("!Q")
_Job = tuple[memoryview, "Future[None]"]


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
        self, members: Sequence[str], rank: int, lines: Mapping[int, SecureLine],
        sockets: Sequence[socket.socket],
    ) -> None:  # fmt: skip
        """Take over connections with all other members, by rank."""
        self._members, self._rank = tuple(members), rank
        self._sockets = list(sockets)
        self._timeout = timedelta(seconds=60)
        self._lock = threading.Lock()
        self._closed = False
        self._sends: dict[int, queue.SimpleQueue[_Job | None]] = {}
        self._receives: dict[int, queue.SimpleQueue[_Job | None]] = {}
        self._moved = dict.fromkeys(lines, 0)
        for other, line in lines.items():
            for queues, work in ((self._sends, self._write), (self._receives, self._read)):
                queues[other] = queue.SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(other, line, queues[other], work),
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
            for one in (*self._sends.values(), *self._receives.values()):
                one.put(None)

    # ---------------------------------------------------- interface of torch's process groups

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Start to send one contiguous tensor; the bytes must not change until it has ended."""
        return Transfer(self._begin(self._sends[to], tensors[0]))

    def recv(self, tensors: Sequence[Tensor], of: int, tag: int = 0) -> Transfer:
        """Start to receive into one contiguous tensor."""
        return Transfer(self._begin(self._receives[of], tensors[0]))

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
        for step in range(1, len(self._members)):  # all begin with another partner
            to, of = ((self._rank + way * step) % len(self._members) for way in (1, -1))
            if give(to).numel():
                begun.append(self._begin(self._sends[to], give(to)))
            if gets[of].numel():
                begun.append(self._begin(self._receives[of], gets[of]))
        return Transfer(*begun)

    # --------------------------------------------------------------------------- threads

    def _begin(self, jobs: queue.SimpleQueue[_Job | None], tensor: Tensor) -> Future[None]:
        done = Future[None]()
        with self._lock:
            if not self._closed:
                jobs.put((_bytes_of(tensor), done))
                return done
        done.set_exception(ConnectionAbortedError("this group is closed"))
        return done

    def _serve(
        self, other: int, line: SecureLine, jobs: queue.SimpleQueue[_Job | None],
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
    rank, lines = members.index(meeting.me), dict[int, SecureLine]()
    sockets: list[socket.socket] = []
    listener.begin(meeting.name)
    store.set(f"line/{meeting.me}", listener.dial)
    try:
        for other, member in enumerate(members):
            if other == rank:
                continue
            if other < rank:  # those before this one are dialled, the others dial
                line, lines[other] = _dial(store, member, tls, meeting)
            else:
                line, lines[other] = listener.take(meeting, member)
            sockets.append(line)
    except BaseException:
        for line in sockets:
            cut(line)
        raise
    return LineGroup(members, rank, lines, sockets)


def _dial(
    store: RendezvousStore, other: str, tls: MemberTls, meeting: LineMeeting
) -> tuple[socket.socket, SecureLine]:
    """Connect to a member at the address that it has put on the board."""
    while True:
        dial = store.get(f"line/{other}").decode(errors="replace")
        try:
            line = socket.create_connection(split_host_port(dial), timeout=meeting.left_s())
            try:
                tune(line)
                member = tls.dialling(line, to=other)
                if not meeting.is_known(member):
                    raise AuthError("it has not the key that the hub knows", given=other)
                line.settimeout(meeting.left_s())
                member.send(meeting.name.encode())
                member.receive(most=0)
                line.settimeout(None)
            except BaseException:
                line.close()
                raise
        except (OSError, AuthError, WireError, ConfigError) as error:
            if time.monotonic() + RETRY_S >= meeting.deadline or meeting.is_over():
                raise PeerLost("a member is not reached", given=f"{other}: {error}") from error
            time.sleep(RETRY_S)  # e.g. it has restarted, and its new address comes
        else:
            return line, member


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory, without a copy."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
