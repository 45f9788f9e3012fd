"""Through the hub or directly: for `route = "auto"`, whichever was faster when it was tried.

That members reach each other does not make the direct route the faster one. On a ring every line
carries 2 (n - 1) / n of a vector in each direction, one step after the other; through the hub it is
one vector, and the mean comes down while the rest goes up. But all of it goes over the hub's line
and its processor. How fast those are nobody knows until they are used, so both are timed: some
rounds the other way, seldom enough to cost little.
"""

from __future__ import annotations

import math

import msgspec

LEAST_S = 1.0
"""Shorter rounds stay direct: there is little to gain, and the hub has other jobs."""
ROUNDS = 2
"""Rounds of a route that are compared; the first one after a change opens TCP's windows again."""
LONG_S = 3.0
"""Of rounds that take longer one says enough, for now."""
SOON = 4
"""Rounds after which a change that one round has caused is looked at again."""
RECENT = 3
"""Rounds of each route that are remembered; the quickest counts."""
GAIN = 0.9
"""The other route is taken if it needs at most this share of the time."""
GIVE_UP = 2.0
"""A trial ends with a round that takes this many times as long."""
COST = 0.02
"""Share of the time of rounds that trials cost, but for those that come `SOON`."""
LEAST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Rounds between two trials."""
LEAST_BYTES = 2**18
"""Rounds that move less say nothing about lines."""
SIZES = 2.0
"""Rounds that move less than the largest ones, by this factor, say little about lines."""
SMALLER = 64
"""After so many of those in turn they are what counts: the codec has changed, or the method."""


class FasterRoute(msgspec.Struct):
    """What is known of both routes, kept with the job. Changed only by the functions below."""

    relay: bool = False
    """Rounds go through the hub."""
    trial: bool = False
    """For the moment they go the other way."""
    again: int = 0
    """Round of the next trial, at the earliest."""
    relay_s: list[float] = []
    """What the last rounds through the hub took."""
    direct_s: list[float] = []
    nbytes: int = 0
    """What a member puts into those rounds; times of others count in proportion."""
    smaller: int = 0
    """Rounds since then that were too small."""

    @property
    def through_hub(self) -> bool:
        """Whether the next round goes through the hub."""
        return self.relay != self.trial

    def last_s(self, *, relay: bool) -> list[float]:
        """Return what the last rounds of a route took."""
        return self.relay_s if relay else self.direct_s


def learn(known: FasterRoute, *, relay: bool, seconds: float, nbytes: int, round_: int) -> str:
    """Note what a round took, and decide how the next ones go; return what changed, for people.

    `nbytes` is what a member put into it, encoded.
    """
    if relay != known.through_hub:  # a route failed, or members do not reach each other
        return ""
    if nbytes < LEAST_BYTES:
        return ""
    if nbytes < known.nbytes / SIZES:
        known.smaller += 1
        if known.smaller < SMALLER:
            return ""
    if known.smaller >= SMALLER or nbytes > known.nbytes * SIZES:
        known.nbytes, known.trial = nbytes, False
        known.relay_s, known.direct_s = [], []
    known.smaller = 0
    if relay != known.through_hub:  # of a trial that is over with that
        return ""
    last, others = known.last_s(relay=relay), known.last_s(relay=not relay)
    last.append(seconds * known.nbytes / nbytes)
    del last[:-RECENT]
    if not known.trial:
        if _is_enough(last) and round_ + 1 >= known.again and min(last) >= LEAST_S:
            known.trial = True
            others.clear()
        return ""
    usual_s, other_s = min(others), min(last)  # longer ones were disturbed
    if not _is_enough(last) and other_s < GIVE_UP * usual_s:
        return ""
    slower = max(usual_s, other_s) / min(usual_s, other_s) - 1.0
    _pause(known, round_, math.ceil(ROUNDS * slower / COST))
    if other_s > GAIN * usual_s:
        return ""
    if len(others) < ROUNDS:
        known.again = round_ + SOON
    known.relay = not known.relay
    new, old = ("through the hub", "directly") if known.relay else ("directly", "through the hub")
    return f"rounds go {new}: {other_s:.2g} s, {old} {usual_s:.2g} s"


def failed(known: FasterRoute, *, relay: bool, round_: int) -> None:
    """Note that a round was aborted, and nobody's loss explains it."""
    if relay == known.through_hub and (known.trial or known.relay):
        known.relay = known.relay and known.trial
        _pause(known, round_, LONGEST_PAUSE)


def _is_enough(last: list[float]) -> bool:
    return len(last) >= ROUNDS or min(last) >= LONG_S


def _pause(known: FasterRoute, round_: int, rounds: int) -> None:
    known.trial = False
    known.again = round_ + min(LONGEST_PAUSE, max(LEAST_PAUSE, rounds))
