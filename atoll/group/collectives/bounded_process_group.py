"""A process group with a deadline for every wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from torch import Tensor

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Result of one exchange, equal on every member."""

    vector: Tensor
    contributors: tuple[str, ...]
    weight: float
    """Sum of the weights; 0: nothing to average, and the vector is zero."""
    digest: str
    sent_bytes: int
    received_bytes: int


@dataclass(slots=True)
class TransferCounters:
    """Bytes moved between members."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class BoundedProcessGroup:
    """A process group and the limits of one attempt."""

    group: Any
    members: tuple[str, ...]
    rank: int
    deadline: float
    moved: TransferCounters = field(default_factory=TransferCounters)
    """Bytes moved by :meth:`send` and :meth:`receive`."""
    ring: tuple[int, ...] = ()
    """Ranks in the order of rings and trees; empty: as they are."""
    _ranks: tuple[int, ...] = ()
    """Places in another order -> ranks in the group; empty: they are equal."""

    def in_ring_order(self) -> BoundedProcessGroup:
        """Return this group with members numbered by their places on the ring."""
        if not self.ring:
            return self
        return replace(
            self, members=tuple(self.members[rank] for rank in self.ring),
            rank=self.ring.index(self.rank), ring=(), _ranks=self.ring,
        )  # fmt: skip

    def run(self, start: Callable[[], Any]) -> None:
        """Run one collective to its end, at most until the deadline.

        Raises:
            DeadlineExceeded: the deadline has passed.
            RuntimeError: Gloo's own error; a connection broke, or the time was over.
        """
        left = self._left()
        self.group._set_default_timeout(left)
        start().wait(left)

    def send(self, tensor: Tensor, to: int) -> list[Any]:
        """Start to send a contiguous tensor; pass the return value to :meth:`end`."""
        if not tensor.numel():
            return []
        self.moved.sent += tensor.numel() * tensor.element_size()
        return [self.group.send([tensor], self._ranks[to] if self._ranks else to, 0)]

    def receive(self, tensor: Tensor, of: int) -> list[Any]:
        """Start to receive a tensor; pass the return value to :meth:`end`."""
        if not tensor.numel():
            return []
        self.moved.received += tensor.numel() * tensor.element_size()
        return [self.group.recv([tensor], self._ranks[of] if self._ranks else of, 0)]

    def end(self, *begun: Iterable[Any]) -> None:
        """Wait for the given transfers, at most until the deadline; raises as :meth:`run`."""
        for works in begun:
            for work in works:
                work.wait(self._left())

    def _left(self) -> timedelta:
        left_s = self.deadline - RealClock().monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("no time is left for the members' exchange")
        return timedelta(seconds=left_s)
