"""What one member trains: model, optimizer, schedule and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.gate import Gate


class Scheduler(Protocol):
    """What sets the learning rate after every step; torch's `LRScheduler` fits."""

    def step(self) -> Any:
        """Set the rate of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take up a state that `state_dict` returned."""
        ...


class LossScale(Protocol):
    """What a loss is multiplied by against underflow in half precision."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep; from any thread while training rests."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up a state that `state_dict` returned."""
        ...


class DataStretch(Protocol):
    """The data that a member trains on, as far as rounds have to know of it."""

    def place(self) -> tuple[int, dict[str, int]] | None:
        """Return the slot and where it stands; None while what it gives out is not its own."""
        ...

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        """Go on with a slot from a place; empty: from its beginning."""
        ...


class HeldElsewhere(Protocol):
    """The model that is trained, where `Task.model` is only its picture in main memory."""

    def pull(self) -> None:
        """Bring what training has made of the model since into the picture."""
        ...

    def push(self) -> None:
        """Put the picture into the model that is trained."""
        ...

    @property
    def vector(self) -> Tensor | None:
        """The memory of the picture, if all that members agree on lies there without gaps."""
        ...

    def spoil(self) -> None:
        """Take note that somebody works in that memory: it shows the model no longer."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A tensor that lies elsewhere, in parts: it is put together whenever somebody asks for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    """Returns it in main memory; from the thread that trains, while training rests."""

    @property
    def layout(self) -> torch.layout:
        """How its numbers lie: without gaps."""
        return torch.strided

    def numel(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)


@dataclass(slots=True)
class Period:
    """What one member does between two rounds.

    A slow machine does fewer optimizer steps than the schedule counts, so that all arrive together:
    after `done` of its `planned` steps the schedule stands at `start + done * length / planned`.
    """

    start: int = 0
    """Step of the schedule at which the period began."""
    length: int = 0
    """Steps of the schedule until the round; 0: nobody knows, every step counts as one."""
    planned: int = 0
    """Optimizer steps of this member until the round."""
    done: int = 0
    """Of them done."""

    @property
    def step(self) -> int:
        """Where the schedule stands now."""
        if not self.length:
            return self.start + self.done
        return self.start + self.done * self.length // self.planned


@dataclass(slots=True)
class Losses:
    """The mean loss over the steps since the last round, for people."""

    _sum: float = 0.0
    _count: int = 0

    def add(self, loss: float | None) -> None:
        """Count a step's loss, if it is known; one that is not finite makes the mean so."""
        if loss is not None:
            self._sum += loss
            self._count += 1

    def take(self) -> float | None:
        """Return the mean since the last call and start again; None without a step."""
        total, count = self._sum, self._count
        self._sum, self._count = 0.0, 0
        return total / count if count else None


@dataclass(slots=True)
class Task:
    """One member's training, as strategies see and change it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None = None
    member: str = "w0"
    """Own name, for messages."""
    step: int = 0
    """Where the schedule stands: optimizer steps of a machine that does all of them."""
    tokens: int = 0
    """Tokens trained by this member."""
    round: int = 0
    """Rounds committed: the next one to join."""
    past: str = ""
    """Hash over the digests of all those rounds: equal on members that always agreed."""
    gate: Gate = field(default_factory=Gate, repr=False)
    """Closed while the state moves; others read it through `gate.still`."""
    last: int = 0
    """Step of the schedule at which the run ends; 0: unknown."""
    paced: bool = False
    """Whether this member may do fewer steps per round than the schedule counts."""
    pace: float = 1.0
    """Which share of a period's steps it does, by its measured speed."""
    period: Period = field(default_factory=Period)
    stretch: DataStretch | None = field(default=None, repr=False)
    """The data, where somebody deals it out anew from round to round."""
    leases: dict[int, dict[str, int]] = field(default_factory=dict, repr=False)
    """Where each slot of the data stood at the last round."""
    overflowed: bool = False
    """Whether the gradients of this step overflowed in half precision; they are zeros then."""
    skipped: bool = False
    """Whether members that agree on gradients have agreed not to take this step."""
    elsewhere: HeldElsewhere | None = field(default=None, repr=False)
    """Where the model is trained if not in `model` itself: spread over the ranks of an island."""
    scaler: LossScale | None = field(default=None, repr=False)
    """The scale of the loss, where the trainer scales it."""
    losses: Losses = field(default_factory=Losses, repr=False)
    """Of the steps since the last round."""
    waited_s: float = 0.0
    """Seconds that a strategy waited for others outside of rounds, since somebody took note."""
    _parameters: list[nn.Parameter] = field(init=False, repr=False, default_factory=list)

    def begin_period(self, due: int, *, together: bool = False) -> None:
        """Plan the steps until the round that is due at step `due` of the schedule.

        Args:
            due: Where the schedule stands then.
            together: Every member does the very same steps: the pace does not count.
        """
        end = min(due, self.last) if self.last > self.step else due
        length = max(1, end - self.step)
        pace = 1.0 if together else self.pace
        self.period = Period(self.step, length, max(1, round(length * pace)))

    def free_period(self) -> None:
        """Count every step as one from here: rounds do not come after a number of steps."""
        self.period = Period(self.step)

    def advance(self, *, taken: bool = True) -> None:
        """An optimizer step was done: move the schedule on.

        A step that was not `taken`, as gradients had overflowed, counts for rounds alone: the
        learning rate stays.
        """
        if self.step != self.period.step:  # it was set: training goes on from a saved state
            self.free_period()
        self.period.done += 1
        before, self.step = self.step, self.period.step
        if self.scheduler is not None and taken:
            for _ in range(self.step - before):
                self.scheduler.step()

    def pull(self) -> None:
        """Make `model` show what training has made of it. To be called before it is read."""
        if self.elsewhere is not None:
            self.elsewhere.pull()

    def push(self) -> None:
        """Let training go on from what `model` shows. To be called after it was changed."""
        if self.elsewhere is not None:
            self.elsewhere.push()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict()`; tensors held elsewhere as :class:`RemoteState`."""
        far = getattr(self.optimizer, "remote_state_dict", self.optimizer.state_dict)
        found: dict[str, Any] = far()
        return found

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters in registration order, a shared one once.

        They are looked for once: what is frozen at the first call stays out.
        """
        if not self._parameters:
            self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        return self._parameters

    def buffers(self) -> list[Tensor]:
        """Return the floating-point buffers that are saved, e.g. running means of BatchNorm."""
        saved = self.model.state_dict(keep_vars=True)
        return [
            buffer
            for name, buffer in self.model.named_buffers()
            if name in saved and buffer.is_floating_point()
        ]

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())
