"""Rules about the loss: it stands still, it climbs, it is no number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Curve, Facts, JobFacts
from atoll.hub.alarms.statistics import noise, standard_error
from atoll.wire.states import JobState

FLAT_POINTS, FLAT_S = 60, 600.0
"""With fewer rounds, or in less time, nobody can say that a loss stands still."""
FLAT_SHARE = 0.02
"""Of all that was gained so far: who surely gains less in the last third stands still."""
FLAT_LEVEL = 0.005
"""Of the loss itself, where nothing was gained so far."""
AUTOCORRELATION = 1.5
"""Losses of neighbouring rounds are alike, so the error of a mean is larger than it seems."""

DIVERGING_POINTS = 12
DIVERGING_NOISE = 6.0
"""A climb is one of more than so many deviations of the noise..."""
DIVERGING_SHARE = 0.15
"""... and of more than this share of the best level."""

BAD_FOR_S = 120.0
"""A loss that was no number is news for so long; that a job failed of it, for a day."""
FAILED_FOR_S = 86_400.0
SAME_STORY_S = 600.0
"""What went bad longer before the newest has nothing to do with it."""

NOT_FINITE = "LossNotFinite"


def loss_flat(facts: Facts) -> Iterator[Finding]:
    """Find runs that learn nothing any more."""
    for job, member, curve in _curves(facts):
        gain = flat_gain(curve)
        if gain is not None:
            minutes = (curve[-1][0] - curve[len(curve) * 2 // 3][0]) / 60
            what = f"the loss of {job.who(member)}" if member else f"the loss of {job.job}"
            yield Finding(
                kind="loss-flat",
                job=job.job,
                member=member,
                node=job.node_of(member),
                value=curve[-1][1],
                cause=f"{what} stands at {curve[-1][1]:.3f}: in the last {minutes:.0f} minutes it "
                f"changed by {-gain:+.4f}, which is within its noise",
                remedy=f"if it is good enough: atoll stop {job.job}; else change the learning rate "
                f"and go on: atoll resume {job.job} --set train.lr=...",
            )


def flat_gain(curve: Curve) -> float | None:
    """Return what the last third of a curve gained if it surely is next to nothing; else None.

    The two halves of the last third are compared. It is not enough that no gain is seen: the
    error must be so small that a gain worth having would have been seen.
    """
    if len(curve) < FLAT_POINTS or curve[-1][0] - curve[0][0] < FLAT_S:
        return None
    values = [loss for _, loss in curve]
    last = values[-(len(values) // 3) :]
    before, after = last[: len(last) // 2], last[len(last) // 2 :]
    gain = statistics.fmean(before) - statistics.fmean(after)
    error = AUTOCORRELATION * math.hypot(standard_error(before), standard_error(after))
    level = statistics.fmean(after)
    gained = statistics.fmean(values[: max(3, len(values) // 20)]) - level
    worth_having = max(FLAT_SHARE * gained, FLAT_LEVEL * abs(level))
    return gain if abs(gain) + 2 * error < worth_having else None


def loss_diverging(facts: Facts) -> Iterator[Finding]:
    """Find runs whose loss climbs away from what it had reached."""
    for job, member, curve in _curves(facts):
        found = climb(curve)
        if found is None:
            continue
        best, now = found
        worst = member or _worst(job)
        about = f", most of all that of {job.who(worst)}" if worst and not member else ""
        what = f"the loss of {job.who(member)}" if member else f"the loss of {job.job}"
        yield Finding(
            kind="loss-diverging",
            severity="critical",
            job=job.job,
            member=worst,
            node=job.node_of(worst),
            key="" if member else "all",
            value=now,
            cause=f"{what} climbs: it was {best:.3f} and is {now:.3f} now{about}",
            remedy=f"atoll stop {job.job}; then go on from the last checkpoint with a lower "
            f"learning rate: atoll resume {job.job} --set train.lr=...",
        )


def climb(curve: Curve) -> tuple[float, float] | None:
    """Return the best and the present level if the loss surely climbs; else None.

    Levels are medians of several rounds, so that a single bad round is nothing.
    """
    if len(curve) < DIVERGING_POINTS:
        return None
    values = [loss for _, loss in curve]
    width = max(5, len(values) // 20)
    now = statistics.median(values[-width:])
    levels = [
        statistics.median(values[start : start + width])
        for start in range(len(values) - 2 * width + 1)
    ]
    best = min(levels, default=math.inf)
    limit = max(DIVERGING_NOISE * noise(values) / math.sqrt(width), DIVERGING_SHARE * abs(best))
    return (best, now) if now - best > limit else None


def _worst(job: JobFacts) -> str:
    """Return the member whose own loss has climbed most, if one stands out."""
    rises = {m: found[1] - found[0] for m, c in job.curves.items() if m and (found := climb(c))}
    return max(rises, key=lambda m: rises[m]) if rises and len(rises) < len(job.members) else ""


def _curves(facts: Facts) -> Iterator[tuple[JobFacts, str, Curve]]:
    """Yield the curves that say how a run goes: one of all, or one of each that trains alone."""
    for job in facts.jobs:
        if job.state == JobState.RUNNING:
            for member, curve in job.curves.items():
                if bool(member) == job.alone:
                    yield job, member, curve


def loss_not_finite(facts: Facts) -> Iterator[Finding]:
    """Find members whose numbers are no numbers; the first of a job is the one to look at."""
    for job in facts.jobs:
        if not job.bad:
            continue
        last = max(mark.time for mark in job.bad)
        recent = [mark for mark in job.bad if mark.time >= last - SAME_STORY_S]
        first = recent[0]
        failed = job.state == JobState.FAILED and (job.error or {}).get("kind") == NOT_FINITE
        if facts.now - last > (FAILED_FOR_S if failed else BAD_FOR_S):
            continue
        others = sorted({mark.member for mark in recent} - {first.member})
        later = f"; later {', '.join(others)} too" if others else ""
        yield Finding(
            kind="loss-not-finite",
            severity="critical",
            job=job.job,
            member=first.member,
            node=job.node_of(first.member),
            cause=f"{job.who(first.member)} was the first with numbers that are none: "
            f"{first.text}{later}",
            remedy="lower the learning rate or clip gradients: "
            f"atoll resume {job.job} --set train.clip=1.0; if it is always this machine, "
            f"test its memory and take it out: atoll drain {job.node_of(first.member) or 'NODE'}",
        )
