"""Effects of an event in a round: values that tell the caller what to do, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import GroupError
from atoll.rounds.data_slots import Cursor
from atoll.rounds.timing import RoundTimings
from atoll.wire.messages import RoundJoin, RoundPlan, Verdict


@dataclass(frozen=True)
class Planned:
    """A plan was made: store it, notify the reducer, answer the members."""

    plan: RoundPlan
    joins: Mapping[str, RoundJoin] = field(default_factory=dict)


@dataclass(frozen=True)
class Decided:
    """A verdict was reached: store it and the fields below, then answer the voters."""

    plan: RoundPlan
    verdict: Verdict
    seconds: float
    cursors: Mapping[int, Cursor] = field(default_factory=dict)
    """Position of every data slot after it."""
    timings: RoundTimings = field(default_factory=RoundTimings)
    contributed: tuple[str, ...] = ()
    """Members with a launch that thereby counts as successful."""


@dataclass(frozen=True)
class StateAdopted:
    """The members are ahead of the record: store their round as the committed one."""

    round: int


@dataclass(frozen=True)
class Refused:
    """A waiting member must not take part."""

    member: str
    error: GroupError


@dataclass(frozen=True)
class MemberDropped:
    """A member of the open plan is no longer waited for: notify the reducer and the others."""

    plan: RoundPlan
    member: str
    tell_members: bool = True


@dataclass(frozen=True)
class Paused:
    """The run is paused for a reason, or continues (empty reason)."""

    reason: str


@dataclass(frozen=True)
class EventRaised:
    """An event for people; `alarm`: it should not happen in a healthy run."""

    kind: str
    text: str
    member: str = ""
    alarm: bool = False


Effect = Planned | Decided | StateAdopted | Refused | MemberDropped | Paused | EventRaised
