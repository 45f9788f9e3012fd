"""The interfaces of a strategy: inner (one step), outer (synchronization), and their results.

Half-precision overflow: a gradient scaler detects it on one member only. Where gradients are
averaged in every step, all members must skip the step or none. The flag travels in the weight of
the contribution, without extra bytes or a round of its own: weights count tokens and are whole
numbers, so a fraction means that some member's gradients overflowed.

`extend_history_hash` keeps one hash over all rounds of a run, by which members compare histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from atoll.codec.base import Codec
from atoll.digest import Digest
from atoll.group.base import Group
from atoll.task import Task

HIDDEN = "hidden"
"""Phase of a round during which training continued."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One committed round, as this member saw it."""

    round: int
    """Its number, from 0."""
    contributors: tuple[str, ...]
    """Members whose values are in the mean."""
    weight: float
    """Sum of their weights."""
    seconds: Mapping[str, float]
    """Seconds by phase: prepare, join, reduce, commit (all attempts together), apply.

    For a background round `reduce` is the time training waited, and `hidden` the rest.
    """
    sent_bytes: int = 0
    received_bytes: int = 0
    delta_norm: float = 0.0
    """Euclidean norm of the mean that was applied."""
    digest: str = ""
    """Digest of the agreed state after the round; equal on every member.

    Empty where members apply results at different times: a later result has it.
    """
    committed: bool = True
    aborted: int = 0
    """Attempts that were aborted before it was committed."""
    more: bool = False
    """Of a round of `finish`: call `finish` again, other members are not done yet."""
    stopping: bool | None = None
    """Whether the job ends with this round; None: as the group says when the result is applied."""

    def ends(self, group: Group) -> bool:
        """Return whether the job ends here; the same on every member.

        With a background round under way the group may already know more on some members.
        """
        return group.stopping if self.stopping is None else self.stopping

    @property
    def held_up_s(self) -> float:
        """Seconds that training waited for it."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != HIDDEN)


@dataclass(frozen=True, slots=True)
class Committed:
    """The state that all members share between two rounds, which joining members load."""

    step: int
    """Step of the schedule after the round."""
    base: str
    """Its digest, compared when members join."""
    tensors: list[Tensor] | None = None
    """Parameters, then floating-point buffers, in the task's order; None: the model's own."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one member sends and receives in a run: encoded values, without frame headers."""

    rounds: int
    relay_sent_bytes: int
    relay_received_bytes: int
    direct_sent_bytes: int
    direct_received_bytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step."""

    loss: float
    """Mean training loss of the batch, before the step."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    tokens: int
    sync: SyncResult | None = field(default=None)


class Outer(Protocol):
    """How replicas are synchronized.

    Call order: `setup`, then `load_state_dict` when resuming or `begin` otherwise, then `gradients`
    and `sync` in every step, and `finish` once. Members agree in committed rounds, each of which
    happens on every member or on none.
    """

    @property
    def shared_steps(self) -> int:
        """Number of first steps that every member computes on the same data."""
        ...

    @property
    def one_model(self) -> bool:
        """Whether all members carry the same parameters after a round."""
        ...

    @property
    def one_state(self) -> bool:
        """Whether all members on the same round have the same committed state.

        If not, a joining member loads that of one donor.
        """
        ...

    @property
    def inherits(self) -> bool:
        """Whether a joining member starts from another member's state."""
        ...

    @property
    def goes_on(self) -> bool:
        """Whether training may go on after `finish`, whose round is then an ordinary one."""
        ...

    @property
    def can_grow(self) -> bool:
        """Whether `setup` may follow a `finish`, for parameters that became trainable."""
        ...

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Allocate and check; nothing crosses the network yet."""
        ...

    def begin(self, task: Task) -> SyncResult | None:
        """Make every member start from the same parameters."""
        ...

    def gradients(self, task: Task) -> None:
        """Combine gradients: called after backward, before the optimizer's step."""
        ...

    def sync(self, task: Task) -> SyncResult | None:
        """Combine parameters if due: called after the optimizer's step."""
        ...

    def finish(self, task: Task) -> SyncResult | None:
        """Synchronize the steps since the last round, so that all members end with one model."""
        ...

    def digest(self, task: Task) -> str:
        """Return the digest of the parameters that this member carries."""
        ...

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Load the parameters to evaluate and to save into the model, and restore them on exit.

        Most strategies leave the model as it is; where members train ahead of the agreed state,
        that state is loaded. Do not train inside.
        """
        ...

    def committed(self, task: Task) -> Committed:
        """Return the result of the last round; tensors are not copied.

        Call it only while the state does not change (`task.state_lock`): it is valid until the next
        round is applied.
        """
        ...

    def rejoin(self, task: Task) -> None:
        """Restart the counters: the task was just set to a committed state."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state. Keys `shared.*` are equal on every member after a round."""
        ...

    def shared_state(self) -> dict[str, Tensor]:
        """Return the `shared.*` entries as the last round left them; never waits.

        Callable from any thread while `task.state_lock` keeps the state from changing, also during
        a round.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; the model's parameters are restored elsewhere."""
        ...

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return what the member of a rank sends in a run of `steps`; exact, and pure.

        Args:
            elements: Trained values of the model, and its floating-point buffers.
            peers: Members, itself included.
            steps: Optimizer steps of the run.
            rank: Index among the members; on the direct route shares differ by a block.
        """
        ...


class Inner(Protocol):
    """How one optimizer step is computed."""

    def step(self, task: Task, batch: Any, outer: Outer) -> StepResult:
        """Do one step; call the outer strategy before and after the optimizer's step.

        Raises:
            LossNotFinite: the loss or a gradient is NaN or infinite; nothing was updated.
        """
        ...


OVERFLOW_WEIGHT = 2.0**-20
"""Weight of overflowed (zeroed) gradients: float64 adds it exactly to up to 2^32 tokens."""


def reported_weight(weight: float, *, overflowed: bool) -> float:
    """Return the weight to send: a whole number, or the overflow flag."""
    return OVERFLOW_WEIGHT if overflowed else float(max(1, round(weight)))


def any_overflowed(total: float) -> bool:
    """Return whether the sum of the weights shows that some member's gradients overflowed."""
    return total != int(total)


def extend_history_hash(task: Task, sync: SyncResult | None) -> SyncResult | None:
    """Add a round to the task's history hash; return the same result.

    Call it before the state with the new round can be read: history and round belong together. A
    result without a digest changes nothing; a later one has it.
    """
    if sync is not None and sync.digest:
        text = f"{task.past} {sync.round} {sync.digest}"
        task.past = Digest(text.encode()).hexdigest()
    return sync
