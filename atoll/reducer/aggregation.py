"""The syntax of aggregations: how members' vectors are aggregated, and which of them are admitted.

  aggregate = "mean" | "sum" | "median" | "trimmed:F" | "krum:F" | "multi-krum:F[:M]"
           | "clip:TAU[:ROUNDS]" | "geometric-median"
  admission = "finite" | "norms[:K[:FLOOR]]"

A robust aggregate may have the prefix `bucket:S:`, e.g. `bucket:2:krum:1`: the rule then sees the
means of random groups of S members. Every contribution carries its aggregation as
`AGGREGATE/ADMISSION/KEY`, so that a mismatch between members is detected; a plain mean is the
empty text. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from atoll.errors import ConfigError, PeerLost, unknown

MAX_SPEC_CHARS = 200
"""Longest aggregation accepted from the wire."""
MAX_COUNT = 1_000_000
"""Largest number of members or rounds in a rule."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Syntax of a rule, and the number of members it needs."""

    form: str
    """Shown in messages, e.g. `krum:F`."""
    least: tuple[float, ...] = ()
    """Minimum of each number; its length is the maximum count of numbers."""
    whole: tuple[bool, ...] = ()
    """Which numbers are integers."""
    required: int = 0
    """How many numbers are mandatory."""
    members: Callable[..., int] = lambda *_: 1
    """Numbers -> fewest members for which the rule is defined."""
    counts_bad: bool = False
    """Whether the first number is the count of wrong contributions."""
    by_coordinate: bool = False
    """Whether coordinates are independent, so that parts of vectors can be aggregated."""
    nearest: Callable[[int], str] = lambda _: "median"
    """Number of members -> the nearest rule defined for so many."""


def _krum_members(bad: float, best: float = 0) -> int:
    return int(max(2 * bad + 3, bad + best))


def _nearest_to_krum(name: str) -> Callable[[int], str]:
    def nearest(members: int) -> str:
        if members >= 3:
            return f"{name}:{(members - 3) // 2}"
        return "median"

    return nearest


AGGREGATES: Mapping[str, _Kind] = MappingProxyType(
    {
        "mean": _Kind("mean", by_coordinate=True),
        "sum": _Kind("sum", by_coordinate=True),
        "median": _Kind("median", by_coordinate=True),
        "trimmed": _Kind(
            "trimmed:F", (0,), (True,), 1, lambda bad: int(2 * bad + 1), True, True,
            nearest=lambda members: f"trimmed:{(members - 1) // 2}",
        ),
        "krum": _Kind(
            "krum:F", (0,), (True,), 1, _krum_members, True, nearest=_nearest_to_krum("krum")
        ),
        "multi-krum": _Kind(
            "multi-krum:F[:M]", (0, 1), (True, True), 1, _krum_members, True,
            nearest=_nearest_to_krum("multi-krum"),
        ),
        "clip": _Kind("clip:TAU[:ROUNDS]", (math.ulp(0.0), 1), (False, True), 1),
        "geometric-median": _Kind("geometric-median"),
    }
)  # fmt: skip

ADMISSIONS: Mapping[str, _Kind] = MappingProxyType(
    {
        "finite": _Kind("finite"),
        "norms": _Kind("norms[:K[:FLOOR]]", (1.0, 0.0), (False, False)),
    }
)

BUCKET = "bucket"
"""Prefix of a rule that sees the means of groups."""

ADDING = ("mean", "sum")
"""Aggregates that are a sum over members: partial sums may be sent."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's name and its numbers."""

    name: str
    numbers: tuple[float, ...] = ()
    bucket: int = 1
    """Members per bucket; 1: no bucketing."""

    @property
    def spec(self) -> str:
        """Canonical text."""
        numbers = (str(int(n)) if n.is_integer() else repr(n) for n in self.numbers)
        before = [BUCKET, str(self.bucket)] if self.bucket > 1 else []
        return ":".join([*before, self.name, *numbers])

    def number(self, index: int, default: float) -> float:
        """Return one of the numbers, or `default` if it was omitted."""
        return self.numbers[index] if len(self.numbers) > index else default


def parse_aggregate(text: str) -> Rule:
    """Parse an aggregate.

    Raises:
        ConfigError: the name is unknown (names the nearest one), or a number is wrong.
    """
    before, _, rest = text.partition(":")
    if before.strip() != BUCKET:
        return _parsed("aggregate", text, AGGREGATES)
    size, _, inner = rest.partition(":")
    rule = _parsed("aggregate", inner, AGGREGATES) if inner else Rule("")
    whole = size.strip().isascii() and size.strip().isdigit() and len(size) < 7
    if not whole or int(size) < 1 or not inner or rule.name in ADDING:
        raise ConfigError(
            "this is not a robust rule in buckets", given=repr(text),
            expected="bucket:S:RULE with S >= 1 and a robust rule, e.g. bucket:2:krum:1",
            remedy="a mean is the same with and without buckets" if rule.name in ADDING else "",
        )  # fmt: skip
    return replace(rule, bucket=int(size))


def parse_admission(text: str) -> Rule:
    """Parse an admission; raises ConfigError as :func:`parse_aggregate`."""
    return _parsed("admission", text, ADMISSIONS)


def members_needed(aggregate: Rule) -> int:
    """Return the fewest contributions for which an aggregate is defined."""
    rows = AGGREGATES[aggregate.name].members(*aggregate.numbers)
    return (rows - 1) * aggregate.bucket + 1


def is_by_coordinate(aggregate: Rule) -> bool:
    """Return whether an aggregate treats every coordinate independently, in any part of a vector.

    False with buckets: the owners of different parts might receive different contributions.
    """
    return AGGREGATES[aggregate.name].by_coordinate and aggregate.bucket == 1


def check_members(aggregate: Rule, members: int) -> None:
    """Raise PeerLost, which names the nearest usable rule, if there are too few contributions.

    The round may be retried: members may come back or be admitted again.
    """
    needed = members_needed(aggregate)
    if members < needed:
        raise PeerLost(
            f"too few contributions for the aggregate {aggregate.spec}",
            given=members, expected=f"at least {needed}",
            remedy=f"{AGGREGATES[aggregate.name].nearest(members)} works with {members}; min_nodes "
            f"= {needed} in [job] lets the run pause instead",
        )  # fmt: skip


def fitted(aggregate: Rule, members: int, *, found: int) -> Rule:
    """Adapt a rule to the contributions left after wrong ones were found.

    A rule against F wrong contributions counts all of them. The `found` ones, which are left out,
    are subtracted from F if the rule would otherwise need more than the `members` contributions
    left.

    Raises:
        PeerLost: there are too few nevertheless; names the nearest rule that works.
    """
    if AGGREGATES[aggregate.name].counts_bad:
        bad, *rest = aggregate.numbers
        for fewer in range(min(found, int(bad)) + 1):
            rule = replace(aggregate, numbers=(bad - fewer, *rest))
            if members >= members_needed(rule):
                return rule
    check_members(aggregate, members)
    return aggregate


@dataclass(frozen=True, slots=True)
class VectorAggregation:
    """How the contributions to one exchange are aggregated."""

    aggregate: Rule = Rule("mean")
    admission: Rule = Rule("finite")
    key: str = ""
    """Name of the vector; each has its own history."""

    @property
    def spec(self) -> str:
        """Text on the wire; empty for a plain mean."""
        if self.aggregate.name == "mean" and self.admission.name == "finite":
            return ""
        return f"{self.aggregate.spec}/{self.admission.spec}/{self.key}"


@lru_cache(maxsize=64)  # members send the same text with each reduce
def parse_aggregation(text: str) -> VectorAggregation:
    """Parse the aggregation of a contribution; raises ConfigError if it is malformed."""
    if not text:
        return VectorAggregation()
    parts = text.split("/", 2)
    if len(text) > MAX_SPEC_CHARS or len(parts) != 3:
        raise ConfigError(
            "this is not a valid aggregation", given=repr(text[:MAX_SPEC_CHARS]),
            expected="AGGREGATE/ADMISSION/KEY",
        )  # fmt: skip
    return VectorAggregation(parse_aggregate(parts[0]), parse_admission(parts[1]), parts[2])


def _parsed(role: str, text: str, table: Mapping[str, _Kind]) -> Rule:
    name, *rest = (part.strip() for part in text.split(":"))
    if name not in table:
        raise unknown(role, name, table)
    kind = table[name]
    if not kind.required <= len(rest) <= len(kind.least):
        raise ConfigError(
            f"{role} {name} has too many or too few numbers", given=repr(text), expected=kind.form
        )
    try:
        numbers = tuple(float(part) for part in rest)
    except ValueError as error:
        raise ConfigError(
            f"a number of {role} {name} is wrong", given=repr(text), expected=kind.form
        ) from error
    for number, least, whole in zip(numbers, kind.least, kind.whole, strict=False):
        if not number >= least or (whole and not (number.is_integer() and number <= MAX_COUNT)):
            raise ConfigError(
                f"a number of {role} {name} is out of range", given=repr(text),
                expected=f"{kind.form}, {'a whole number ' if whole else ''}>= {least:g}",
            )  # fmt: skip
    return Rule(name, numbers)
