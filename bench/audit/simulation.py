"""A verified run of several members in one process: the hub's ledger, real steps, cheats.

The members' digests, the checkers' recomputation, the hub's check of a handed-over file and the
ledger are the ones of a cluster. A round is one second of the ledger's clock.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from torch import Tensor

from atoll.config import JobSpec, parse_spec
from atoll.reducer.combine import NormHistory, combine
from atoll.reducer.looks import Looks
from atoll.reducer.mean import Share, weighed
from atoll.train.evaluate import evaluate
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.recomputation import Recomputation
from atoll.verification.challenge import Stage
from atoll.verification.draw import FIRST_ROUNDS, Draw
from atoll.verification.ledger import MemberRound, Notice, VerificationLedger
from atoll.verification.state_file import digests_of
from atoll.verification.trace import state_digest
from atoll.wire.messages import Look, RoundPlan, VerificationTask
from bench.audit.members import SimulatedMember, corrupted, names

MEMBERS = 8
LATE = 1000.0
"""Seconds after which a member that was asked is late."""


def job(*, every: int, rounds: int, width: int, batch: int, seed: int = 7) -> JobSpec:
    """Return the job of a simulation: a small GPT on the default corpus, DiLoCo with int8."""
    return parse_spec(
        f"""
        [job]
        nodes = {MEMBERS}
        device = "cpu"
        seed = {seed}
        [model]
        name = "gpt"
        layers = 2
        width = {width}
        heads = 2
        context = 64
        dropout = 0.05
        [train]
        steps = {every * rounds}
        batch = {batch}
        warmup = 20
        lr = 3e-3
        pace = "equal"
        [strategy]
        preset = "diloco"
        codec = "int8"
        every = {every}
        shared_steps = 0
        """
    )


@dataclass
class Seconds:
    """Seconds of the processor."""

    train: float = 0.0
    digests: float = 0.0
    looks: float = 0.0
    checks: float = 0.0

    @property
    def overhead(self) -> float:
        """What verification costs, as a share of the members' own steps."""
        return (self.digests + self.looks + self.checks) / self.train


@dataclass
class Outcome:
    """What a run showed."""

    loss: float
    seconds: Seconds
    struck: dict[str, list[int]]
    """Member -> rounds of its strikes."""
    evicted: dict[str, int]
    """Member -> the round after which it was evicted."""
    checked: int
    member_rounds: int
    notices: list[Notice] = field(default_factory=list)


class Simulation:
    """Members and a checker that are built once, for any number of runs."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.members = {
            name: SimulatedMember(spec, name, num_slots=MEMBERS) for name in names(MEMBERS)
        }
        self.checker = Recomputation(spec, num_slots=MEMBERS)
        self._scratch = tempfile.TemporaryDirectory(prefix="atoll-audit-")
        self.folder = Path(self._scratch.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        """Remove the handed-over files."""
        self._scratch.cleanup()

    def run(
        self, rounds: int, *, cheats: Mapping[str, str] | None = None, share: float, seed: int,
        looked_at: bool = True, verified: bool = True, members: int = MEMBERS,
    ) -> Outcome:  # fmt: skip
        """Train for some rounds; `cheats`: member -> what it does.

        Unless `verified`, no member is checked. Only the first `members` take part.
        """
        draw = Draw(
            random.Random(seed), share=share, first_rounds=FIRST_ROUNDS if verified else 1 << 40
        )
        run = _Run(self, VerificationLedger(draw), looked_at=looked_at, members=members)
        for name, member in self.members.items():
            member.reset()
            member.cheat = (cheats or {}).get(name, "")
        for round_ in range(rounds):
            run.round(round_)
        return run.outcome()


class _Run:
    """One run."""

    def __init__(
        self, simulation: Simulation, ledger: VerificationLedger, *, looked_at: bool, members: int
    ) -> None:
        self._simulation, self._ledger, self._looked_at = simulation, ledger, looked_at
        self._live = dict(list(simulation.members.items())[:members])
        self._seconds, self._looks, self._norms = Seconds(), Looks(random.Random(0)), NormHistory()
        self._notices: list[Notice] = []
        self._struck: dict[str, list[int]] = {}
        self._evicted: dict[str, int] = {}
        self._rounds = 0
        self._files: dict[tuple[int, int], Path] = {}
        self._start: dict[int, Tensor] = {}

    def round(self, round_: int) -> None:
        """Train, agree, verify."""
        live = self._live
        turns = {name: member.train() for name, member in live.items()}
        for name, member in live.items():
            if member.cheating and member.cheat == "copy":
                victim = next(other for other in live if not live[other].cheating)
                turns[name] = member.copied(turns[name], turns[victim])
        self._seconds.train += sum(turn.train_s for turn in turns.values())
        shares = [live[name].share(turn) for name, turn in turns.items()]
        looks = self._look(shares) if self._looked_at else {}
        plan = RoundPlan(
            "", round_, round_, list(live), "relay", unweighted=[*self._ledger.draw.distrusted]
        )
        shares = weighed(shares, plan, refused=())
        codec = next(iter(live.values())).built.codec
        mean = combine(shares, codec=codec, memory=self._norms, round_=round_)
        vector = codec.mean_codec(mean.packet).decode(mean.packet)
        for member in live.values():
            member.take(vector)
        known = {
            name: MemberRound(
                turn.commitment, turn.base, slot=turn.given[0], cursor=turn.given[1],
                packet=turn.received,
            )
            for name, turn in turns.items()
        }  # fmt: skip
        self._tell(self._ledger.committed(round_, known, float(round_), looks=looks), round_)
        self._verify(round_)
        self._rounds += len(turns)

    def _look(self, shares: list[Share]) -> dict[str, Look]:
        """Return how the contributions look, as the reducer reports it to the hub."""
        began = time.process_time()
        found = self._looks.of(shares)
        self._seconds.looks += time.process_time() - began
        return found

    # ------------------------------------------------------------------------- verification

    def _verify(self, round_: int) -> None:
        """Let everyone do its tasks until nothing is open."""
        ledger, now, began = self._ledger, float(round_), time.process_time()
        while ledger.open:
            self._tell(ledger.tick(list(self._live), now), round_)
            done = False
            for name, member in list(self._live.items()):
                for task in ledger.tasks(name):
                    if member.cheat == "silent" and task.member == name:
                        continue
                    done = True
                    self._do(name, member, task, now, round_)
            if not done and ledger.open:
                now += LATE
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()
        self._seconds.checks += time.process_time() - began

    def _do(
        self, name: str, member: SimulatedMember, task: VerificationTask, now: float, round_: int
    ) -> None:
        if task.kind == Stage.DEPOSIT:
            kept = member.witness.kept(task.round)
            if kept is not None:
                self._deposit(name, task, 0, kept, now, round_)
            return
        begin = task.first if task.kind == Stage.JUDGE else 0
        opening = KeptState.read(self._files[task.challenge, 0])
        state = opening if not begin else KeptState.read(self._files[task.challenge, begin])
        found = self._simulation.checker.run(task, state, start=opening.model)
        if found.state is not None:
            self._deposit(name, task, task.last, found.state, now, round_)
            return
        answer = found.answer
        if member.cheating and task.member == name:  # it can name what it likes, but for its mark
            challenge = self._ledger.open[task.challenge]
            mark = challenge.sides[name][task.last]
            answer = msgspec.structs.replace(answer, digests=[*answer.digests[:-1], mark])
        elif member.cheat == "accuse" and task.kind != Stage.DETAIL:
            commitment = self._ledger.open[task.challenge].commitment
            answer = msgspec.structs.replace(answer, contribution=corrupted(commitment))
        self._tell(self._ledger.answer(name, answer, now), round_)

    def _deposit(
        self, name: str, task: VerificationTask, position: int, state: KeptState, now: float,
        round_: int,
    ) -> None:  # fmt: skip
        """Hand a state over, as a hub takes it: only with the digests that it has to have."""
        path = self._simulation.folder / f"{task.challenge}-{position}"
        state.write(path)
        challenge = self._ledger.open[task.challenge]
        if state_digest(*digests_of(path)) == challenge.state_before(position):
            self._files[task.challenge, position] = path
            self._tell(self._ledger.deposited(name, task.challenge, position, now), round_)

    def _tell(self, notices: list[Notice], round_: int) -> None:
        self._notices += notices
        for notice in notices:
            if notice.kind == "strike":
                self._struck.setdefault(notice.member, []).append(round_)
            elif notice.kind == "evicted":
                self._evicted[notice.member] = round_
                self._live.pop(notice.member, None)

    def outcome(self) -> Outcome:
        """Return what the run showed."""
        one: Any = next(iter(self._live.values()))
        self._seconds.digests = sum(
            member.witness.seconds for member in self._simulation.members.values()
        )
        with one.outer.evaluating(one.task):
            loss = evaluate(one.built.model, one.built.held_out, limit_tokens=65_536).loss
        checked = sum(record.checked for record in self._ledger.book.members.values())
        return Outcome(
            loss, self._seconds, self._struck, self._evicted, checked, self._rounds, self._notices
        )
