"""Effects of an occurrence in a round: values that say what the caller has to do, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import GroupError
from atoll.rounds.data_slots import Cursor
from atoll.rounds.timing import RoundTimings
from atoll.wire.messages import RoundJoin, RoundPlan, Verdict


@dataclass(frozen=True)
class Planned:
    """A plan was made: store it, tell the reducer, answer the members."""

    plan: RoundPlan
    joins: Mapping[str, RoundJoin] = field(default_factory=dict)
    """Reports of its members when they joined."""


@dataclass(frozen=True)
class Decided:
    """A verdict was reached: store it with all that changed with it, then answer the voters."""

    plan: RoundPlan
    verdict: Verdict
    seconds: float
    cursors: Mapping[int, Cursor] = field(default_factory=dict)
    """Where every slot of the data stands after it."""
    timings: RoundTimings = field(default_factory=RoundTimings)
    contributed: tuple[str, ...] = ()
    """Members whose launches count as successful by it."""


@dataclass(frozen=True)
class StateAdopted:
    """The members are ahead of the record: store their round as the committed one."""

    round: int


@dataclass(frozen=True)
class Refused:
    """A member that waits to join must not take part."""

    member: str
    error: GroupError


@dataclass(frozen=True)
class MemberDropped:
    """A member of an open plan is not waited for any more: tell the reducer and the others."""

    plan: RoundPlan
    member: str
    tell_members: bool = True


@dataclass(frozen=True)
class Paused:
    """The run is paused for the reason given, or goes on (no reason)."""

    reason: str


@dataclass(frozen=True)
class EventRaised:
    """An event for people; `alarm`: it should not happen at all."""

    kind: str
    text: str
    member: str = ""
    alarm: bool = False


Effect = Planned | Decided | StateAdopted | Refused | MemberDropped | Paused | EventRaised
