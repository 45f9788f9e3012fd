"""Collectives that a script calls itself: `run.all_reduce`, `run.broadcast`, `run.barrier`.

Each call is a round of the group, as a training round is: all members of the plan get the same
result, or none does. The value of a member that is lost during the call is either in the result of
every other member or of none; the call returns when the remaining members are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar, overload

import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError, GroupError, LeftBehind, unknown
from atoll.group.aggregation import exactly
from atoll.group.base import AllToAllResult, Decidable, PeerMessage, Reduced, flatten, unflatten
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedRound, Exchange, run_round
from atoll.run.session import Session
from atoll.strategies.base import SyncResult
from atoll.strategies.outer.overlapped import OverlappedOuter
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.vectors.whole_state import values, words

if TYPE_CHECKING:
    from atoll.strategies.wrapped_optimizer import OuterOptimizer
    from atoll.task import Task
    from atoll.train.state.wrapped_state import WrappedState

T = TypeVar("T", bound=Decidable)

MEAN, SUM, MIN, MAX = "mean", "sum", "min", "max"
OPERATIONS = (MEAN, SUM, MIN, MAX)
BASE = "values"
"""Digest of the state before a model is wrapped: there is none."""
KEY = "value"
_EXACT = "fp32"


class CollectiveSession(Session):
    """A member that may exchange values with the others, besides its training."""

    _task: Task | None = None
    _optimizer: OuterOptimizer | None = None
    _state: WrappedState | None = None

    @overload
    def all_reduce(self, value: Tensor, op: str = ..., *, codec: str = ...) -> Tensor: ...

    @overload
    def all_reduce(
        self, value: Sequence[Tensor], op: str = ..., *, codec: str = ...
    ) -> list[Tensor]: ...

    def all_reduce(
        self, value: Tensor | Sequence[Tensor], op: str = MEAN, *, codec: str = _EXACT
    ) -> Tensor | list[Tensor]:
        """Return the mean, sum, least or greatest of all members' values, equal on every member.

        Every member MUST call it at the same place, with the same shapes: between the same two
        steps of a wrapped optimizer, or before `wrap`. Methods whose rounds run in the background
        first end theirs, as `finish` does. Sums and means are computed in float32; integers, and
        `min` and `max`, exactly, for which every member gets the values of all others.

        A member that is lost is left out on all; `run.members` has those that took part. A sum is
        then one of fewer members, so prefer a mean with counts of your own.

        Args:
            value: A tensor, or several that are exchanged together; not changed.
            op: `mean`, `sum`, `min` or `max`.
            codec: Encoding of means and sums, e.g. `int8`.

        Returns:
            New tensors of the same types on the same devices.

        Raises:
            ConfigError: an unknown operation, a mean of integers, a member of several processes, a
                method without common rounds, or a run that is taken over and not wrapped yet.
            LeftBehind: the others finished without this member, e.g. because it was frozen; after
                `wrap` it has taken over their state.
            GroupLeft: this member was asked to leave.
            GroupError: the members' shapes differ.
        """
        if op not in OPERATIONS:
            raise unknown("operation", op, OPERATIONS)
        self._check_alone()
        tensors = [value] if isinstance(value, Tensor) else list(value)
        whole = any(not one.is_floating_point() for one in tensors)
        if whole and op == MEAN:
            raise ConfigError(
                "a mean of integers is no integer", given=f"{[one.dtype for one in tensors]}",
                expected="floating-point tensors", remedy="value.float(), or op='sum'",
            )  # fmt: skip
        exact = bool(tensors) and (whole or op in (MIN, MAX))
        found = self._gathered(tensors, op) if exact else self._averaged(tensors, op, codec)
        return found[0] if isinstance(value, Tensor) else found

    @overload
    def broadcast(self, value: Tensor, source: str = ...) -> Tensor: ...

    @overload
    def broadcast(self, value: Sequence[Tensor], source: str = ...) -> list[Tensor]: ...

    def broadcast(
        self, value: Tensor | Sequence[Tensor], source: str = ""
    ) -> Tensor | list[Tensor]:
        """Return the values of one member, bit for bit, on every member.

        Called as `all_reduce`, with tensors of the same shapes and types on every member.

        Args:
            value: The source's is sent; on the others only shapes, types and devices matter.
            source: The member; empty: the first of those that take part.

        Raises:
            GroupError: the source was lost before its values arrived.
            ConfigError, LeftBehind, GroupLeft: as in :meth:`all_reduce`.
        """
        self._check_alone()
        tensors = [value] if isinstance(value, Tensor) else list(value)
        group, codec = self.group, make_codec(_EXACT)

        def copied(plan: object) -> Reduced:
            holder = source or group.members[0]
            own = words(tensors) if tensors else torch.zeros(1)
            work = group.reduce([own], codec=codec, weight=float(group.me == holder), key=KEY)
            with self._resting():
                return work.wait()

        with exactly(group):
            try:
                round_ = self._round(copied)
            except GroupError as error:
                if "weight" not in str(error) or isinstance(error, LeftBehind):
                    raise
                raise GroupError(
                    "the member that has the values was lost", given=source or "the first member",
                    expected="a member that takes part", remedy="broadcast from another one",
                ) from error  # fmt: skip
        found = values(round_.reduced.tensors[0].cpu(), tensors) if tensors else []
        back = [one.to(like.device, like.dtype) for one, like in zip(found, tensors, strict=True)]
        return back[0] if isinstance(value, Tensor) else back

    def barrier(self) -> None:
        """Return when every member has called it; raises as :meth:`all_reduce` does."""
        self.all_reduce(torch.zeros(1))

    def _check_alone(self) -> None:
        if self._joint:
            raise ConfigError(
                "a member of several processes exchanges no values of its own",
                given=f"{self.ranks} ranks", expected="members of one process",
                remedy="torch.distributed between the ranks of an island",
            )  # fmt: skip

    # --------------------------------------------------------------------------------- exchanges

    def _averaged(self, tensors: Sequence[Tensor], op: str, codec: str) -> list[Tensor]:
        group, encoded = self.group, make_codec(codec)
        encoded.set_shapes([tuple(one.shape) for one in tensors])

        def mean(_: object) -> Reduced:
            vector = flatten(tensors)
            work = group.reduce([vector], codec=encoded, weight=1.0, key=KEY)
            with self._resting():
                return work.wait()

        with exactly(group):
            reduced = self._round(mean).reduced
        vector = reduced.tensors[0].reshape(-1)
        if op == SUM:
            vector = vector * reduced.weight
        return [
            one.to(like.dtype).clone()
            for one, like in zip(unflatten(vector, tensors), tensors, strict=True)
        ]

    def _gathered(self, tensors: Sequence[Tensor], op: str) -> list[Tensor]:
        """Return an operation on the values of all members, computed here in slot order."""
        group, codec, own = self.group, make_codec(_EXACT), words(tensors)

        def everything(_: object) -> AllToAllResult:
            packet = codec.encode(own, key=KEY)
            work = group.all_to_all([PeerMessage(tuple(group.members), packet)])
            with self._resting():
                return work.wait()

        result = self._round(everything).reduced
        found = {
            sender: codec.decode(packets[0])
            for sender, packets in result.packets.items()
            if packets
        }
        other = [sender for sender, vector in found.items() if len(vector) != len(own)]
        if other:
            raise GroupError(
                "the members' shapes differ", given=f"{len(found[other[0]])} words of {other[0]}",
                expected=f"{len(own)}, as here", remedy="give tensors of the same shapes and types",
            )  # fmt: skip
        parts = [values(vector, tensors) for vector in found.values()]
        return [
            _combined(op, [part[index] for part in parts]).to(like.device, like.dtype)
            for index, like in enumerate(tensors)
        ]

    # -------------------------------------------------------------------------------- the round

    def _resting(self) -> AbstractContextManager[None]:
        return self._task.state_lock.resting() if self._optimizer and self._task else nullcontext()

    def _round(self, exchange: Exchange[T]) -> CommittedRound[T]:
        """Run a round with this exchange, between two steps of the training."""
        task, optimizer = self._task, self._optimizer
        if task is None or optimizer is None:
            return self._round_without_model(exchange)
        outer = optimizer.outer
        if not (outer.one_state and outer.inherits):
            raise ConfigError(
                "this method has no rounds of all members", given=type(outer).__name__,
                expected="a method with one common state, e.g. ddp or diloco",
                remedy="exchange values before run.wrap, or by run.topic",
            )  # fmt: skip
        if isinstance(outer, OverlappedOuter):
            self.finish()  # its background round uses the group
        try:
            with task.state_lock.moving():
                committed = self._round_of(task, exchange)
        except LeftBehind as error:
            self._recover(error)
            raise
        return committed

    @property
    def takes_over(self) -> bool:
        """Whether this process continues a run: it joined late, or the job was resumed.

        Then :meth:`wrap` loads the state, and values can only be exchanged after it.
        """
        registered = self._connection.registered if self._connection is not None else None
        late = self._enrolled is not None and self._enrolled.late
        return late or (registered is not None and registered.resume_round >= 0)

    def _round_without_model(self, exchange: Exchange[T]) -> CommittedRound[T]:
        if self.takes_over:
            raise ConfigError(
                "this member takes over a run, and has not got its state yet",
                given="a collective before run.wrap", expected="run.wrap first",
                remedy="exchange values after run.wrap, where all members are at the same step",
            )  # fmt: skip
        report = PeriodReport(round=self.group.committed_round, base=BASE)
        return run_round(self.group, exchange, report)

    def _round_of(self, task: Task, exchange: Exchange[T]) -> CommittedRound[T]:
        """Run a round that leaves the common state as it is, and count it."""
        assert self._optimizer is not None
        outer, number, pace = self._optimizer.outer, task.round, task.pace
        common = outer.committed(task).base
        report = PeriodReport(round=number, base=task.labelled(common), tokens=task.tokens)
        committed = run_round(self.group, exchange, report, resting=task.state_lock.resting)
        # A lost member's data is read on by others; within its own slot this member has read ahead.
        RoundClient(self.group, self._clock).apply_verdict(task, committed, ahead=True)
        task.pace = committed.verdict.pace.get(self.group.me, pace)
        task.round = number + 1
        if self._state is not None and not task.period.done:  # otherwise the model is ahead
            found = SyncResult(
                round=number, contributors=committed.reduced.contributors, weight=0.0,
                seconds=committed.seconds, stopping=False,
            )  # fmt: skip
            self._state.after(found)
        return committed

    def _recover(self, error: LeftBehind) -> None:
        raise error


def _combined(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Return an operation on the members' tensors."""
    stacked = torch.stack(list(parts))
    if op == MIN:
        return stacked.amin(0)
    if op == MAX:
        return stacked.amax(0)
    return stacked.sum(0, dtype=parts[0].dtype)
