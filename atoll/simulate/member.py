"""A simulated member: trains for a period, joins, exchanges, votes; fails, returns and recovers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.errors import EpochChanged, GroupError, LeftBehind
from atoll.simulate.record import Spent
from atoll.simulate.scheduler import Alarm, Process
from atoll.simulate.setting import Absence, Cause
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import Lease, RoundJoin, RoundPlan, RoundVote, Verdict

if TYPE_CHECKING:
    from atoll.simulate.exchange import Exchange
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.setting import Profile


class Phase(StrEnum):
    """What a member does."""

    AWAY = "away"
    STARTING = "starting"
    TRAINING = "training"
    JOINING = "joining"
    EXCHANGING = "exchanging"
    VOTING = "voting"
    RECOVERING = "recovering"


SPENT = {
    Phase.STARTING: Spent.RECOVERING,
    Phase.RECOVERING: Spent.RECOVERING,
    Phase.JOINING: Spent.WAITING,
    Phase.EXCHANGING: Spent.COMMUNICATING,
    Phase.VOTING: Spent.COMMUNICATING,
}

AGAIN_S = 1.0
"""Pause before a refused request is repeated."""

PAUSES = frozenset({Cause.ASLEEP, Cause.CUT})
"""After these the same process goes on."""

FIRST_TIMEOUT_S, CONNECT_S = 0.2, 1.5
"""TCP's first retransmission time-out on Linux; until a lost connection is made again."""

LEAST_JITTER = 0.2
"""A period takes at least this share of its mean time."""


class SimulatedMember:
    """See the module's docstring."""

    def __init__(self, hub: SimulatedHub, slot: int, profile: Profile, away: list[Absence]) -> None:
        """Be away until the world starts it; `away` in order."""
        self.hub, self.scheduler, self.setting = hub, hub.scheduler, hub.setting
        self.name, self.slot, self.profile = f"w{slot}", slot, profile
        self.reachable: list[str] = []
        """Members of its site."""
        self.process = Process(self.scheduler, self.name)
        self.phase = Phase.AWAY
        self.life = 0
        self._chance = random.Random(f"{self.setting.seed}:{slot}:compute")
        self._away = away
        self._next = 0
        self._since = self.scheduler.now
        self._cause = Cause.CLOSED
        self._work_s = 0.0
        """Seconds of steps that no round contains yet."""
        self._steps = 0
        self._busy_s = 0.0
        self._end_of_steps: Alarm | None = None
        self._before_sleep: tuple[Phase, float] | None = None
        """Phase, and seconds of steps that were left; None: it is awake."""
        self.line_until_s = 0.0
        """Until then its line carries nothing."""
        self._round, self._base = -1, ""
        self._lease: Lease | None = None
        self._every = self.setting.every
        """Steps of a period, unless a verdict says otherwise."""

    # --------------------------------------------------------------------- coming and going

    def place(self, begin_s: float) -> None:
        """Enter the schedule of its presence; the world begins now."""
        self._begin_s = begin_s
        first = self._away[0] if self._away else None
        if first is not None and first.since_s <= 0:
            self._next = 1
            self._cause = first.cause
            self.scheduler.at(begin_s + first.until_s, self._come)
        else:
            self._come(first=True)

    def _come(self, *, first: bool = False) -> None:
        self._enter(Phase.STARTING)
        self.life += 1
        self.process = Process(self.scheduler, self.name)
        self.hub.launched(self, first=first)
        self._await_absence()
        self._after(self.setting.start_s, lambda: self.hub.register(self))

    def _await_absence(self) -> None:
        if self._next < len(self._away):
            away = self._away[self._next]
            self._next += 1
            begin = self._pause if away.cause in PAUSES else self._leave
            self.scheduler.at(self._begin_s + away.since_s, partial(begin, away))

    def _leave(self, away: Absence) -> None:
        """The machine fails, or its owner wants it back."""
        self._enter(Phase.AWAY)
        self._cause = away.cause
        self._lose()
        self.process.kill()
        self.hub.record.events[away.cause.value] += 1
        self.hub.lost(self, away.cause)
        if not math.isinf(away.until_s):
            self.scheduler.at(self._begin_s + away.until_s, self._come)

    def _pause(self, away: Absence) -> None:
        """The machine falls asleep, or its line is cut: its process is there later."""
        self.line_until_s = self._begin_s + (
            carries_again_s(away) if away.cause == Cause.CUT else away.until_s
        )
        self.hub.record.events[away.cause.value] += 1
        if away.cause == Cause.ASLEEP:
            alarm, self._end_of_steps = self._end_of_steps, None
            left_s = 0.0
            if alarm is not None and self.phase == Phase.TRAINING:
                alarm.cancel()
                left_s = alarm.when - self.scheduler.now
            self._before_sleep = self.phase, left_s
            self._enter(Phase.AWAY)
            self._cause = Cause.FAILED
            self.process.stop()
        self.hub.lost(self, away.cause)
        if not math.isinf(away.until_s):
            self.scheduler.at(self.line_until_s, self._return)

    def _return(self) -> None:
        """It goes on where it was. If the hub has given it up, who slept gets a new process."""
        before, self._before_sleep = self._before_sleep, None
        known = self.hub.heard(self)
        if not known and before is not None:
            self._lose()
            self.process.kill()
            self._come()
            return
        if not known:
            self.hub.register(self)
        if before is not None:
            phase, left_s = before
            self._enter(phase)
            if phase == Phase.TRAINING:
                self._end_of_steps = self._after(left_s, self._join)
        self.process.go_on()
        self._await_absence()

    def finish(self) -> None:
        """The simulation ends: count what is under way; steps under way count as useful."""
        phase = self.phase
        self._enter(Phase.AWAY)
        if phase != Phase.AWAY:
            self.hub.record.seconds[Spent.USEFUL] += self._work_s

    def _enter(self, phase: Phase) -> None:
        now = self.scheduler.now
        seconds, was = now - self._since, self.phase
        self._since, self.phase = now, phase
        if was == Phase.TRAINING:
            self._work_s += seconds
            self._busy_s += seconds
        elif was in SPENT:
            self.hub.record.seconds[SPENT[was]] += seconds
        elif self._cause == Cause.FAILED:  # away; hours that are not lent count nowhere
            self.hub.record.seconds[Spent.ABSENT] += seconds

    def _lose(self) -> None:
        self.hub.record.seconds[Spent.LOST] += self._work_s
        self._work_s = 0.0

    def _after(self, seconds: float, call: Callable[[], Any]) -> Alarm:
        return self.scheduler.after(seconds, call, self.process)

    def inside_bps(self, other: SimulatedMember) -> float:
        """Return the bits per second to another member that it reaches."""
        if self.profile.site and self.profile.site == other.profile.site:
            return self.profile.site_bps
        return min(self.profile.up_bps, self.profile.down_bps)

    # ------------------------------------------------------------------------------- rounds

    def registered(self, *, round_: int, base: str, recover: bool, lease: Lease | None) -> None:
        """The hub knows the process: train from the beginning, or take over the state."""
        if recover:
            self.recover()
            return
        self._round, self._base, self._lease = round_, base, lease
        self.train(0.0)  # the first round is that in which all agree on where they begin

    def train(self, share: float) -> None:
        """Train for a share of a period, then join."""
        self._enter(Phase.TRAINING)
        steps = round(self._every * share)
        noise = max(LEAST_JITTER, self._chance.gauss(1.0, self.setting.jitter))
        self._steps, self._busy_s = steps, 0.0
        self._end_of_steps = self._after(steps * self.profile.step_s * noise, self._join)

    def _join(self) -> None:
        self._enter(Phase.JOINING)
        lease = self._lease
        body = RoundJoin(
            self._round, self._base, self.reachable, steps=self._steps, busy_s=self._busy_s,
            lease=None if lease is None else Lease(lease.slot, _moved(lease, self._steps)),
        )  # fmt: skip
        self.hub.request("join", self, body, lambda: self.hub.join(self, body))

    def planned(self, plan: RoundPlan, exchange: Exchange) -> None:
        """The plan has arrived: send the contribution."""
        if self.phase != Phase.JOINING:
            return
        self._enter(Phase.EXCHANGING)
        if plan.route == "alone":
            exchange.contributors = [self.name]
            self.resulted(exchange)
        else:
            exchange.begin(self)

    def resulted(self, exchange: Exchange) -> None:
        """The mean has arrived: vote for it."""
        if self.phase != Phase.EXCHANGING or exchange.closed:
            return
        self._enter(Phase.VOTING)
        plan = exchange.plan
        self._vote(RoundVote(plan.round, plan.epoch, True, str(plan.epoch), exchange.contributors))

    def failed(self, exchange: Exchange, reason: str) -> None:
        """The exchange failed here: vote against it."""
        if self.phase == Phase.EXCHANGING and not exchange.closed:
            self._enter(Phase.VOTING)
            plan = exchange.plan
            self._vote(RoundVote(plan.round, plan.epoch, False, reason=reason))

    def _vote(self, body: RoundVote) -> None:
        self.hub.request("vote", self, body, lambda: self.hub.vote(self, body))

    def decided(self, verdict: Verdict) -> None:
        """The verdict has arrived: apply the mean and train on, or join again."""
        if self.phase not in (Phase.VOTING, Phase.EXCHANGING):
            return
        if not verdict.committed:
            self._join()
            return
        if self.name in self.hub.contributors(verdict):
            self.hub.record.seconds[Spent.USEFUL] += self._work_s
            self._work_s = 0.0
        self._lose()
        self._round, self._base = verdict.round + 1, verdict.digest
        self._lease = verdict.leases.get(self.name, self._lease)
        self._every = verdict.every or self._every
        self.train(verdict.pace.get(self.name, 1.0))

    def refused(self, error: GroupError) -> None:
        """A request was refused: the group has gone on, or it has to be repeated."""
        if isinstance(error, LeftBehind):
            self._lose()
            self.hub.record.events["left behind"] += 1
            self.recover()
        elif isinstance(error, EpochChanged):
            self._join()
        else:
            self._after(AGAIN_S, self.recover)

    # ----------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Ask who has the committed state."""
        self._enter(Phase.RECOVERING)
        self._busy_s = 0.0
        self.hub.request("recover", self, None, lambda: self.hub.recover(self))

    def recovered(self, round_: int, base: str, share: float, lease: Lease | None) -> None:
        """The state has arrived."""
        self._round, self._base, self._lease = round_, base, lease
        self._every = self.hub.interval or self._every

        def stands(error: GroupError | None) -> None:
            if error is not None:
                self.recover()
            else:
                self.hub.record.events["recovered"] += 1
                self.train(share)

        self.hub.request("standing", self, None, lambda: self.hub.stand(self, round_, base, stands))


def _moved(lease: Lease, steps: int) -> dict[str, int]:
    return {**lease.cursor, "offset": lease.cursor.get("offset", 0) + steps}


def carries_again_s(cut: Absence) -> float:
    """Return when connections work again that were open when a line was cut.

    TCP repeats what was lost after 0.2 s and then after twice as long each time (RFC 6298). Who
    has heard nothing for `DEAD_AFTER_S` connects anew.
    """
    tries = (cut.since_s + FIRST_TIMEOUT_S * (2**number - 1) for number in range(1, 64))
    again_s = next((when for when in tries if when >= cut.until_s), math.inf)
    return min(again_s, max(cut.until_s, cut.since_s + DEAD_AFTER_S) + CONNECT_S)
