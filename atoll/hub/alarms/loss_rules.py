"""Alarm rules on the loss: plateau, divergence, not finite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Curve, Facts, JobFacts
from atoll.hub.alarms.statistics import noise, standard_error
from atoll.wire.states import JobState

FLAT_POINTS, FLAT_S = 60, 600.0
"""With fewer rounds or less time, a plateau cannot be distinguished from noise."""
FLAT_SHARE = 0.02
"""Plateau: the last third gains less than this share of the total gain so far."""
FLAT_LEVEL = 0.005
"""Minimum gain relative to the loss itself, in case there was no gain so far."""
AUTOCORRELATION = 1.5
"""Factor on the standard error, because losses of neighbouring rounds are correlated."""

DIVERGING_POINTS = 12
DIVERGING_NOISE = 6.0
"""Divergence: a rise of more than this many standard deviations of the noise..."""
DIVERGING_SHARE = 0.15
"""... and of more than this share of the best level."""

BAD_FOR_S = 120.0
"""How long a loss that was not finite is reported."""
FAILED_FOR_S = 86_400.0
SAME_STORY_S = 600.0
"""Incidents that precede the latest one by more than this are unrelated to it."""

NOT_FINITE = "LossNotFinite"


def loss_flat(facts: Facts) -> Iterator[Finding]:
    """Find runs that no longer improve."""
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
                cause=f"{what} has stopped improving at {curve[-1][1]:.3f}: in the last "
                f"{minutes:.0f} minutes it changed by {-gain:+.4f}, which is within its noise",
                remedy=f"if it is low enough: atoll stop {job.job}; else change the learning rate "
                f"and resume: atoll resume {job.job} --set train.lr=...",
            )


def flat_gain(curve: Curve) -> float | None:
    """Return the gain of the last third if it is significantly below a useful gain; else None.

    Compares its halves; the error must be small enough to detect a useful gain.
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
    """Find runs with a loss that rises from the level it had reached."""
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
            cause=f"{what} rises: it was {best:.3f} and is {now:.3f} now{about}",
            remedy=f"atoll stop {job.job}; then resume from the last checkpoint with a lower "
            f"learning rate: atoll resume {job.job} --set train.lr=...",
        )


def climb(curve: Curve) -> tuple[float, float] | None:
    """Return best and present level (medians of several rounds) if the loss rises; else None."""
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
    rises = {m: found[1] - found[0] for m, c in job.curves.items() if m and (found := climb(c))}
    return max(rises, key=lambda m: rises[m]) if rises and len(rises) < len(job.members) else ""


def _curves(facts: Facts) -> Iterator[tuple[JobFacts, str, Curve]]:
    """Yield the curve over all members, or one per member if they train separately."""
    for job in facts.jobs:
        if job.state == JobState.RUNNING:
            for member, curve in job.curves.items():
                if bool(member) == job.alone:
                    yield job, member, curve


def loss_not_finite(facts: Facts) -> Iterator[Finding]:
    """Find members with losses that are not finite; reports the first one of each job."""
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
            cause=f"{job.who(first.member)} was the first to report values that are not finite: "
            f"{first.text}{later}",
            remedy="lower the learning rate or clip gradients: "
            f"atoll resume {job.job} --set train.clip=1.0; if it is always this machine, "
            f"test its memory and drain it: atoll drain {job.node_of(first.member) or 'NODE'}",
        )
