"""What a group does with the members' values beyond averaging them; equal on every member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from atoll.errors import ConfigError, unknown
from atoll.reducer.policies import (
    ADDING,
    AggregationPolicy,
    Rule,
    check_members,
    is_by_coordinate,
    members_needed,
    parse_admission,
    parse_aggregate,
)

COLLECTIVES = ("auto", "ring", "butterfly", "tree", "hierarchical", "star")
"""Ways of a mean between members that can dial each other."""

ADD_ON_THE_WAY = ("ring", "butterfly", "tree", "hierarchical")
"""Those in which partial sums travel: no member sees the values of another."""


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """How values become one, how they travel between members that can dial each other.

    Raises:
        ConfigError: a word is unknown (the nearest one is named), a number is out of range, or the
            words contradict each other.
    """

    aggregate: str = "mean"
    """The rule that makes one vector of the members': `mean`, or a robust one."""
    collective: str = "auto"
    """How a mean travels on the direct route: `auto`, or the name of a collective."""
    admission: str = "finite"
    """Which contributions are let in: `finite` ones, or those that pass a filter."""

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if self.collective not in COLLECTIVES:
            raise unknown("collective", self.collective, COLLECTIVES)
        if self.robust and self.collective in ADD_ON_THE_WAY:
            raise ConfigError(
                "this collective adds values on the way, where no rule can tell them apart",
                given=f"collective {self.collective} with aggregate {self.aggregate}, "
                f"admission {self.admission}",
                expected="a place that sees all contributions",
                remedy='collective = "auto"',
            )
        if self.needs_reducer and self.collective != "auto":
            raise ConfigError(
                "this policy needs the reducer, where no collective is used",
                given=f"collective {self.collective} with aggregate {self.aggregate}, "
                f"admission {self.admission}",
                remedy='collective = "auto"',
            )

    @cached_property
    def rule(self) -> Rule:
        """The aggregate, parsed once: every reduce asks for it."""
        return parse_aggregate(self.aggregate)

    @cached_property
    def _admission(self) -> Rule:
        return parse_admission(self.admission)

    @property
    def robust(self) -> bool:
        """Whether contributions are looked at one by one, so that a sum of them will not do."""
        return self.rule.name not in ADDING or self._filters

    @property
    def needs_reducer(self) -> bool:
        """Whether one place has to see all of every contribution, and to remember."""
        return not is_by_coordinate(self.rule) or self._filters

    @property
    def _filters(self) -> bool:
        return self._admission.name != "finite"

    @property
    def members_needed(self) -> int:
        """How many contributions the aggregate needs to mean anything."""
        return members_needed(self.rule)

    def spec(self, key: str) -> str:
        """Return the text that travels with a contribution; empty for a plain mean.

        Args:
            key: Names the vector.
        """
        return AggregationPolicy(self.rule, self._admission, key).spec

    def check_direct(self) -> None:
        """Refuse to go without the reducer where a rule needs whole vectors, or a memory.

        Raises:
            ConfigError: it does.
        """
        if self.needs_reducer:
            raise ConfigError(
                "this policy needs the reducer, which sees all of every contribution",
                given=f"aggregate {self.aggregate}, admission {self.admission} on the direct route",
                expected='aggregate "median" or "trimmed:F", or a route through the hub',
                remedy='route = "auto" or "relay" in [job]',
            )

    def check_codec(self, codec: str) -> None:
        """Refuse a codec that the collective cannot carry.

        Args:
            codec: Its canonical spec.

        Raises:
            ConfigError: partial sums would be rounded on every hop.
        """
        if self.collective in ADD_ON_THE_WAY and codec != "fp32":
            raise ConfigError(
                "this collective adds values on the way: they would be encoded anew on every hop",
                given=f"collective {self.collective} with codec {codec}",
                expected="codec fp32, or a collective that encodes once each way",
                remedy='collective = "auto" or "star"',
            )

    def check_members(self, members: int) -> None:
        """Refuse to go on with fewer members than the aggregate needs.

        Raises:
            PeerLost: there are too few; the round is worth another attempt.
        """
        check_members(self.rule, members)


class HasPolicy(Protocol):
    """A group, as far as its policy is concerned."""

    policy: GroupPolicy


@contextmanager
def exactly(group: HasPolicy) -> Iterator[None]:
    """Let exchanges inside compare or copy values instead of combining updates.

    What members find out together about their state (are all equal? which codec is it to be?) is
    no update: norms mean nothing there, and every other rule than these two would change it. Where
    the policy is robust it is the coordinate median: equal values of a majority stay what they
    are, whatever the others say.
    """
    before = group.policy
    group.policy = GroupPolicy(aggregate="median" if before.robust else "mean")
    try:
        yield
    finally:
        group.policy = before
