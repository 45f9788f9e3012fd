"""Several exchanges in one round: what runs them, and their common result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from atoll.codec.base import Codec
from atoll.digest import Digest
from atoll.group.base import AllToAllResult, Group, PeerMessage, Reduced, Resting
from atoll.wire.messages import RoundPlan

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ExchangeResult(Generic[V]):
    """The result of a round's exchanges: equal on every member except for `value`."""

    value: V
    contributors: tuple[str, ...]
    """Members whose values count."""
    weight: float
    """Sum of their weights."""
    digest: str


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """Runs exchanges; while it waits, other threads may read the member's state."""

    group: Group
    resting: Resting
    weight: float
    """Of this member's values."""

    def reduce(self, xs: Sequence[Tensor], *, codec: Codec, key: str) -> Reduced:
        """Return the weighted mean; see :meth:`Group.reduce`."""
        work = self.group.reduce(xs, codec=codec, weight=self.weight, key=key)
        with self.resting():
            return work.wait()

    def all_to_all(self, messages: Sequence[PeerMessage]) -> AllToAllResult:
        """Exchange messages between all pairs; see :meth:`Group.all_to_all`."""
        work = self.group.all_to_all(messages, weight=self.weight)
        with self.resting():
            return work.wait()


Exchanging = Callable[[ExchangeContext, RoundPlan], ExchangeResult[V]]


def hashed(*digests: str) -> str:
    """Return one digest of several."""
    return Digest("\0".join(digests).encode()).hexdigest()
