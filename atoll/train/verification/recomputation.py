"""A member-round, or a part of one, computed again with the trainer's own parts.

Nothing here knows what the member found: it returns digests, and the hub compares them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.config import JobSpec
from atoll.data import Cursor
from atoll.devices.choose import CPU
from atoll.group.single import SingleGroup
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.outer.periodic import KEY, PeriodicOuter
from atoll.strategies.vectors.flat import Flat, digest
from atoll.task import Period
from atoll.train.batches import MemberStream
from atoll.train.build import build
from atoll.train.computing import options_on
from atoll.train.verification.arithmetic import arithmetic, seed_step
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.own_part import own_digest
from atoll.verification.challenge import Stage
from atoll.verification.trace import EMPTY, mark_positions, packet_digest, state_digest
from atoll.wire.messages import VerificationAnswer, VerificationTask

SCORED_ROWS = 4
"""Rows of a batch on which the gain of a contribution is measured."""
HELD_OUT = 64
"""Number of held-out batches that rounds use in turn."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a recomputation found."""

    answer: VerificationAnswer
    state: KeptState | None
    """The state after the last step, if the task asks for it."""
    contribution: Tensor | None
    """The update, if all steps were done."""


class _NoRounds(OuterDefaults):
    """Lets steps follow each other: what comes after the last one is not a round here."""


class Recomputation:
    """The parts of one job, built once, for any number of tasks; used from one thread.

    It seeds torch, so no training may run in the same process.
    """

    def __init__(self, spec: JobSpec, *, num_slots: int) -> None:
        """Build the job's model, optimizer, strategy and data; raises as :func:`build`."""
        device = torch.device(CPU)
        built = build(spec, member="checker", slot=0, num_slots=num_slots, device=device)
        options = options_on(spec, device)
        self._local = Local(language_model_loss, clip=options.clip, options=options)
        self._local.prepare(built.model)
        if not isinstance(built.outer, PeriodicOuter):
            raise TypeError(f"{built.strategy} has no rounds that can be computed again")
        self._outer, self._built, self._spec = built.outer, built, spec
        self._outer.setup(built.task, group=SingleGroup(me="checker"), codec=built.codec)
        self._flat = Flat.of(built.task)
        self._stub: Any = _NoRounds()
        self.arithmetic = arithmetic(built.dataset.digest)

    def run(
        self, task: VerificationTask, state: KeptState, *, start: Tensor | None = None
    ) -> Recomputed:
        """Do the steps of a task from a state; `start`: the model at the opening, if it differs.

        If the steps fail with the own part and succeed without it, the answer is `unusable`: the
        member that handed it over made it up.

        Raises:
            AtollError: a step failed.
        """
        try:
            return self._run(task, state, start=start)
        except Exception as error:
            if task.kind != Stage.REPLAY or state.own == EMPTY or _lacks_memory(error):
                raise
            try:
                self._run(task, replace(state, own=EMPTY), start=start)
            except Exception:
                raise error from None
            why = f"{type(error).__name__}: {error}"[:300]
            found = VerificationAnswer(
                challenge=task.challenge, kind=task.kind, failed=why, unusable=True
            )
            return Recomputed(found, None, None)

    def _run(self, task: VerificationTask, state: KeptState, *, start: Tensor | None) -> Recomputed:
        done, last = (task.first if task.kind == Stage.JUDGE else 0), task.last
        training, schedule = self._built.task, self._built.schedule
        state.load(training, self._flat)
        training.round = task.round
        training.period = Period(task.step, task.length, task.steps, done)
        training.step, training.tokens = training.period.step, 0
        self._outer.begin_at(training, state.model if start is None else start)
        schedule.load_state_dict({"step": training.step})
        wanted = self._wanted(task)
        digests, counted = [], 0
        stream = self._stream(task, skip=done)
        for step in range(done, last):
            seed_step(self._spec.job.seed, round_=task.round, slot=task.slot, step=step)
            counted = self._local.step(training, next(stream), self._stub).tokens
            if step + 1 in wanted:
                own = own_digest(training.optimizer)
                digests.append(state_digest(digest(self._flat.read()), own))
        # A judge does one step, but the weight counts those of the whole period.
        training.tokens += counted * done
        answer = VerificationAnswer(challenge=task.challenge, kind=task.kind, digests=digests)
        if task.kind == Stage.STATE:
            return Recomputed(answer, KeptState.of(training, self._flat), None)
        if last != task.steps:
            return Recomputed(answer, None, None)
        return self._ended(answer, task, state.model if start is None else start)

    def _ended(
        self, answer: VerificationAnswer, task: VerificationTask, start: Tensor
    ) -> Recomputed:
        """Add the digests at the end of the period: of own part, contribution and packet."""
        training, codec = self._built.task, self._built.codec
        delta, weight, _ = self._outer.contribution(training)
        codec.set_round(task.round)
        packet = codec.encode(delta, key=KEY)
        found = VerificationAnswer(
            challenge=answer.challenge, kind=answer.kind, digests=answer.digests,
            closing=own_digest(training.optimizer), contribution=digest(delta),
            packet=packet_digest(packet.codec, weight, packet.data),
        )  # fmt: skip
        if task.kind == Stage.REPLAY:
            found = msgspec.structs.replace(found, gains=self._gains(task, start))
        return Recomputed(found, None, delta.clone())

    def _gains(self, task: VerificationTask, start: Tensor) -> list[float]:
        """Return what the contribution gains on the member's own and on held-out data.

        The model is the one after the steps, and that of `start` afterwards. Empty if there are no
        held-out data. See `atoll/verification/scores.py`.
        """
        first = task.round % HELD_OUT
        batches = [next(self._stream(task, skip=0))]
        batches += itertools.islice(self._built.held_out(batch=SCORED_ROWS, first=first), 1)
        if len(batches) < 2:
            return []
        self._built.model.eval()
        try:
            after = [self._loss(*batch) for batch in batches]
            self._flat.write(start)
            before = [self._loss(*batch) for batch in batches]
        finally:
            self._built.model.train()
        return [(b - a) / b for a, b in zip(after, before, strict=True)]

    def _loss(self, inputs: Tensor, targets: Tensor) -> float:
        rows = slice(0, SCORED_ROWS)
        with torch.no_grad():
            return float(language_model_loss(self._built.model, (inputs[rows], targets[rows]))[0])

    def _wanted(self, task: VerificationTask) -> set[int]:
        """Return the steps after which the state's digest is wanted."""
        if task.kind == Stage.REPLAY:
            return set(mark_positions(task.steps))
        if task.kind == Stage.STATE:
            return set()
        return set(range(task.first + 1, task.last + 1))

    def _stream(self, task: VerificationTask, *, skip: int) -> MemberStream:
        cursor = Cursor.from_dict(task.cursor) if task.cursor else Cursor(task.slot)
        stream = MemberStream(
            self._built.shards, slot=task.slot, batch=self._spec.train.batch,
            cursor=replace(cursor, slot=task.slot),
        )  # fmt: skip
        for _ in range(skip):
            next(stream)
        return stream


def _lacks_memory(error: Exception) -> bool:
    """Return whether the fault may be that of this machine."""
    return isinstance(error, MemoryError | OSError) or "memory" in str(error).lower()
