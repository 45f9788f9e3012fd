"""What is known about each member: rounds, challenges, strikes; and the settled challenges."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

STRIKES = 3
"""A member with so many is evicted."""

KEPT = 500
"""Newest settled challenges that are kept for people."""


class MemberRecord(msgspec.Struct, omit_defaults=True):
    """One member's history; its rounds, and how those that were checked ended."""

    rounds: int = 0
    checked: int = 0
    passed: int = 0
    strikes: list[str] = []
    """Why each was given."""
    checks: int = 0
    """Rounds of others that it has computed again."""
    accused_falsely: int = 0
    """Strikes that it got for naming digests of another's round that judges did not find."""
    evicted: bool = False
    round: int = -1
    """The last one that it committed to."""
    closing: str = ""
    """Digest of its own part after that round; the next one may open with it."""
    norm: float = 0.0
    alike: float = 0.0
    along: float = 0.0
    """How its last contribution looked; see `Look`."""
    own: float = 0.0
    held_out: float = 0.0
    """What its last contribution that passed gained on its own and on held-out data."""
    rating: float = 0.0
    """How regularly it gains more on its own data, -1 to 1; see `scores.py`."""


class SettledChallenge(msgspec.Struct, omit_defaults=True):
    """A challenge that has ended, for people."""

    number: int
    round: int
    member: str
    why: str
    result: str
    checker: str = ""
    judge: str = ""
    """All judges of the challenge, with commas."""
    step: int = 0
    """First step that differed; 0: none was searched."""
    guilty: str = ""
    reason: str = ""
    own: float = 0.0
    held_out: float = 0.0
    """Gains that the checker measured; both 0: none."""
    at: float = 0.0
    """When it ended, seconds since 1970."""


class VerificationRecord(msgspec.Struct, omit_defaults=True):
    """What a hub keeps on disk, and what it shows."""

    members: dict[str, MemberRecord] = {}
    settled: list[SettledChallenge] = []
    number: int = 0
    """Challenges so far."""
    again: list[str] = []
    """Members whose last challenge came to nothing: they are checked in their next round."""


@dataclass
class MemberBook:
    """The records of a job's members."""

    members: dict[str, MemberRecord] = field(default_factory=dict)
    settled: deque[SettledChallenge] = field(default_factory=lambda: deque(maxlen=KEPT))

    def of(self, member: str) -> MemberRecord:
        """Return a member's record, a new one if there is none."""
        return self.members.setdefault(member, MemberRecord())

    def evicted(self) -> set[str]:
        """Return the members that have no place in the job any more."""
        return {name for name, record in self.members.items() if record.evicted}

    def strike(self, member: str, reason: str) -> bool:
        """Give a strike; return whether the member is evicted by it."""
        record = self.of(member)
        record.strikes.append(reason)
        newly = len(record.strikes) >= STRIKES and not record.evicted
        record.evicted = record.evicted or newly
        return newly
