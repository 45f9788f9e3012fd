"""One member's training: model, optimizer, schedule and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.digest import Digest
from atoll.state_lock import StateLock


class Scheduler(Protocol):
    """A learning-rate scheduler stepped after every optimizer step; torch's `LRScheduler` fits."""

    def step(self) -> Any:
        """Set the rate of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Load what `state_dict` returned."""
        ...


class LossScale(Protocol):
    """The factor of the loss that prevents underflow in half precision."""

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint; from any thread while training rests."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load what `state_dict` returned."""
        ...


class DataStretch(Protocol):
    """A member's data slot, as far as rounds use it."""

    def place(self) -> tuple[int, dict[str, int]] | None:
        """Return the slot and its cursor; None while the member reads data that is not its own."""
        ...

    def place_after(self, steps: int) -> tuple[int, dict[str, int]] | None:
        """Return what :meth:`place` will return so many own steps later; None: not known."""
        ...

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        """Continue with a slot from a cursor; empty: from its beginning."""
        ...


class Witness(Protocol):
    """Takes digests of a member's steps, where others may compute them again."""

    def stepped(self) -> None:
        """A step was taken, and counted."""
        ...

    def contributed(self, delta: Tensor) -> None:
        """The member is about to contribute `delta`, which may be overwritten later."""
        ...

    def restarted(self) -> None:
        """The member has taken over the state of others, and goes on from it."""
        ...

    def commitment(self) -> Any:
        """Return the `Commitment` to send with the next join; None: there is none."""
        ...


class HeldElsewhere(Protocol):
    """A model trained elsewhere, with a copy in main memory: `Task.model`."""

    def pull(self) -> None:
        """Update the copy from the trained model."""
        ...

    def push(self) -> None:
        """Update the trained model from the copy."""
        ...

    @property
    def vector(self) -> Tensor | None:
        """The copy's memory, if everything members agree on is contiguous in it."""
        ...

    def spoil(self) -> None:
        """Note that this memory is used as scratch: the copy is out of date."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A tensor held elsewhere in parts, assembled on request."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    """Returns it in main memory; call it from the training thread, while training rests."""

    @property
    def layout(self) -> torch.layout:
        """Its memory layout: strided."""
        return torch.strided

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(slots=True)
class Period:
    """One member's steps between two rounds.

    A slow machine does fewer optimizer steps than the schedule counts, so that all finish together:
    after `done` of its `planned` steps the schedule is at `start + done * length / planned`.
    """

    start: int = 0
    """Step of the schedule at which the period began."""
    length: int = 0
    """Steps of the schedule until the round; 0: unknown, every step counts as one."""
    planned: int = 0
    """Optimizer steps of this member until the round."""
    done: int = 0
    """Steps of `planned` that are done."""

    @property
    def step(self) -> int:
        """Current step of the schedule."""
        if not self.length:
            return self.start + self.done
        return self.start + self.done * self.length // self.planned


@dataclass(slots=True)
class Losses:
    """Mean loss since the last round, for display."""

    _sum: float = 0.0
    _count: int = 0

    def add(self, loss: float | None) -> None:
        """Add a step's loss, if known; a non-finite one makes the mean non-finite."""
        if loss is not None:
            self._sum += loss
            self._count += 1

    def take(self) -> float | None:
        """Return the mean since the last call and reset; None without a step."""
        total, count = self._sum, self._count
        self._sum, self._count = 0.0, 0
        return total / count if count else None


@dataclass(slots=True)
class Task:
    """One member's training, read and changed by strategies."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None = None
    member: str = "w0"
    """The member's name, for messages."""
    step: int = 0
    """Step of the schedule: optimizer steps of a machine that does all of them."""
    tokens: int = 0
    """Tokens trained by this member."""
    round: int = 0
    """Rounds committed, which is also the number of the next one."""
    past: str = ""
    """Hash over the digests of all rounds: equal on members with the same history."""
    state_lock: StateLock = field(default_factory=StateLock, repr=False)
    """Held while the state changes; others read it through `state_lock.still`."""
    last: int = 0
    """Step of the schedule at which the run ends; 0: unknown."""
    group: int = -1
    """Stage of a SWARM whose rounds it takes part in; -1: the one of its member."""
    paced: bool = False
    """Whether this member may do fewer steps per round than the schedule counts."""
    whole_periods: bool = False
    """Whether it does whole periods only, also when it comes into the middle of one."""
    pace: float = 1.0
    """Share of a period's steps that it does, by its measured speed."""
    period: Period = field(default_factory=Period)
    stretch: DataStretch | None = field(default=None, repr=False)
    """The data, if it is assigned anew from round to round."""
    leases: dict[int, dict[str, int]] = field(default_factory=dict, repr=False)
    """Cursor of each data slot at the last round."""
    leased: int = 0
    """Data slots that had a member at the last round; 0: unknown."""
    overflowed: bool = False
    """Whether this step's gradients overflowed in half precision; they are zeroed then."""
    skipped: bool = False
    """Whether members that average gradients have agreed to skip this step."""
    elsewhere: HeldElsewhere | None = field(default=None, repr=False)
    """Set if the model is trained elsewhere than in `model`: sharded over an island's ranks."""
    scaler: LossScale | None = field(default=None, repr=False)
    """The loss scale, if the trainer uses one."""
    losses: Losses = field(default_factory=Losses, repr=False)
    """Of the steps since the last round."""
    witness: Witness | None = field(default=None, repr=False)
    """Set in jobs whose rounds are verified."""
    waited_s: float = 0.0
    """Seconds a strategy waited for others outside of rounds, since last read."""
    fit: Callable[[Sequence[str]], None] | None = field(default=None, repr=False)
    """Sets the strategy up for other parameters, by name; None: they never change."""
    exchanged: tuple[str, ...] = ()
    """Names of the parameters that members exchange, if they have changed during the run."""
    base_digest: tuple[tuple[tuple[int, int], ...], str] = field(default=((), ""), repr=False)
    """Of a frozen base: versions of its tensors, and their digest."""
    _parameters: list[nn.Parameter] = field(init=False, repr=False, default_factory=list)

    def begin_period(self, due: int, *, together: bool = False) -> None:
        """Plan the steps until the round at step `due` of the schedule.

        Args:
            due: Step of the schedule at which the round is due.
            together: Every member does the same steps, whatever its pace.
        """
        end = min(due, self.last) if self.last > self.step else due
        length = max(1, end - self.step)
        pace = 1.0 if together else self.pace
        self.period = Period(self.step, length, max(1, round(length * pace)))

    def free_period(self) -> None:
        """From here every step counts as one: rounds have no fixed schedule."""
        self.period = Period(self.step)

    def advance(self, *, updated: bool = True) -> None:
        """Advance the schedule after an optimizer step.

        A step that `updated` no parameters, because gradients overflowed, counts for rounds only:
        the learning rate stays.
        """
        if self.step != self.period.step:  # it was set: training goes on from a saved state
            self.free_period()
        self.period.done += 1
        before, self.step = self.step, self.period.step
        if self.scheduler is not None and updated:
            for _ in range(self.step - before):
                self.scheduler.step()
        if self.witness is not None:
            self.witness.stepped()

    def pull(self) -> None:
        """Update `model` from where it is trained. Call it before reading `model`."""
        if self.elsewhere is not None:
            self.elsewhere.pull()

    def push(self) -> None:
        """Update the trained model from `model`. Call it after changing `model`."""
        if self.elsewhere is not None:
            self.elsewhere.push()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict()`; tensors held elsewhere as :class:`RemoteState`."""
        far = getattr(self.optimizer, "remote_state_dict", self.optimizer.state_dict)
        found: dict[str, Any] = far()
        return found

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters in registration order, without duplicates.

        Determined at the first call: parameters frozen then stay excluded, until `exchange`.
        """
        if not self._parameters:
            self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        return self._parameters

    def exchange(self, names: Sequence[str]) -> None:
        """Exchange the parameters of these names from now on.

        Raises:
            KeyError: the model has no parameter of such a name.
        """
        named = dict(self.model.named_parameters())
        wanted = {id(named[name]) for name in names}
        self._parameters = [p for p in self.model.parameters() if id(p) in wanted]
        self.exchanged = tuple(sorted(names))

    def labelled(self, base: str) -> str:
        """Return the digest of a state as members compare it: with the set of parameters."""
        if not self.exchanged:
            return base
        text = " ".join([base, *self.exchanged])
        return Digest(text.encode()).hexdigest()

    def buffers(self) -> list[Tensor]:
        """Return the saved inexact (real or complex) buffers, e.g. running means of BatchNorm."""
        return [buffer for buffer in self.saved_buffers().values() if is_inexact(buffer)]

    def counts(self) -> dict[str, Tensor]:
        """Return the other saved buffers by name, e.g. the batches that BatchNorm has counted.

        Every member keeps its own.
        """
        return {name: b for name, b in self.saved_buffers().items() if not is_inexact(b)}

    def frozen(self) -> dict[str, Tensor]:
        """Return the parameters that members do not exchange, by name."""
        exchanged = {id(parameter) for parameter in self.parameters()}
        return {n: p for n, p in self.model.named_parameters() if id(p) not in exchanged}

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the model's checkpoints contain, by name."""
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    @property
    def num_parameters(self) -> int:
        """Number of trained real values; a complex one counts as two."""
        return sum(real_numel(parameter) for parameter in self.parameters())


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor has real or complex numbers, which can be averaged."""
    return tensor.is_floating_point() or tensor.is_complex()


def real_numel(tensor: Tensor) -> int:
    """Return the number of real values of a tensor; a complex one counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
