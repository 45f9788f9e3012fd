"""One member-round that is computed again: who does what next, and what follows from the digests.

    DEPOSIT   the member hands over the state it began with; the hub checks it against the
              commitment, so that no statement has to be believed
    REPLAY    a checker, another node, computes the round; the hub compares the digests
    DETAIL    they differ: both give the digest of every step between the last marks that agree
              and the first that differ
    STATE     the checker hands over the state before the first differing step
    JUDGE     a third node computes this step: who gave another digest has lied. A second judge has
              to agree where there is one, and a third decides between two, so that a checker and
              one judge who lie together convict no one; the judge that two contradict gets a
              strike too

A difference after the last step (of the own part, the contribution or the packet) goes to the judge
at once, who computes the last step, the contribution and the packet.

The checker never sees the member's digests, so it cannot claim to have found them. After a silence
longer than the patience at its turn the member gets a strike, a checker or a judge is replaced by
another. If a checker falls silent after it has named other digests, these still
count: the judges then compute from the beginning to the first difference that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.verification.trace import Outcome, first_difference, mark_positions, state_digest
from atoll.wire.messages import Commitment, VerificationAnswer, VerificationTask

LONGEST = 5.0
"""Times the patience for which a member may say that it is still computing."""

TRIAL = "trial"
"""Why a round is computed again by a checker that has accused falsely before."""

HELPERS = 3
"""Checkers, or judges, that are asked one after the other before a challenge is given up."""

AGREED = 2
"""Judges that have to agree, if so many can be asked."""


class Stage(StrEnum):
    """What a challenge waits for."""

    DEPOSIT = "deposit"
    REPLAY = "replay"
    DETAIL = "detail"
    STATE = "state"
    JUDGE = "judge"
    SETTLED = "settled"


class Result(StrEnum):
    """How a challenge ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The member computed something else, or did not answer."""
    ACCUSED_FALSELY = "accused falsely"
    """The checker computed something else."""
    UNDECIDED = "undecided"
    """Judges agree with neither: their arithmetic differs, or several lie."""
    UNCHECKED = "unchecked"
    """No checker was there to compute it again."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the hub knows about a member-round by itself, besides what the member committed to."""

    round: int
    base: str
    """Digest of the committed parameters that all members began with."""
    step: int
    length: int
    steps: int
    """Optimizer steps that the member had to take, by its pace."""
    slot: int
    cursor: dict[str, int]
    """The data that the member was given."""
    packet: str = ""
    """Digest of the packet that the reducer got; empty: unknown."""
    patience_s: float = 60.0


@dataclass
class Challenge:
    """See the module's docstring. Times are monotonic seconds."""

    number: int
    member: str
    why: str
    facts: Facts
    commitment: Commitment
    deadline: float
    latest: float = 0.0
    """The deadline cannot be moved beyond."""
    checker: str = ""
    judge: str = ""
    stage: Stage = Stage.DEPOSIT
    result: Result | None = None
    guilty: str = ""
    """The member that gets a strike; empty: none."""
    reason: str = ""
    step: int = 0
    """The first step that differs, counted from 1 in the period; 0: none was searched."""
    checkers: list[str] = field(default_factory=list)
    """Checkers that were asked so far."""
    judges: list[str] = field(default_factory=list)
    """Judges that were asked so far."""
    votes: dict[str, list[str]] = field(default_factory=dict)
    """Member or checker -> judges that found its digest."""
    contradicted: list[str] = field(default_factory=list)
    """Judges that found the other side's digest than those that agreed."""
    found: Outcome | None = None
    """What the round ends in, as the checker found it."""
    final: bool = False
    """Whether the difference is after the last step."""
    begin: int = 0
    """A judge computes the steps after this one."""
    part: tuple[int, int] = (0, 0)
    """Steps between which the first difference lies."""
    sides: dict[str, dict[int, str]] = field(default_factory=dict)
    """Member and checker -> number of steps done -> the digest that it names."""
    gains: tuple[float, float] = (0.0, 0.0)
    """What the contribution gains on the member's own and on held-out data, as its checker says."""
    unusable: int = 0
    """Checkers that could not begin with what the member handed over."""
    details: set[str] = field(default_factory=set)
    """Those that have named the digests of all steps of `part`."""

    # ------------------------------------------------------------------- what is to be done

    @property
    def waits_for(self) -> list[str]:
        """Members that have a task now."""
        if self.stage == Stage.DETAIL:
            return [name for name in (self.member, self.checker) if name not in self.details]
        at = {
            Stage.DEPOSIT: self.member, Stage.REPLAY: self.checker, Stage.STATE: self.checker,
            Stage.JUDGE: self.judge,
        }  # fmt: skip
        return [at[self.stage]] if at.get(self.stage) else []

    def task(self, member: str) -> VerificationTask | None:
        """Return what a member is to do now."""
        if member not in self.waits_for:
            return None
        facts = self.facts
        first, last = {
            Stage.DETAIL: self.part, Stage.STATE: (0, self.step - 1),
            Stage.JUDGE: (self.begin, self.step),
        }.get(self.stage, (0, facts.steps))  # fmt: skip
        return VerificationTask(
            challenge=self.number, kind=self.stage, member=self.member, round=facts.round,
            step=facts.step, length=facts.length, steps=facts.steps, slot=facts.slot,
            cursor=facts.cursor, first=first, last=last,
        )  # fmt: skip

    def wants(self, member: str, position: int) -> bool:
        """Return whether a member is to hand over the state after `position` steps."""
        at = {Stage.DEPOSIT: 0, Stage.STATE: self.step - 1}.get(self.stage)
        return member in self.waits_for and position == at

    def state_before(self, position: int) -> str:
        """Return the digest of the state after `position` steps on which both sides agree."""
        if position == 0:
            return self._opening
        return self.sides[self.checker][position]

    # ------------------------------------------------------------------------------ answers

    def deposited(self, member: str, position: int, now: float) -> None:
        """A state was handed over, and its digest is `state_before(position)`."""
        if self.wants(member, position):
            self._next(Stage.REPLAY if self.stage == Stage.DEPOSIT else Stage.JUDGE, now)

    def answer(self, member: str, body: VerificationAnswer, now: float) -> None:
        """Take a finding; one that is not expected is ignored."""
        if member not in self.waits_for or body.kind != self.stage:
            return
        if self.stage == Stage.REPLAY:
            self._replayed(body, now)
        elif self.stage == Stage.DETAIL:
            self._detailed(member, body, now)
        elif self.stage == Stage.JUDGE:
            self._judged(body, now)
        elif self.stage == Stage.STATE and body.failed:
            self._without(self.checker, now)

    def working(self, member: str, now: float) -> None:
        """A member says that it is computing what is asked of it: on a busy machine that takes."""
        if member in self.waits_for and self.stage != Stage.DEPOSIT:
            later = min(self.latest, now + self.facts.patience_s)
            self.deadline = max(self.deadline, later)

    def late(self, now: float) -> None:
        """Process the patience: strike a silent member, replace a silent checker or judge."""
        if self.stage == Stage.SETTLED or now < self.deadline:
            return
        silent = self.waits_for
        if self.member in silent:
            missing = "its state" if self.stage == Stage.DEPOSIT else "the digests of its steps"
            self.settle(Result.FAILED, self.member, f"it did not hand over {missing} in time")
        else:
            self._without(silent[0] if silent else "", now)

    def gone(self, member: str, now: float) -> None:
        """A member has left: its part is over, or done by another one."""
        if self.stage == Stage.SETTLED:
            return
        if member == self.member and self.stage in (Stage.DEPOSIT, Stage.DETAIL):
            self.settle(Result.UNCHECKED, "", f"{member} is gone")
        elif member in self.waits_for:
            self._without(member, now)

    def _replayed(self, body: VerificationAnswer, now: float) -> None:
        positions = (0, *mark_positions(self.facts.steps))
        if body.failed or len(body.digests) != len(positions) - 1:
            self.unusable += bool(body.failed) and body.unusable
            self._without(self.checker, now)
            return
        own, found = [self._opening, *self.commitment.marks], [self._opening, *body.digests]
        self.found = Outcome(body.closing, body.contribution, body.packet)
        if len(body.gains) == 2 and all(map(math.isfinite, body.gains)):
            self.gains = body.gains[0], body.gains[1]
        if own[-1] == found[-1] and self._own_outcome.agrees(self.found):
            self.settle(Result.PASSED, "", "")
            return
        # A mark that differs comes first, even if the states agree again after it.
        marks = zip(own, found, strict=True)
        at = next((i for i, (mine, other) in enumerate(marks) if mine != other), 0)
        self.final, at = not at, at or len(own) - 1
        self.part = (positions[at - 1], positions[at])
        self.sides = {
            self.member: dict(zip(positions, own, strict=True)),
            self.checker: dict(zip(positions, found, strict=True)),
        }
        self.details.clear()
        self._next(Stage.DETAIL, now)
        if self.part[1] - self.part[0] == 1:  # there is no step between
            self._search(now)

    def _detailed(self, member: str, body: VerificationAnswer, now: float) -> None:
        first, last = self.part
        if body.failed or len(body.digests) != last - first:
            if member == self.checker:
                self._without(member, now)
            else:
                why = f"it cannot name the digests of its steps: {body.failed or 'too few'}"
                self.settle(Result.FAILED, member, why)
            return
        side = self.sides[member]
        if body.digests[-1] != side[last]:
            text = f"its digests of single steps contradict its own at step {last}"
            result = Result.FAILED if member == self.member else Result.ACCUSED_FALSELY
            self.settle(result, member, text)
            return
        side.update(enumerate(body.digests, first + 1))
        self.details.add(member)
        if not self.waits_for:
            self._search(now)

    def _search(self, now: float) -> None:
        """Find the first step between two marks that differs; the next is its judge."""
        first, last = self.part
        own, found = ([side[at] for at in range(first, last + 1)] for side in self.sides.values())
        if self.final and own[:-1] != found[:-1]:
            # They agree again at the end: there is a difference between, which comes first.
            at = next(i for i, pair in enumerate(zip(own, found, strict=True)) if len({*pair}) > 1)
            self.final, self.step = False, first + at
        else:
            self.step = last if self.final else first + first_difference(own, found)
        self.begin = self.step - 1
        self._next(Stage.JUDGE if self.step == 1 else Stage.STATE, now)

    def _judged(self, body: VerificationAnswer, now: float) -> None:
        if body.failed or len(body.digests) != self.step - self.begin:
            self._without(self.judge, now)
            return
        outcome = Outcome(body.closing, body.contribution, body.packet)
        digest = body.digests[-1]
        own = self.sides[self.member][self.step] == digest
        other = self.sides[self.checker][self.step] == digest
        if self.final and own:
            own, other = (side.agrees(outcome) for side in (self._own_outcome, self._found))
        if own == other:
            self._without(self.judge, now)
        else:
            right = self.member if own else self.checker
            agreed = self.votes.setdefault(right, [])
            agreed.append(self.judge)
            if len(agreed) >= AGREED:
                self._convict(right)
            else:
                self._without(self.judge, now)

    def _convict(self, right: str) -> None:
        """End the challenge with a strike for the other side than the one that is right."""
        if len(self.votes.get(right, ())) >= AGREED:
            wrong = self.checker if right == self.member else self.member
            self.contradicted = self.votes.get(wrong, [])
        if right == self.checker:
            self.settle(Result.FAILED, self.member, self._difference())
        else:
            self.settle(Result.ACCUSED_FALSELY, self.checker, self._difference())

    def _difference(self) -> str:
        if not self.final:
            steps = f"step {self.step}"
            if self.step - self.begin > 1:
                steps = f"one of the steps {self.begin + 1} to {self.step}"
            return f"{steps} of {self.facts.steps} was not computed as the job says"
        one, other = self._own_outcome, self._found
        if one.contribution != other.contribution:
            return "the contribution is not the difference that its steps made"
        if one.closing != other.closing:
            return "the optimizer's state is not the one that its steps made"
        return "what it sent is not the contribution that it committed to"

    # ------------------------------------------------------------------------------ changes

    def assign(self, candidates: Sequence[str], now: float) -> None:
        """Give the open place of checker or judge to the first of `candidates` that may have it."""
        if self.stage == Stage.REPLAY and not self.checker:
            free = [name for name in candidates if name not in (self.member, *self.checkers)]
            if not free or len(self.checkers) >= (1 if self.why == TRIAL else HELPERS):
                if AGREED <= len(self.checkers) == self.unusable:
                    # It is what its last round ended in, so a member has made it up.
                    text = "its optimizer's state is none with which steps can be computed"
                    self.settle(Result.FAILED, self.member, text)
                else:
                    self.settle(Result.UNCHECKED, "", "there is no checker to compute it again")
                return
            self.checker = free[0]
            self.checkers.append(self.checker)
            self._next(self.stage, now)
        elif self.stage == Stage.JUDGE and not self.judge:
            involved = (self.member, self.checker, *self.judges)
            free = [name for name in candidates if name not in involved]
            if not free or len(self.judges) >= HELPERS:
                own, other = (len(self.votes.get(name, ())) for name in (self.member, self.checker))
                if own != other:
                    self._convict(self.member if own > other else self.checker)
                    return
                text = f"no judge could decide who is right about step {self.step}"
                if own:
                    text = f"judges contradict each other about step {self.step}"
                self.settle(Result.UNDECIDED, "", text)
                return
            self.judge = free[0]
            self.judges.append(self.judge)
            self._next(self.stage, now)

    def needs_helper(self) -> bool:
        """Return whether `assign` has a place to give."""
        if self.stage == Stage.REPLAY:
            return not self.checker
        return self.stage == Stage.JUDGE and not self.judge

    def settle(self, result: Result, guilty: str, reason: str) -> None:
        """End the challenge."""
        self.stage, self.result, self.guilty, self.reason = Stage.SETTLED, result, guilty, reason

    def _without(self, helper: str, now: float) -> None:
        """A checker or a judge is of no use: another one takes its place."""
        if helper == self.judge and self.stage == Stage.JUDGE:
            self.judge = ""
        elif helper == self.checker and self.stage in (Stage.DETAIL, Stage.STATE):
            # What it has named stands: it is judged without its help.
            self.step, self.begin = self.step or self.part[1], 0
            self._next(Stage.JUDGE, now)
        elif helper == self.checker:
            self.checker, self.found, self.final, self.step = "", None, False, 0
            self.details.clear()
            self.votes.clear()
            self._next(Stage.REPLAY, now)

    def _next(self, stage: Stage, now: float) -> None:
        self.stage, self.deadline = stage, now + self.facts.patience_s
        self.latest = now + LONGEST * self.facts.patience_s

    @property
    def _opening(self) -> str:
        return state_digest(self.facts.base, self.commitment.opening)

    @property
    def _own_outcome(self) -> Outcome:
        own = self.commitment
        return Outcome(own.closing, own.contribution, self.facts.packet)

    @property
    def _found(self) -> Outcome:
        if self.found is None:
            raise RuntimeError("no checker has found anything yet")
        return self.found
