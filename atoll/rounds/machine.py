"""The rules of a round, without sockets, files or a clock: who meets, and what was decided.

A round is join -> reduce -> commit. :class:`RoundMachine` is told what happened (a member joined,
voted, was lost; time went by) and returns what follows. It never acts: whoever calls it makes each
consequence durable before anyone hears of it (see `rounds.py`).

The transaction is that of two-phase commit (Gray, "Notes on data base operating systems", 1978)
with a coordinator that never waits for a dead participant: a member that is lost before it voted is
left out, and finds on its return that the group went on without it.
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
    majority_base,
    minority,
    tally,
    wrong_lease,
)
from atoll.rounds.data_slots import Cursor
from atoll.rounds.effects import Decided, Effect, EventRaised, Refused
from atoll.rounds.quorum import Quorum
from atoll.rounds.timing import hold_s
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

LEAST_READY_S = 2.0
"""A member that has just taken over the state has at least so long for its first join."""


@dataclass
class RoundMachine(Quorum):
    """The rounds of one job: what happens to them, and what follows."""

    # ------------------------------------------------------------------- what happened

    def expect(self, member: str) -> None:
        """A process was launched for this member at the start of the job: rounds wait for it."""
        if member not in self.aside:
            self.roll.begin(member, "expected")

    def launch(self, member: str) -> None:
        """A process was launched while the job runs: it says itself when it can take part."""
        if member not in self.aside:
            self.roll.begin(member, "expected" if self.starting else "launched")

    def register(self, member: str, *, dial: list[str]) -> None:
        """A member entered the job."""
        if member in self.aside:
            return
        self.dials[member] = dial
        if self.roll.standing.get(member) not in ("live", "recovering", "away"):
            fresh = self.recovers and not self.roll.knows(member)
            self.roll.standing[member] = "launched" if fresh else "live"

    def back(self, member: str) -> None:
        """The process of a member that was taken for lost speaks again."""
        if member in self.aside:
            return
        known = self.roll.knows(member) or not self.recovers
        self.roll.standing[member] = "live" if known else "away"

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """A member wants to take part in a round.

        Raises:
            LeftBehind: that round is committed, or cannot be the next one, or the member comes from
                a history or with data that are not those of the group.
            GroupError: the member is leaving.
        """
        self._check_join(member, body, now)
        effects: list[Effect] = []
        if self.attempt is not None and self.attempt.attends(member):
            if body.round == self.attempt.plan.round:
                self.roll.standing[member] = "live"
                return []
            effects += self.attempt.leave(member)
        self.roll.standing[member] = "live"
        if body.round == self.committed_round:
            self.proved(member, body.base)
            if body.lease is not None:
                self.progress.leases.held.setdefault(member, body.lease.slot)
        self.lobby.enter(member, body, now)
        return effects + self.settle(now)

    def _check_join(self, member: str, body: RoundJoin, now: float) -> None:
        if member in self.aside:
            raise GroupError("this member takes no part in rounds", given=member)
        if member in self.roll.leaving:
            raise GroupError(LEAVING, given=member)
        self.lobby.learn_late(member, body.round, now, self.progress.measures)
        late, early = body.round < self.committed_round, body.round > self.committed_round
        error: GroupError | None = None
        if late or (early and not self.unproved):
            error = is_behind(body.round, self.committed_round)
        elif member in self.roll.outsiders:
            error = diverged_history(body.base, self.committed_round)
        elif not early and body.lease is not None and not self.attends(member):
            wrong = self.progress.leases.wrong(member, body.lease)
            error = wrong_lease(wrong) if wrong else None
        if error is not None:
            if not (late or early) or not self.roll.knows(member):
                self.roll.forget(member)
                self.roll.standing[member] = "away"
            raise error

    def vote(self, member: str, body: RoundVote, now: float) -> list[Effect]:
        """A member tells how its reduce went.

        Raises:
            EpochChanged: the attempt is not the open one (nor one with a known verdict).
            GroupError: the vote cannot be true; :meth:`withdraw` leaves the member out.
        """
        attempt = self.attempt
        if attempt is None or body.epoch != attempt.plan.epoch:
            raise not_open(body.epoch, attempt)
        if member not in attempt.plan.members:
            raise not_open(body.epoch, None)
        attempt.take(member, body)
        self.roll.standing[member] = "live"
        return self.settle(now)

    def withdraw(self, member: str, now: float) -> list[Effect]:
        """Leave a member out of the open attempt whose vote was refused."""
        return self.step_aside(member, "away") + self.settle(now)

    def gone(self, member: str, now: float, *, lost: bool = True) -> list[Effect]:
        """A member was lost, replaced by a new process, or (not `lost`) has finished."""
        if member in self.aside:
            return []
        self.roll.finished = self.roll.finished or not lost
        effects = self.step_aside(member, "gone", tell_members=lost)
        return effects + self.settle(now)

    def leave(self, member: str, now: float) -> list[Effect]:
        """A member told that it leaves: nobody waits for it, and it waits for nobody."""
        effects: list[Effect] = []
        if member in self.aside:
            return effects
        if member in self.joins:
            effects.append(Refused(member, GroupError(LEAVING, given=member)))
        self.roll.leaving.add(member)
        return effects + self.gone(member, now)

    def silent(self, member: str, now: float) -> list[Effect]:
        """Nothing was heard of an awaited member: this round goes on without it."""
        text = f"{member} is silent: round {self.committed_round} goes on without it"
        note = EventRaised("member-silent", text, member)
        return [note, *self.step_aside(member, "away"), *self.settle(now)]

    def recover(self, member: str, now: float) -> list[Effect]:
        """A member lacks the committed state, and takes it over now."""
        effects: list[Effect] = []
        if self.attempt is None or member not in self.attempt.votes:
            effects = self.step_aside(member, "recovering")
        self.roll.forget(member)
        self.roll.standing[member] = "recovering"
        self.roll.asked_at[member] = now
        return effects + self.settle(now)

    def newcomer(self, member: str, now: float, *, whole: bool) -> float:
        """Return the share of a period's steps that a member does before its first join."""
        trainers = self.roll.trainers()
        pace = self.progress.newcomer_pace(member, trainers, now=now, whole=whole)
        self.roll.busy_s[member] = pace * (self.progress.measures.period_s or 0.0)
        return pace

    def stand(self, member: str, round_: int, base: str, now: float) -> list[Effect]:
        """A member has taken over the committed state.

        Raises:
            LeftBehind: another round was committed meanwhile, or its state is another one.
        """
        if round_ != self.committed_round:
            raise is_behind(round_, self.committed_round)
        others = {m: told for m, told in self.roll.bases.items() if m != member}
        if others and majority_base(others) != base:
            raise differs(base, majority_base(others), round_)
        self.proved(member, base)
        ready_s = LEAST_READY_S + self.roll.busy_s.get(member, 0.0)
        self.roll.recovered(member, now + min(hold_s(self.progress.measures), ready_s))
        return self.settle(now)

    def rewind(self, round_: int, cursors: Mapping[int, Cursor]) -> None:
        """Nobody holds the committed state any more: go on from an earlier round."""
        self.committed_round, self.unproved, self.unwell = round_, False, set()
        self.start_round = min(self.start_round, round_)
        self.roll.set_back()
        self.progress.set_back(cursors)

    def reducer(self, now: float, *, ready: bool) -> list[Effect]:
        """The job's reducer came or went."""
        self.reducer_ready = ready
        return self.settle(now)

    # ------------------------------------------------------------------ what follows

    def settle(self, now: float) -> list[Effect]:
        """Return everything that follows by now; also to be called as time goes by."""
        return self._decide(now) + self.gather(now)

    def reopen(
        self, plan: RoundPlan, now: float, joins: Mapping[str, RoundJoin] | None = None
    ) -> None:
        """Take up an attempt without a verdict that an earlier life of the hub had planned."""
        self.attempt = Attempt(plan, now, joins or {})

    def _decide(self, now: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None:
            return []
        effects: list[Effect] = []
        if not attempt.hopeless(self.unwell):
            if attempt.missing() and not attempt.overdue(now):
                return []
            for member in attempt.missing():
                effects += self.leave_out(member, "it did not vote in time")
            effects += self._leave_out_odd_ones(attempt)
        verdict = tally(attempt.plan, attempt.votes, attempt.left, least=self.min_nodes)
        self.unwell = {m for m, vote in attempt.votes.items() if not vote.ok}
        if verdict.committed:
            verdict, notes = self._commit(attempt, verdict, now)
            effects += notes
        else:
            self.aborted = attempt
            text = f"round {verdict.round} was aborted (epoch {verdict.epoch}): {verdict.reason}"
            alarm = verdict.reason.startswith(DIFFERENT)
            effects.append(EventRaised("round-aborted", text, alarm=alarm))
        self.attempt = None
        effects.append(self._decided(attempt, verdict, now))
        late = [m for m, join in self.joins.items() if join.round < self.committed_round]
        return effects + [effect for member in late for effect in self.refuse(member)]

    def _decided(self, attempt: Attempt, verdict: Verdict, now: float) -> Decided:
        progress = self.progress
        contributed = [m for m in verdict.contributors if m in self.roll.stands]
        return Decided(
            attempt.plan,
            verdict,
            now - attempt.planned_at,
            dict(progress.leases.cursors),
            progress.measures,
            tuple(contributed) if verdict.committed else (),
        )

    def _leave_out_odd_ones(self, attempt: Attempt) -> list[Effect]:
        """Let nobody hold up the others twice: neither by another result nor by none."""
        effects: list[Effect] = []
        for member, why in minority(attempt.counted(), self.unwell).items():
            effects += self.leave_out(member, why)
            if why == ODD:
                text = f"{member} holds another result of round {self.committed_round}"
                effects.append(EventRaised("result-differs", text, member, alarm=True))
        return effects

    def _commit(
        self, attempt: Attempt, verdict: Verdict, now: float
    ) -> tuple[Verdict, list[EventRaised]]:
        self.committed_round = attempt.plan.round + 1
        self.unproved, self.unwell, self.aborted = False, set(), None
        self.roll.committed(attempt.counted())
        here = {m for m, s in self.roll.standing.items() if s != "gone"}
        trainers = sorted({*self.roll.trainers(), *(here & set(verdict.contributors))})
        return self.progress.commit(attempt, verdict, trainers, now)
