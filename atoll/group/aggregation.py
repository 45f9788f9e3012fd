"""How a group aggregates values, equal on every member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypedDict

from atoll.errors import ConfigError, unknown
from atoll.reducer.aggregation import (
    ADDING,
    Rule,
    VectorAggregation,
    check_members,
    is_by_coordinate,
    members_needed,
    parse_admission,
    parse_aggregate,
)

COLLECTIVES = ("auto", "ring", "butterfly", "tree", "hierarchical", "star")

ADD_ON_THE_WAY = ("ring", "butterfly", "tree", "hierarchical")
"""Collectives that send partial sums: no member sees the values of another."""


class AggregationOptions(TypedDict, total=False):
    """Keywords of :class:`Aggregation`, for functions that pass them on."""

    aggregate: str
    collective: str
    admission: str


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How values are aggregated, and how they travel on the direct route.

    Raises:
        ConfigError: a name is unknown (the nearest one is named), a number is out of range, or the
            options contradict each other.
    """

    aggregate: str = "mean"
    """The aggregation rule: `mean`, or a robust one."""
    collective: str = "auto"
    """`auto`, or the name of a collective for the direct route."""
    admission: str = "finite"
    """`finite` contributions, or those that pass a filter."""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise unknown("collective", self.collective, COLLECTIVES)
        if self.robust and self.collective in ADD_ON_THE_WAY:
            raise ConfigError(
                "this collective sends partial sums, which hide single contributions from the rule",
                given=f"collective {self.collective} with aggregate {self.aggregate}, "
                f"admission {self.admission}",
                expected="a reducer, which sees all contributions",
                remedy='collective = "auto"',
            )
        if self.needs_reducer and self.collective != "auto":
            raise ConfigError(
                "this aggregation needs the reducer, which replaces the collective",
                given=f"collective {self.collective} with aggregate {self.aggregate}, "
                f"admission {self.admission}",
                remedy='collective = "auto"',
            )

    @cached_property
    def rule(self) -> Rule:
        """The parsed aggregate; cached, because every reduce needs it."""
        return parse_aggregate(self.aggregate)

    @cached_property
    def _admission(self) -> Rule:
        return parse_admission(self.admission)

    @property
    def robust(self) -> bool:
        """Whether contributions are examined one by one, so that partial sums do not suffice."""
        return self.rule.name not in ADDING or self._filters

    @property
    def needs_reducer(self) -> bool:
        """Whether one place has to see all contributions completely, or needs a history."""
        return not is_by_coordinate(self.rule) or self._filters

    @property
    def _filters(self) -> bool:
        return self._admission.name != "finite"

    @property
    def members_needed(self) -> int:
        """The fewest contributions for which the aggregate is defined."""
        return members_needed(self.rule)

    def spec(self, key: str) -> str:
        """Return the text sent with contributions to vector `key`; empty for a plain mean."""
        return VectorAggregation(self.rule, self._admission, key).spec

    def planned(self, collective: str, *, codec: str) -> Aggregation:
        """Return this with the collective of a plan, where partial sums are possible."""
        if not collective or self.aggregate != "mean" or self.robust or codec != "fp32":
            return self
        return replace(self, collective=collective)

    def check_direct(self) -> None:
        """Raise ConfigError if a rule needs the reducer."""
        if self.needs_reducer:
            raise ConfigError(
                "this aggregation needs the reducer, which sees all of every contribution",
                given=f"aggregate {self.aggregate}, admission {self.admission} on the direct route",
                expected='aggregate "median" or "trimmed:F", or a route through the hub',
                remedy='route = "auto" or "relay" in [job]',
            )

    def check_codec(self, codec: str) -> None:
        """Raise ConfigError if the collective would round partial sums on every hop."""
        if self.collective in ADD_ON_THE_WAY and codec != "fp32":
            raise ConfigError(
                "this collective sends partial sums, which would be encoded again on every hop",
                given=f"collective {self.collective} with codec {codec}",
                expected="codec fp32, or a collective that encodes once each way",
                remedy='collective = "auto" or "star"',
            )

    def check_members(self, members: int) -> None:
        """Raise PeerLost if the aggregate needs more members; the round may be retried."""
        check_members(self.rule, members)


class HasAggregation(Protocol):
    """A group that aggregates."""

    aggregation: Aggregation


@contextmanager
def exactly(group: HasAggregation) -> Iterator[None]:
    """Let exchanges inside compare or copy values instead of combining updates.

    State comparisons (are all replicas equal? which codec?) are no updates, so admission by norms
    does not apply, and only two rules preserve the values: the mean, or where the rule is robust
    the coordinate median, which keeps the equal values of a majority.
    """
    before = group.aggregation
    group.aggregation = Aggregation(aggregate="median" if before.robust else "mean")
    try:
        yield
    finally:
        group.aggregation = before
