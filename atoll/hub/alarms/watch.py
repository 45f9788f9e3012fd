"""Evaluates the alarm rules periodically; changes become alarms, events and notifications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from atoll.clock import Clock
from atoll.hub.alarms import job_rules, loss_rules, machine_rules, member_rules, swarm_rules
from atoll.hub.alarms.collect import FactCollector
from atoll.hub.alarms.engine import Alarm, Changes, Engine, Finding, Rule
from atoll.hub.alarms.machine_rules import duration
from atoll.hub.alarms.store import Alarms
from atoll.hub.observability.events import Events

RULES = (
    Rule(kind="zero-contribution", find=member_rules.zero_contribution, holds_s=5, gone_s=30),
    Rule(kind="loss-flat", find=loss_rules.loss_flat, holds_s=120, gone_s=120),
    Rule(kind="loss-diverging", find=loss_rules.loss_diverging, holds_s=20, gone_s=60),
    Rule(kind="loss-not-finite", find=loss_rules.loss_not_finite, holds_s=0, gone_s=60),
    Rule(kind="update-outlier", find=member_rules.update_outlier, holds_s=5, gone_s=60),
    Rule(kind="replica-mismatch", find=member_rules.replica_mismatch, holds_s=0, gone_s=60),
    Rule(kind="straggler", find=member_rules.straggler, holds_s=10, gone_s=30),
    Rule(kind="stale", find=member_rules.stale, holds_s=30, gone_s=15),
    Rule(kind="stage-slow", find=swarm_rules.stage_slow, holds_s=120, gone_s=60),
    Rule(kind="stage-alone", find=swarm_rules.stage_alone, holds_s=60, gone_s=10),
    Rule(kind="swarm-paused", find=swarm_rules.swarm_paused, holds_s=5, gone_s=2),
    Rule(kind="stage-fails", find=swarm_rules.stage_fails, holds_s=10, gone_s=10),
    Rule(kind="member-banned", find=swarm_rules.member_banned, holds_s=0, gone_s=60),
    Rule(
        kind="flapping-link", find=machine_rules.flapping_link, holds_s=0, gone_s=120,
        of_nodes=True,
    ),
    Rule(
        kind="disk-filling", find=machine_rules.disk_filling, holds_s=30, gone_s=60, of_nodes=True
    ),
    Rule(
        kind="memory-filling", find=machine_rules.memory_filling, holds_s=60, gone_s=60,
        of_nodes=True,
    ),
    Rule(kind="clock-skew", find=machine_rules.clock_skew, holds_s=20, gone_s=60, of_nodes=True),
    Rule(
        kind="version-mismatch", find=machine_rules.version_mismatch, holds_s=0, gone_s=10,
        of_nodes=True,
    ),
    Rule(kind="node-lost", find=machine_rules.node_lost, holds_s=0, gone_s=5, of_nodes=True),
    Rule(kind="job-failed", find=job_rules.job_failed, holds_s=0, gone_s=0),
    Rule(kind="queue-full", find=job_rules.queue_full, holds_s=10, gone_s=30),
    Rule(kind="limit-reached", find=job_rules.limit_reached, holds_s=0, gone_s=30),
)  # fmt: skip
"""Every kind of alarm, see docs/operate/alarms.md. The times are long enough that faults which
recover on their own are not reported: a short disconnect, one slow round, one noisy loss.
"""

KINDS = tuple(rule.kind for rule in RULES)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmIntervals:
    """Timing of the evaluation."""

    every_s: float = 2.0
    nodes_every: int = 4
    """Nodes are checked in one of this many evaluations, because there may be thousands."""
    patience: float = 1.0
    """Factor on `holds_s` and `gone_s` of all rules; smaller in tests."""


DEFAULT_INTERVALS = AlarmIntervals()


OnAlarm = Callable[[Alarm], Awaitable[None]]


class AlarmWatch:
    """The task that evaluates the rules."""

    def __init__(
        self, *, collector: FactCollector, alarms: Alarms, events: Events, clock: Clock,
        rules: Sequence[Rule] = RULES, intervals: AlarmIntervals = DEFAULT_INTERVALS,
    ) -> None:  # fmt: skip
        self._collector, self._alarms, self._events = collector, alarms, events
        self._clock, self._intervals = clock, intervals
        self._rules = [_at_pace(rule, intervals.patience) for rule in rules]
        self._engine = Engine(self._rules)
        self._looks = 0
        self.on_alarm: OnAlarm = _no_notifier
        """Called with every alarm that opened or ended, once stored; MUST NOT block."""
        alarms.on_silence = self._engine.put

    def opened(self, address: str, incarnation: str) -> None:
        """Record that a process connected."""
        self._collector.links.opened(address, incarnation, self._clock.monotonic())

    async def run(self) -> None:
        """Evaluate until cancelled; a failure is logged."""
        self._engine.restore(await self._alarms.load(), self._clock.wall())
        while True:
            await asyncio.sleep(self._intervals.every_s)
            try:
                await self.look()
            except Exception:
                log.exception("an evaluation of the alarm rules has failed")

    async def look(self) -> Changes:
        """Evaluate once; return what changed."""
        nodes = self._looks % self._intervals.nodes_every == 0
        self._looks += 1
        facts = await self._collector.facts(nodes=nodes)
        found: list[Finding] = []
        kinds: set[str] = set()
        for rule in self._rules:
            if rule.of_nodes and not nodes:
                continue
            try:
                found += rule.find(facts)
                kinds.add(rule.kind)
            except Exception:  # a faulty rule must not disable the others
                log.exception("the rule for %s has failed", rule.kind)
        changes = self._engine.look(found, kinds, facts.now)
        if changes:
            changes = await self._keep(changes)
        return changes

    async def _keep(self, changes: Changes) -> Changes:
        try:
            kept = await self._alarms.keep(changes)
        except BaseException:
            self._engine.undo(changes)
            raise
        for alarm in kept.opened:
            self._engine.put(alarm)
        for alarm in [*kept.opened, *kept.ended]:  # before events, which may fail on a full disk
            await self.on_alarm(alarm)
        # Concurrently, so that a thousand nodes lost at once share one commit.
        await asyncio.gather(*(self._event(alarm) for alarm in [*kept.opened, *kept.ended]))
        return kept

    async def _event(self, alarm: Alarm) -> None:
        found = alarm.finding
        kind, text = "alarm", f"{found.cause}; what to do: {found.remedy}"
        if alarm.ended is not None:
            lasted = duration(alarm.ended - alarm.since)
            kind, text = "alarm-ended", f"ended after {lasted}: {found.cause}"
        fields = {"kind": found.kind, "severity": found.severity, "node": found.node}
        await self._events.add(found.job, kind, text, member=found.member, fields=fields)


def _at_pace(rule: Rule, patience: float) -> Rule:
    return replace(rule, holds_s=rule.holds_s * patience, gone_s=rule.gone_s * patience)


async def _no_notifier(alarm: Alarm) -> None:
    """Default without targets."""
