"""The direct route: members dial each other and torch.distributed (Gloo) moves the tensors.

Gloo has habits that this module holds off: its timeouts are half an hour unless set, a blocked
wait cannot be aborted, and it listens on whatever the hostname resolves to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded, GroupError, PeerLost
from atoll.group.collectives.collectives import (
    BoundedProcessGroup,
    Exchanged,
    check_weight,
    weighted_mean,
)
from atoll.group.routes.all_to_all import all_to_all_direct
from atoll.group.routes.rendezvous_store import RendezvousBoard, RendezvousStore
from atoll.group.routes.requests import ReduceRequest
from atoll.reducer.all_to_all import DeliveredMessage, Outgoing
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

T = TypeVar("T")

FIRST_CONNECT_S = 20.0
"""Longest time in which the first process group of a process must be connected."""
CONNECT_FLOOR_S, CONNECT_FACTOR = 5.0, 10.0
"""Later ones: so many times what it took before, but never less than the floor."""


@dataclass(frozen=True, slots=True)
class DirectGroup:
    """Who meets where, until when."""

    epoch: int
    members: tuple[str, ...]
    board: str
    """host:port of the first member's board."""
    deadline: float

    @classmethod
    def of(cls, plan: RoundPlan) -> DirectGroup:
        """Return the meeting of a plan's members on the direct route; its time runs from now."""
        deadline = RealClock().monotonic() + plan.timeout_s
        return cls(plan.epoch, tuple(plan.members), plan.store, deadline)


class DirectRoute:
    """This member's board, and the process group of the members it met last."""

    def __init__(self, *, address: str, job: str, me: str) -> None:
        """Open a board on a free port of `address`.

        Args:
            address: Own numeric address, as other members dial it.
            job: Names the notes on the board.
            me: Own member id.
        """
        self._address, self._job, self._me = address, job, me
        self._board = RendezvousBoard(address)
        self.dial = self._board.dial
        self.connect_s: float | None = None
        """How long it took to connect the last process group; None: there was none."""
        self._lock = threading.Lock()
        self._serial = 0
        self._key: tuple[str, tuple[str, ...]] | None = None
        self._group: Any | None = None
        self._store: RendezvousStore | None = None

    def begin(self) -> int:
        """Return the number of a new meeting; whatever was under way before is given up.

        A meeting may take several exchanges, one after the other.

        Called where the order of exchanges is certain: before a thread is started for it.
        """
        with self._lock:
            self._serial += 1
            store, self._store = self._store, None
            serial = self._serial
        if store is not None:
            store.close()  # frees a thread that waits for members who do not come
        return serial

    def exchange(self, request: ReduceRequest) -> Exchanged:
        """Return what the values of the plan's members come to, by default their weighted mean.

        Raises:
            PeerLost: a member's connection broke, or the aggregate needs more members.
            DeadlineExceeded: it took longer than `plan.timeout_s`.
            GroupError: nothing was left to average.
        """
        out = self.meet(
            DirectGroup.of(request.plan),
            lambda wires: weighted_mean(
                wires, request.vector, codec=request.codec, weight=request.weight,
                key=request.key, policy=request.policy,
            ),
            serial=request.serial,
            anew=request.phase == 0,
        )  # fmt: skip
        return check_weight(out, request.plan.members)

    def swap(
        self, plan: RoundPlan, gift: Outgoing, *, serial: int, anew: bool = True
    ) -> tuple[DeliveredMessage, int, int]:
        """Return what the members of the plan have for this one, and bytes sent and received.

        Args:
            plan: Who takes part.
            gift: What this member has for them.
            serial: What :meth:`begin` returned.
            anew: Whether connections may be made: only in the first exchange of a plan.

        Raises:
            PeerLost: a member's connection broke.
            DeadlineExceeded: it took longer than `plan.timeout_s`.
            PeerRefused: what somebody sent is of no use.
        """
        return self.meet(
            DirectGroup.of(plan),
            lambda wires: all_to_all_direct(wires, gift),
            serial=serial,
            anew=anew,
        )

    def meet(
        self,
        meeting: DirectGroup,
        work: Callable[[BoundedProcessGroup], T],
        *,
        serial: int,
        anew: bool = True,
    ) -> T:
        """Return what `work` gives on a process group of the meeting's members.

        The group of the last meeting is used again if its members are the same. If its connections
        turn out to be broken `work` is done once more on a fresh group.

        Args:
            meeting: Who meets.
            work: What to do together; the same on every member.
            serial: What :meth:`begin` returned.
            anew: Whether connections may be made; otherwise the group must be there already.

        Raises:
            PeerLost: a member's connection broke.
            DeadlineExceeded: the meeting's deadline has passed.
        """
        with self._lock:
            known = self._key == _key_of(meeting)
        if not known and not anew:
            raise PeerLost("the connections to the other members are gone")
        try:
            group = self._connect(meeting, serial)
            rank = meeting.members.index(self._me)
            return work(BoundedProcessGroup(group, meeting.members, rank, meeting.deadline))
        except GroupError:
            self._forget(serial)  # lets the others fail at once instead of waiting for this member
            raise
        except RuntimeError as error:
            self._forget(serial)
            if RealClock().monotonic() >= meeting.deadline:
                raise DeadlineExceeded("the members' exchange took too long") from error
            if not known or not anew:
                raise PeerLost("a member's connection broke", given=_first_line(error)) from error
            # A member may have been restarted since the last round: it waits in a fresh group.
            log.info("the last round's connections are gone (%s); connecting anew", error)
        return self.meet(meeting, work, serial=serial)

    def _connect(self, meeting: DirectGroup, serial: int) -> Any:
        """Return the process group of the meeting's members; the last one if they are the same."""
        with self._lock:
            self._check(serial)
            if self._group is not None and self._key == _key_of(meeting):
                return self._group
        self._forget(serial)
        group = self._new_group(meeting, serial)
        with self._lock:
            self._check(serial)
            self._group, self._key = group, _key_of(meeting)
        return group

    def _connect_timeout_s(self) -> float:
        """Return how long connecting may take, from how long it took."""
        if self.connect_s is None:
            return FIRST_CONNECT_S
        return max(CONNECT_FLOOR_S, CONNECT_FACTOR * self.connect_s)

    def _new_group(self, meeting: DirectGroup, serial: int) -> Any:
        """Connect to all members of the meeting."""
        began = RealClock().monotonic()
        deadline = min(meeting.deadline, began + self._connect_timeout_s())
        names = f"{self._job}/{meeting.epoch}/{','.join(meeting.members)}"
        store = RendezvousStore(meeting.board, names, deadline=deadline)
        try:
            with self._lock:
                self._check(serial)
                self._store = store
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=max(0.001, deadline - RealClock().monotonic()))
            options._threads = 2
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            rank = meeting.members.index(self._me)
            group = dist.ProcessGroupGloo(store, rank, len(meeting.members), options)
        finally:
            store.close()
        self.connect_s = RealClock().monotonic() - began
        return group

    def drop(self) -> None:
        """Give up what is under way and forget the process group; the next exchange connects."""
        self._forget(self.begin())

    def _forget(self, serial: int) -> None:
        """Forget the process group on behalf of one exchange, unless that was given up."""
        with self._lock:
            self._check(serial)
            group, self._group, self._key = self._group, None, None
        if group is not None:
            # Its destructor waits for operations under way; this thread must not.
            threading.Thread(target=lambda held: held.clear(), args=([group],), daemon=True).start()

    def _check(self, serial: int) -> None:
        """Refuse an exchange that was given up; a later one may be under way. Lock held."""
        if serial != self._serial:
            raise PeerLost("this exchange was given up", expected="another attempt is under way")

    def close(self) -> None:
        """Drop the group. A process that lost a peer should leave with `os._exit` after this."""
        self.drop()
        self._board.close()


def _key_of(meeting: DirectGroup) -> tuple[str, tuple[str, ...]]:
    """Return what makes two meetings share a process group."""
    return meeting.board, meeting.members


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
