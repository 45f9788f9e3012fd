"""The direct route: members connect to each other, by encrypted lines.

With `encryption = "off"` torch.distributed (Gloo) moves the tensors. That works around three
properties of Gloo: its time-out is half an hour unless set, a blocked wait cannot be aborted, and
it listens on the address to which the hostname resolves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
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
from atoll.group.routes.connecting import Connecting, PreparedGroup, close_group
from atoll.group.routes.line_group import LineGroup, connect_lines
from atoll.group.routes.line_listener import GroupListener, LineMeeting
from atoll.group.routes.line_speeds import measure_lines
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import RendezvousStore, StoreServer
from atoll.group.routes.requests import ReduceRequest
from atoll.reducer.all_to_all import DeliveredMessage, Outgoing
from atoll.rounds.ring_order import LEAST
from atoll.wire.messages import RoundPlan
from atoll.wire.round_messages import MOST_LINES

log = logging.getLogger(__name__)

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

T = TypeVar("T")

FIRST_CONNECT_S = 20.0
"""Time limit for connecting the first process group of a process."""
CONNECT_FLOOR_S, CONNECT_FACTOR = 5.0, 10.0
"""For later groups: the last duration times the factor, but at least the floor."""


@dataclass(frozen=True, slots=True)
class DirectGroup:
    """Members, rendezvous store and deadline of one meeting."""

    epoch: int
    members: tuple[str, ...]
    store: str
    """host:port of the first member's store."""
    deadline: float
    ring: tuple[int, ...] = ()
    """Ranks in the order of rings and trees; empty: as they are."""

    @classmethod
    def of(cls, plan: RoundPlan) -> DirectGroup:
        """Return the meeting of a plan's members; its time limit starts now."""
        deadline = RealClock().monotonic() + plan.timeout_s
        ring = tuple(map(plan.members.index, plan.ring))
        return cls(plan.epoch, tuple(plan.members), plan.store, deadline, ring)


class DirectRoute:
    """This member's rendezvous store, and the process group of the last meeting."""

    def __init__(self, *, address: str, job: str, me: str) -> None:
        """Open a store on a free port of the own numeric address, which other members can reach."""
        self._address, self._job, self._me = address, job, me
        self._store = StoreServer(address)
        self.dial = self._store.dial
        self._lines: MemberLines | None = None
        self._listener: GroupListener | None = None
        self.identities: Callable[[], Mapping[str, str]] | None = None
        """Asks the hub for the fingerprints of the members' keys; None: names are not verified."""
        self.first_epoch = 0
        """Epoch of the run's first plan, the same on all of its members: lines between these are
        measured when they connect; 0: unknown."""
        self.connect_s: float | None = None
        """Seconds to connect the last process group; None: no group yet."""
        self.lines: dict[str, tuple[float, float]] = {}
        """Other members -> what was measured from them: round trip in s, bytes per s."""
        # Exchanges run on threads that may outlive their attempt: `_serial` shows which one is
        # current, and only that one may touch the group.
        self._lock = threading.Lock()
        self._serial = 0
        self._key: tuple[str, tuple[str, ...]] | None = None
        self._group: Any | None = None
        self._connecting = Connecting()
        self._prepared: PreparedGroup | None = None

    def trust(self, lines: MemberLines) -> None:
        """Connect only with members that know the job's key."""
        self._lines = self._store.lines = lines
        if lines.tls is not None:
            if self._listener is None:
                self._listener = GroupListener(self._address)
            self._listener.trust(lines.tls)

    def begin(self) -> int:
        """Return the number of a new meeting, and abandon the previous one.

        A meeting may run several exchanges in sequence. Called before a thread is started for it,
        so that the order of meetings is certain.
        """
        with self._lock:
            self._serial += 1
            serial, before = self._serial, self._connecting
            self._connecting = Connecting()
        before.end()
        return serial

    def prepare(self, meeting: DirectGroup) -> None:
        """Begin to connect, for a meeting that is expected; nothing if one has begun already.

        Its first exchange then finds connections. A member that has not prepared connects then.
        """
        with self._lock:
            if self._serial == 0 and self._prepared is None:
                self._prepared = PreparedGroup(
                    self._name_of(meeting), lambda connecting: self._new_group(meeting, connecting)
                )

    def exchange(self, request: ReduceRequest) -> Exchanged:
        """Return the aggregate of the values of the plan's members, by default their weighted mean.

        Raises:
            PeerLost: a member's connection broke, or the aggregate needs more members.
            DeadlineExceeded: it took longer than `plan.timeout_s`.
            GroupError: nothing was left to average.
        """
        out = self.meet(
            DirectGroup.of(request.plan),
            lambda wires: weighted_mean(
                wires, request.vector, codec=request.codec, weight=request.weight,
                key=request.key, aggregation=request.aggregation,
            ),
            serial=request.serial,
            anew=request.phase == 0,
        )  # fmt: skip
        return check_weight(out, request.plan.members)

    def all_to_all(
        self, plan: RoundPlan, gift: Outgoing, *, serial: int, anew: bool = True
    ) -> tuple[DeliveredMessage, int, int]:
        """Run an all-to-all; return the packets, and bytes sent and received.

        Connections are made only if `anew`, i.e. in the first exchange of a plan. Raises as
        :meth:`exchange`, and PeerRefused if a member sent something unusable.
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
        """Return the result of `work`, the same on every member, on a process group of the members.

        The group of the last meeting is reused if its members are the same. If its connections turn
        out to be broken, `work` runs once more on a new group. Without `anew` the group must exist.

        Raises:
            PeerLost: a member's connection broke.
            DeadlineExceeded: the meeting's deadline has passed.
        """
        with self._lock:
            known = self._key == _key_of(meeting) or self._prepared is not None
        if not known and not anew:
            raise PeerLost("the connections to the other members are gone")
        try:
            group = self._connect(meeting, serial)
            rank = meeting.members.index(self._me)
            return work(
                BoundedProcessGroup(
                    group, meeting.members, rank, meeting.deadline, ring=meeting.ring
                )
            )
        except GroupError:
            self._forget(serial)  # closes the connections, so that the others fail at once
            raise
        except (RuntimeError, OSError) as error:  # of Gloo, of lines
            self._forget(serial)
            if RealClock().monotonic() >= meeting.deadline:
                raise DeadlineExceeded("the members' exchange took too long") from error
            if not known or not anew:
                raise PeerLost("a member's connection broke", given=_first_line(error)) from error
            # A member restarted since the last round waits in a new group.
            log.info("the last round's connections are gone (%s); reconnecting", error)
        return self.meet(meeting, work, serial=serial)

    def _connect(self, meeting: DirectGroup, serial: int) -> Any:
        """Return the process group of the meeting's members, reused if they are the same."""
        with self._lock:
            self._check(serial)
            worn = isinstance(self._group, LineGroup) and self._group.worn
            if self._group is not None and self._key == _key_of(meeting) and not worn:
                return self._group
            connecting = self._connecting
            prepared, self._prepared = self._prepared, None
        self._forget(serial)
        group = None
        if prepared is not None:
            group = prepared.take(self._name_of(meeting), over=lambda: connecting.over)
        if group is None:
            group = self._new_group(meeting, connecting)
        with self._lock:
            if serial == self._serial:
                self._group, self._key = group, _key_of(meeting)
                return group
        close_group(group)
        raise PeerLost("this exchange was abandoned", expected="another attempt is under way")

    def _name_of(self, meeting: DirectGroup) -> str:
        """Return a name of the meeting that is unique, and equal on all of its members."""
        return f"{self._job}/{meeting.epoch}/{','.join(meeting.members)}"

    def _connect_timeout_s(self) -> float:
        if self.connect_s is None:
            return FIRST_CONNECT_S
        return max(CONNECT_FLOOR_S, CONNECT_FACTOR * self.connect_s)

    def _new_group(self, meeting: DirectGroup, connecting: Connecting) -> Any:
        began = RealClock().monotonic()
        deadline = min(meeting.deadline, began + self._connect_timeout_s())
        names, lines = self._name_of(meeting), self._lines
        if lines is None:
            raise PeerLost("this member has not registered", given=self._me)
        store = RendezvousStore(meeting.store, names, lines=lines, deadline=deadline)
        try:
            connecting.hold(store)
            if lines.tls is not None and self._listener is not None:
                group: Any = connect_lines(
                    store, self._listener, lines.tls,
                    LineMeeting(
                        names, meeting.members, self._me, deadline,
                        self.identities() if self.identities is not None else None,
                        lambda: connecting.over,
                    ),
                )  # fmt: skip
            else:
                group = self._gloo(store, meeting, deadline)
        finally:
            store.close()
        self.connect_s = RealClock().monotonic() - began
        if meeting.epoch == self.first_epoch and LEAST <= len(meeting.members) <= MOST_LINES:
            rank = meeting.members.index(self._me)
            bounded = BoundedProcessGroup(group, meeting.members, rank, meeting.deadline)
            try:
                self.lines = measure_lines(bounded)
            except BaseException:
                close_group(group)
                raise
        return group

    def _gloo(self, store: RendezvousStore, meeting: DirectGroup, deadline: float) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=max(0.001, deadline - RealClock().monotonic()))
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        rank = meeting.members.index(self._me)
        return dist.ProcessGroupGloo(store, rank, len(meeting.members), options)

    def drop(self) -> None:
        """Abandon the current exchange and the process group; the next exchange connects anew."""
        self._forget(self.begin())

    def _forget(self, serial: int) -> None:
        """Drop the process group on behalf of one exchange, unless that was abandoned."""
        with self._lock:
            self._check(serial)
            group, self._group, self._key = self._group, None, None
        close_group(group)

    def _check(self, serial: int) -> None:
        """Raise PeerLost if the exchange was abandoned. Called with the lock held."""
        if serial != self._serial:
            raise PeerLost("this exchange was abandoned", expected="another attempt is under way")

    def close(self) -> None:
        """Drop the group. A process that lost a peer should exit with `os._exit` afterwards."""
        if self._prepared is not None:
            self._prepared.drop()
        self.drop()
        self._store.close()
        if self._listener is not None:
            self._listener.close()


def _key_of(meeting: DirectGroup) -> tuple[str, tuple[str, ...]]:
    return meeting.store, meeting.members


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
