"""The simulated hub: the real round machine behind a processor and a line of limited speed.

What `hub/rounds/service.py` and `hub/rounds/recovery.py` do with sockets and a database is done
here with alarms: each request takes its turn at the hub's processor, its effects are carried out in
order, answers take the hub's line. Tests compare rounds with those of the real service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from atoll.errors import GroupError
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Decided, Effect, MemberDropped, Planned, Refused
from atoll.rounds.machine import RoundMachine
from atoll.rounds.member_states import RoundMemberState
from atoll.rounds.timing import broken_s
from atoll.simulate.exchange import Exchange
from atoll.simulate.lines import SharedLine
from atoll.simulate.member import SimulatedMember
from atoll.simulate.network import Network
from atoll.simulate.record import Record, RoundRow
from atoll.simulate.scheduler import Alarm, Scheduler
from atoll.simulate.setting import Cause, Setting
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import Recover, RoundJoin, RoundPlan, RoundVote, Verdict, pack

SILENT_S, GONE_S = 6.0, DEAD_AFTER_S
"""A lost machine is noticed after three heartbeats, and given up like a session."""
RECONNECT_S = 5.0
"""A process whose connection is broken is given up so much later."""
TICK_S = 0.25
"""The hub looks at its deadlines so often."""
SAVE_EVERY = 10
"""Rounds between two checkpoints, to which the run goes back if no member has the state."""

TIMED = 23
"""One in so many events is timed: to look at the processor's clock can cost more than the event."""

WAITED_FOR = frozenset({RoundMemberState.LIVE, RoundMemberState.RECOVERING})

Answer = Callable[[], None]


class SimulatedHub:
    """See the module's docstring."""

    def __init__(self, scheduler: Scheduler, setting: Setting, record: Record) -> None:
        self.scheduler, self.setting, self.record = scheduler, setting, record
        self.network = Network(setting, record)
        self.processor = SharedLine(1.0)
        """Of the messages; a turn takes seconds, not bytes."""
        self.members: dict[str, SimulatedMember] = {}
        count = len(setting.fleet)
        self.machine = RoundMachine(
            "simulated", nodes_wanted=count, min_nodes=1, preference=setting.route,
            reducer_ready=True, quorum=setting.quorum,
            commit_log=CommitLog(data_slots=DataSlots(count)),
        )  # fmt: skip
        self.exchange: Exchange | None = None
        self.base = "start"
        self.interval = 0
        """Steps between rounds that the committed state carries; 0: as the job file says."""
        self._rows: dict[int, RoundRow] = {}
        self._first_join_s = 0.0
        self._contributors: tuple[int, frozenset[str]] = (-1, frozenset())
        self._undecided: list[Answer] = []
        """Recovering members that wait for the verdict."""
        self._ticking: Alarm | None = None
        self._lost: dict[str, int] = {}
        """Members of which nothing is heard, each with a number of its own."""
        self._silent: set[str] = set()
        """Of these, who need not be waited for."""
        self._losses = 0
        self._timings = 0
        self._sizes: dict[tuple[str, int], int] = {}

    def add(self, member: SimulatedMember) -> None:
        """Take a member of the fleet into the world."""
        self.members[member.name] = member
        self.network.add(member)

    def request(self, kind: str, member: SimulatedMember, body: Any, call: Answer) -> None:
        """A member asks something: it is dealt with when it has its turn at the processor."""
        if member.line_until_s > self.scheduler.now:
            again = partial(self.request, kind, member, body, call)
            self.scheduler.at(member.line_until_s, again, member.process)
            return
        self._count(kind, self._size(kind, body))
        arrives = self.scheduler.now + member.profile.one_way_s
        beats = len(self.members) / self.setting.costs.beat_every_s * self.setting.costs.beat_s
        cost_s = self.setting.costs.message_s / max(0.05, 1.0 - beats)
        when = self.processor.take(arrives, cost_s)
        self.record.deepest("hub's processor, s", when - arrives)
        self.scheduler.at(when, call, member.process)

    def _tell(self, kind: str, member: SimulatedMember, body: Any, call: Answer) -> None:
        nbytes = self._size(kind, body)
        self._count(kind, nbytes)
        sent = max(self.network.line_out.take(self.scheduler.now, nbytes), member.line_until_s)
        self.scheduler.at(sent + member.profile.one_way_s, call, member.process)

    def _count(self, kind: str, nbytes: int) -> None:
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

    def launched(self, member: SimulatedMember, *, first: bool) -> None:
        """A process was started on a member's machine."""
        machine = self.machine
        self.heard(member)
        if machine.members.states.get(member.name, RoundMemberState.GONE) != RoundMemberState.GONE:
            self._carry_out(machine.gone(member.name, self.scheduler.now))
        if first:
            machine.expect(member.name)
        else:
            machine.launch(member.name)

    def register(self, member: SimulatedMember) -> None:
        """A process enters the job."""

        def answer() -> None:
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
            effects = self._timed("join", lambda: machine.join(member.name, body, now))
        except GroupError as error:
            self._refuse(member, error)
            return
        self.record.deepest("joins waiting", len(machine.joins))
        if machine.attends(member.name) and not effects and self.exchange is not None:
            plan, exchange = self.exchange.plan, self.exchange
            self._tell("plan", member, plan, lambda: member.planned(plan, exchange))
            return
        self._carry_out(effects)
        self._tick_later()

    def vote(self, member: SimulatedMember, body: RoundVote) -> None:
        """Handle a vote, as `RoundService.vote`."""
        machine, now = self.machine, self.scheduler.now
        try:
            effects = self._timed("vote", lambda: machine.vote(member.name, body, now))
        except GroupError as error:
            self._refuse(member, error)
            return
        self._carry_out(effects)

    def _refuse(self, member: SimulatedMember, error: GroupError) -> None:
        self._tell("refused", member, None, lambda: member.refused(error))

    def recover(self, member: SimulatedMember) -> None:
        """Handle Recover, as `RecoveryCoordinator.recover`."""
        effects = self._timed("recover", lambda: self.machine.recover(member.name, self._now()))
        self._carry_out(effects)
        life = member.life

        def go_on() -> None:
            if member.life == life and member.process.alive:
                self._send_state(member)

        if self.machine.attempt is not None:
            self._undecided.append(go_on)
        else:
            self.scheduler.after(self.setting.costs.recover_s, go_on)

    def _send_state(self, member: SimulatedMember) -> None:
        machine, now = self.machine, self._now()
        named = self._timed("holders", lambda: machine.members.holders(member.name, ()))
        holders = [m for m in named if self.members[m].process.alive]
        if not holders and machine.committed_round:
            back = machine.committed_round // SAVE_EVERY * SAVE_EVERY
            self.record.events["set back"] += 1
            machine.rewind(back, {})
            self.base = f"checkpoint-{back}"
        share = machine.newcomer(member.name, now, whole=not holders)
        slots = machine.commit_log.data_slots
        lease = slots.lease(member.name) if slots.cursors else None
        self._count("sources", 60 * len(holders))
        round_, base, size = machine.committed_round, self.base, self.setting.newcomer_bytes
        self._fetch(member, holders, size, lambda: member.recovered(round_, base, share, lease))

    def _fetch(
        self, member: SimulatedMember, holders: list[str], nbytes: float, then: Answer
    ) -> None:  # fmt: skip
        """Let a member have the state: from one of its site, another member, or the hub."""
        scheduler, now = self.scheduler, self._now()
        near = [m for m in member.reachable if m in self.machine.members.up_to_date]
        near = [m for m in near if m != member.name and self.members[m].process.alive]
        if near:
            donor = self.members[near[member.slot % len(near)]]
            self.record.events["bytes inside sites"] += round(nbytes)
            scheduler.after(8 * nbytes / member.inside_bps(donor), then, member.process)
        elif holders:  # newcomers begin at different donors, as `ask_order` does
            donor = self.members[holders[member.slot % len(holders)]]
            sending_s = 8 * nbytes / donor.profile.up_bps
            begun = max(now, self.network.relayed_in(donor, now, nbytes) - sending_s)
            slower_s = 8 * nbytes / min(donor.profile.up_bps, member.profile.down_bps)

            def pass_on() -> None:  # not before: until then the hub's line carries other bytes
                arrived = self.network.relayed_out(member, self._now(), nbytes)
                scheduler.at(max(begun + slower_s, arrived), then, member.process)

            scheduler.at(begun, pass_on, member.process)
        else:
            scheduler.at(self.network.relayed_out(member, now, nbytes), then, member.process)

    def stand(
        self,
        member: SimulatedMember,
        round_: int,
        base: str,
        answer: Callable[[GroupError | None], None],
    ) -> None:
        """Handle Standing, as `RecoveryCoordinator.standing`."""
        try:
            effects = self.machine.stand(member.name, round_, base, self._now())
        except GroupError as found:
            error = found
            self._tell("refused", member, None, lambda: answer(error))
            return
        self._tell("done", member, None, lambda: answer(None))
        self._carry_out(effects)

    def lost(self, member: SimulatedMember, cause: Cause) -> None:
        """A machine takes no part any more; when the hub notices depends on the cause."""
        if cause == Cause.CLOSED:
            self._give_up(member.name)
            return
        silent_s, gone_s = SILENT_S, GONE_S
        if cause == Cause.KILLED:
            silent_s, gone_s = broken_s(self.machine.commit_log.timings), RECONNECT_S
        self._losses += 1
        number = self._lost[member.name] = self._losses
        self.scheduler.after(silent_s, lambda: self._silence(member, number))
        self.scheduler.after(gone_s, lambda: self._end_session(member, number))

    def heard(self, member: SimulatedMember) -> bool:
        """A machine is there again; return whether its session has not ended meanwhile."""
        self._silent.discard(member.name)
        return self._lost.pop(member.name, 0) > 0

    def _silence(self, member: SimulatedMember, number: int) -> None:
        if self._lost.get(member.name) == number:
            self._silent.add(member.name)
            self._notice_silence()

    def _end_session(self, member: SimulatedMember, number: int) -> None:
        if self._lost.get(member.name) == number:
            self.heard(member)
            self._give_up(member.name)

    def _give_up(self, name: str) -> None:
        self._carry_out(self.machine.gone(name, self._now()))

    def _notice_silence(self) -> None:
        """Wait no longer for members that are silent, as the hub's tick does."""
        for name in sorted(self._silent):
            if self._waits_for(name):
                self._carry_out(self.machine.silent(name, self._now()))

    def _waits_for(self, name: str) -> bool:
        machine = self.machine
        if machine.attempt is not None:
            return machine.attends(name) and name not in machine.attempt.votes
        state = machine.members.states.get(name)
        return bool(machine.joins) and name not in machine.joins and state in WAITED_FOR

    # ------------------------------------------------------------------------------ effects

    def _now(self) -> float:
        return self.scheduler.now

    def _timed(self, kind: str, call: Callable[[], Any]) -> Any:
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
        self._notice_silence()
        self._carry_out(self._timed("tick", lambda: self.machine.settle(self._now())))
        self._tick_later()

    def _carry_out(self, effects: Iterable[Effect]) -> None:
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
            elif isinstance(effect, Refused):
                self._refuse(self.members[effect.member], effect.error)
            else:
                self.record.events[type(effect).__name__] += 1
        self._tick_later()

    def _planned(self, plan: RoundPlan) -> None:
        now = self._now()
        self._rows[plan.epoch] = RoundRow(
            plan.round, plan.epoch, self._first_join_s, now, len(plan.members), plan.route
        )
        self.record.rows.append(self._rows[plan.epoch])
        exchange = self.exchange = Exchange(self, plan)
        for name in plan.members:
            member = self.members[name]
            self._tell("plan", member, plan, partial(member.planned, plan, exchange))
        self.machine.plan_sent(now)
        self.scheduler.after(TICK_S, self._notice_silence)
        self.scheduler.at(now + plan.timeout_s, exchange.time_out)
        overdue_s = 1.5 * plan.timeout_s + 15.0
        self.scheduler.at(now + overdue_s + TICK_S, lambda: self._overdue(plan.epoch))

    def _overdue(self, epoch: int) -> None:
        attempt = self.machine.attempt
        if attempt is not None and attempt.plan.epoch == epoch:
            self._carry_out(self.machine.settle(self._now()))

    def _decided(self, effect: Decided) -> None:
        verdict, exchange = effect.verdict, self.exchange
        row = self._rows.pop(verdict.epoch)
        row.decided_s, row.committed = self._now(), verdict.committed
        row.contributors, row.reason = len(verdict.contributors), verdict.reason[:120]
        if verdict.committed:
            self.base, self.interval = verdict.digest, verdict.every
        if exchange is not None:
            exchange.closed = True
        self.exchange = None
        for name in effect.plan.members:
            member = self.members[name]
            self._tell("verdict", member, verdict, partial(member.decided, verdict))
        self.machine.verdict_sent(verdict, self._now())
        waiting, self._undecided = self._undecided, []
        for answer in waiting:
            self.scheduler.after(self.setting.costs.recover_s, answer)

    def contributors(self, verdict: Verdict) -> frozenset[str]:
        """Return the contributors of a verdict as a set, made once."""
        if self._contributors[0] != verdict.epoch:
            self._contributors = verdict.epoch, frozenset(verdict.contributors)
        return self._contributors[1]
