"""Base class of strategies whose rounds run in the background while training continues.

Each member trains its own parameters ahead of the common ones, a flat float32 vector that is equal
on all members. Evaluation, digests, checkpoints and joining members use the common parameters. A
round under way changes them only once its result is applied.
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
        """Start without a round under way."""
        self._clock: Clock = clock if clock is not None else RealClock()
        self._flight: BackgroundRound | None = None
        self._next = 0
        self._common_step = 0
        """Step at which the common state was last changed, or confirmed."""
        self._resumed = False
        """Whether the last loaded state was this member's own, not a donor's."""

    @property
    @abstractmethod
    def _base(self) -> str:
        """Digest of the common state, compared when members join."""

    @abstractmethod
    def _settle(self, task: Task) -> None:
        """Restart the counters; the member's parameters equal the common ones."""

    @abstractmethod
    def _plan(self, task: Task) -> None:
        """Start the period until the next event."""

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state."""
        self._task, self._codec = task, codec
        self._round_client = RoundClient(group, self._clock, codec=codec)
        self._flat = Flat.of(task)
        codec.set_shapes(self._flat.shapes)
        self._start = self._flat.read()

    def digest(self, task: Task) -> str:
        """Return the digest of the common parameters and buffers."""
        return self._base

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Load the common parameters into the model for the block; see :meth:`Outer.evaluating`."""
        return as_carrier(self._flat, self._start)

    def committed(self, task: Task) -> Committed:
        """Return the common state, without the round under way; see :meth:`Outer.committed`."""
        return Committed(self._common_step, self._base, self._flat.values(self._start))

    def rejoin(self, task: Task) -> None:
        """Continue from the common state, or from this member's saved one; see `Outer.rejoin`."""
        if not self._resumed:
            self._drop_flight()
            self._flat.write(self._start)
            self._settle(task)
        self._resumed = False
        self._round_client.restart()
        self._plan(task)

    def _drop_flight(self) -> None:
        """Discard the round under way and its result."""
        if self._flight is not None and self._flight.work is not None:
            self._flight.end()
            self._task.round = self._round_client.group.committed_round
        self._flight = None

    def _pending(self) -> dict[str, Tensor]:
        """Return the result of the round under way; waits for it."""
        return self._flight.state() if self._flight is not None else {}

    def _shared(self) -> dict[str, Tensor]:
        """Return the shared state that all these strategies have."""
        codec = codec_state(self._codec)
        return {
            "shared.start": self._start,
            "shared.step": torch.tensor(self._common_step),
            **{key: value for key, value in codec.items() if key.startswith(SHARED_STATE)},
        }

    def _result(
        self, number: int, landed: RoundResult, *, began: float, delta_norm: float
    ) -> SyncResult:
        """Return the result of an applied round; `began` is when applying started."""
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        return SyncResult(
            round=number, contributors=landed.contributors, weight=landed.weight,
            seconds={**landed.seconds, "apply": apply_s}, sent_bytes=landed.sent_bytes,
            received_bytes=landed.received_bytes, delta_norm=delta_norm, digest=self._base,
            aborted=landed.aborted,
        )  # fmt: skip


def started(rounds: Sequence[CommittedMean], *, number: int, digest: str) -> SyncResult:
    """Merge the rounds of the initial broadcast into one result."""
    last = rounds[-1]
    return SyncResult(
        round=number, contributors=last.reduced.contributors, weight=last.reduced.weight,
        seconds={k: sum(one.seconds[k] for one in rounds) for k in last.seconds},
        sent_bytes=last.sent_bytes, received_bytes=last.received_bytes, digest=digest,
        aborted=last.attempts - 1,
    )  # fmt: skip


def in_a_row(results: Sequence[SyncResult]) -> SyncResult | None:
    """Merge consecutive rounds into one result with the numbers of the last."""
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
    """Return the entries whose keys start with `prefix`, without the prefix."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
