"""What has to be remembered of a job between two looks: each look reads only what is new."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.hub.alarms.curve import LossCurve
from atoll.hub.alarms.facts import JobFacts, Mark, MemberFacts
from atoll.hub.jobs import Job
from atoll.hub.timelines import Passed

ROUNDS_KEPT = 40
MARKS_KEPT = 100
NOT_FINITE = "LossNotFinite"
_REFUSED = "contribution-refused"
_DIFFERS = frozenset({"alarm:replica-differs", "alarm:result-differs"})
_NO_NUMBER = ("not finite", "nan", "inf")


class JobMemory:
    """One job's rounds, losses and marks as far as they were seen."""

    def __init__(self, job: str) -> None:
        """Know nothing of it."""
        self.job = job
        self.last_event = 0
        self._rounds: deque[Passed] = deque(maxlen=ROUNDS_KEPT)
        self._curves: dict[str, LossCurve] = {}
        self._counted = 0
        self._bad: list[Mark] = []
        self._differs: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._since: dict[tuple[str, int], float] = {}

    @property
    def after(self) -> int:
        """Epoch after which rounds are read: the last one is read again, it may be known better."""
        return self._rounds[-1].epoch - 1 if self._rounds else 0

    def take_rounds(self, rounds: Iterable[Passed]) -> None:
        """Take rounds in, oldest first."""
        for one in rounds:
            if self._rounds and self._rounds[-1].epoch == one.epoch:
                self._rounds[-1] = one
            else:
                self._rounds.append(one)
            if one.epoch > self._counted:
                self._counted = one.epoch
                self._count(one)

    def _count(self, one: Passed) -> None:
        """Add a round's losses to the curves, and note figures that are none."""
        losses = {row.member: row.loss for row in one.rows if row.loss is not None}
        for member, loss in losses.items():
            self._curves.setdefault(member, LossCurve()).add(one.time, loss)
        if losses:
            mean = statistics.fmean(losses.values())
            self._curves.setdefault("", LossCurve()).add(one.time, mean)
        for row in one.rows:
            for text in row.odd:
                if text.startswith(("loss is", "update_norm is")):
                    self._mark_bad(Mark(one.time, row.member, f"{text} in round {one.round}"))

    def _mark_bad(self, mark: Mark) -> None:
        known = {(m.member, m.text) for m in self._bad}
        if (mark.member, mark.text) not in known and len(self._bad) < MARKS_KEPT:
            self._bad.append(mark)
            self._bad.sort(key=lambda m: m.time)

    def take_events(self, events: Iterable[Mapping[str, Any]], record: Job) -> None:
        """Take events in, oldest first."""
        for event in events:
            self.last_event = event["id"]
            kind, text = event["kind"], str(event["text"])
            member = event["fields"].get("member") or event["member"]
            mark = Mark(event["time"], member, text)
            if kind in _DIFFERS:
                self._differs.append(mark)
            elif kind == _REFUSED and any(word in text.lower() for word in _NO_NUMBER):
                self._mark_bad(mark)
            elif kind == "member-failed":
                known = record.members.get(member)
                error = (known.error if known is not None else None) or {}
                if error.get("kind") == NOT_FINITE:
                    said = f"{error.get('what', '')} ({error.get('given', '')})"
                    self._mark_bad(Mark(event["time"], member, said))

    def facts(
        self, record: Job, *, now: float, alone: bool, standings: Mapping[str, str],
        waits: tuple[list[str], float],
    ) -> JobFacts:  # fmt: skip
        """Return what rules look at."""
        members = {}
        for name, member in record.members.items():
            launch = (name, member.attempt)
            if member.state == "running":
                self._since.setdefault(launch, now)
            result = member.result or {}
            members[name] = MemberFacts(
                member=name,
                node=member.node,
                state=member.state,
                standing=standings.get(name, ""),
                aside=name in record.aside,
                since=self._since.get(launch, now),
                error=member.error,
                digest=str(result.get("digest") or ""),
                rounds=int(result.get("rounds") or 0),
            )
        return JobFacts(
            job=record.job,
            state=record.state,
            reason=record.reason,
            error=record.error,
            ended=record.ended,
            alone=alone,
            members=members,
            rounds=list(self._rounds),
            curves={name: curve.points for name, curve in self._curves.items()},
            bad=list(self._bad),
            differs=list(self._differs),
            waits_for=waits[0],
            waits_s=waits[1],
        )
