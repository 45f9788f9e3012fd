"""What a rule finds, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from atoll.hub.alarms.facts import Facts

Severity = Literal["warning", "critical"]

Identity = tuple[str, str, str, str, str]
"""Kind, job, node, member and key: findings with the same are about the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something is wrong at this moment."""

    kind: str
    cause: str
    """What is wrong and where, in words; it names the node."""
    remedy: str
    """What a person can do or type."""
    severity: Severity = "warning"
    job: str = ""
    node: str = ""
    member: str = ""
    value: float | None = None
    """The figure that gave it away."""
    key: str = ""
    """Tells it from others of its kind at the same place."""

    @property
    def identity(self) -> Identity:
        """What this finding is about."""
        return self.kind, self.job, self.node, self.member, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Looks at facts and says what is wrong; it has no state of its own."""

    kind: str
    find: Callable[[Facts], Iterable[Finding]]
    holds_s: float
    """An alarm opens when its condition has held for so long."""
    gone_s: float
    """It ends when its condition has not held for so long."""
    of_nodes: bool = False
    """It looks at every machine, and is asked less often."""
