"""Groups inside one process: n members on n threads, for tests and experiments.

The semantics are those of a distributed group: real codecs, means over the weights received and
summed in member order, equal bytes on every member, one verdict per attempt. Members can join,
leave, lag, recover and be killed in any phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from atoll.clock import RealClock
from atoll.errors import ConfigError
from atoll.group.base import Group, Work
from atoll.group.in_process.coordinator import Coordinator
from atoll.group.in_process.group import MemoryGroup
from atoll.ids import member_id
from atoll.rounds.timing import FixedWaits

__all__ = ["MemoryGroup", "MemoryGroups"]

T = TypeVar("T")

WAIT_S = 180.0
"""Longest wait for other members: they compute meanwhile, maybe all on one busy core."""
RUN_S = 600.0
"""Longest time for what all members do together."""

PHASES = ("now", "join", "send", "sent", "commit", "recover", "standing")


class MemoryGroups:
    """The members of one process, in slot order."""

    def __init__(
        self,
        n: int,
        *,
        timeout_s: float = WAIT_S,
        ids: Sequence[str] | None = None,
        start_round: int = 0,
        min_members: int = 1,
        grace_s: float | None = None,
        hold_s: float = 10.0,
    ) -> None:
        """Create `n` members.

        Args:
            n: Number of members, >= 1.
            timeout_s: Longest wait in a join, a reduce or a commit.
            ids: Names, by default w0, w1, ...; a name ends with the number of its slot.
            start_round: Rounds committed before.
            min_members: With fewer live members no round is planned, and joins have no time limit.
            grace_s: Wait for live members after the first join; later ones are left out. None: no
                limit.
            hold_s: Wait for recovering members after the first join.
        """
        names: list[str] = list(ids if ids is not None else map(member_id, range(n)))
        if n < 1 or len(names) != n or len(set(names)) != n:
            raise ConfigError(
                "a group needs one name per member", given=f"{n} members, {names}",
                expected="at least one member, all names different",
            )  # fmt: skip
        waits = FixedWaits(math.inf if grace_s is None else grace_s, hold_s, timeout_s)
        self.coordinator = Coordinator(
            names, waits=waits, start_round=start_round, min_members=min_members
        )
        self._groups = [MemoryGroup(self.coordinator, name, start_round) for name in names]

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[MemoryGroup]:
        return iter(self._groups)

    def __getitem__(self, index: int) -> MemoryGroup:
        return self._groups[index]

    def run(
        self, function: Callable[[Group], T], *, timeout_s: float = RUN_S
    ) -> list[T | BaseException]:
        """Call `function(group)` on one thread per member; return results or errors."""
        work = [
            Work.start(lambda group=group: function(group), name=f"member-{group.me}")  # type: ignore[misc]
            for group in self._groups
        ]
        deadline = RealClock().monotonic() + timeout_s
        results: list[T | BaseException] = []
        for each in work:
            try:
                results.append(each.wait(max(0.0, deadline - RealClock().monotonic())))
            except BaseException as error:  # handed to the caller in place of the result
                results.append(error)
        return results

    def together(self, function: Callable[[Group], T], *, timeout_s: float = RUN_S) -> list[T]:
        """Call :meth:`run`, and raise the first error."""
        results: list[T] = []
        for result in self.run(function, timeout_s=timeout_s):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def kill(self, member: str, *, at: str = "now") -> None:
        """Kill a member; from then on its own calls raise PeerLost.

        `at` is `now`, or a phase: `join`, `send` (before its contribution arrives), `sent` (after),
        `commit`, `recover` or `standing`.
        """
        if at not in PHASES or member not in self.coordinator.order:
            raise ConfigError(
                "this member cannot be killed like that", given=f"{member} at {at}",
                expected=f"one of {self.coordinator.order} at one of {PHASES}",
            )  # fmt: skip
        self.coordinator.kill(member, at=at)

    def lose(self, member: str) -> None:
        """Stop waiting for a member, as if it were frozen; its own calls fail later."""
        self.coordinator.silent(member)

    def stop(self) -> None:
        """Mark the next plan as the job's last."""
        self.coordinator.stop()

    def add(self, member: str | None = None) -> MemoryGroup:
        """Add a newcomer, or a new process of a member that ended; the next plan waits for it.

        If it calls `recover` first, rounds wait for it as for a recovering member.
        """
        try:
            name = self.coordinator.add(member)
        except KeyError:
            raise ConfigError("a living member has this name", given=member) from None
        group = MemoryGroup(self.coordinator, name, self.coordinator.machine.committed_round)
        self._groups = [each for each in self._groups if each.me != name] + [group]
        return group
