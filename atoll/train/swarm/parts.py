"""What a member of a SWARM is given: the job, and its connections to ledger, rounds and states."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.train.swarm.work import Rows
from atoll.wire.message import Message
from atoll.wire.swarm import Share

ROOM = 4
"""Microbatches that a driver has under way."""


class Ask(Protocol):
    """Asks the ledger, through the hub; raises AtollError."""

    def __call__(self, body: Message, *, timeout_s: float) -> Message:
        """Return the answer."""
        ...


class Rounds(Protocol):
    """The rounds in which the members of a stage agree on a mean."""

    def agree(
        self, stage: int, step: int, closing: int, *, vector: Tensor, rows: int
    ) -> Future[Tensor]:
        """Start a round; its future is the mean with the rows as weights, or a GroupError."""
        ...


class Trained(Protocol):
    """A stage with its optimizer and schedule."""

    @property
    def runner(self) -> StageRunner:
        """The stage's computation."""
        ...

    def update(self) -> None:
        """Step the optimizer with the gradients in `grad`."""
        ...


class Stages(Protocol):
    """Builds a stage, with the state of a step."""

    def take(self, stage: int, step: int, donors: Sequence[str]) -> Trained:
        """Return a stage at `step`: of the job's start, a donor's, or a checkpoint's.

        Raises:
            AtollError: nobody has the state now; ask for a place again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SwarmJob:
    """What a job fixes for all its members."""

    stages: int
    steps: int
    rows: Rows
    rows_each: int
    """Rows of a microbatch."""
    codec: str
    seed: int = 0
    room: int = ROOM


@dataclass(slots=True)
class StepState:
    """What this member knows of its present step."""

    shares: int = 0
    folded: list[Share] = field(default_factory=list)
    closing: int = 0
    mean: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An event: the ledger has answered."""

    asked: Message
    answer: Message | None
    """None: there was none."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """An event: the round of this member's stage has ended."""

    step: int
    closing: int
    mean: Tensor | None
    """None: it failed."""
