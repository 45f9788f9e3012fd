"""State of a job between two evaluations, in bounded memory: rounds, loss curves, trends."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.hub.alarms.facts import JobFacts, Mark, MemberFacts
from atoll.hub.jobs.jobs import Job
from atoll.hub.rounds.timeline import CatchUp
from atoll.wire.states import MemberState, RoundMemberState

MAX_POINTS = 240


class LossCurve:
    """Points of (time, loss), each the mean of equally many rounds; when full, neighbours merge."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._width = 1
        self._open: list[tuple[float, float]] = []

    def add(self, time: float, loss: float) -> None:
        """Add the loss of one round."""
        self._open.append((time, loss))
        if len(self._open) < self._width:
            return
        self.points.append(_mean(self._open))
        self._open = []
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean([a, b]) for a, b in pairs]
            self._width *= 2


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[-1][0], sum(loss for _, loss in points) / len(points)


ROUNDS_KEPT = 40
MARKS_KEPT = 100
NOT_FINITE = "LossNotFinite"
_REFUSED = "contribution-refused"
_DIFFERS = frozenset({"alarm:replica-differs", "alarm:result-differs"})
_NO_NUMBER = ("not finite", "nan", "inf")


class JobMemory:
    """Rounds, losses and incidents of one job seen so far."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.last_event = 0
        self._rounds: deque[CatchUp] = deque(maxlen=ROUNDS_KEPT)
        self._curves: dict[str, LossCurve] = {}
        self._counted = 0
        self._bad: list[Mark] = []
        self._differs: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._since: dict[tuple[str, int], float] = {}

    @property
    def after(self) -> int:
        """Epoch after which rounds are read; the last is read again, as it may be incomplete."""
        return self._rounds[-1].epoch - 1 if self._rounds else 0

    def take_rounds(self, rounds: Iterable[CatchUp]) -> None:
        """Add rounds, oldest first."""
        for one in rounds:
            if self._rounds and self._rounds[-1].epoch == one.epoch:
                self._rounds[-1] = one
            else:
                self._rounds.append(one)
            if one.epoch > self._counted:
                self._counted = one.epoch
                self._count(one)

    def _count(self, one: CatchUp) -> None:
        """Add a round's losses to the curves and record values that are not finite."""
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
        """Add events, oldest first."""
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
        self, record: Job, *, now: float, alone: bool,
        round_states: Mapping[str, RoundMemberState | None], waits: tuple[list[str], float],
    ) -> JobFacts:  # fmt: skip
        """Return the facts for rules."""
        members = {}
        for name, member in record.members.items():
            launch = (name, member.attempt)
            if member.state == MemberState.RUNNING:
                self._since.setdefault(launch, now)
            members[name] = MemberFacts(
                member=name,
                node=member.node,
                state=member.state,
                round_state=round_states.get(name),
                aside=name in record.aside,
                since=self._since.get(launch, now),
                error=member.error,
                end=member.result,
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


LEAST_SPAN_S = 300.0
"""Shorter observation does not allow a forecast for the next hour."""
LEAST_R2 = 0.9
"""Required share of the variance explained by the line."""


class Trend:
    """Forecasts when a steadily decreasing value reaches zero, in constant memory.

    Exponentially weighted least squares: weighted means, variances and covariance are updated per
    sample (West, "Updating mean and variance estimates", CACM 22(9), 1979).
    """

    __slots__ = ("_began", "_covariance", "_first", "_mean_t", "_mean_x", "_var_t", "_var_x",
                 "_weight", "_when", "_window_s", "last")  # fmt: skip

    def __init__(self, *, window_s: float = 1_800.0) -> None:
        """A sample that is `window_s` old has weight 1/e."""
        self._window_s = window_s
        self._began = self._when = self._first = self.last = 0.0
        self._weight = 0.0
        self._mean_t = self._mean_x = 0.0
        self._var_t = self._var_x = self._covariance = 0.0

    def add(self, now: float, value: float) -> None:
        """Add a sample."""
        if self._weight == 0.0:
            self._began, self._first = now, value
        fade = math.exp(-(now - self._when) / self._window_s) if self._weight else 0.0
        self._when, self.last = now, value
        before = self._weight * fade
        self._weight = before + 1.0
        t, x = now - self._began, value
        dt, dx = t - self._mean_t, x - self._mean_x
        share = 1.0 / self._weight
        self._mean_t += share * dt
        self._mean_x += share * dx
        keep = before / self._weight
        self._var_t = keep * (self._var_t + share * dt * dt)
        self._var_x = keep * (self._var_x + share * dx * dx)
        self._covariance = keep * (self._covariance + share * dt * dx)

    def full_in_s(self) -> float | None:
        """Return the seconds until zero along the line; None: no steady decrease."""
        span_s = self._when - self._began
        if span_s < LEAST_SPAN_S or self._var_t <= 0 or self._var_x <= 0:
            return None
        slope = self._covariance / self._var_t
        fits = slope * (self._covariance / self._var_x)  # no power: it raises for huge values
        if not (slope < 0 and fits >= LEAST_R2):  # NaN, too
            return None
        return max(0.0, -self.last / slope)
