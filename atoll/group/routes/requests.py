"""The requests of one exchange, equal on each route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.codec.base import Codec
from atoll.group.aggregation import Aggregation
from atoll.group.base import PeerMessage
from atoll.group.collectives.collectives import PLAIN
from atoll.wire.messages import RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRequest:
    """One reduce."""

    plan: RoundPlan
    vector: Tensor
    """Own values, float32, shape (n,)."""
    codec: Codec
    weight: float
    key: str
    """Key of the codec's residual state."""
    aggregation: Aggregation = PLAIN
    serial: int
    """Return value of :meth:`Routes.begin` for its plan."""
    phase: int = 0
    """Number of the exchange within the plan. Only the first one may connect, so that members
    cannot meet in different exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllRequest:
    """One all-to-all."""

    plan: RoundPlan
    messages: Sequence[PeerMessage]
    weight: float
    serial: int
    """Return value of :meth:`Routes.begin` for its plan."""
    phase: int = 0
