"""A job's members that commit, answer and are checked, with the real ledger and draw."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from atoll.verification.draw import Draw
from atoll.verification.ledger import MemberRound, Notice, VerificationLedger
from atoll.verification.trace import FRESH
from atoll.wire.messages import Commitment, Look
from tests.verification.member_rounds import BASE, Party

STEPS = 8
NAMES = [f"w{i}" for i in range(8)]


def own(known: MemberRound) -> Commitment:
    assert known.commitment is not None
    return known.commitment


class Cluster:
    """Members that commit, answer and are checked, one round after the other."""

    def __init__(self, *, share: float = 0.0, first_rounds: int = 10, seed: int = 1) -> None:
        self.draw = Draw(random.Random(seed), share=share, first_rounds=first_rounds)
        self.ledger = VerificationLedger(self.draw)
        self.parties = {name: Party(name) for name in NAMES}
        self.openings = dict.fromkeys(NAMES, FRESH)
        self.notices: list[Notice] = []
        self.round = 0

    @property
    def live(self) -> list[str]:
        evicted = self.ledger.book.evicted()
        return [name for name in NAMES if name not in evicted]

    def commitments(self) -> dict[str, MemberRound]:
        found = {}
        for name in self.live:
            party = self.parties[name]
            own = party.commitment(STEPS, opening=self.openings[name])
            own = msgspec.structs.replace(own, step=self.round * STEPS)
            found[name] = MemberRound(own, BASE, packet=party.packet(STEPS))
        return found

    def play(
        self,
        changes: Mapping[str, MemberRound] | None = None,
        *,
        looks: Mapping[str, Look] | None = None,
    ) -> None:
        """Commit a round, and let everyone do its tasks."""
        now = float(self.round)
        members = {**self.commitments(), **(changes or {})}
        for name, known in members.items():
            self.openings[name] = own(known).closing if known.commitment else FRESH
        self.notices += self.ledger.committed(self.round, members, now, looks=looks)
        while self.ledger.open:
            self.notices += self.ledger.tick(self.live, now)
            done = 0
            for name in NAMES:
                for task in self.ledger.tasks(name):
                    if not self.parties[name].answers:
                        continue
                    done += 1
                    challenge = self.ledger.open[task.challenge]
                    opening = challenge.commitment.opening
                    if task.kind in ("deposit", "state"):
                        at = 0 if task.kind == "deposit" else task.last
                        self.notices += self.ledger.deposited(name, task.challenge, at, now)
                    else:
                        party = self.parties[name]
                        if task.member != name and not party.accuses:
                            party = Party(name)  # it cheats in its own work only
                        answer = party.answer(task, opening=opening)
                        self.notices += self.ledger.answer(name, answer, now)
            if not done:
                now += 1000.0
        self.round += 1

    def members_with(self, kind: str) -> list[str]:
        return [notice.member for notice in self.notices if notice.kind == kind]
