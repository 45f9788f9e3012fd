"""The members that wait for the next plan of a round."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.hub.measures import Measures, learn_spread
from atoll.ids import slot_of
from atoll.wire.messages import RoundJoin


@dataclass
class Lobby:
    """Who waits, for what, and since when."""

    joins: dict[str, RoundJoin] = field(default_factory=dict)
    not_before: float = 0.0
    """Waiting does not count before this time: the run was paused."""
    late: set[str] = field(default_factory=set)
    """Members that the last plan was made without because they did not come in time."""
    _came: dict[str, float] = field(default_factory=dict)
    _last: tuple[int, float] = (-1, 0.0)
    """The round of the last plan, and since when its members waited."""

    def enter(self, member: str, join: RoundJoin, now: float) -> None:
        """A member joins; coming again changes its words, not its place."""
        self.joins[member] = join
        self._came.setdefault(member, now)

    def leave(self, member: str) -> None:
        """A member waits no more."""
        self.joins.pop(member, None)
        self._came.pop(member, None)

    def members(self) -> list[str]:
        """Return who waits, in slot order."""
        return sorted(self.joins, key=slot_of)

    def since(self) -> float:
        """Return since when the others are waited for."""
        return max(min(self._came.values()), self.not_before)

    def spread_s(self, *, starting: bool) -> float:
        """Return how far apart the members came.

        Processes of a job that starts begin at different times, which says nothing of later
        rounds; there the time that each was busy counts, if all have told it.
        """
        times = [max(came, self.not_before) for came in self._came.values()]
        busy = [join.busy_s for join in self.joins.values()]
        if starting and all(busy):
            times = busy
        return max(times) - min(times)

    def leave_for(self, round_: int) -> dict[str, RoundJoin]:
        """Return what all said who waited; they meet in this round now."""
        self._last = (round_, self.since())
        joins, self.joins, self._came = self.joins, {}, {}
        return joins

    def learn_late(self, member: str, round_: int, now: float, measures: Measures) -> None:
        """Learn from a member that comes too late how long to wait the next time.

        Otherwise two members that take turns in being a little late would never meet again.
        """
        if member in self.late and round_ == self._last[0]:
            learn_spread(measures, now - self._last[1])
        self.late.discard(member)
