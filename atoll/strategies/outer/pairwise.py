"""Pairs that meet in the middle beside training: nobody's gradients wait for anybody.

AD-PSGD (Lian et al. 2018, https://arxiv.org/abs/1710.06952). Legend: x_i the parameters of member
i, x_i' those of the moment at which a meeting began, j its partner, u_i what its optimizer added
meanwhile.

    beside training:     m = (x_i' + x_j') / 2
    between two steps:   x_i = m + u_i

In every meeting all members are paired at random, by a seed that all share; with an odd number one
sits out. The meeting runs on a thread of its own, while optimizer steps go on; its result is put in
between two steps, and what was learned meanwhile stays on top. So a slow member slows the meetings
and nobody's steps.

With `delay` a result is taken after so many steps, and waited for if it is not there: two runs are
then equal bit for bit, and training is late by no more than that.

Differs from the paper:
  * members that train are paired anew for every meeting, all at once; its split into active and
    passive members keeps two that pick each other from waiting forever, which matchings cannot;
  * a meeting is agreed on by all members: one that cannot be finished is held again;
  * floating-point buffers are averaged like parameters;
  * who is done with its steps goes on to attend, without values, until all are; then everybody gets
    the mean of all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.errors import AtollError, ConfigError
from atoll.group.base import Work
from atoll.group.run_round import CommittedRound, Exchange
from atoll.methods.decentralized import Pairwise
from atoll.strategies.base import HIDDEN, Committed, SyncResult, Traffic
from atoll.strategies.graphs import pairs
from atoll.strategies.outer.base import SHARED_STATE
from atoll.strategies.outer.decentralized import DecentralizedOuter
from atoll.strategies.outer.overlapped import in_a_row
from atoll.strategies.rounds.all_to_all import AllToAllVectors
from atoll.strategies.traffic import all_to_all_volume
from atoll.strategies.vectors.flat import length
from atoll.task import Task
from atoll.wire.messages import RoundPlan

KEY = "parameters"
"""Names the codec's residual state."""

COMMON, DUE = "shared.common", "own.due"

PENDING = "own.pending."
"""Start of the keys of a result that was not taken yet."""

DONE = 0.0
"""What members tell as their weight once they have done all steps; before: 1 + their step."""


@dataclass(frozen=True, slots=True)
class PairwiseResult:
    """What a meeting came to for one member."""

    move: Tensor | None
    """What brings it to the middle; None: it met nobody."""
    weights: Mapping[str, float]
    digest: str

    @property
    def contributors(self) -> tuple[str, ...]:
        """Who took part."""
        return tuple(self.weights)


@dataclass(slots=True)
class _PairExchange:
    """A meeting under way, or one whose result waits to be taken."""

    step: int
    """At which it began."""
    prepare_s: float
    work: Work[CommittedRound[PairwiseResult]] | None
    """None: the result was loaded from a saved state."""
    loaded: PairwiseResult | None = None


class PairwiseOuter(DecentralizedOuter):
    """See the module's docstring."""

    _last_rounds = 1

    def __init__(self, options: Pairwise, *, clock: Clock | None = None) -> None:
        """Check the options."""
        super().__init__(every=options.every, clock=clock)
        if options.delay < 0:
            raise ConfigError("delay is too small", given=options.delay, expected="0 or more")
        self.options = options
        self._flight: _PairExchange | None = None
        self._due = 0
        """Step from which on the next meeting may begin."""
        self._common = 0
        """Step of the slowest member when the last meeting began: the same on all."""

    def _stand(self, task: Task) -> None:
        self._common = task.step

    def _plan(self, task: Task) -> None:
        """Let every step count: meetings come when they come."""
        task.free_period()

    # ----------------------------------------------------------------------- the moments

    def gradients(self, task: Task) -> None:
        """Begin a meeting, if none is under way; the step that follows does not wait for it."""
        if self._flight is not None or task.step < self._due:
            return
        entered = self._clock.monotonic()
        before = self._flat.read()
        self._check(before, task)
        self._due = task.step + self._every
        work = self._round_client.start(
            self._exchange(before, telling=1.0 + task.step),
            self._round_client.report(task, base=self._base),
        )
        self._flight = _PairExchange(task.step, self._clock.monotonic() - entered, work)

    def sync(self, task: Task) -> SyncResult | None:
        """Take the result of a meeting, if it is there or has to be."""
        flight, delay = self._flight, self.options.delay
        if flight is None:
            return None
        there = flight.work is None or flight.work.done()
        if task.step < flight.step + delay or not (delay or there):
            return None
        return self._take(task, flight)

    def finish(self, task: Task) -> SyncResult | None:
        """Attend until all are done, then make one model of all."""
        results = [self._take(task, self._flight)] if self._flight is not None else []
        told: Mapping[str, float] = {}
        while not told or any(weight != DONE for weight in told.values()):
            result, told = self._attend(task)
            results.append(result)
        last = super().finish(task)
        return in_a_row([*results, last] if last is not None else results)

    def _attend(self, task: Task) -> tuple[SyncResult, Mapping[str, float]]:
        """Be at a meeting without values; return it, and what all have told."""
        number = task.round
        agreed = self._round_client.run(task, self._exchange(None, telling=DONE), base=self._base)
        met = agreed.reduced
        self._swaps.finish(committed=False)  # nothing was encoded
        self._note(task, met)
        result = SyncResult(
            round=number, contributors=met.contributors, weight=float(len(met.contributors)),
            seconds=agreed.seconds, sent_bytes=agreed.sent_bytes,
            received_bytes=agreed.received_bytes, aborted=agreed.attempts - 1,
        )  # fmt: skip
        return result, met.weights

    def _take(self, task: Task, flight: _PairExchange) -> SyncResult:
        """Bring this member to the middle of its pair; what it learned since stays on top."""
        number, entered = task.round, self._clock.monotonic()
        agreed: CommittedRound[PairwiseResult] | None = None
        self._flight = None
        if flight.work is not None:
            try:
                with task.gate.resting():
                    agreed = flight.work.wait()
            except BaseException:
                self._swaps.finish(committed=False)
                raise
            self._round_client.apply_verdict(task, agreed, ahead=True)
        met = agreed.reduced if agreed is not None else flight.loaded
        if met is None:
            raise RuntimeError("a meeting is either under way or loaded")
        if agreed is not None:
            self._swaps.finish(committed=self._group.me in met.contributors)
        waited_s = self._clock.monotonic() - entered
        if met.move is not None:
            self._flat.write(self._flat.read(self._scratch).add_(met.move))
        self._note(task, met)
        if agreed is None:
            task.round = self._group.committed_round
        whole_s = sum(agreed.seconds.values()) if agreed is not None else 0.0
        seconds = {
            "prepare": flight.prepare_s, "join": 0.0, "reduce": waited_s, "commit": 0.0,
            "apply": self._clock.monotonic() - entered - waited_s,
            HIDDEN: max(0.0, whole_s - waited_s),
        }  # fmt: skip
        return SyncResult(
            round=number, contributors=met.contributors, weight=float(len(met.contributors)),
            seconds=seconds,
            sent_bytes=agreed.sent_bytes if agreed is not None else 0,
            received_bytes=agreed.received_bytes if agreed is not None else 0,
            delta_norm=length(met.move) if met.move is not None else 0.0,
            aborted=agreed.attempts - 1 if agreed is not None else 0,
        )  # fmt: skip

    def _note(self, task: Task, met: PairwiseResult) -> None:
        """A meeting was committed, and its result is taken."""
        self._advance(task, met.digest)
        training = [weight for weight in met.weights.values() if weight != DONE]
        if training:
            self._common = int(min(training)) - 1

    def _exchange(self, values: Tensor | None, *, telling: float) -> Exchange[PairwiseResult]:
        """Return what gives this member's values to its partner, if it trains; on any thread."""

        def exchange(plan: RoundPlan) -> PairwiseResult:
            members, me = plan.members, self._group.me
            partner = members[pairs(len(members), round_=plan.round)[members.index(me)]]
            to = [partner] if partner != me and values is not None else []
            got = self._swaps.swap(
                plan, {KEY: values} if values is not None else {}, to=to, weight=telling,
                resting=nullcontext,
            )  # fmt: skip
            return PairwiseResult(_move(got, partner), got.weights, got.digest)

        return exchange

    def _round(self, task: Task) -> SyncResult | None:
        return self.sync(task)

    # ----------------------------------------------------------------------------- state

    def committed(self, task: Task) -> Committed:
        """Return the model as it is, and the step that all know of."""
        return Committed(self._common, self._base)

    def rejoin(self, task: Task) -> None:
        """Begin the next meeting with the next step, unless one's own state says otherwise."""
        if not self._resumed:
            self._drop()
            self._due = task.step
        super().rejoin(task)

    def _drop(self) -> None:
        """Forget a meeting under way, whatever comes of it."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.work is not None:
            try:
                flight.work.wait()
            except AtollError:
                self._swaps.finish(committed=False)
            else:
                self._swaps.finish(committed=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every member that goes apart, and a result not taken yet."""
        pending: dict[str, Tensor] = {}
        if self._flight is not None:
            met = self._landed(self._flight)
            pending = _pending(self._flight.step, met) if met is not None else {}
        places = {COMMON: torch.tensor(self._common), DUE: torch.tensor(self._due)}
        return super().state_dict() | places | pending

    def _landed(self, flight: _PairExchange) -> PairwiseResult | None:
        """Wait for the result of a meeting; None if there will be none."""
        if flight.work is None:
            return flight.loaded
        try:
            met = flight.work.wait().reduced
        except AtollError:  # whoever takes the result learns why
            return None
        self._swaps.finish(committed=self._group.me in met.contributors)
        return met

    def shared_state(self) -> dict[str, Tensor]:
        """Return the chain of all rounds; waits for nothing."""
        shared = {k: v for k, v in super().state_dict().items() if k.startswith(SHARED_STATE)}
        return shared | {COMMON: torch.tensor(self._common)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        self._drop()
        super().load_state_dict(state)
        self._common = int(state[COMMON])
        if DUE in state:
            self._due = int(state[DUE])
            self._flight = _loaded(state)

    def _round_volume(self, elements: int, peers: int, *, round_: int, rank: int) -> Traffic:
        if pairs(peers, round_=round_)[rank] == rank:
            return all_to_all_volume([], [])
        nbytes = self._codec.nbytes(elements)
        return all_to_all_volume([(nbytes, 1)], [nbytes])

    def _rounds(self, steps: int) -> int:
        """Return how many meetings there are, if each takes no longer than `every` steps."""
        return -(-steps // max(self._every, self.options.delay))


def _move(got: AllToAllVectors, partner: str) -> Tensor | None:
    """Return what brings a member to the middle; None if not both gave their values."""
    theirs = got.others.get(partner)
    if theirs is None or KEY not in got.own or got.weights.get(partner, DONE) == DONE:
        return None
    return (theirs[KEY] - got.own[KEY]).div_(2)


def _pending(step: int, met: PairwiseResult) -> dict[str, Tensor]:
    """Return the result of a meeting that began at a step, for a saved state."""
    names = " ".join([met.digest, *met.weights])
    move = {} if met.move is None else {PENDING + "move": met.move}
    return move | {
        PENDING + "step": torch.tensor(step),
        PENDING + "weights": torch.tensor([*met.weights.values()], dtype=torch.float64),
        PENDING + "names": torch.tensor(list(names.encode()), dtype=torch.uint8),
    }


def _loaded(state: Mapping[str, Tensor]) -> _PairExchange | None:
    """Return the meeting whose result is in a saved state."""
    if PENDING + "step" not in state:
        return None
    digest, *names = bytes(state[PENDING + "names"].tolist()).decode().split()
    weights = dict(zip(names, state[PENDING + "weights"].tolist(), strict=True))
    move = state.get(PENDING + "move")
    met = PairwiseResult(move.clone() if move is not None else None, weights, digest)
    return _PairExchange(int(state[PENDING + "step"]), 0.0, None, met)
