"""From findings to alarms: they open when a condition lasts, and end when it is gone for good.

What a rule finds, and what a rule is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


UPDATE_S = 30.0
"""Words and figures of an open alarm are written again at most so often."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is, or was, wrong for some time."""

    id: int
    """0: not stored yet."""
    finding: Finding
    since: float
    """When its condition began; seconds since 1970."""
    seen: float
    """When it was last found."""
    ended: float | None = None
    silenced: bool = False

    def view(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        found = self.finding
        return {
            "id": self.id, "kind": found.kind, "severity": found.severity, "job": found.job,
            "node": found.node, "member": found.member, "cause": found.cause,
            "remedy": found.remedy, "since": self.since, "ended": self.ended,
            "value": found.value, "silenced": self.silenced,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Changes:
    """What a look brought."""

    opened: list[Alarm] = field(default_factory=list)
    updated: list[Alarm] = field(default_factory=list)
    ended: list[Alarm] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.updated or self.ended)


class Engine:
    """Holds what is open and what is about to be. Times are handed in."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        """Know how long each kind must hold and be gone."""
        self._rules = {rule.kind: rule for rule in rules}
        self._pending: dict[Identity, float] = {}
        self._written: dict[Identity, float] = {}
        self.open: dict[Identity, Alarm] = {}

    def restore(self, alarms: Iterable[Alarm], now: float) -> None:
        """Take up alarms that an earlier life of the hub left open; they may end from now on."""
        for alarm in alarms:
            if alarm.finding.kind in self._rules:
                self.open[alarm.finding.identity] = replace(alarm, seen=now)

    def look(self, found: Iterable[Finding], kinds: Collection[str], now: float) -> Changes:
        """Return what follows from findings of these kinds, all that were looked for just now."""
        changes, present = Changes(), {one.identity: one for one in found}
        for identity, finding in present.items():
            known = self.open.get(identity)
            if known is not None:
                self._see_again(known, finding, now, changes)
                continue
            since = self._pending.setdefault(identity, now)
            if now - since >= self._rules[finding.kind].holds_s:
                self.open[identity] = alarm = Alarm(0, finding, since, now)
                self._written[identity] = now
                del self._pending[identity]
                changes.opened.append(alarm)
        for identity in [i for i in self._pending if i[0] in kinds and i not in present]:
            del self._pending[identity]
        for identity, alarm in list(self.open.items()):
            gone = identity[0] in kinds and identity not in present
            if gone and now - alarm.seen >= self._rules[identity[0]].gone_s:
                del self.open[identity]
                self._written.pop(identity, None)
                changes.ended.append(replace(alarm, ended=now))
        return changes

    def _see_again(self, known: Alarm, finding: Finding, now: float, changes: Changes) -> None:
        """Keep an alarm open, in today's words."""
        identity = finding.identity
        self.open[identity] = alarm = replace(known, finding=finding, seen=now)
        worse = finding.severity != known.finding.severity
        stale = now - self._written.get(identity, 0.0) >= UPDATE_S
        if worse or (stale and finding != known.finding):
            self._written[identity] = now
            changes.updated.append(alarm)

    def put(self, alarm: Alarm) -> None:
        """Note what became of an alarm elsewhere: it has an id now, or was silenced."""
        known = self.open.get(alarm.finding.identity)
        if known is not None:
            kept = replace(known, id=alarm.id, silenced=alarm.silenced)
            self.open[alarm.finding.identity] = kept
