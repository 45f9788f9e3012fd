"""Turns findings into alarms: opened when a condition lasts, ended when it stays away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from atoll.hub.alarms.facts import Facts

Severity = Literal["warning", "critical"]

Identity = tuple[str, str, str, str, str]
"""Kind, job, node, member and key. Findings with equal identity are the same alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that a rule found in one evaluation."""

    kind: str
    cause: str
    """What is wrong and where, for people; names the node."""
    remedy: str
    severity: Severity = "warning"
    job: str = ""
    node: str = ""
    member: str = ""
    value: float | None = None
    key: str = ""
    """Distinguishes findings of one kind at the same place."""

    @property
    def identity(self) -> Identity:
        """Key under which alarms are tracked."""
        return self.kind, self.job, self.node, self.member, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A stateless function from facts to findings."""

    kind: str
    find: Callable[[Facts], Iterable[Finding]]
    holds_s: float
    """Time that the condition must hold before an alarm opens."""
    gone_s: float
    """Time that the condition must be absent before the alarm ends."""
    of_nodes: bool = False
    """The rule checks every node, so it runs less often."""


UPDATE_S = 30.0
"""Minimum interval between two stored updates of an open alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem that lasts or has lasted."""

    id: int
    """0: not stored yet."""
    finding: Finding
    since: float
    """Unix time at which the condition began."""
    seen: float
    ended: float | None = None
    silenced: bool = False

    def view(self) -> dict[str, Any]:
        """Return the alarm as the API shows it."""
        found = self.finding
        return {
            "id": self.id, "kind": found.kind, "severity": found.severity, "job": found.job,
            "node": found.node, "member": found.member, "cause": found.cause,
            "remedy": found.remedy, "since": self.since, "ended": self.ended,
            "value": found.value, "silenced": self.silenced,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Changes:
    """Alarms that one evaluation opened, updated and ended."""

    opened: list[Alarm] = field(default_factory=list)
    updated: list[Alarm] = field(default_factory=list)
    ended: list[Alarm] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.updated or self.ended)


class Engine:
    """Tracks pending and open alarms; callers pass the time."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = {rule.kind: rule for rule in rules}
        self._pending: dict[Identity, float] = {}
        self._stored: dict[Identity, tuple[float, Finding]] = {}
        """Time and content of the last stored update; absent after a failed write."""
        self.open: dict[Identity, Alarm] = {}

    def restore(self, alarms: Iterable[Alarm], now: float) -> None:
        """Take over the alarms that were open when the hub stopped."""
        for alarm in alarms:
            if alarm.finding.kind in self._rules:
                self.open[alarm.finding.identity] = replace(alarm, seen=now)
                self._stored[alarm.finding.identity] = (0.0, alarm.finding)

    def look(self, found: Iterable[Finding], kinds: Collection[str], now: float) -> Changes:
        """Update the alarms of these `kinds` from all their findings; return the changes."""
        changes, present = Changes(), {one.identity: one for one in found}
        for identity, finding in present.items():
            known = self.open.get(identity)
            if known is not None:
                self._see_again(known, finding, now, changes)
                continue
            since = self._pending.setdefault(identity, now)
            if now - since >= self._rules[finding.kind].holds_s:
                self.open[identity] = alarm = Alarm(0, finding, since, now)
                self._stored[identity] = (now, finding)
                del self._pending[identity]
                changes.opened.append(alarm)
        for identity in [i for i in self._pending if i[0] in kinds and i not in present]:
            del self._pending[identity]
        for identity, alarm in list(self.open.items()):
            gone = identity[0] in kinds and identity not in present
            if gone and now - alarm.seen >= self._rules[identity[0]].gone_s:
                del self.open[identity]
                self._stored.pop(identity, None)
                changes.ended.append(replace(alarm, ended=now))
        return changes

    def _see_again(self, known: Alarm, finding: Finding, now: float, changes: Changes) -> None:
        identity = finding.identity
        self.open[identity] = alarm = replace(known, finding=finding, seen=now)
        stored = self._stored.get(identity)
        if stored is not None:
            at, before = stored
            stale = now - at >= UPDATE_S and finding != before
            if not stale and finding.severity == before.severity:
                return
        self._stored[identity] = (now, finding)
        changes.updated.append(alarm)

    def undo(self, changes: Changes) -> None:
        """Revert changes that could not be stored; the next evaluation finds them again."""
        for alarm in changes.opened:
            del self.open[alarm.finding.identity]
            self._pending[alarm.finding.identity] = alarm.since
        for alarm in changes.updated:
            self._stored.pop(alarm.finding.identity, None)
        for alarm in changes.ended:
            self.open[alarm.finding.identity] = replace(alarm, ended=None)

    def put(self, alarm: Alarm) -> None:
        """Take over the id and the `silenced` flag of an open alarm."""
        known = self.open.get(alarm.finding.identity)
        if known is not None:
            kept = replace(known, id=alarm.id, silenced=alarm.silenced)
            self.open[alarm.finding.identity] = kept
