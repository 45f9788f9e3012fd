"""The rules of a round, without sockets, files or a clock.

A round is join -> reduce -> commit:

1. Members *join* and wait. When enough have joined, or the time for the others is over,
   `quorum.py` makes a plan: the members, the route and an epoch number. That opens an attempt.
2. The members *reduce* among themselves, invisibly to the machine.
3. Each member *votes*. When no vote is missing, `checks.py` counts them and the attempt ends with
   one verdict: committed or aborted. After an abort the members join again.

Each method of :class:`RoundMachine` processes one event and returns its effects, in order. The
machine never acts: the caller MUST make an effect durable before it sends anything about it
(`hub/rounds/service.py`; in one process, `group/in_process/coordinator.py`).

This is two-phase commit (Gray, "Notes on data base operating systems", 1978) with a coordinator
that never waits for a dead participant: a member lost before its vote is left out, and has to
recover the committed state when it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import GroupError
from atoll.rounds.attempt import Attempt, not_open
from atoll.rounds.checks import (
    DIFFERENT,
    LEAVING,
    ODD,
    differs,
    diverged_history,
    is_behind,
    minority,
    tally,
    wrong_lease,
)
from atoll.rounds.commit import learn_steps
from atoll.rounds.data_slots import Cursor
from atoll.rounds.effects import Decided, Effect, EventRaised, Refused
from atoll.rounds.quorum import Quorum
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict
from atoll.wire.states import RoundMemberState

RETURNED = (RoundMemberState.LIVE, RoundMemberState.RECOVERING, RoundMemberState.AWAY)
"""States that a member keeps when it registers again, because its process was here before."""

LEAST_READY_S = 2.0
"""Least time for the first join of a member that has just recovered."""

HOLD_MARGIN = 1.5
"""A round waits for a member that recovers slowly this many times as long as that took before."""


@dataclass
class RoundMachine(Quorum):
    """The rounds of one job; see the module's docstring. Times are monotonic seconds."""

    # -------------------------------------------------------------------------- events

    def expect(self, member: str) -> None:
        """A process was launched at the start of the job: rounds wait for it."""
        if member not in self.aside:
            self.members.begin(member, RoundMemberState.EXPECTED)

    def launch(self, member: str) -> None:
        """A process was launched later: rounds wait for it once it asks for the state."""
        if member not in self.aside:
            self.members.begin(
                member, RoundMemberState.EXPECTED if self.starting else RoundMemberState.LAUNCHED
            )

    def register(self, member: str, *, dial: list[str]) -> None:
        """A process has entered the job."""
        if member in self.aside:
            return
        self.dials[member] = dial
        if self.members.states.get(member) not in RETURNED:
            fresh = self.recovers and not self.members.knows(member)
            self.members.states[member] = (
                RoundMemberState.LAUNCHED if fresh else RoundMemberState.LIVE
            )

    def back(self, member: str) -> None:
        """A member that was considered lost has reconnected."""
        if member in self.aside:
            return
        known = self.members.knows(member) or not self.recovers
        self.members.states[member] = RoundMemberState.LIVE if known else RoundMemberState.AWAY

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """A member waits for the plan of a round.

        Raises:
            LeftBehind: the round is committed or not the next one, or the member has another
                history or another member's data.
            GroupError: the member is leaving.
        """
        self._check_join(member, body, now)
        effects: list[Effect] = []
        if self.attempt is not None and self.attempt.attends(member):
            # The answer to its first join was lost: the caller sends the open plan again. A join
            # of another round means that the process has restarted and will not vote.
            if body.round == self.attempt.plan.round:
                self.members.states[member] = RoundMemberState.LIVE
                return []
            effects += self.attempt.leave(member)
        self.members.states[member] = RoundMemberState.LIVE
        self.lines.learn(member, body.lines, among=self.members.states)
        if body.round == self.committed_round:  # `quorum.py` decides about later rounds
            self.proved(member, body.base)
            if body.lease is not None:
                self._hold(member, body.lease.slot)
        self.pending.enter(member, body, now)
        return effects + self.settle(now)

    def _hold(self, member: str, slot: int) -> None:
        slots = self.commit_log.data_slots
        if member not in slots.held:
            slots.hold(member, slot)

    def _check_join(self, member: str, body: RoundJoin, now: float) -> None:
        if member in self.aside:
            raise GroupError("this member takes no part in rounds", given=member)
        if member in self.members.leaving:
            raise GroupError(LEAVING, given=member)
        self.pending.learn_late(member, body.round, now, self.commit_log.timings)
        late, early = body.round < self.committed_round, body.round > self.committed_round
        if late:  # else a slow member is never given fewer steps, and misses every round
            learn_steps(self.commit_log.timings, {member: body})
        error: GroupError | None = None
        if late or (early and not self.unproved):
            error = is_behind(body.round, self.committed_round)
        elif member in self.members.outsiders:
            error = diverged_history(body.base, self.committed_round)
        elif not early and body.lease is not None and not self.attends(member):
            wrong = self.commit_log.data_slots.wrong(member, body.lease)
            error = wrong_lease(wrong) if wrong else None
        if error is not None:
            # A member that is only late or early may still be a donor of the committed state.
            if not (late or early) or not self.members.knows(member):
                self.members.forget(member)
                self.members.states[member] = RoundMemberState.AWAY
            raise error

    def vote(self, member: str, body: RoundVote, now: float) -> list[Effect]:
        """A member votes on the open attempt.

        Raises:
            EpochChanged: the attempt is not the open one (nor one with a known verdict).
            GroupError: the vote contradicts the plan; :meth:`withdraw` leaves the member out.
        """
        attempt = self.attempt
        if attempt is None or body.epoch != attempt.plan.epoch:
            raise not_open(body.epoch, attempt)
        if member not in attempt.members:
            raise not_open(body.epoch, None)
        attempt.take(member, body)
        if body.report is not None and member in attempt.joins:
            attempt.joins[member] = body.report
        self.members.states[member] = RoundMemberState.LIVE
        return self.settle(now)

    def withdraw(self, member: str, now: float) -> list[Effect]:
        """Leave a member with a refused vote out of the open attempt."""
        return self.step_aside(member, RoundMemberState.AWAY) + self.settle(now)

    def gone(self, member: str, now: float, *, lost: bool = True) -> list[Effect]:
        """A process was lost, was replaced, or (not `lost`) has finished."""
        if member in self.aside:
            return []
        self.members.finished = self.members.finished or not lost
        effects = self.step_aside(member, RoundMemberState.GONE, tell_members=lost)
        return effects + self.settle(now)

    def leave(self, member: str, now: float) -> list[Effect]:
        """A member leaves for good: rounds stop waiting for it, and its own join ends."""
        effects: list[Effect] = []
        if member in self.aside:
            return effects
        if member in self.joins:
            effects.append(Refused(member, GroupError(LEAVING, given=member)))
        self.members.leaving.add(member)
        return effects + self.gone(member, now)

    def silent(self, member: str, now: float) -> list[Effect]:
        """Continue without a member that has been unreachable for too long."""
        text = f"{member} is silent: round {self.committed_round} continues without it"
        note = EventRaised("member-silent", text, member)
        return [note, *self.step_aside(member, RoundMemberState.AWAY), *self.settle(now)]

    def recover(self, member: str, now: float, *, needs_s: float = 0.0) -> list[Effect]:
        """A member recovers the committed state; rounds wait for it, for a bounded time.

        `needs_s`: how long it took to fetch a state that is outdated by now.
        """
        effects: list[Effect] = []
        # A vote stays valid even if the member then leaves the round.
        if self.attempt is None or member not in self.attempt.votes:
            effects = self.step_aside(member, RoundMemberState.RECOVERING)
        self.members.forget(member)
        self.members.states[member] = RoundMemberState.RECOVERING
        self.members.asked_at[member] = now
        self.members.away_since.setdefault(member, now)
        effects += self._hold_for(member, needs_s, now)
        return effects + self.settle(now)

    def _hold_for(self, member: str, needs_s: float, now: float) -> list[Effect]:
        """Let a round wait for a member that needs longer than usual, if that is worth it."""
        hold_s = HOLD_MARGIN * needs_s
        worth = hold_s > self.hold_s() and self.members.earns(member, needs_s, now)
        if not worth or self.waits is not None or member in self.members.holds:
            return []
        self.members.holds[member] = hold_s
        text = (
            f"{member} needs {needs_s:.0f} s to recover the state: round {self.committed_round}"
            f" waits for it, {hold_s:.0f} s at most"
        )
        return [EventRaised("waits-to-recover", text, member)]

    def newcomer(self, member: str, now: float, *, whole: bool) -> float:
        """Return the share of a period's steps that a member does before its first join."""
        self.members.away_since.setdefault(member, now)
        pace = self.commit_log.newcomer_pace(member, self.members.trainers, now=now, whole=whole)
        self.members.busy_s[member] = pace * (self.commit_log.timings.period_s or 0.0)
        return pace

    def stand(self, member: str, round_: int, base: str, now: float) -> list[Effect]:
        """A member has recovered the committed state.

        Raises:
            LeftBehind: another round was committed meanwhile, or its state is another one.
        """
        if round_ != self.committed_round:
            raise is_behind(round_, self.committed_round)
        usual = self.members.bases.majority_without(member)
        if usual not in ("", base):
            raise differs(base, usual, round_)
        self.proved(member, base)
        ready_s = LEAST_READY_S + self.members.busy_s.get(member, 0.0)
        self.members.recovered(member, now + min(self.hold_s(), ready_s))
        return self.settle(now)

    def may_return(self) -> bool:
        """Return whether all holders of the state, or all members, are lost but may reconnect."""
        if self.recovers:
            return not self.members.holders("", ()) and bool(self.members.missed())
        return all(state == RoundMemberState.GONE for state in self.members.states.values())

    def rewind(self, round_: int, cursors: Mapping[int, Cursor]) -> None:
        """Continue from an earlier round; no member holds the committed state any more."""
        self.committed_round, self.unproved, self.voted_against = round_, False, set()
        self.start_round = min(self.start_round, round_)
        self.members.set_back()
        self.commit_log.set_back(cursors)

    def reducer(self, now: float, *, ready: bool) -> list[Effect]:
        """The job's reducer has connected or was lost."""
        self.reducer_ready = ready
        return self.settle(now)

    # ----------------------------------------------------------------------- effects

    def settle(self, now: float) -> list[Effect]:
        """Return the effects due by now; also to be called when only time has passed."""
        return self._decide(now) + self.gather(now)

    def plan_sent(self, now: float) -> None:
        """The open plan is durable and goes to its members only now.

        The time that its write took, e.g. on a full disk, counts for no limit and no measurement.
        """
        if self.attempt is not None:
            if self.commit_log.committed_at is not None:
                self.commit_log.committed_at += now - self.attempt.planned_at
            self.attempt.planned_at = now

    def verdict_sent(self, verdict: Verdict, now: float) -> None:
        """A verdict is durable and goes to its members only now: a period begins with it."""
        if verdict.committed and self.commit_log.committed_at is not None:
            self.commit_log.committed_at = now

    def reopen(
        self, plan: RoundPlan, now: float, joins: Mapping[str, RoundJoin] | None = None
    ) -> None:
        """Resume an attempt that was open when the hub stopped."""
        self.attempt = Attempt(plan, now, dict(joins or {}))

    def _decide(self, now: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None:
            return []
        effects: list[Effect] = []
        # One vote against decides at once, so that the others do not finish a useless reduce.
        if not attempt.hopeless(self.voted_against):
            if attempt.waits and not attempt.overdue(now):
                return []
            for member in attempt.missing():
                effects += self.leave_out(member, "it did not vote in time")
            effects += self._leave_out_odd_ones(attempt)
        verdict = tally(
            attempt.plan,
            attempt.votes,
            attempt.left,
            least=self.min_nodes,
            whole=self.whole,
        )
        self.voted_against = {m for m, vote in attempt.votes.items() if not vote.ok}
        if verdict.committed:
            verdict, notes = self._commit(attempt, verdict, now)
            effects += notes
        else:
            self.aborted = attempt  # `_learn_from_abort` examines it before the next plan
            text = f"round {verdict.round} was aborted (epoch {verdict.epoch}): {verdict.reason}"
            alarm = verdict.reason.startswith(DIFFERENT)
            effects.append(EventRaised("round-aborted", text, alarm=alarm))
        self.attempt = None
        effects.append(self._decided(attempt, verdict, now))
        late = [m for m, join in self.joins.items() if join.round < self.committed_round]
        return effects + [effect for member in late for effect in self.refuse(member)]

    def _decided(self, attempt: Attempt, verdict: Verdict, now: float) -> Decided:
        commit_log = self.commit_log
        contributed = [m for m in verdict.contributors if m in self.members.up_to_date]
        return Decided(
            attempt.plan,
            verdict,
            now - attempt.planned_at,
            dict(commit_log.data_slots.cursors),
            commit_log.timings,
            tuple(contributed) if verdict.committed else (),
        )

    def _leave_out_odd_ones(self, attempt: Attempt) -> list[Effect]:
        """Leave out members that would block the others a second time."""
        effects: list[Effect] = []
        for member, why in minority(attempt.counted(), self.voted_against).items():
            effects += self.leave_out(member, why)
            if why == ODD:
                text = f"{member} holds another result of round {self.committed_round}"
                effects.append(EventRaised("result-differs", text, member, alarm=True))
        return effects

    def _commit(
        self, attempt: Attempt, verdict: Verdict, now: float
    ) -> tuple[Verdict, list[EventRaised]]:
        self.committed_round = attempt.plan.round + 1
        self.unproved, self.voted_against, self.aborted = False, set(), None
        self.members.committed(attempt.counted())
        here = {m for m, s in self.members.states.items() if s != RoundMemberState.GONE}
        trainers = sorted({*self.members.trainers(), *(here & set(verdict.contributors))})
        return self.commit_log.commit(attempt, verdict, trainers, now, guests=self.guests)
