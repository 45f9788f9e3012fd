"""A simulated member: trains for a period, joins, exchanges, votes; recovers what it has missed.

It is one process on one machine: a member that is placed again is another one, of the same name.
Where the method hides rounds behind training it goes on for some steps while a round is under way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from atoll.errors import EpochChanged, GroupError, LeftBehind
from atoll.simulate.record import Spent
from atoll.simulate.scheduler import Alarm, Process
from atoll.wire.messages import Lease, RoundJoin, RoundPlan, RoundVote, Verdict

if TYPE_CHECKING:
    from atoll.simulate.exchange import Exchange
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.machine import SimulatedMachine
    from atoll.simulate.setting import Profile


class Phase(StrEnum):
    """What a member does."""

    ENDED = "ended"
    ASLEEP = "asleep"
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

ROUND = frozenset({Phase.JOINING, Phase.EXCHANGING, Phase.VOTING})

AGAIN_S = 1.0
"""Pause before a refused request is repeated."""

LEAST_JITTER = 0.2
"""A period takes at least this share of its mean time."""


class SimulatedMember:
    """See the module's docstring."""

    def __init__(
        self, hub: SimulatedHub, machine: SimulatedMachine, *, slot: int, life: int
    ) -> None:
        """Be launched for the `life`-th time; `start` begins."""
        self.hub, self.scheduler, self.setting = hub, hub.scheduler, hub.setting
        self.name, self.slot, self.life, self.machine = f"w{slot}", slot, life, machine
        self.process = Process(self.scheduler, self.name)
        self.phase = Phase.ENDED
        again = f":{life}" if life > 1 else ""
        self._chance = random.Random(f"{self.setting.seed}:{slot}:compute{again}")
        self._since = self.scheduler.now
        self._work_s, self._offered_s = 0.0, 0.0
        """Seconds of steps that no round contains yet: since it joined, and before."""
        self._steps, self._busy_s = 0, 0.0
        """Of the period so far."""
        self._report = (0, 0.0)
        """Steps and seconds of the period that it has joined with."""
        self._end_of_steps: Alarm | None = None
        self._awaiting_steps: Verdict | None = None
        """A verdict that came while it trained on."""
        self._before_sleep: tuple[Phase, float] | None = None
        """Phase, and seconds of steps that were left; None: it is awake."""
        self._round, self._base = -1, ""
        self._lease: Lease | None = None
        self._every = self.setting.schedule.every
        """Steps of a period, unless a verdict says otherwise."""
        self._pace, self._delay = 1.0, 0
        """As the last verdict says."""
        self._asked, self.needs_s = 0.0, 0.0
        """When it asked for the state, and how long it took to come, if that was too late."""

    @property
    def profile(self) -> Profile:
        """What its machine can do."""
        return self.machine.profile

    @property
    def reachable(self) -> list[str]:
        """Members of its site."""
        return self.machine.site.members if self.machine.site is not None else []

    # ------------------------------------------------------------------------ its process

    def start(self) -> None:
        """Start: load everything, then register."""
        self._since = self.scheduler.now
        self.phase = Phase.STARTING
        self._after(self.setting.start_s, lambda: self.hub.register(self))

    def end(self) -> None:
        """End at once; what no round contains is lost."""
        self._enter(Phase.ENDED)
        self._lose()
        self.process.kill()

    def finish(self) -> None:
        """The simulation ends: steps under way count as useful."""
        alive = self.phase != Phase.ENDED
        self._enter(Phase.ENDED)
        if alive:
            self.hub.record.seconds[Spent.USEFUL] += self._work_s + self._offered_s

    def sleep(self) -> None:
        """Stand still with the machine."""
        alarm, left_s = self._end_of_steps, 0.0
        if alarm is not None:
            alarm.cancel()
            left_s = alarm.when - self.scheduler.now
        phase = self.phase
        self._enter(Phase.ASLEEP)
        self._end_of_steps, self._before_sleep = None, (phase, left_s if alarm else -1.0)
        self.process.stop()

    def wake(self) -> None:
        """Go on where it was."""
        if self._before_sleep is None:
            return
        phase, left_s = self._before_sleep
        self._before_sleep = None
        self._enter(phase)
        if left_s >= 0:
            self._end_of_steps = self._after(left_s, self._steps_done)
        self.process.go_on()

    def _enter(self, phase: Phase) -> None:
        """Count the time since the last change, then change."""
        now = self.scheduler.now
        seconds, was = now - self._since, self.phase
        self._since, self.phase = now, phase
        if self._end_of_steps is not None:
            self._work_s += seconds
            self._busy_s += seconds
        elif was in SPENT:
            self.hub.record.seconds[SPENT[was]] += seconds

    def _lose(self) -> None:
        """Lose all steps that no round contains; those under way end."""
        self._enter(self.phase)
        if self._end_of_steps is not None:
            self._end_of_steps.cancel()
            self._end_of_steps = None
        self.hub.record.seconds[Spent.LOST] += self._work_s + self._offered_s
        self._work_s = self._offered_s = 0.0
        self._steps, self._busy_s, self._awaiting_steps = 0, 0.0, None

    def _after(self, seconds: float, call: Callable[[], Any]) -> Alarm:
        return self.scheduler.after(seconds, call, self.process)

    # -------------------------------------------------------------------------------- steps

    def registered(self, *, round_: int, base: str, recover: bool, lease: Lease | None) -> None:
        """The hub knows the process: train from the beginning, or take over the state."""
        if recover:
            self.recover()
            return
        self._round, self._base, self._lease = round_, base, lease
        self._train(0)  # the first round is that in which all agree on where they begin

    def _length(self) -> int:
        """Return the steps of the period before the next round, at full pace."""
        return self.setting.schedule.steps_before(self._round, every=self._every)

    def _train(self, steps: int) -> None:
        """Train so many steps, then join."""
        self._enter(Phase.TRAINING)
        self._compute(steps)

    def _compute(self, steps: int) -> None:
        noise = max(LEAST_JITTER, self._chance.gauss(1.0, self.setting.jitter))
        self._steps += steps
        seconds = steps * self.profile.step_s * noise
        self._end_of_steps = self._after(seconds, self._steps_done)

    def _steps_done(self) -> None:
        """The steps are over: join, or apply the round whose verdict has come meanwhile."""
        self._enter(self.phase)
        self._end_of_steps = None
        verdict, self._awaiting_steps = self._awaiting_steps, None
        if verdict is not None:
            self._go_on(verdict)
        elif self.phase == Phase.TRAINING:
            self._join_first()

    # ------------------------------------------------------------------------------- rounds

    def _join_first(self) -> None:
        """Join with the steps of a period, and begin with those that hide the round."""
        self._report = self._steps, self._busy_s
        self._offered_s += self._work_s
        self._work_s, self._steps, self._busy_s = 0.0, 0, 0.0
        self._join()
        hidden = self.setting.schedule.hidden_before(
            self._round + 1, delay=self._delay, every=self._every
        )
        if hidden:
            self._compute(max(1, round(hidden * self._pace)))

    def _join(self) -> None:
        self._enter(Phase.JOINING)
        lease, (steps, busy_s) = self._lease, self._report
        body = RoundJoin(
            self._round, self._base, self.reachable, steps=steps, busy_s=busy_s,
            lease=None if lease is None else Lease(lease.slot, _moved(lease, steps)),
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
        names, nbytes = exchange.contributors, round(exchange.moved.relay_sent)
        body = RoundVote(plan.round, plan.epoch, True, str(plan.epoch), names, nbytes=nbytes)
        self._vote(body)

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
        contributed = self.name in self.hub.contributors(verdict)
        self.hub.record.seconds[Spent.USEFUL if contributed else Spent.LOST] += self._offered_s
        self._offered_s = 0.0
        self._enter(Phase.TRAINING)
        if self._end_of_steps is not None:
            self._awaiting_steps = verdict
        else:
            self._go_on(verdict)

    def _go_on(self, verdict: Verdict) -> None:
        """Apply a committed round, and train until the next one."""
        self._round, self._base = verdict.round + 1, verdict.digest
        self._lease = verdict.leases.get(self.name, self._lease)
        hidden = self.setting.schedule.hidden_before(
            self._round, delay=self._delay, every=self._every
        )
        self._every = verdict.every or self._every
        self._pace, self._delay = verdict.pace.get(self.name, 1.0), verdict.delay
        self._train(round(max(0, self._length() - hidden) * self._pace))

    def refused(self, error: GroupError) -> None:
        """A request was refused: the group has gone on, or it has to be repeated."""
        if self.phase not in ROUND:
            return
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
        self._lose()
        self._enter(Phase.RECOVERING)
        self._asked = self.scheduler.now
        self.hub.request("recover", self, None, lambda: self.hub.recovery.recover(self))

    def recovered(self, round_: int, base: str, share: float, lease: Lease | None) -> None:
        """The state has arrived."""
        self._round, self._base, self._lease = round_, base, lease
        self._every = self.hub.interval or self._every
        self._pace = min(1.0, share) or 1.0
        fetched_s = self.scheduler.now - self._asked

        def stands(error: GroupError | None) -> None:
            if error is not None:
                self.needs_s = fetched_s
                self.recover()
            else:
                self.needs_s = 0.0
                self.hub.record.events["recovered"] += 1
                self._train(round(self._length() * share))

        def stand() -> None:
            self.hub.recovery.stand(self, round_, base, stands)

        self.hub.request("standing", self, None, stand)


def _moved(lease: Lease, steps: int) -> dict[str, int]:
    return {**lease.cursor, "offset": lease.cursor.get("offset", 0) + steps}
