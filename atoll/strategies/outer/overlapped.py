"""What strategies have in common whose rounds run beside training.

Members are ahead of what they agreed on: each carries its own parameters, and all keep the same
common ones, a flat float32 vector. That is what is evaluated, what the digest is of, what a
checkpoint's model is, and what newcomers start from. A round in which a result is still to come has
not changed it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.group.base import Group
from atoll.group.run_round import CommittedMean
from atoll.strategies.base import Committed, SyncResult
from atoll.strategies.codec_selection import codec_state
from atoll.strategies.outer.base import SHARED_STATE, OuterDefaults, as_carrier
from atoll.strategies.rounds.background_round import BackgroundRound, RoundResult
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task


class OverlappedOuter(OuterDefaults, ABC):
    """Common parameters, own parameters, and at most one round under way."""

    one_model = False

    def __init__(self, *, clock: Clock | None) -> None:
        """Have nothing under way."""
        self._clock: Clock = clock if clock is not None else RealClock()
        self._flight: BackgroundRound | None = None
        self._next = 0
        self._taken = 0
        """Step at which the common state was last changed, or confirmed."""
        self._resumed = False
        """The state that was loaded last was this member's own, not another's."""

    @property
    @abstractmethod
    def _base(self) -> str:
        """What members compare when they join."""

    @abstractmethod
    def _settle(self, task: Task) -> None:
        """Count from here: the common parameters are the own ones."""

    @abstractmethod
    def _plan(self, task: Task) -> None:
        """Begin the period until the next moment."""

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Take the parameters as they are for the common state."""
        self._task, self._codec = task, codec
        self._round_client = RoundClient(group, self._clock, codec=codec)
        self._flat = Flat.of(task)
        codec.set_shapes([tensor.shape for tensor in self._flat.tensors])
        self._start = self._flat.read()

    def digest(self, task: Task) -> str:
        """Return the digest of the common parameters and buffers."""
        return self._base

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Put the common parameters into the model inside; see :meth:`Outer.evaluating`."""
        return as_carrier(self._flat, self._start)

    def committed(self, task: Task) -> Committed:
        """Return the common state, without what is under way; see :meth:`Outer.committed`."""
        return Committed(self._taken, self._base, self._flat.views(self._start))

    def rejoin(self, task: Task) -> None:
        """Go on from the common state, or as one's own saved state says; see `Outer.rejoin`."""
        if not self._resumed:
            self._drop_flight()
            self._flat.write(self._start)
            self._settle(task)
        self._resumed = False
        self._round_client.restart()
        self._plan(task)

    def _drop_flight(self) -> None:
        """Forget a round under way; what it had come to is not taken."""
        if self._flight is not None and self._flight.work is not None:
            self._flight.end()
            self._task.round = self._round_client.group.committed_round
        self._flight = None

    def _pending(self) -> dict[str, Tensor]:
        """Return the result of a round under way, once it is there."""
        return self._flight.state() if self._flight is not None else {}

    def _shared(self) -> dict[str, Tensor]:
        """Return the shared state that all such strategies have."""
        codec = codec_state(self._codec)
        return {
            "shared.start": self._start,
            "shared.step": torch.tensor(self._taken),
            **{key: value for key, value in codec.items() if key.startswith(SHARED_STATE)},
        }

    def _result(
        self, number: int, landed: RoundResult, *, began: float, delta_norm: float
    ) -> SyncResult:
        """Return a round that was taken; applying its result began at `began`."""
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        return SyncResult(
            round=number, contributors=landed.contributors, weight=landed.weight,
            seconds={**landed.seconds, "apply": apply_s}, sent_bytes=landed.sent_bytes,
            received_bytes=landed.received_bytes, delta_norm=delta_norm, digest=self._base,
            aborted=landed.aborted,
        )  # fmt: skip


def started(rounds: Sequence[CommittedMean], *, number: int, digest: str) -> SyncResult:
    """Return the rounds of a same start as one result."""
    last = rounds[-1]
    return SyncResult(
        round=number, contributors=last.reduced.contributors, weight=last.reduced.weight,
        seconds={k: sum(one.seconds[k] for one in rounds) for k in last.seconds},
        sent_bytes=last.sent_bytes, received_bytes=last.received_bytes, digest=digest,
        aborted=last.attempts - 1,
    )  # fmt: skip


def in_a_row(results: Sequence[SyncResult]) -> SyncResult | None:
    """Return rounds that were held one after the other as one result: that of the last."""
    if len(results) < 2:
        return results[0] if results else None
    last = results[-1]
    phases = {phase for one in results for phase in one.seconds}
    return SyncResult(
        round=last.round, contributors=last.contributors, weight=last.weight,
        seconds={k: sum(one.seconds.get(k, 0.0) for one in results) for k in phases},
        sent_bytes=sum(one.sent_bytes for one in results),
        received_bytes=sum(one.received_bytes for one in results), delta_norm=last.delta_norm,
        digest=last.digest, aborted=sum(one.aborted for one in results),
    )  # fmt: skip


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state whose keys begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
