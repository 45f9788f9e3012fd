"""What a member commits to: digests of its own steps, taken while it trains.

A period's opening is taken before its first batch is drawn: then the verdict of the last round has
been applied, and model, optimizer and position in the data are settled.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.strategies.vectors.flat import Flat, digest
from atoll.strategies.verifiable import AUDIT
from atoll.task import Period, Task
from atoll.train.batches import MemberStream
from atoll.train.build import Built
from atoll.train.verification.arithmetic import arithmetic, seed_step
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.own_part import bytes_digest, own_digest
from atoll.verification.trace import mark_positions, state_digest
from atoll.wire.messages import Commitment

KEPT = 2
"""Openings that a member keeps if it is not informed for which rounds the draw is over."""
MOST_KEPT = 8
"""Openings that it keeps at most; it waits with the next period until one can be dropped."""
RELEASE_S = 60.0
"""How long it waits for that."""


@dataclass(slots=True)
class _Opened:
    """The period under way."""

    round: int
    step: int
    slot: int
    cursor: dict[str, int]
    opening: str
    marked: tuple[int, ...]
    marks: list[str] = field(default_factory=list)
    closing: str = ""
    contribution: str = ""


def watch(task: Task, stream: MemberStream, spec: JobSpec, built: Built) -> Witness | None:
    """Return the witness of a member's steps, attached to its task; None if none is wanted."""
    if spec.job.trust != AUDIT:
        return None
    found = Witness(
        task, stream, seed=spec.job.seed, arithmetic=arithmetic(built.dataset.digest),
        opened=threading.Event(),
    )  # fmt: skip
    found.restarted()
    task.witness = found
    return found


class Witness:
    """Digests the steps of one member; see :class:`atoll.task.Witness`."""

    def __init__(
        self, task: Task, stream: MemberStream, *, seed: int, arithmetic: str,
        opened: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """Watch `task`, which trains on `stream`, in a job with this seed.

        `opened` is set at every opening, for a thread that calls `release`; None: there is none.

        Raises:
            ConfigError: the model has parameters that a float32 vector would round.
        """
        self._task, self._stream = task, stream
        self._seed, self._arithmetic = seed, arithmetic
        self._flat = Flat.of(task)
        if self._flat.dtype != torch.float32:
            raise ConfigError(
                "rounds of a model with float64 parameters cannot be verified",
                expected="parameters of at most float32", remedy='trust = "members" in [job]',
            )  # fmt: skip
        self._scratch = self._flat.new()
        self._period: Period | None = None
        self._opened: _Opened | None = None
        self._kept: dict[int, KeptState] = {}
        self._changed = threading.Condition()
        self.opened = opened

    def reading(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the stream's batches; every one begins a step."""
        while True:
            if self._task.period is not self._period or self._opened is None:
                self._open()
            opened = self._opened
            if opened is not None:
                seed_step(
                    self._seed, round_=opened.round, slot=opened.slot, step=self._task.period.done
                )
            yield next(self._stream)

    def _open(self) -> None:
        task, place = self._task, self._stream.place()
        self._period, self._opened = task.period, None
        if place is None:
            return
        kept = KeptState.of(task, self._flat)
        with self._changed:
            self._kept[task.round] = kept
            if self.opened is not None:
                self.opened.set()
                self._changed.wait_for(lambda: len(self._kept) <= MOST_KEPT, timeout=RELEASE_S)
            for old in sorted(self._kept)[: -(KEPT if self.opened is None else MOST_KEPT)]:
                del self._kept[old]
        self._opened = _Opened(
            task.round, task.step, place[0], dict(place[1]), bytes_digest(kept.own),
            mark_positions(task.period.planned),
        )  # fmt: skip

    def stepped(self) -> None:
        """A step was taken: digest the state if the step is marked."""
        opened, done = self._opened, self._task.period.done
        if opened is None or done not in opened.marked:
            return
        own = own_digest(self._task.optimizer)
        opened.marks.append(state_digest(digest(self._flat.read(self._scratch)), own))
        if done == self._task.period.planned:
            opened.closing = own

    def contributed(self, delta: Tensor) -> None:
        """Digest the contribution, as it is before it is encoded."""
        if self._opened is not None:
            self._opened.contribution = digest(delta)

    def commitment(self) -> Commitment | None:
        """Return what the member commits to in this round; None if it contributes nothing."""
        opened, period = self._opened, self._task.period
        if opened is None or not opened.contribution:
            return None
        return Commitment(
            step=opened.step, length=period.length, steps=period.done, slot=opened.slot,
            cursor=opened.cursor, opening=opened.opening, closing=opened.closing,
            marks=opened.marks, contribution=opened.contribution, arithmetic=self._arithmetic,
        )  # fmt: skip

    def kept(self, round_: int) -> KeptState | None:
        """Return the state with which a round's steps began, if it is still kept. Thread-safe."""
        return self._kept.get(round_)

    def release(self, drawn: int, *, needed: Collection[int]) -> None:
        """Drop the openings of rounds up to `drawn`, except those that are `needed`. Thread-safe.

        The newest one is kept, because its round is not over.
        """
        with self._changed:
            for old in sorted(self._kept)[:-1]:
                if old <= drawn and old not in needed:
                    del self._kept[old]
            self._changed.notify_all()

    def restarted(self) -> None:
        """Begin with an own part that has taken no step; after a start or a recovery."""
        self._task.optimizer.state.clear()
        self._period = self._opened = None
