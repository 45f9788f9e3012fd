"""AD-PSGD: random pairs average in the background; no member's steps wait for another's.

Lian et al. 2018 (https://arxiv.org/abs/1710.06952). Legend: x_i the parameters of member i, x_i'
those at which an exchange began, j its partner, u_i what its optimizer has added since.

  in the background:   m = (x_i' + x_j') / 2
  between two steps:   x_i = m + u_i

In every exchange all members are paired at random from a common seed; with an odd number one sits
out. The exchange runs on its own thread while optimizer steps continue. Its result is applied
between two steps, and the updates made meanwhile are kept on top. A slow member therefore slows
down exchanges, but not the steps of others.

With `delay` a result is applied after exactly so many steps, waiting for it if needed: runs are
then bitwise reproducible, and results are never later than that.

Differs from the paper:
  * all training members are paired anew for every exchange; the paper's split into active and
    passive members avoids the deadlock of two that pick each other, which matchings cannot have;
  * an exchange is agreed on by all members: one that cannot be finished is repeated;
  * floating-point buffers are averaged like parameters;
  * a member that has done its steps keeps taking part, without values, until all are done; then
    every member gets the mean of all models.
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
"""Key of the codec's residual."""

COMMON, DUE = "shared.common", "own.due"

PENDING = "own.pending."
"""Prefix of the keys of a result that was not applied yet."""

DONE = 0.0
"""The weight that a member reports once it has done all steps; before that it is 1 + its step."""


@dataclass(frozen=True, slots=True)
class PairwiseResult:
    """The result of an exchange for one member."""

    move: Tensor | None
    """The change that brings it to the pair's mean; None: it had no partner."""
    weights: Mapping[str, float]
    digest: str

    @property
    def contributors(self) -> tuple[str, ...]:
        """The members that took part."""
        return tuple(self.weights)


@dataclass(slots=True)
class _PairExchange:
    """An exchange under way, or one whose result is not applied yet."""

    step: int
    """The step at which it began."""
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
        """Step from which on the next exchange may begin."""
        self._common = 0
        """Step of the slowest member when the last exchange began; equal on all members."""

    def _stand(self, task: Task) -> None:
        self._common = task.step

    def _plan(self, task: Task) -> None:
        """Make every step a period of its own: exchanges have no fixed schedule."""
        task.free_period()

    # ----------------------------------------------------------------------- steps

    def gradients(self, task: Task) -> None:
        """Begin an exchange if none is under way; the next step does not wait for it."""
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
        """Apply the result of an exchange, if it has arrived or is due."""
        flight, delay = self._flight, self.options.delay
        if flight is None:
            return None
        there = flight.work is None or flight.work.done()
        if task.step < flight.step + delay or not (delay or there):
            return None
        return self._take(task, flight)

    def finish(self, task: Task) -> SyncResult | None:
        """Take part until all members are done, then average all models."""
        results = [self._take(task, self._flight)] if self._flight is not None else []
        weights: Mapping[str, float] = {}
        while not weights or any(weight != DONE for weight in weights.values()):
            result, weights = self._attend(task)
            results.append(result)
        last = super().finish(task)
        return in_a_row([*results, last] if last is not None else results)

    def _attend(self, task: Task) -> tuple[SyncResult, Mapping[str, float]]:
        """Take part in an exchange without values; return its result and all reported weights."""
        number = task.round
        agreed = self._round_client.run(task, self._exchange(None, telling=DONE), base=self._base)
        met = agreed.reduced
        self._all_to_all.finish(committed=False)  # nothing was encoded
        self._note(task, met)
        result = SyncResult(
            round=number, contributors=met.contributors, weight=float(len(met.contributors)),
            seconds=agreed.seconds, sent_bytes=agreed.sent_bytes,
            received_bytes=agreed.received_bytes, aborted=agreed.attempts - 1,
        )  # fmt: skip
        return result, met.weights

    def _take(self, task: Task, flight: _PairExchange) -> SyncResult:
        """Move this member to its pair's mean, keeping the updates made since on top."""
        number, entered = task.round, self._clock.monotonic()
        agreed: CommittedRound[PairwiseResult] | None = None
        self._flight = None
        if flight.work is not None:
            try:
                with task.state_lock.resting():
                    agreed = flight.work.wait()
            except BaseException:
                self._all_to_all.finish(committed=False)
                raise
            self._round_client.apply_verdict(task, agreed, ahead=True)
        met = agreed.reduced if agreed is not None else flight.loaded
        if met is None:
            raise RuntimeError("an exchange is either under way or loaded")
        if agreed is not None:
            self._all_to_all.finish(committed=self._group.me in met.contributors)
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
        """Record a committed exchange whose result was applied."""
        self._advance(task, met.digest)
        training = [weight for weight in met.weights.values() if weight != DONE]
        if training:
            self._common = int(min(training)) - 1

    def _exchange(self, values: Tensor | None, *, telling: float) -> Exchange[PairwiseResult]:
        """Return the exchange with this member's partner, if it trains; runs on any thread."""

        def exchange(plan: RoundPlan) -> PairwiseResult:
            members, me = plan.members, self._group.me
            partner = members[pairs(len(members), round_=plan.round)[members.index(me)]]
            to = [partner] if partner != me and values is not None else []
            got = self._all_to_all.exchange(
                plan, {KEY: values} if values is not None else {}, to=to, weight=telling,
                resting=nullcontext,
            )  # fmt: skip
            return PairwiseResult(_move(got, partner), got.weights, got.digest)

        return exchange

    def _round(self, task: Task) -> SyncResult | None:
        return self.sync(task)

    # ----------------------------------------------------------------------------- state

    def committed(self, task: Task) -> Committed:
        """Return the current model, and the step known to all members."""
        return Committed(self._common, self._base)

    def rejoin(self, task: Task) -> None:
        """Begin the next exchange with the next step, unless a saved one was loaded."""
        if not self._resumed:
            self._drop()
            self._due = task.step
        super().rejoin(task)

    def _drop(self) -> None:
        """Discard the exchange under way."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.work is not None:
            try:
                flight.work.wait()
            except AtollError:
                self._all_to_all.finish(committed=False)
            else:
                self._all_to_all.finish(committed=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the decentralized state, and a result that was not applied yet."""
        pending: dict[str, Tensor] = {}
        if self._flight is not None:
            met = self._landed(self._flight)
            pending = _pending(self._flight.step, met) if met is not None else {}
        places = {COMMON: torch.tensor(self._common), DUE: torch.tensor(self._due)}
        return super().state_dict() | places | pending

    def _landed(self, flight: _PairExchange) -> PairwiseResult | None:
        """Wait for the result of an exchange; None if it failed."""
        if flight.work is None:
            return flight.loaded
        try:
            met = flight.work.wait().reduced
        except AtollError:  # reported when the result is applied
            return None
        self._all_to_all.finish(committed=self._group.me in met.contributors)
        return met

    def shared_state(self) -> dict[str, Tensor]:
        """Return the digest chain of all rounds; never waits."""
        shared = {k: v for k, v in super().state_dict().items() if k.startswith(SHARED_STATE)}
        return shared | {COMMON: torch.tensor(self._common)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
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
        """Return the number of exchanges, if each takes at most `every` steps."""
        return -(-steps // max(self._every, self.options.delay))


def _move(got: AllToAllVectors, partner: str) -> Tensor | None:
    """Return the change that brings a member to the pair's mean; None unless both sent values."""
    theirs = got.others.get(partner)
    if theirs is None or KEY not in got.own or got.weights.get(partner, DONE) == DONE:
        return None
    return (theirs[KEY] - got.own[KEY]).div_(2)


def _pending(step: int, met: PairwiseResult) -> dict[str, Tensor]:
    """Return the state entries of a result whose exchange began at `step`."""
    names = " ".join([met.digest, *met.weights])
    move = {} if met.move is None else {PENDING + "move": met.move}
    return move | {
        PENDING + "step": torch.tensor(step),
        PENDING + "weights": torch.tensor([*met.weights.values()], dtype=torch.float64),
        PENDING + "names": torch.tensor(list(names.encode()), dtype=torch.uint8),
    }


def _loaded(state: Mapping[str, Tensor]) -> _PairExchange | None:
    """Return the exchange whose result is in a state, if any."""
    if PENDING + "step" not in state:
        return None
    digest, *names = bytes(state[PENDING + "names"].tolist()).decode().split()
    weights = dict(zip(names, state[PENDING + "weights"].tolist(), strict=True))
    move = state.get(PENDING + "move")
    met = PairwiseResult(move.clone() if move is not None else None, weights, digest)
    return _PairExchange(int(state[PENDING + "step"]), 0.0, None, met)
