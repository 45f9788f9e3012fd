"""What members of one process group move their tensors with, each wait bounded by a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came out of one exchange, equal on every member."""

    vector: Tensor
    contributors: tuple[str, ...]
    weight: float
    """Sum of the weights; 0: there was nothing to average, and the vector is zero."""
    digest: str
    sent_bytes: int
    received_bytes: int


@dataclass(slots=True)
class TransferCounters:
    """Bytes that went from member to member."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class BoundedProcessGroup:
    """A process group and this attempt's bounds."""

    group: Any
    members: tuple[str, ...]
    rank: int
    deadline: float
    moved: TransferCounters = field(default_factory=TransferCounters)
    """What :meth:`send` and :meth:`receive` moved."""

    def run(self, start: Callable[[], Any]) -> None:
        """Run one collective to its end, at most until the deadline.

        Raises:
            DeadlineExceeded: the deadline had passed before.
            RuntimeError: Gloo's own error; a connection broke, or time was up.
        """
        left = self._left()
        self.group._set_default_timeout(left)
        start().wait(left)

    def send(self, tensor: Tensor, to: int) -> list[Any]:
        """Begin to send a contiguous tensor to a member; give what this returns to :meth:`end`."""
        if not tensor.numel():
            return []
        self.moved.sent += tensor.numel() * tensor.element_size()
        return [self.group.send([tensor], to, 0)]

    def receive(self, tensor: Tensor, of: int) -> list[Any]:
        """Begin to receive a tensor from a member; see :meth:`send`."""
        if not tensor.numel():
            return []
        self.moved.received += tensor.numel() * tensor.element_size()
        return [self.group.recv([tensor], of, 0)]

    def end(self, *begun: Iterable[Any]) -> None:
        """Wait until what was begun is done, at most until the deadline.

        Raises:
            DeadlineExceeded: the deadline has passed.
            RuntimeError: Gloo's own error; a connection broke, or time was up.
        """
        for works in begun:
            for work in works:
                work.wait(self._left())

    def _left(self) -> timedelta:
        left_s = self.deadline - RealClock().monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("no time is left for the members' exchange")
        return timedelta(seconds=left_s)
