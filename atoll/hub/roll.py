"""Who belongs to a job just now, what each is doing, and who stands on the committed state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from atoll.ids import slot_of

Standing = Literal["expected", "launched", "recovering", "live", "away", "gone"]
"""expected: starts with the job, rounds wait for it. launched: a newcomer that has not asked for
the state yet, nobody waits. recovering: takes the state over, rounds wait a bounded time. live:
trains or waits in a join. away: its process is there, but it is not waited for until it speaks
again (it was silent, late or fell behind). gone: its process has ended, or it is leaving."""

AWAITED: frozenset[Standing] = frozenset({"expected", "live"})

MOST_SKIPPED = 6
"""A member that never recovers in time is awaited in one of 2**6 rounds at least."""


@dataclass
class Roll:
    """The members of one job."""

    standing: dict[str, Standing] = field(default_factory=dict)
    stands: set[str] = field(default_factory=set)
    """Members known to stand on the committed state."""
    recorded: set[str] = field(default_factory=set)
    """Members that stand on it by the record of an earlier life of the hub, not confirmed yet."""
    bases: dict[str, str] = field(default_factory=dict)
    """Digests of the committed state that members have told."""
    leaving: set[str] = field(default_factory=set)
    """Members that told that they leave for good."""
    outsiders: set[str] = field(default_factory=set)
    """Members whose processes are from before the run was set back, and not heard of since."""
    asked_at: dict[str, float] = field(default_factory=dict)
    """When each member last asked who has the state."""
    ready_at: dict[str, float] = field(default_factory=dict)
    """Until when the first join of a member that has just taken over the state may take."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the work that a member does before its first join."""
    finished: bool = False
    """A member has done all its work: the job is about to end."""
    _slow: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often a member did not recover in time, and up to which round nobody waits for it."""

    def begin(self, member: str, standing: Standing) -> None:
        """A new process was launched for a member."""
        self.forget(member)
        self.leaving.discard(member)
        self.outsiders.discard(member)
        self.standing[member] = standing

    def knows(self, member: str) -> bool:
        """Return whether a member stands on the committed state, proved or by the record."""
        return member in self.stands or member in self.recorded

    def proved(self, member: str, base: str) -> None:
        """A member showed that it stands on the committed state."""
        self.stands.add(member)
        self.bases[member] = base
        self.standing[member] = "live"

    def forget(self, member: str) -> None:
        """A member stands on nothing that others could take over."""
        self.stands.discard(member)
        self.recorded.discard(member)
        self.bases.pop(member, None)

    def committed(self, members: Iterable[str]) -> None:
        """A round was committed; these members have its state."""
        self.stands, self.recorded, self.bases = set(members), set(), {}
        self.ready_at = {}

    def awaited(self) -> list[str]:
        """Return the members that every round waits for."""
        return [m for m, s in self.standing.items() if s in AWAITED]

    def recovering(self, round_: int) -> list[str]:
        """Return the members that a round waits for while they take over the state."""
        return [
            m
            for m, s in self.standing.items()
            if s == "recovering" and round_ >= self._slow.get(m, (0, 0))[1]
        ]

    def trainers(self) -> list[str]:
        """Return the members that train in the next period, in slot order."""
        found = [m for m, s in self.standing.items() if s in ("live", "recovering")]
        return sorted(found, key=slot_of)

    def all_gone(self) -> bool:
        """Return whether nobody is left, though the work is not done."""
        everybody_gone = all(s == "gone" for s in self.standing.values())
        return bool(self.standing) and everybody_gone and not self.finished

    def too_slow(self, member: str, round_: int) -> None:
        """A member did not recover in time: twice as many rounds as before go on without it."""
        times = self._slow.get(member, (0, 0))[0] + 1
        self._slow[member] = (times, round_ + 2 ** min(times, MOST_SKIPPED))

    def recovered(self, member: str, ready_at: float) -> None:
        """A member did recover, and joins at the latest at `ready_at`."""
        self._slow.pop(member, None)
        self.outsiders.discard(member)
        self.ready_at[member] = ready_at

    def holders(self, asker: str, failed: Iterable[str]) -> list[str]:
        """Return who can give the committed state, in slot order.

        Members that answer now come before those that were silent or late, those that failed the
        asker come last.
        """
        there = [m for m, s in self.standing.items() if s != "gone" and self.knows(m)]
        others = [m for m in there if m != asker]
        near = [m for m in others if self.standing[m] != "away"]
        for choice in (near, others):
            usable = [m for m in choice if m not in set(failed)]
            if usable:
                return sorted(usable, key=slot_of)
        return sorted(others, key=slot_of)

    def missed(self) -> list[str]:
        """Return the members that had the committed state when they were lost."""
        return [m for m, s in self.standing.items() if s == "gone" and self.knows(m)]

    def set_back(self) -> None:
        """Nobody has the committed state any more.

        Whoever comes back from before has another history than those that go on now.
        """
        self.outsiders = {m for m, s in self.standing.items() if s in ("live", "away", "gone")}
        self.committed(())
        self._slow = {}


def present(roll: Roll, joins: Mapping[str, object]) -> set[str]:
    """Return the members that are at work or wait for the next round."""
    return set(roll.awaited()) | set(joins)
