"""Whether a machine takes work now: a pure rule, with hysteresis."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from atoll.node.availability.policy import OwnerPolicy
from atoll.node.availability.quiet_hours import parse_quiet_hours
from atoll.node.availability.reading import Reading

BEGIN_S = 3.0
"""How long a reason must last before work is returned: plugs are sometimes pulled by mistake."""

END_S = 30.0
"""How long every reason must be gone before work is taken again."""

RECHARGED_PERCENT = 5.0
"""Charge above the limit that a battery needs before work is taken again."""

AT_ONCE = ("sleep", "quiet hours")
"""Reasons without hysteresis."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Why a machine takes no work; empty: it does."""

    cause: str = ""
    """battery, metered, active, lid, sleep or quiet hours."""
    text: str = ""
    """For people, e.g. `quiet hours until 07:00`."""


WORK = Pause()


def decide(
    policy: OwnerPolicy, reading: Reading, now: datetime.datetime, *, before: Pause = WORK
) -> Pause:
    """Return why the machine should take no work at the local time `now`.

    `before` is the last decision: a low battery must first recharge a little.
    """
    if policy.pause_on_sleep and reading.sleeping:
        return Pause("sleep", "the machine goes to sleep")
    if policy.pause_on_lid_close and reading.lid_closed:
        return Pause("lid", "the lid is closed")
    if policy.pause_on_battery and reading.on_battery and _is_low(policy, reading, before):
        return Pause("battery", _battery_text(policy, reading))
    if policy.pause_on_metered and reading.metered:
        return Pause("metered", "on a metered network")
    wanted_s = policy.pause_when_active * 60
    if wanted_s and reading.idle_s is not None and reading.idle_s < wanted_s:
        text = f"the owner is active (idle for less than {policy.pause_when_active:g} minutes)"
        return Pause("active", text)
    ends = [end for span in policy.quiet_hours if (end := parse_quiet_hours(span).end_of(now))]
    if ends:
        return Pause("quiet hours", f"quiet hours until {_moment(max(ends), now)}")
    return WORK


def _is_low(policy: OwnerPolicy, reading: Reading, before: Pause) -> bool:
    if reading.battery_percent is None or policy.battery_percent >= 100:
        return True
    margin = RECHARGED_PERCENT if before.cause == "battery" else 0.0
    return reading.battery_percent <= policy.battery_percent + margin


def _battery_text(policy: OwnerPolicy, reading: Reading) -> str:
    if reading.battery_percent is None or policy.battery_percent >= 100:
        return "on battery"
    return f"on battery, at or below {policy.battery_percent:g} %"


def _moment(end: datetime.datetime, now: datetime.datetime) -> str:
    return end.strftime("%H:%M" if end.date() - now.date() <= _ONE_DAY else "%A %H:%M")


_ONE_DAY = datetime.timedelta(days=1)


class Hysteresis:
    """Follows decisions without flapping: reasons must last, and must be gone for a while."""

    def __init__(self) -> None:
        """Start as a machine that takes work."""
        self._first = True
        self.pause = WORK
        """The decision in force."""
        self._other_since: float | None = None
        """Monotonic time since which the readings demand the opposite."""

    def follow(
        self, policy: OwnerPolicy, reading: Reading, *, now: datetime.datetime, monotonic: float
    ) -> Pause:
        """Return the decision in force after these readings."""
        said = decide(policy, reading, now, before=self.pause)
        first, self._first = self._first, False
        if bool(said.cause) == bool(self.pause.cause):
            self.pause, self._other_since = said, None
            return said
        if self._other_since is None:
            self._other_since = monotonic
        doubtful = (said.cause or self.pause.cause) not in AT_ONCE
        wait_s = (BEGIN_S if said.cause else END_S) if doubtful and not first else 0.0
        if monotonic - self._other_since >= wait_s:
            self.pause, self._other_since = said, None
        return self.pause
