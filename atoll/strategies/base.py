"""What a strategy is: inner x outer x codec over a group. The two seams and their values.

What members do when one of them has gradients that overflowed in half precision.

A gradient scaler finds out on one member only. Where gradients are agreed on in every step, all
members must skip the step or none: the flag travels in the weight of the contribution, so it costs
no bytes and no round of its own. Weights count tokens, which are whole numbers; a fraction means
that somebody's gradients overflowed.

One hash over all rounds of a run, by which members compare their pasts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from atoll.codec.base import Codec
from atoll.group.base import Group
from atoll.task import Task

HIDDEN = "hidden"
"""Phase of a round during which training went on."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One committed round, as this member saw it."""

    round: int
    """Its number, from 0."""
    contributors: tuple[str, ...]
    """Whose values are in the mean."""
    weight: float
    """Sum of their weights."""
    seconds: Mapping[str, float]
    """Seconds by phase: prepare, join, reduce, commit (all attempts together), apply. Of a round
    that ran beside training `reduce` is what was still waited for, and `hidden` the rest."""
    sent_bytes: int = 0
    received_bytes: int = 0
    delta_norm: float = 0.0
    """Euclidean norm of the mean that was applied."""
    digest: str = ""
    """Digest of the agreed state after the round; equal on every member. Empty where members take
    results at different times: a later one has it in its own."""
    committed: bool = True
    aborted: int = 0
    """Attempts before that were not committed."""
    more: bool = False
    """Of a round of `finish`: it is to be called again, others have not come so far yet."""
    stopping: bool | None = None
    """Whether the job ends with this round; None: as its group says when the result is taken."""

    def ends(self, group: Group) -> bool:
        """Return whether the job ends here; the same on every member.

        With another round under way beside training the group may know more on some members.
        """
        return group.stopping if self.stopping is None else self.stopping

    @property
    def held_up_s(self) -> float:
        """How long training stood still for it."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != HIDDEN)


@dataclass(frozen=True, slots=True)
class Committed:
    """The state that all members share between two rounds, for who comes late."""

    step: int
    """Where the schedule stood after the round."""
    base: str
    """Its digest, as members tell it when they join."""
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
    """How replicas come to agree.

    Calls come in this order: `setup`, `load_state_dict` when resuming or `begin` when not, then
    `gradients` and `sync` in every step, and `finish` once. Everything that crosses the network
    goes through `group.agree`, so a round happens on every member or on none.
    """

    @property
    def shared_steps(self) -> int:
        """How many first steps every member computes on the same data."""
        ...

    @property
    def one_model(self) -> bool:
        """Whether all members carry the same parameters after a round."""
        ...

    @property
    def one_state(self) -> bool:
        """Whether members on the same round have the same committed state, for who comes late.

        If not, a newcomer takes over that of one donor.
        """
        ...

    @property
    def inherits(self) -> bool:
        """Whether who comes late starts from another member's state, be it equal or not."""
        ...

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Get ready; nothing crosses the network yet."""
        ...

    def begin(self, task: Task) -> SyncResult | None:
        """Make every member start from the same parameters."""
        ...

    def gradients(self, task: Task) -> None:
        """Combine gradients: called after backward, before the optimizer's step."""
        ...

    def sync(self, task: Task) -> SyncResult | None:
        """Combine parameters if it is time: called after the optimizer's step."""
        ...

    def finish(self, task: Task) -> SyncResult | None:
        """Agree on what the last steps since a sync brought, so that all end with one model."""
        ...

    def digest(self, task: Task) -> str:
        """Return the digest of the parameters that this member carries."""
        ...

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Put the parameters that count into the model inside: what to evaluate and to keep.

        Most methods leave the model as it is; where members are ahead of what they agreed on, it
        is the agreed state. Nothing is trained inside, and the model is as before afterwards.
        """
        ...

    def committed(self, task: Task) -> Committed:
        """Return what the last round left on every member; tensors are not copied.

        Only while the state rests (`task.gate`): it stays as it is until the next round is applied.
        """
        ...

    def rejoin(self, task: Task) -> None:
        """Count from here: the task was just set to a committed state."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state. Keys `shared.*` are equal on every member after a round."""
        ...

    def shared_state(self) -> dict[str, Tensor]:
        """Return the `shared.*` keys of the state as the last round left them; waits for nothing.

        From any thread while the state rests (`task.gate`), also while a round is under way.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; the model's parameters are restored elsewhere."""
        ...

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return what the member of a rank sends in a run of `steps`; exact, and pure.

        Args:
            elements: Trained numbers of the model, and its floating-point buffers.
            peers: Members, itself included.
            steps: Optimizer steps of the run.
            rank: Index among the members; on the direct route shares differ by a block.
        """
        ...


class Inner(Protocol):
    """How one optimizer step is computed."""

    def step(self, task: Task, batch: Any, outer: Outer) -> StepResult:
        """Do one step, with the outer strategy's two moments around the optimizer's step.

        Raises:
            LossNotFinite: the loss or a gradient is; nothing was updated.
        """
        ...


OVERFLOW_WEIGHT = 2.0**-20
"""Weight of gradients that overflowed, and are zeros now: exact beside 2^32 tokens."""


def reported_weight(weight: float, *, overflowed: bool) -> float:
    """Return the weight to contribute with: a whole number, or the sign of an overflow."""
    return OVERFLOW_WEIGHT if overflowed else float(max(1, round(weight)))


def any_overflowed(total: float) -> bool:
    """Return whether the sum of the weights says that some member's gradients overflowed."""
    return total != int(total)


def extend_history_hash(task: Task, sync: SyncResult | None) -> SyncResult | None:
    """Take a round into the hash of a task's past; return the same result.

    Call it before others may read the state with the new round in it: past and round belong
    together. A result without a digest changes nothing: members take it at different times, and a
    later one has it in its own.
    """
    if sync is not None and sync.digest:
        text = f"{task.past} {sync.round} {sync.digest}"
        task.past = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return sync
