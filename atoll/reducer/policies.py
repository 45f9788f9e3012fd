"""The words of policies: how members' vectors become one, and which of them are let in.

    aggregate = "mean" | "sum" | "median" | "trimmed:F" | "krum:F" | "multi-krum:F[:M]"
              | "clip:TAU[:ROUNDS]" | "geometric-median"
    admission = "finite" | "norms[:K[:FLOOR]]"

Before a robust aggregate may stand `bucket:S:`, e.g. `bucket:2:krum:1`: the rule then sees the
means of random groups of S members.

A policy travels with every contribution as `AGGREGATE/ADMISSION/KEY`, so that members who want
different things are found out; a plain mean is the empty text. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from atoll.errors import ConfigError, PeerLost, unknown

MAX_POLICY_CHARS = 200
"""Longest text of a policy that is taken from the wire."""
MAX_COUNT = 1_000_000
"""Largest number of members or rounds in a rule."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a rule is written, and how many members it needs."""

    form: str
    """For messages, e.g. `krum:F`."""
    least: tuple[float, ...] = ()
    """The smallest value of each number; as many numbers may follow the name."""
    whole: tuple[bool, ...] = ()
    """Which of them are whole."""
    required: int = 0
    """How many of them must be there."""
    members: Callable[..., int] = lambda *_: 1
    """Numbers -> members without whom the rule has no meaning."""
    counts_bad: bool = False
    """Whether its first number is that of wrong contributions."""
    by_coordinate: bool = False
    """Whether every coordinate is treated by itself, so that parts of vectors will do."""
    nearest: Callable[[int], str] = lambda _: "median"
    """Members that there are -> the nearest rule that works with them."""


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
"""Name of an aggregate -> how it is written."""

ADMISSIONS: Mapping[str, _Kind] = MappingProxyType(
    {
        "finite": _Kind("finite"),
        "norms": _Kind("norms[:K[:FLOOR]]", (1.0, 0.0), (False, False)),
    }
)
"""Name of an admission -> how it is written."""

BUCKET = "bucket"
"""Word before a rule that sees the means of groups."""

ADDING = ("mean", "sum")
"""Aggregates that are a sum of all: partial sums may travel."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A name and its numbers."""

    name: str
    numbers: tuple[float, ...] = ()
    bucket: int = 1
    """Members in one of the random groups whose means the rule sees."""

    @property
    def spec(self) -> str:
        """Canonical text."""
        numbers = (str(int(n)) if n.is_integer() else repr(n) for n in self.numbers)
        before = [BUCKET, str(self.bucket)] if self.bucket > 1 else []
        return ":".join([*before, self.name, *numbers])

    def number(self, index: int, default: float) -> float:
        """Return one of the numbers, or what holds where it was left out."""
        return self.numbers[index] if len(self.numbers) > index else default


def parse_aggregate(text: str) -> Rule:
    """Return the rule that makes one vector of many.

    Raises:
        ConfigError: the name is unknown (the nearest one is named), or a number is wrong.
    """
    before, _, rest = text.partition(":")
    if before.strip() != BUCKET:
        return _parsed("aggregate", text, AGGREGATES)
    size, _, inner = rest.partition(":")
    rule = _parsed("aggregate", inner, AGGREGATES) if inner else Rule("")
    whole = size.strip().isascii() and size.strip().isdigit() and len(size) < 7
    if not whole or int(size) < 1 or not inner or rule.name in ADDING:
        raise ConfigError(
            "this is no robust rule in buckets", given=repr(text),
            expected="bucket:S:RULE with S >= 1 and a robust rule, e.g. bucket:2:krum:1",
            remedy="a mean is the same with and without buckets" if rule.name in ADDING else "",
        )  # fmt: skip
    return replace(rule, bucket=int(size))


def parse_admission(text: str) -> Rule:
    """Return the filter of contributions.

    Raises:
        ConfigError: as :func:`parse_aggregate`.
    """
    return _parsed("admission", text, ADMISSIONS)


def members_needed(aggregate: Rule) -> int:
    """Return how many contributions an aggregate needs to mean anything."""
    rows = AGGREGATES[aggregate.name].members(*aggregate.numbers)
    return (rows - 1) * aggregate.bucket + 1


def is_by_coordinate(aggregate: Rule) -> bool:
    """Return whether an aggregate treats every coordinate by itself, in any part of a vector.

    In buckets it does not: those who own a part each might not see the same contributions.
    """
    return AGGREGATES[aggregate.name].by_coordinate and aggregate.bucket == 1


def check_members(aggregate: Rule, members: int) -> None:
    """Refuse to apply a rule to fewer contributions than it needs.

    Members may come back, or be let in again: the error is one after which a round is tried anew.

    Raises:
        PeerLost: there are too few; the nearest rule that works is named.
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
    """Return a rule for the contributions that are left after some were found to be wrong.

    A rule against F wrong contributions means all of them. Those that were found are left out, so
    where it would need more than are left it is one against the F - found that may still be there.

    Args:
        aggregate: The rule.
        members: Contributions that are left.
        found: Those that were left out.

    Raises:
        PeerLost: there are too few even so; the nearest rule that works is named.
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
class AggregationPolicy:
    """What is done with the contributions to one exchange."""

    aggregate: Rule = Rule("mean")
    admission: Rule = Rule("finite")
    key: str = ""
    """Names the vector, so that each has a history of its own."""

    @property
    def spec(self) -> str:
        """What travels; empty for a plain mean."""
        if self.aggregate.name == "mean" and self.admission.name == "finite":
            return ""
        return f"{self.aggregate.spec}/{self.admission.spec}/{self.key}"


@lru_cache(maxsize=64)  # members send the same text with each reduce
def parse_policy(text: str) -> AggregationPolicy:
    """Return the policy that came with a contribution.

    Raises:
        ConfigError: it is none.
    """
    if not text:
        return AggregationPolicy()
    parts = text.split("/", 2)
    if len(text) > MAX_POLICY_CHARS or len(parts) != 3:
        raise ConfigError(
            "this is no policy", given=repr(text[:MAX_POLICY_CHARS]),
            expected="AGGREGATE/ADMISSION/KEY",
        )  # fmt: skip
    return AggregationPolicy(parse_aggregate(parts[0]), parse_admission(parts[1]), parts[2])


def _parsed(role: str, text: str, table: Mapping[str, _Kind]) -> Rule:
    """Return a rule of a table from its text."""
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
