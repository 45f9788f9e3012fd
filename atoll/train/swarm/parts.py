"""What a member of a SWARM is given: the job, and its connections to ledger, rounds and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from atoll.group.peers.channel import PeerMail
from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.swarm.copies import EVERY_S
from atoll.train.swarm.work import ReportTo, Rows
from atoll.wire.message import Message
from atoll.wire.swarm import Share, SwarmPlace

ROOM = 8
"""Microbatches that a driver has under way."""

Shapes = Sequence[Sequence[int]]


class Ask(Protocol):
    """Asks the ledger, through the hub; raises AtollError."""

    def __call__(self, body: Message, *, timeout_s: float) -> Message:
        """Return the answer."""
        ...


class Rounds(Protocol):
    """The rounds in which the members of a stage agree on a mean."""

    def agree(
        self, stage: int, step: int, closing: int, *, vector: Tensor, rows: int, shapes: Shapes
    ) -> Future[Tensor]:
        """Start a round; its future is the mean with the rows as weights, or a GroupError.

        `vector` holds tensors of these shapes, one after the other.
        """
        ...


class Trained(Protocol):
    """A stage with its optimizer and schedule."""

    @property
    def runner(self) -> StageRunner:
        """The stage's computation."""
        ...

    def update(self, mean: Tensor | None, *, rows: int) -> None:
        """Step the optimizer with a mean of the runner's gradients, and go on to the next step.

        `rows` were folded here. None: this member steps by itself, and has no row.
        """
        ...

    def meet(self, *, last: bool = False) -> None:
        """Combine parameters with the other members of the stage, if that is due after a step.

        After the `last` step what is left since the round before is combined; may be repeated.

        Raises:
            LeftBehind: the others went on without this member, which has to recover.
            GroupLeft: this member leaves.
        """
        ...

    @property
    def evaluates(self) -> bool:
        """Whether the state of now is to be evaluated: it is time to, and the stage agrees on it.

        At the end of the job it is in any case.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Surround an evaluation: the parameters are those on which the stage agrees."""
        ...


class Stages(Protocol):
    """Builds a stage, with the state of a step."""

    @property
    def held_out(self) -> Sequence[int]:
        """Microbatches of an evaluation, and of the one at the end, once a stage was taken."""
        ...

    def take(self, place: SwarmPlace) -> Trained:
        """Return the place's stage at its step: of the job's start, a donor's, or a checkpoint's.

        Raises:
            AtollError: no member has the state now; ask for a place again.
        """
        ...

    def save(self, *, history: int, final: bool, failed: Callable[[], None]) -> None:
        """Save the taken stage as it is now for a checkpoint; returns once it is copied.

        `failed` is called, from any thread, if it could not be saved; of the `final` save always.
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
    early: int = 0
    """The first so many microbatches of a step are computed on the weights of the step before."""
    agrees: bool = True
    """The members of a stage average their gradients in every step; else each uses its own."""
    seed: int = 0
    room: int = ROOM
    copies_s: float = EVERY_S
    """Least time between two copies of a member's sum."""
    free_bytes: int = 0
    """Memory of this machine's device before it has a stage; 0: unknown."""


@dataclass(slots=True)
class Counted:
    """What this member knows to be counted of one step."""

    shares: int = 0
    folded: list[Share] = field(default_factory=list)


@dataclass(slots=True)
class StepState:
    """What this member knows of its present step."""

    counted: Counted = field(default_factory=Counted)
    ahead: Counted = field(default_factory=Counted)
    """Of the step after."""
    closing: int = 0
    """As the ledger has named it; 0: the stage is open."""
    meetings: set[int] = field(default_factory=set)
    """Closings whose rounds run."""
    mean: Tensor | None = None
    over: bool = False
    """All stages have agreed, and the verdict of this stage is still on its way to this member."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An event: the ledger has answered."""

    question: Message
    answer: Message | None
    """None: there was none."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """An event: the round of this member's stage has ended."""

    step: int
    closing: int
    mean: Tensor | None
    """None: it failed."""


Event = PeerMail | ReportTo | Answer | Agreed
"""What a member's own thread processes."""
