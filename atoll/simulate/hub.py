"""The simulated hub: the real round machine behind a processor and a line of limited speed.

What `hub/rounds/service.py` does with sockets and a database is done here with alarms: each request
takes its turn at the hub's processor, its effects are carried out in order, answers take the hub's
line. Tests compare rounds with those of the real service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from atoll.errors import ConfigError, GroupError
from atoll.hub.scheduler.resources import summarized
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Decided, Effect, MemberDropped, Paused, Planned, Refused
from atoll.rounds.machine import RoundMachine
from atoll.simulate.exchange import Exchange
from atoll.simulate.lines import SharedLine
from atoll.simulate.machine import SimulatedMachine, Vacancies
from atoll.simulate.member import SimulatedMember
from atoll.simulate.network import Network
from atoll.simulate.placement import Launch, Placement
from atoll.simulate.record import Record, RoundRow
from atoll.simulate.recovery import SimulatedRecovery
from atoll.simulate.scheduler import Alarm, Scheduler
from atoll.simulate.sessions import SimulatedSessions
from atoll.simulate.setting import Setting
from atoll.wire.messages import Recover, RoundJoin, RoundPlan, RoundVote, Verdict, pack
from atoll.wire.states import RoundMemberState

TICK_S = 0.25
"""The hub looks at its deadlines so often."""
TIMED = 23
"""One in so many events is timed: to look at the processor's clock can cost more than the event."""

DONE = "done"

WAITED_FOR = frozenset({RoundMemberState.LIVE, RoundMemberState.RECOVERING})

Answer = Callable[[], None]


class SimulatedHub:
    """See the module's docstring."""

    placing: type[Placement] = Placement

    def __init__(self, scheduler: Scheduler, setting: Setting, record: Record) -> None:
        self.scheduler, self.setting, self.record = scheduler, setting, record
        self.network = Network(setting, record)
        self.processor = SharedLine(1.0)
        """Of the messages; a turn takes seconds, not bytes."""
        self.machines: dict[str, SimulatedMachine] = {}
        self.members: dict[str, SimulatedMember] = {}
        """The newest process of each member."""
        self.machine = RoundMachine(
            "simulated", nodes_wanted=setting.wanted, min_nodes=setting.min_members,
            preference=setting.route, reducer_ready=True, quorum=setting.quorum,
            commit_log=CommitLog(
                data_slots=DataSlots(setting.wanted), paced=setting.schedule.paced
            ),
        )  # fmt: skip
        self.placement = self.placing(
            scheduler, setting, record, may_return=lambda: self.machine.may_return(),
            launch=self.launch,
        )  # fmt: skip
        self.vacancies = Vacancies(scheduler, record, places=setting.wanted)
        self.sessions = SimulatedSessions(self)
        self.recovery = SimulatedRecovery(self)
        self.exchange: Exchange | None = None
        self.base = "start"
        self.interval = 0
        """Steps between rounds that the committed state carries; 0: as the job file says."""
        self._rows: dict[int, RoundRow] = {}
        self._first_join_s = 0.0
        self._contributors: tuple[int, frozenset[str]] = (-1, frozenset())
        self.undecided: list[Answer] = []
        """Recovering members that wait for the verdict."""
        self._ticking: Alarm | None = None
        self.begun = False
        """Whether the job has been submitted."""
        self.done = False
        """Whether its last round is committed."""
        self._paused_since: float | None = None
        self._timings = 0
        self._sizes: dict[tuple[str, int], int] = {}

    def add(self, machine: SimulatedMachine) -> None:
        """Take a machine of the fleet into the world."""
        self.machines[machine.name] = machine
        self.network.add(machine)
        self.placement.know(machine.profile)

    def begin(self) -> None:
        """The job is submitted to the machines that are there.

        Raises:
            ConfigError: it could not start if all machines were there.
        """
        unfit, least = self.placement.unfit(), self.setting.least
        if len(self.machines) - len(unfit) < least:
            raise ConfigError(
                "this job would never start on these machines",
                given=f"{len(self.machines)} machines" + (
                    f", of which {len(unfit)} cannot run it: {summarized(unfit)}" if unfit else ""
                ),
                expected=f"{least}",
                remedy="--min-members for fewer, or --machines for more of the same mixture",
            )  # fmt: skip
        self.begun = True
        self.placement.place()

    def request(self, kind: str, member: SimulatedMember, body: Any, call: Answer) -> None:
        """A member asks something: it is dealt with when it has its turn at the processor."""
        if member.machine.line_until_s > self.scheduler.now:
            again = partial(self.request, kind, member, body, call)
            self.scheduler.at(member.machine.line_until_s, again, member.process)
            return
        self.count(kind, self._size(kind, body))
        arrives = self.scheduler.now + member.profile.one_way_s
        beats = len(self.machines) / self.setting.costs.beat_every_s * self.setting.costs.beat_s
        cost_s = self.setting.costs.message_s / max(0.05, 1.0 - beats)
        when = self.processor.take(arrives, cost_s)
        self.record.deepest("hub's processor, s", when - arrives)
        self.scheduler.at(when, call, member.process)

    def tell(self, kind: str, member: SimulatedMember, body: Any, call: Answer) -> None:
        """Send a message to a member, on which it acts by `call`."""
        nbytes = self._size(kind, body)
        self.count(kind, nbytes)
        line_s = member.machine.line_until_s
        sent = max(self.network.line_out.take(self.scheduler.now, nbytes), line_s)
        self.scheduler.at(sent + member.profile.one_way_s, call, member.process)

    def count(self, kind: str, nbytes: int) -> None:
        """Count a message."""
        self.record.messages[kind] += 1
        self.record.control_bytes[kind] += nbytes

    def _size(self, kind: str, body: Any) -> int:
        """Return the encoded size of a message; those of one kind and round are alike."""
        if body is None:
            body = Recover([])
        key = (kind, self.machine.epoch)
        if key not in self._sizes:
            if len(self._sizes) > 64:
                self._sizes.clear()
            self._sizes[key] = len(pack(body))
        return self._sizes[key]

    # ------------------------------------------------------------------- requests of members

    def launch(self, launch: Launch) -> None:
        """A process of a member is to be started on a machine."""
        member = SimulatedMember(
            self, self.machines[launch.machine], slot=launch.slot, life=launch.attempt
        )
        self.members[member.name] = member
        self.launched(member)
        member.machine.launch(member)

    def launched(self, member: SimulatedMember) -> None:
        """Tell the rounds, as `RoundService.expect`."""
        self.machine.launch(member.name)

    def register(self, member: SimulatedMember) -> None:
        """A process enters the job."""

        def answer() -> None:
            if not self.placement.connected(member.name, member.life) and not self.back(member):
                member.machine.host(None)  # refused: another process has its place, or it has left
                return
            self.sessions.forget(member.name)
            machine = self.machine
            machine.register(member.name, dial=[f"{member.name}:1"] if member.reachable else [])
            slots = machine.commit_log.data_slots
            lease = slots.lease(member.name) if slots.cursors else None
            member.registered(
                round_=machine.committed_round, base=self.base, recover=machine.recovers,
                lease=None if machine.recovers else lease,
            )  # fmt: skip

        self.request("register", member, None, answer)

    def join(self, member: SimulatedMember, body: RoundJoin) -> None:
        """Handle a join, as `RoundService.join`."""
        machine, now = self.machine, self.scheduler.now
        if not machine.joins and machine.attempt is None:
            self._first_join_s = now
        try:
            effects = self.timed("join", lambda: machine.join(member.name, body, now))
        except GroupError as error:
            self._refuse(member, error)
            return
        self.record.deepest("joins waiting", len(machine.joins))
        if machine.attends(member.name) and not effects and self.exchange is not None:
            plan, exchange = self.exchange.plan, self.exchange
            self.tell("plan", member, plan, lambda: member.planned(plan, exchange))
            return
        self.carry_out(effects)
        self._tick_later()

    def vote(self, member: SimulatedMember, body: RoundVote) -> None:
        """Handle a vote, as `RoundService.vote`."""
        machine, now = self.machine, self.scheduler.now
        try:
            effects = self.timed("vote", lambda: machine.vote(member.name, body, now))
        except GroupError as error:
            self._refuse(member, error)
            return
        self.carry_out(effects)

    def _refuse(self, member: SimulatedMember, error: GroupError) -> None:
        self.tell("refused", member, None, lambda: member.refused(error))

    def gone(self, member: SimulatedMember, *, left: bool = False) -> None:
        """The process of a member is given up, or has `left` on purpose."""
        self.placement.lost(member.name, member.life, left=left)
        self.carry_out(self.machine.gone(member.name, self.now()))

    def back(self, member: SimulatedMember) -> bool:
        """A process that was given up is there again; return whether nothing has replaced it."""
        if not self.placement.back(member.name, member.life):
            return False
        self.machine.back(member.name)
        return True

    def notice_silence(self) -> None:
        """Wait no longer for members that are silent, as the hub's tick does."""
        for name in sorted(self.sessions.silent):
            if self._waits_for(name):
                self.carry_out(self.machine.silent(name, self.now()))

    def _waits_for(self, name: str) -> bool:
        machine = self.machine
        if machine.attempt is not None:
            return machine.attends(name) and name not in machine.attempt.votes
        state = machine.members.states.get(name)
        return bool(machine.joins) and name not in machine.joins and state in WAITED_FOR

    # ------------------------------------------------------------------------------ effects

    def now(self) -> float:
        """Return the simulated time."""
        return self.scheduler.now

    def timed(self, kind: str, call: Callable[[], Any]) -> Any:
        """Call the machine, and add up the processor time that it takes on this computer."""
        self._timings += 1
        if self._timings % TIMED:
            return call()
        began = time.thread_time()
        try:
            return call()
        finally:
            self.record.measured_s[kind] += time.thread_time() - began
            self.record.measured[kind] += 1

    def _tick_later(self) -> None:
        machine = self.machine
        if self._ticking is None and machine.joins and machine.attempt is None:
            self._ticking = self.scheduler.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.notice_silence()
        self.carry_out(self.timed("tick", lambda: self.machine.settle(self.now())))
        self._tick_later()

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out what the round machine has decided, in order."""
        for effect in effects:
            if isinstance(effect, Planned):
                self._planned(effect.plan)
            elif isinstance(effect, Decided):
                self._decided(effect)
            elif isinstance(effect, MemberDropped):
                if effect.tell_members:
                    self.record.messages["member lost"] += len(effect.plan.members)
                if self.exchange is not None:
                    self.exchange.drop(effect.member)
            elif isinstance(effect, Paused):
                self._paused(effect.reason)
            elif isinstance(effect, Refused):
                self._refuse(self.members[effect.member], effect.error)
            else:
                self.record.events[type(effect).__name__] += 1
        self._tick_later()

    def _paused(self, why: str) -> None:
        """The job has too few members, or (no `why`) enough again."""
        now, since = self.now(), self._paused_since
        if why and since is None:
            self.record.events["paused"] += 1
        if not why and since is not None:
            self.record.paused_s += now - since
        self._paused_since = (since if since is not None else now) if why else None

    @property
    def ended(self) -> str:
        """Why the job is over; empty: it is not."""
        return DONE if self.done else self.placement.ended

    def finish(self) -> None:
        """The simulation ends."""
        self._paused("")

    def _planned(self, plan: RoundPlan) -> None:
        now = self.now()
        self._rows[plan.epoch] = RoundRow(
            plan.round, plan.epoch, self._first_join_s, now, len(plan.members), plan.route
        )
        self.record.rows.append(self._rows[plan.epoch])
        exchange = self.exchange = Exchange(self, plan)
        for name in plan.members:
            member = self.members[name]
            self.tell("plan", member, plan, partial(member.planned, plan, exchange))
        self.machine.plan_sent(now)
        self.scheduler.after(TICK_S, self.notice_silence)
        self.scheduler.at(now + plan.timeout_s, exchange.time_out)
        overdue_s = 1.5 * plan.timeout_s + 15.0
        self.scheduler.at(now + overdue_s + TICK_S, lambda: self._overdue(plan.epoch))

    def _overdue(self, epoch: int) -> None:
        attempt = self.machine.attempt
        if attempt is not None and attempt.plan.epoch == epoch:
            self.carry_out(self.machine.settle(self.now()))

    def _decided(self, effect: Decided) -> None:
        verdict, exchange = effect.verdict, self.exchange
        row = self._rows.pop(verdict.epoch)
        row.decided_s, row.committed = self.now(), verdict.committed
        row.contributors, row.reason = len(verdict.contributors), verdict.reason[:120]
        if verdict.committed:
            self.base, self.interval = verdict.digest, verdict.every
            self.placement.committed(verdict.contributors)
            self.done = 0 < self.setting.schedule.rounds <= self.machine.committed_round
        if exchange is not None:
            exchange.closed = True
        self.exchange = None
        for name in effect.plan.members:
            member = self.members[name] if exchange is None else exchange.members[name]
            self.tell("verdict", member, verdict, partial(member.decided, verdict))
        self.machine.verdict_sent(verdict, self.now())
        waiting, self.undecided = self.undecided, []
        for answer in waiting:
            self.scheduler.after(self.setting.costs.recover_s, answer)

    def contributors(self, verdict: Verdict) -> frozenset[str]:
        """Return the contributors of a verdict as a set, made once."""
        if self._contributors[0] != verdict.epoch:
            self._contributors = verdict.epoch, frozenset(verdict.contributors)
        return self._contributors[1]
