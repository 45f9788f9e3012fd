"""The verification of one job's rounds: commitments in, challenges and strikes out.

A hub gives it every committed round with the members' commitments (`committed`), hands out the
tasks that follow (`tasks`) and brings the findings back (`answer`, `deposited`). What people are
to know comes back as notices; a hub evicts the members that a notice names.

Some cheats need no challenge, because a commitment contradicts what the hub knows itself:

 * the data it was given, the step of the schedule, the number of steps at its pace;
 * the own part at its opening: that at its last closing, or that of a member that has just begun.
   A process that starts or recovers drops its optimizer's state, so there is no third one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from atoll.verification.challenge import TRIAL, Challenge, Facts, Result, Stage
from atoll.verification.draw import Draw
from atoll.verification.record import MemberBook, MemberRecord, SettledChallenge, VerificationRecord
from atoll.verification.scores import odd_ones, rated
from atoll.verification.trace import FRESH, mark_positions, planned_steps
from atoll.wire.messages import Commitment, Look, VerificationAnswer, VerificationTask

DECIDED = (Result.PASSED, Result.FAILED, Result.ACCUSED_FALSELY)

PATIENCE_S = 120.0
PATIENCE_ROUNDS = 10.0
"""How long a member may take for a task: so many seconds, and so many times the round's own."""


@dataclass(frozen=True, slots=True)
class MemberRound:
    """What the hub knows about one member's part in a committed round."""

    commitment: Commitment | None
    base: str
    pace: float = 1.0
    slot: int = 0
    cursor: dict[str, int] = field(default_factory=dict)
    """The data that it was given."""
    packet: str = ""
    """Digest of what the reducer got; empty: unknown."""
    busy_s: float = 0.0


def position(cursor: Mapping[str, int]) -> tuple[int, int]:
    """Return the pass and the offset of a position in a slot; an empty one is its beginning."""
    return cursor.get("data_pass", 0), cursor.get("offset", 0)


@dataclass(frozen=True, slots=True)
class Notice:
    """An event for the operator."""

    kind: str
    """`strike`, `evicted`, `unchecked` or `undecided`."""
    member: str
    text: str


@dataclass
class VerificationLedger:
    """See the module's docstring. Times are monotonic seconds."""

    draw: Draw
    book: MemberBook = field(default_factory=MemberBook)
    open: dict[int, Challenge] = field(default_factory=dict)
    number: int = 0
    drawn: int = -1
    """The last round for which was drawn who is challenged."""
    _arithmetic: dict[str, str] = field(default_factory=dict)
    _missed: bool = False
    _sent_away: set[str] = field(default_factory=set)
    _uncheckable: set[str] = field(default_factory=set)

    # ------------------------------------------------------------------------------- rounds

    def committed(
        self, round_: int, members: Mapping[str, MemberRound], now: float, *,
        looks: Mapping[str, Look] | None = None,
    ) -> list[Notice]:  # fmt: skip
        """Take over a committed round; draw who is challenged.

        `looks`: how the members' contributions look beside each other, as the reducer says.
        """
        # After a restart of the hub a round may have been committed that this ledger did not see.
        self._missed = self.drawn != round_ - 1 and bool(self.book.members)
        looks = {name: look for name, look in (looks or {}).items() if name in members}
        for member, look in looks.items():
            record = self.book.of(member)
            record.norm, record.alike, record.along = look.norm, look.alike, look.along
        self.drawn = round_
        notices: list[Notice] = []
        starts = Counter((m.commitment.step, m.commitment.length) for m in members.values()
                         if m.commitment is not None)  # fmt: skip
        sound: dict[str, Challenge] = {}
        for member, known in sorted(members.items()):
            record = self.book.of(member)
            record.rounds += 1
            if record.evicted:  # the job was resumed, and with it this member
                if member not in self._sent_away:
                    text = f"{member} was evicted before"
                    notices.append(Notice("evicted", member, text))
                self._sent_away.add(member)
                continue
            wrong = self._contradiction(record, round_, known, starts)
            if known.commitment is not None:
                record.round, record.closing = round_, known.commitment.closing
                self._arithmetic[member] = known.commitment.arithmetic
            if wrong:
                self._settled_by_hub(member, round_, wrong)
                notices += self._strike(member, f"round {round_}: {wrong}")
            elif known.commitment is not None:
                sound[member] = self._challenge(member, round_, known, known.commitment, now)
        busy = {challenge.member for challenge in self.open.values()}
        for member, why in self.draw.drawn(round_, sound, odd=odd_ones(looks)).items():
            if member in busy:
                continue
            if len(self._candidates(member, set(members))) < 2:
                notices += self._cannot(member)
                continue
            self._uncheckable.discard(member)
            self.draw.challenged(member)
            self._open(sound.pop(member), why)
        self._try_accusers(sound)
        return notices

    def _open(self, sound: Challenge, why: str, *, checker: str = "") -> None:
        self.number += 1
        checkers = [checker] if checker else []
        self.open[self.number] = replace(
            sound, number=self.number, why=why, checker=checker, checkers=checkers
        )

    def _try_accusers(self, sound: dict[str, Challenge]) -> None:
        """Let each member that accused falsely compute a round of a member that is trusted."""
        waiting = {one.checker for one in self.open.values() if one.why == TRIAL}
        waiting |= {one.member for one in self.open.values()}
        for accuser in sorted(self.draw.on_trial.keys() & sound.keys() - waiting):
            usual = self._arithmetic.get(accuser)
            free = [
                name for name in sorted(sound.keys() - self.draw.distrusted)
                if name not in waiting and self._arithmetic.get(name) == usual
            ]  # fmt: skip
            if len(free) > 1:  # one to be checked, one to judge
                member = free[self.draw.random.randrange(len(free))]
                waiting.add(member)
                self._open(sound[member], TRIAL, checker=accuser)

    def _contradiction(
        self, record: MemberRecord, round_: int, known: MemberRound,
        starts: Counter[tuple[int, int]],
    ) -> str:  # fmt: skip
        """Return what in a commitment contradicts what the hub knows; empty: nothing."""
        own = known.commitment
        if own is None:
            return "it committed to nothing"
        usual, count = starts.most_common(1)[0]
        if (own.step, own.length) != usual and 2 * count > starts.total():
            return (
                f"it did {own.length} steps from {own.step}, the others {usual[1]} from {usual[0]}"
            )
        steps = planned_steps(own.length, known.pace)
        if own.steps != steps:
            return f"it took {own.steps} steps instead of {steps}"
        if (own.slot, *position(own.cursor)) != (known.slot, *position(known.cursor)):
            return (
                f"it read slot {own.slot} from {position(own.cursor)}, "
                f"not {known.slot} from {position(known.cursor)}"
            )
        if len(own.marks) != len(mark_positions(steps)):
            return f"it named {len(own.marks)} marked steps"
        goes_on = record.round == round_ - 1 and own.opening == record.closing
        if own.opening != FRESH and not goes_on and not self._missed:
            return "its optimizer began in a state that its last round did not end in"
        return ""

    def _challenge(
        self, member: str, round_: int, known: MemberRound, own: Commitment, now: float
    ) -> Challenge:
        patience_s = PATIENCE_S + PATIENCE_ROUNDS * known.busy_s
        facts = Facts(
            round=round_, base=known.base, step=own.step, length=own.length, steps=own.steps,
            slot=known.slot, cursor=dict(known.cursor), packet=known.packet, patience_s=patience_s,
        )  # fmt: skip
        return Challenge(0, member, "", facts, own, deadline=now + patience_s)

    def _candidates(self, member: str, live: Collection[str]) -> list[str]:
        """Return who can compute a member's steps again: first those with the least to do."""
        arithmetic = self._arithmetic.get(member)
        found = [
            name for name in sorted(live)
            if name != member and self._arithmetic.get(name) == arithmetic
            and not self.book.of(name).evicted and name not in self.draw.distrusted
        ]  # fmt: skip
        load = Counter(name for one in self.open.values() for name in one.waits_for)

        def order(name: str) -> tuple[int, bool, float]:
            # Members without a check come first, so that those that accuse falsely are found early.
            return load[name], self.book.of(name).checks > 0, self.draw.random.random()

        return sorted(found, key=order)

    def _cannot(self, member: str) -> list[Notice]:
        """Say once that a member cannot be checked."""
        if member in self._uncheckable:
            return []
        self._uncheckable.add(member)
        what = self._arithmetic.get(member, "")
        text = f"{member} cannot be checked: fewer than two others compute like it ({what})"
        return [Notice("unchecked", member, text)]

    # -------------------------------------------------------------------------------- tasks

    def tasks(self, member: str) -> list[VerificationTask]:
        """Return what a member is to do now."""
        found = (challenge.task(member) for challenge in self.open.values())
        return [task for task in found if task is not None]

    def working(self, member: str, numbers: Collection[int], now: float) -> None:
        """A member says for which challenges it is computing something."""
        for number in numbers:
            if number in self.open:
                self.open[number].working(member, now)

    def answer(self, member: str, body: VerificationAnswer, now: float) -> list[Notice]:
        """Take a finding; one that is not expected is ignored."""
        challenge = self.open.get(body.challenge)
        if challenge is None:
            return []
        challenge.answer(member, body, now)
        return self._after()

    def deposited(self, member: str, number: int, position: int, now: float) -> list[Notice]:
        """A member has handed over the state after `position` steps; its digest is right."""
        challenge = self.open.get(number)
        if challenge is None:
            return []
        challenge.deposited(member, position, now)
        return self._after()

    def gone(self, member: str, now: float) -> list[Notice]:
        """A member has left the job, or its process has ended."""
        for challenge in self.open.values():
            if challenge.member == member and challenge.stage != Stage.SETTLED:
                self.draw.again.add(member)  # it is checked when it is back
            challenge.gone(member, now)
        return self._after()

    def tick(self, live: Collection[str], now: float) -> list[Notice]:
        """Process what only time brings, and find helpers among the `live` members."""
        for challenge in self.open.values():
            challenge.late(now)
            if challenge.needs_helper():
                challenge.assign(self._candidates(challenge.member, live), now)
        return self._after()

    # ------------------------------------------------------------------------------ results

    def _after(self) -> list[Notice]:
        """Take settled challenges out; return what people are to know of them."""
        notices: list[Notice] = []
        for number, one in list(self.open.items()):
            if one.result is None:
                continue
            self.open.pop(number, None)  # an eviction just now has taken its member's out already
            record = self.book.of(one.member)
            self.book.settled.append(
                SettledChallenge(
                    number, one.facts.round, one.member, one.why, one.result, one.checker,
                    ", ".join(one.judges), one.step, one.guilty, one.reason, *one.gains,
                )
            )  # fmt: skip
            on_trial = one.why == TRIAL and one.result == Result.PASSED
            if one.checker and one.result in DECIDED:
                self.book.of(one.checker).checks += 1
                if one.why == TRIAL or one.result == Result.ACCUSED_FALSELY:
                    falsely = one.result == Result.ACCUSED_FALSELY
                    self.draw.accused(one.checker, falsely=falsely)
            if one.result in DECIDED and not on_trial:  # a trial is no proof for others
                record.checked += 1
                if one.result != Result.FAILED:
                    record.passed += 1
                    self.draw.passed(one.member)
            if one.result == Result.PASSED and any(one.gains) and not on_trial:
                record.own, record.held_out = own, held_out = one.gains
                record.rating = rated(record.rating, own=own, held_out=held_out)
            elif one.result == Result.UNCHECKED and one.why != TRIAL:
                self.draw.again.add(one.member)
            notices += self._consequences(one)
        return notices

    def _consequences(self, one: Challenge) -> list[Notice]:
        """Give the strikes that follow from a settled challenge."""
        notices: list[Notice] = []
        where = f"round {one.facts.round}"
        if one.result == Result.FAILED:
            notices += self._strike(one.member, f"{where}: {one.reason}")
        elif one.result == Result.ACCUSED_FALSELY:
            text = f"{where}: it accused {one.member} falsely: {one.reason}"
            notices += self._strike(one.checker, text, accuser=True)
        elif one.result == Result.UNDECIDED:
            text = f"{one.member} in {where}: {one.reason}"
            notices.append(Notice("undecided", one.member, text))
        for judge in one.contradicted:
            self.draw.accused(judge, falsely=True)
            text = f"{where}: as a judge of {one.member} it found what two others did not"
            notices += self._strike(judge, text, accuser=True)
        return notices

    def _settled_by_hub(self, member: str, round_: int, reason: str) -> None:
        self.number += 1
        found = SettledChallenge(
            self.number, round_, member, "commitment", Result.FAILED, guilty=member, reason=reason
        )
        self.book.settled.append(found)
        self.book.of(member).checked += 1

    def _strike(self, member: str, reason: str, *, accuser: bool = False) -> list[Notice]:
        if self.book.of(member).evicted:
            self.draw.forget(member)
            return []
        self.book.of(member).accused_falsely += accuser
        evicted = self.book.strike(member, reason)
        count = len(self.book.of(member).strikes)
        notices = [Notice("strike", member, f"{member}: strike {count} in {reason}")]
        if not evicted:
            if not accuser:
                self.draw.struck(member)
            return notices
        self.draw.forget(member)
        for number, one in list(self.open.items()):
            if one.member == member:
                del self.open[number]
        self._sent_away.add(member)
        text = f"{member} is evicted after {count} strikes; the last in {reason}"
        return [*notices, Notice("evicted", member, text)]

    # -------------------------------------------------------------------------------- state

    def record(self) -> VerificationRecord:
        """Return what is kept on disk: open challenges are not, their members are checked again."""
        due = self.draw.again | {one.member for one in self.open.values()}
        return VerificationRecord(
            dict(self.book.members), list(self.book.settled), self.number, sorted(due)
        )

    def recall(self, known: VerificationRecord) -> None:
        """Take over what an earlier process kept."""
        self.book = MemberBook(dict(known.members))
        self.book.settled.extend(known.settled)
        self.number = known.number
        for member, one in known.members.items():
            if one.checked:
                self.draw.challenged(member)  # not a newcomer any more
            if len(one.strikes) > one.accused_falsely and not one.evicted:
                self.draw.struck(member)
            if one.accused_falsely and not one.evicted:
                self.draw.accused(member, falsely=True)
        self.draw.again = set(known.again)
