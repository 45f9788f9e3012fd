"""A simulated machine: there or not, with a member, or spare."""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from atoll.simulate.record import Spent
from atoll.simulate.setting import Absence, Cause
from atoll.wire.limits import DEAD_AFTER_S

if TYPE_CHECKING:
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.member import SimulatedMember
    from atoll.simulate.record import Record
    from atoll.simulate.scheduler import Scheduler
    from atoll.simulate.setting import Profile


class Use(StrEnum):
    """What a machine is used for."""

    AWAY = "away"
    SPARE = "spare"
    MEMBER = "member"


PAUSES = frozenset({Cause.ASLEEP, Cause.CUT})
"""After these the same process goes on."""

FIRST_TIMEOUT_S, CONNECT_S = 0.2, 1.5
"""TCP's first retransmission time-out on Linux; until a lost connection is made again."""


class Vacancies:
    """The time of places without a machine while a machine has failed: `Spent.ABSENT`.

    A failed machine costs nothing once a spare one has its member's place.
    """

    def __init__(self, scheduler: Scheduler, record: Record, *, places: int) -> None:
        self._scheduler, self._record, self._places = scheduler, record, places
        self._since = scheduler.now
        self._failed = self._members = 0

    def change(self, *, failed: int, members: int) -> None:
        """More or fewer machines have failed, or run a member."""
        now = self._scheduler.now
        vacant = max(0, min(self._failed, self._places - self._members))
        self._record.seconds[Spent.ABSENT] += vacant * (now - self._since)
        self._since = now
        self._failed += failed
        self._members += members


class SimulatedSite:
    """Machines that reach each other."""

    def __init__(self) -> None:
        self.machines: list[SimulatedMachine] = []
        self.members: list[str] = []
        """Of these machines; made anew when one comes or ends."""

    def changed(self) -> None:
        """A member has come or ended."""
        here = (machine.member for machine in self.machines)
        self.members = [member.name for member in here if member is not None]


class SimulatedMachine:
    """See the module's docstring."""

    def __init__(self, hub: SimulatedHub, profile: Profile, away: list[Absence]) -> None:
        """Be away until the world starts it; `away` in order."""
        self.hub, self.scheduler = hub, hub.scheduler
        self.name, self.profile = profile.name, profile
        self.site: SimulatedSite | None = None
        self.member: SimulatedMember | None = None
        self.use = Use.AWAY
        self._launch: SimulatedMember | None = None
        """A process to start as soon as the hub's command arrives."""
        self.line_until_s = 0.0
        """Until then its line carries nothing."""
        self._away = away
        self._next = 0
        self._since = self.scheduler.now
        self._cause = Cause.CLOSED
        self._failed = False

    @property
    def there(self) -> bool:
        """Whether it computes."""
        return self.use != Use.AWAY

    # --------------------------------------------------------------------- coming and going

    def place(self, begin_s: float) -> None:
        """Enter the schedule of its presence; the world begins now."""
        self._begin_s = begin_s
        first = self._away[0] if self._away else None
        if first is not None and first.since_s <= 0:
            self._next = 1
            self._cause = first.cause
            self._enter(Use.AWAY)
            if not math.isinf(first.until_s):
                self.scheduler.at(begin_s + first.until_s, self._come)
        else:
            self._come()

    def _come(self) -> None:
        self._enter(Use.SPARE)
        self._await_absence()
        self.hub.sessions.came(self)
        self._take_command()

    def _await_absence(self) -> None:
        if self._next < len(self._away):
            away = self._away[self._next]
            self._next += 1
            begin = self._pause if away.cause in PAUSES else self._leave
            self.scheduler.at(self._begin_s + away.since_s, partial(begin, away))

    def _leave(self, away: Absence) -> None:
        """The machine fails, or its owner wants it back."""
        self._cause = away.cause
        self._enter(Use.AWAY)
        self.hub.record.events[away.cause.value] += 1
        self.host(None)
        self.hub.sessions.lost(self, away.cause)
        if not math.isinf(away.until_s):
            self.scheduler.at(self._begin_s + away.until_s, self._come)

    def _pause(self, away: Absence) -> None:
        """The machine falls asleep, or its line is cut: its process is there later."""
        self.line_until_s = self._begin_s + (
            carries_again_s(away) if away.cause == Cause.CUT else away.until_s
        )
        self.hub.record.events[away.cause.value] += 1
        if away.cause == Cause.ASLEEP:
            if self.member is not None:
                self.member.sleep()
            self._cause = Cause.FAILED
            self._enter(Use.AWAY)
        self.hub.sessions.lost(self, away.cause)
        if not math.isinf(away.until_s):
            self.scheduler.at(self.line_until_s, partial(self._return, away.cause))

    def _return(self, cause: Cause) -> None:
        """It goes on where it was; one that slept gets a new process if the hub has given it up."""
        member, slept = self.member, cause == Cause.ASLEEP
        known = self.hub.sessions.resume(self)
        goes_on = member is not None and (known or (not slept and self.hub.back(member)))
        if not goes_on:
            self.host(None)
        self._enter(Use.MEMBER if goes_on else Use.SPARE)
        if member is not None and goes_on and slept:
            member.wake()
        self._await_absence()
        if not known:
            self.hub.sessions.came(self)
        self._take_command()

    def launch(self, member: SimulatedMember) -> None:
        """Start the process of a member, as soon as the command can arrive."""
        self._launch = member
        if self.there and self.line_until_s <= self.scheduler.now:
            self._take_command()

    def _take_command(self) -> None:
        member, self._launch = self._launch, None
        if member is not None and self.hub.members.get(member.name) is member:
            self.host(member)
            member.start()

    def host(self, member: SimulatedMember | None) -> None:
        """Run the process of a member, or none: that of another one ends."""
        before, self.member = self.member, member
        if before is not None and before is not member:
            before.end()
        if self.there:
            self._enter(Use.SPARE if member is None else Use.MEMBER)
        if self.site is not None:
            self.site.changed()

    def finish(self) -> None:
        """The simulation ends: count what is under way; steps under way count as useful."""
        if self.member is not None:
            self.member.finish()
        self._cause = Cause.CLOSED
        self._enter(Use.AWAY)

    def _enter(self, use: Use) -> None:
        now = self.scheduler.now
        seconds, was = now - self._since, self.use
        self._since, self.use = now, use
        if was == Use.SPARE:  # hours that are not lent count nowhere, those of members there
            self.hub.record.seconds[Spent.SPARE] += seconds
        has_failed = use == Use.AWAY and self._cause == Cause.FAILED
        self.hub.vacancies.change(
            failed=has_failed - self._failed,
            members=(use == Use.MEMBER) - (was == Use.MEMBER),
        )
        self._failed = has_failed

    def inside_bps(self, other: SimulatedMachine) -> float:
        """Return the bits per second to another machine that it reaches."""
        if self.profile.site and self.profile.site == other.profile.site:
            return self.profile.site_bps
        return min(self.profile.up_bps, self.profile.down_bps)


def carries_again_s(cut: Absence) -> float:
    """Return when connections work again that were open when a line was cut.

    TCP repeats what was lost after 0.2 s and then after twice as long each time (RFC 6298). One
    that has received nothing for `DEAD_AFTER_S` connects anew.
    """
    tries = (cut.since_s + FIRST_TIMEOUT_S * (2**number - 1) for number in range(1, 64))
    again_s = next((when for when in tries if when >= cut.until_s), math.inf)
    return min(again_s, max(cut.until_s, cut.since_s + DEAD_AFTER_S) + CONNECT_S)
