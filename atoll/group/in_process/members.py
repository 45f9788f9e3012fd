"""Who belongs to a group in memory, where each stands, and how members go."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded, GroupLeft, PeerLost
from atoll.group.in_process.attempt import Attempt, Join, MemoryLeases
from atoll.group.in_process.servers import MemoryServers
from atoll.reducer.combine import NormHistory
from atoll.wire.messages import Registered, Source, Sources

Standing = Literal["live", "recovering", "gone"]


class MemoryRoster(ABC):
    """Members of a group in memory. Its methods may be called from any thread."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        timeout_s: float,
        start_round: int,
        min_members: int,
        grace_s: float | None,
        hold_s: float,
    ) -> None:
        """Expect the members `names`, in this order; see :class:`MemoryGroups`."""
        self.timeout_s = timeout_s
        self.checkpoint_round = -1
        """What is left when nobody stands on the committed state; -1: nothing."""
        self.paces: dict[str, float] = {}
        """What verdicts say of members' pace; a test may set it."""
        self._min_members, self._grace_s, self._hold_s = min_members, grace_s, hold_s
        self._changed = threading.Condition()
        self._clock = RealClock()
        self._order = list(names)
        self._standing: dict[str, Standing] = dict.fromkeys(names, "live")
        self._stands = set(names)
        """Who holds the committed state."""
        self._state: dict[str, list[str]] = {}
        self._ended: dict[str, AtollError] = {}
        self._doomed: dict[str, str] = {}
        self._joins: dict[str, Join] = {}
        self._refused: dict[str, AtollError] = {}
        self._attempts: dict[int, Attempt] = {}
        self._leases = MemoryLeases(len(self._order))
        self._memory = NormHistory()
        """What policies remember from round to round."""
        self._unwell: set[str] = set()
        """Who voted against the last attempt of this round."""
        self._epoch = 0
        self._start = self._committed = start_round
        self.servers = MemoryServers(
            changed=self._changed, order=self._order, ended=self._ended, timeout_s=timeout_s,
            is_awaited=lambda member: self._standing.get(member) == "live",
        )  # fmt: skip
        """The parameter servers that members ask."""
        self._stopping = False
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether rounds wait because fewer members are there than must be."""
        with self._changed:
            return self._paused

    # ------------------------------------------------------------------------ membership

    def register(self, member: str, state: Sequence[str]) -> Registered:
        """Note where a member serves its state, and tell it where the group stands."""
        with self._changed:
            self._state[member] = list(state)
            return Registered(
                slot=self._order.index(member), num_slots=len(self._order),
                committed_round=self._committed, stopping=self._stopping,
                recover=self._committed > self._start and member not in self._stands,
            )  # fmt: skip

    def recover(self, member: str, failed: Sequence[str], *, ready: bool) -> Sources:
        """Return who has the committed state; rounds wait a bounded time for the asker."""
        with self._changed:
            self._enter(member, "recover")
            if ready:
                self._withdraw(member, "recovering")
            self._stands.discard(member)
            peers = [
                name for name in self._order
                if name in self._stands and self._standing[name] == "live"
            ]  # fmt: skip
            others = [name for name in peers if name not in failed] or peers
            if not peers:
                self._committed = max(0, self.checkpoint_round)
            self._settle()
            return Sources(
                round=self._committed,
                peers=[Source(name, self._state.get(name, [])) for name in others],
                checkpoint_round=self.checkpoint_round,
                pace=self.paces.get(member, 1.0),
                lease=self._leases.for_newcomer(member, self._present()),
            )

    def stand(self, member: str, round_: int) -> None:
        """A member has taken over the state after `round_` rounds."""
        with self._changed:
            self._enter(member, "standing")
            self._standing[member] = "live"
            if round_ == self._committed:
                self._stands.add(member)
            self._changed.notify_all()

    def leave(self, member: str, reason: str) -> None:
        """A member goes for good; its own calls raise GroupLeft from now on."""
        with self._changed:
            self._end(member, GroupLeft("this member has left the group", given=reason or member))

    def lose(self, member: str) -> None:
        """Wait for a member no more, as for one that is frozen; its own calls find out."""
        with self._changed:
            self._withdraw(member, "gone")
            self._settle()

    def open_attempt(self, member: str, timeout_s: float) -> None:
        """Wait until no attempt with this member is open, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._attends(member), timeout_s)

    def _enter(self, member: str, phase: str) -> None:
        """Kill the member here if that was asked for; the condition is held."""
        if self._doomed.get(member) == phase:
            self._kill(member)
        if member in self._ended:
            raise self._ended[member]

    def _kill(self, member: str) -> None:
        self._end(member, PeerLost("this member was killed", given=member))

    def _end(self, member: str, error: AtollError) -> None:
        self._ended.setdefault(member, error)
        self._doomed.pop(member, None)
        self._stands.discard(member)
        self._withdraw(member, "gone")
        self._settle()

    def _withdraw(self, member: str, standing: Standing) -> None:
        """Take back a member's join and its place in the open plan."""
        self._standing[member] = standing
        self._joins.pop(member, None)
        attempt = self._attempts.get(self._epoch)
        if attempt is not None and member in attempt.plan.members:
            attempt.left.add(member)

    def _present(self) -> list[str]:
        return [name for name in self._order if self._standing.get(name, "gone") != "gone"]

    def _attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        attempt = self._attempts.get(self._epoch)
        return (
            attempt is not None
            and attempt.verdict is None
            and member in attempt.plan.members
            and member not in attempt.left
        )

    @abstractmethod
    def _settle(self) -> None:
        """Do everything that follows from a change."""

    def _wait(self, member: str, ready: Callable[[], bool], what: str) -> None:
        """Wait with the condition held until `ready`, or until the member has ended."""
        wanted = self._changed.wait_for(lambda: ready() or member in self._ended, self.timeout_s)
        if member in self._ended and not ready():
            raise self._ended[member]
        if not wanted:
            raise DeadlineExceeded(f"{what} took too long", given=f"{self.timeout_s:.1f} s")
