"""Which member of a stage takes the next microbatch: interleaved weighted round robin.

SWARM Parallelism (Ryabinin et al. 2023, https://arxiv.org/abs/2301.11913), section 3.2 and its
code. Each stage has a heap of (accumulated seconds, random tie, member): the member with the least
takes the next microbatch, and its expected seconds are added. A member three times as fast so
takes three times as many, evenly interleaved.

Differs from the original:
  * seconds are those of computing, as members report them, without their waiting time: with
    several drivers the waiting time of one follows from the choices of all others;
  * a ban also ends by itself, after a time that doubles with every further error, because members
    here announce themselves only when they lost something.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from random import Random

from atoll.wire.swarm import Holder, SwarmPeer

EMA = 0.1
"""Weight of the newest measurement."""
BACKWARD = 2.5
"""Work of a backward pass, which computes the forward pass again, in forward passes."""
BOTH = 1.0 + BACKWARD
FIRST_ROW_S = 1.0
"""Seconds per row while none is known in the stage: then only their ratio counts."""
FIRST_BAN_S, MAX_BAN_S = 2.0, 60.0


@dataclass
class _Known:
    """What a router knows of a member."""

    row_s: float = 0.0
    """Moving average of the seconds of one row's forward pass; 0: unknown."""
    banned_until: float = 0.0
    errors: int = 0
    """In a row."""
    returns: bool = False
    """It was banned, and must not catch up on what it missed."""


@dataclass
class StageRouter:
    """Chooses members of one stage. Times are monotonic seconds passed as `now`."""

    random: Random
    _known: dict[Holder, _Known] = field(default_factory=dict)
    _heap: list[tuple[float, float, Holder]] = field(default_factory=list)

    def __contains__(self, holder: Holder) -> bool:
        """Return whether a member serves this stage."""
        return holder in self._known

    def update(self, peers: Iterable[SwarmPeer]) -> None:
        """Take over the newest table of this stage; a member with a new epoch is a new one."""
        there = {peer.holder: peer.row_s for peer in peers}
        self._known = {holder: known for holder, known in self._known.items() if holder in there}
        self._heap = [entry for entry in self._heap if entry[2] in self._known]
        least = self._least()
        for holder, row_s in there.items():
            if holder not in self._known:
                self._known[holder] = _Known(row_s)
                self._heap.append((least, self.random.random(), holder))
        heapq.heapify(self._heap)

    def choose(self, rows: int, now: float, *, avoid: Collection[Holder] = ()) -> Holder | None:
        """Return the member that takes `rows` rows there and back; None if none is usable."""
        passed: list[tuple[float, float, Holder]] = []
        chosen: Holder | None = None
        while self._heap and chosen is None:
            entry = heapq.heappop(self._heap)
            known = self._known[entry[2]]
            if entry[2] in avoid or now < known.banned_until:
                passed.append(entry)
                continue
            spent_s = entry[0]
            if known.returns:
                spent_s, known.returns = max(spent_s, self._least()), False
            else:
                chosen = entry[2]
                spent_s += BOTH * rows * self.row_s(chosen)
            heapq.heappush(self._heap, (spent_s, self.random.random(), entry[2]))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return chosen

    def measured(self, holder: Holder, rows: int, seconds: float, *, work: float) -> None:
        """Take over a measurement of `work` (1, `BACKWARD` or `BOTH`) forward passes."""
        known = self._known.get(holder)
        if known is None or seconds <= 0 or rows <= 0:
            return
        row_s = seconds / (work * rows)
        known.row_s = row_s if not known.row_s else (1 - EMA) * known.row_s + EMA * row_s
        known.errors = 0

    def ban(self, holder: Holder, now: float) -> float:
        """Avoid a member that failed until it announces itself again, or some time has passed.

        Returns that time in seconds.
        """
        known = self._known.get(holder)
        if known is None:
            return 0.0
        banned_s = min(MAX_BAN_S, FIRST_BAN_S * 2.0 ** min(8, known.errors))
        known.banned_until = now + banned_s
        known.errors += 1
        known.returns = True
        return banned_s

    def usable(self, now: float) -> list[Holder]:
        """Return the members that are not banned."""
        return [holder for holder, known in self._known.items() if now >= known.banned_until]

    def row_s(self, holder: Holder) -> float:
        """Return the expected seconds of one row's forward pass."""
        own = self._known[holder].row_s
        if own:
            return own
        others = [known.row_s for known in self._known.values() if known.row_s]
        return sum(others) / len(others) if others else FIRST_ROW_S

    def speeds(self) -> dict[str, float]:
        """Return the measured seconds of one row by member."""
        return {holder.member: known.row_s for holder, known in self._known.items() if known.row_s}

    def _least(self) -> float:
        return min((e[0] for e in self._heap if not self._known[e[2]].returns), default=0.0)
