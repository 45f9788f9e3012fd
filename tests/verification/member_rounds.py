"""Member-rounds whose states are numbers: honest ones, and every way to lie about one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from atoll.verification.trace import FRESH, mark_positions, state_digest
from atoll.wire.messages import Commitment, VerificationAnswer, VerificationTask

BASE = "base"


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@dataclass
class Party:
    """Computes steps of a member-round, from step `wrong_from` on in a way of its own."""

    name: str
    wrong_from: int = 10_000
    """First step that it does not compute as the others do; the contribution is step n + 1 and the
    packet step n + 2."""
    until: int = 10_000
    """Last step that it does not compute so."""
    answers: bool = True
    accuses: bool = False
    """Whether it names a wrong digest of whatever it computes again for others."""
    finds_unusable: bool = False
    """Whether it says that it cannot begin with what others hand over."""
    friends: str = ""
    """Liars with the same word here compute the same wrong digests."""
    seen: list[str] = field(default_factory=list)

    def odd(self, step: int) -> str:
        return (self.friends or self.name) if self.wrong_from <= step <= self.until else ""

    def own_part(self, steps: int, *, opening: str) -> str:
        """Return the digest of the own part after so many steps."""
        found = opening
        for step in range(1, steps + 1):
            found = digest(found, step, self.odd(step))
        return found

    def state(self, steps: int, *, opening: str = FRESH) -> str:
        if not steps:
            return state_digest(BASE, opening)
        return state_digest("model", self.own_part(steps, opening=opening))

    def commitment(self, steps: int, *, opening: str = FRESH) -> Commitment:
        return Commitment(
            step=0, length=steps, steps=steps, slot=0, opening=opening,
            closing=self.own_part(steps, opening=opening),
            marks=[self.state(at, opening=opening) for at in mark_positions(steps)],
            contribution=self.contribution(steps), arithmetic="avx2",
        )  # fmt: skip

    def contribution(self, steps: int) -> str:
        return digest(self.own_part(steps, opening="x"), self.odd(steps + 1))

    def packet(self, steps: int) -> str:
        return digest(self.contribution(steps), self.odd(steps + 2))

    def answer(self, task: VerificationTask, *, opening: str = FRESH) -> VerificationAnswer:
        self.seen.append(task.kind)
        if self.finds_unusable and task.kind == "replay":
            why = "this own part cannot be used"
            return VerificationAnswer(task.challenge, task.kind, failed=why, unusable=True)
        every = range(task.first + 1, task.last + 1)
        at = mark_positions(task.steps) if task.kind == "replay" else every
        return VerificationAnswer(
            challenge=task.challenge, kind=task.kind,
            digests=[self.state(step, opening=opening) for step in at],
            closing="made up" if self.accuses else self.own_part(task.steps, opening=opening),
            contribution=self.contribution(task.steps), packet=self.packet(task.steps),
        )  # fmt: skip
