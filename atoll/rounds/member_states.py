"""The members of one job as far as its rounds are concerned: their states, and who can donate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from atoll.ids import slot_of
from atoll.rounds.bases import Bases
from atoll.wire.states import RoundMemberState

AWAITED = frozenset({RoundMemberState.EXPECTED, RoundMemberState.LIVE})
OUTSIDE = frozenset({RoundMemberState.LIVE, RoundMemberState.AWAY, RoundMemberState.GONE})
"""States of members that keep their own history when the run is reset."""

MOST_DONORS = 32
"""A member that recovers gets so many donors at most: it asks one or two of them."""

MOST_SKIPPED = 6
"""Exponent: a member that never recovers in time is awaited in one of 2**6 rounds."""


@dataclass
class MemberStates:
    """The members of one job."""

    states: dict[str, RoundMemberState] = field(default_factory=dict)
    up_to_date: dict[str, None] = field(default_factory=dict)
    """Members known to hold the committed state, as keys: their order is that of the votes."""
    recorded: set[str] = field(default_factory=set)
    """Members that hold it according to the record of a previous hub process, not yet confirmed."""
    bases: Bases = field(default_factory=Bases)
    """Digests of the committed state that members have reported."""
    leaving: set[str] = field(default_factory=set)
    outsiders: set[str] = field(default_factory=set)
    """Members with a process from before the run was reset, silent since."""
    asked_at: dict[str, float] = field(default_factory=dict)
    """When each member last asked for donors."""
    away_since: dict[str, float] = field(default_factory=dict)
    """When each member that recovers first asked for them, ready or not."""
    holds: dict[str, float] = field(default_factory=dict)
    """Seconds for which a round waits for a member that needs long, by :meth:`earns`."""
    waited_for: set[str] = field(default_factory=set)
    """Members that have recovered while a round waited so, until it is over."""
    ready_at: dict[str, float] = field(default_factory=dict)
    """Deadline for the first join of a member that has just recovered."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work before a member's first join."""
    finished: bool = False
    """A member has completed its work: the job is about to end."""
    _donors: list[str] = field(default_factory=list)
    """Members of `up_to_date` in order, and some that no longer are."""
    _slow: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often a member did not recover in time, and the first round that waits for it again."""
    _in_vain: dict[str, int] = field(default_factory=dict)
    """How often it did not, although a round waited for as long as it needed."""

    def begin(self, member: str, state: RoundMemberState) -> None:
        """Record a new process of a member."""
        self.forget(member)
        self._forget_recovery(member)
        self.leaving.discard(member)
        self.outsiders.discard(member)
        self.states[member] = state

    def knows(self, member: str) -> bool:
        """Return whether a member holds the committed state, confirmed or by the record."""
        return member in self.up_to_date or member in self.recorded

    def proved(self, member: str, base: str) -> None:
        """Record that a member holds the committed state."""
        if member not in self.up_to_date:
            self.up_to_date[member] = None
            self._donors.append(member)
        self.bases.put(member, base)
        self.states[member] = RoundMemberState.LIVE

    def forget(self, member: str) -> None:
        """Record that a member does not hold the committed state."""
        self.up_to_date.pop(member, None)
        self.recorded.discard(member)
        self.bases.forget(member)

    def committed(self, members: Iterable[str]) -> None:
        """A round was committed; these members have its state."""
        self.up_to_date, self.recorded, self.bases = dict.fromkeys(members), set(), Bases()
        self._donors = list(self.up_to_date)
        self.ready_at, self.waited_for = {}, set()

    def awaited(self) -> list[str]:
        """Return the members that every round waits for."""
        return [m for m, s in self.states.items() if s in AWAITED]

    def recovering(self, round_: int) -> list[str]:
        """Return the recovering members that a round waits for."""
        return [m for m in self.states if self.is_recovering(m, round_)]

    def is_recovering(self, member: str, round_: int) -> bool:
        """Return whether a round waits for a member because it recovers."""
        if self.states.get(member) != RoundMemberState.RECOVERING:
            return False
        return member in self.holds or round_ >= self._slow.get(member, (0, 0))[1]

    def earns(self, member: str, needs_s: float, now: float) -> bool:
        """Return whether a round is to wait for as long as a member needs to recover.

        While others wait, each loses as much as the member does while it is away. Once that has
        lost as much as the wait costs, both together are at most twice the better choice (the
        ski-rental problem; Karlin et al. 1988, https://doi.org/10.1007/BF01762111). After each wait
        in vain it has to have lost twice as much.
        """
        others = sum(self.states[name] in AWAITED for name in self.states if name != member)
        times = self._in_vain.get(member, 0)
        lost_s = now - self.away_since.get(member, now)
        return needs_s > 0 and lost_s >= needs_s * others * 2 ** min(times, MOST_SKIPPED)

    def trainers(self) -> list[str]:
        """Return the members that train in the next period, in slot order."""
        found = [
            m
            for m, s in self.states.items()
            if s in (RoundMemberState.LIVE, RoundMemberState.RECOVERING)
        ]
        return sorted(found, key=slot_of)

    def all_gone(self) -> bool:
        """Return whether no member is left although the work is not done."""
        everybody_gone = all(s == RoundMemberState.GONE for s in self.states.values())
        return bool(self.states) and everybody_gone and not self.finished

    def too_slow(self, member: str, round_: int) -> None:
        """A member did not recover in time: double the number of rounds that do not wait for it."""
        times = self._slow.get(member, (0, 0))[0] + 1
        self._slow[member] = (times, round_ + 2 ** min(times, MOST_SKIPPED))
        if self.holds.pop(member, None) is not None:
            self._in_vain[member] = self._in_vain.get(member, 0) + 1

    def recovered(self, member: str, ready_at: float) -> None:
        """A member recovered, and joins by `ready_at`."""
        self._slow.pop(member, None)
        if member in self.holds:
            self.waited_for.add(member)
        self._forget_recovery(member)
        self.outsiders.discard(member)
        self.ready_at[member] = ready_at

    def holders(self, asker: str, failed: Iterable[str]) -> list[str]:
        """Return the donors of the committed state, in slot order.

        Members that respond come before those that were silent or late; those that failed the asker
        come last. Of many members each asker gets others, so that no donor serves them all.
        """
        if len(self.states) > 2 * MOST_DONORS:
            some = list(islice(self._near(asker, set(failed)), MOST_DONORS))
            if some:
                return sorted(some, key=slot_of)
        there = [m for m, s in self.states.items() if s != RoundMemberState.GONE and self.knows(m)]
        others = [m for m in there if m != asker]
        near = [m for m in others if self.states[m] != RoundMemberState.AWAY]
        for choice in (near, others):
            usable = [m for m in choice if m not in set(failed)]
            if usable:
                return sorted(usable, key=slot_of)
        return sorted(others, key=slot_of)

    def _near(self, asker: str, failed: set[str]) -> Iterator[str]:
        """Yield donors that respond and have not failed, the ones behind the asker first."""
        names = self._donors
        begin = slot_of(asker) % len(names) if asker and names else 0
        absent = (RoundMemberState.GONE, RoundMemberState.AWAY, None)
        seen = {asker, *failed}
        for place in chain(range(begin, len(names)), range(begin)):
            name = names[place]
            if name in self.up_to_date and name not in seen and self.states.get(name) not in absent:
                seen.add(name)
                yield name

    def missed(self) -> list[str]:
        """Return the members that held the committed state when they were lost."""
        return [m for m, s in self.states.items() if s == RoundMemberState.GONE and self.knows(m)]

    def set_back(self) -> None:
        """Reset: no member holds the committed state.

        Members that return from before have another history than those that continue.
        """
        self.outsiders = {m for m, s in self.states.items() if s in OUTSIDE}
        self.committed(())
        self._slow, self._in_vain, self.holds, self.away_since = {}, {}, {}, {}

    def _forget_recovery(self, member: str) -> None:
        self.away_since.pop(member, None)
        self.holds.pop(member, None)
        self._in_vain.pop(member, None)


def present(members: MemberStates, joins: Mapping[str, object]) -> set[str]:
    """Return the members that train or wait for the next round."""
    return set(members.awaited()) | set(joins)
