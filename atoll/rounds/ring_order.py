"""The order of members on a ring, from measured lines between them; no state, no I/O.

In a ring all-reduce a member sends a piece on when it has come, and its line can carry the next one
when it has carried this one. So a step takes as long as the slowest line needs for a piece, or as
the mean hop of the ring lasts with its delay, whichever is more: the largest cycle mean of the
steps (Baccelli et al. 1992, "Synchronization and Linearity", section 2.3). The second is the length
of a travelling salesman's tour, by which PCCL (Prime Intellect 2025) orders rings. A tree whose
neighbours are near in the order has short hops, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.wire.round_messages import MOST_LINES, Line

PIECE_BYTES = 1 << 20
"""What a hop carries at once, see `RING_SEGMENT` of `group/collectives/adding.py`."""
EXACT = 8
"""Up to so many members all orders are tried; above, pairs of hops are exchanged."""
LEAST = 4
"""With fewer members all rings have the same hops, except for their direction."""
NEAR_S = 0.01
"""If no round trip is longer, all members are at one site: the order does not matter there, and
rates measured on busy machines are noise."""
WORTH = 0.9
"""Another order must take at most this share of the present one's time: the order decides the last
bits of sums, which measurement noise should not change."""


@dataclass
class MeasuredLines:
    """What members of one job have measured, and the order that follows from it."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    _members: list[str] = field(default_factory=list)
    _ring: list[str] = field(default_factory=list)

    def learn(self, member: str, lines: Mapping[str, Line], *, among: Container[str]) -> None:
        """Record what a member has measured from others to itself; `among`: the job's members."""
        for other, found in lines.items():
            known = other in among and other != member
            if known and self.lines.get((other, member)) != found:
                self.lines[other, member] = found
                self._members = []

    def ring(self, members: Sequence[str]) -> list[str]:
        """Return :func:`ring_order`; computed anew where members or lines have changed."""
        if self._members != members:
            here = set(members)
            known = {pair: line for pair, line in self.lines.items() if here.issuperset(pair)}
            self._members, self._ring = list(members), ring_order(members, known)
        return self._ring


def ring_order(members: Sequence[str], lines: Mapping[tuple[str, str], Line]) -> list[str]:
    """Return the members in the order of a fast ring; empty: as they are.

    Lines that were not measured count like the slower half of the others.
    """
    n = len(members)
    if not LEAST <= n <= MOST_LINES or all(trip_s <= NEAR_S for trip_s, _ in lines.values()):
        return []
    usual = sorted(lines.values(), key=_hop_s)[len(lines) // 2]
    hops = [[lines.get((a, b), usual) for b in members] for a in members]
    order = _best_of_all(hops) if n <= EXACT else _by_exchanges(hops)
    (found_s, found), (step_s, usual_tour) = _cost(order, hops), _cost(range(n), hops)
    shorter = found_s <= step_s and found <= WORTH * usual_tour
    return [members[place] for place in order] if found_s <= WORTH * step_s or shorter else []


def _hop_s(line: Line) -> float:
    """Return the seconds until a piece has arrived."""
    return line[0] / 2 + PIECE_BYTES / line[1]


def _cost(order: Sequence[int], hops: Sequence[Sequence[Line]]) -> tuple[float, float]:
    """Return the seconds of a step of a ring, and of all its hops.

    If one slow line decides the first, the second still prefers rings on which members of one site
    are neighbours.
    """
    ring = [hops[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    tour_s = sum(map(_hop_s, ring))
    return max(PIECE_BYTES / min(rate for _, rate in ring), tour_s / len(ring)), tour_s


def _best_of_all(hops: Sequence[Sequence[Line]]) -> list[int]:
    """Return the best order; the first member stays first."""
    others = itertools.permutations(range(1, len(hops)))
    return min(([0, *order] for order in others), key=lambda order: _cost(order, hops))


def _by_exchanges(hops: Sequence[Sequence[Line]]) -> list[int]:
    """Return a short tour: from each to the nearest, then 2-opt (Croes 1958).

    A hop is as long as in the slower one of its two directions.
    """
    n = len(hops)
    far = [[max(_hop_s(hops[a][b]), _hop_s(hops[b][a])) for b in range(n)] for a in range(n)]
    order = _nearest_first(far)
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(n), 2):
            a, b, c, d = order[i], order[i + 1], order[j], order[(j + 1) % n]
            if a != d and far[a][c] + far[b][d] < (far[a][b] + far[c][d]) * (1 - 1e-9):
                order[i + 1 : j + 1] = reversed(order[i + 1 : j + 1])
                improved = True
    return order


def _nearest_first(far: Sequence[Sequence[float]]) -> list[int]:
    order, left = [0], set(range(1, len(far)))
    while left:
        order.append(min(left, key=lambda other: (far[order[-1]][other], other)))
        left.remove(order[-1])
    return order
