"""In place of processes, where there are no namespaces: the real round machine on virtual time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from atoll.fleet.faults import Trouble
from atoll.forecast.predict import Forecast
from atoll.rehearse.curve import START, Curve, Moment
from atoll.rehearse.expected import START_S
from atoll.rehearse.rehearsal import Rehearsal
from atoll.simulate.setting import Absence, Cause, Setting
from atoll.simulate.world import World

LONGEST = 3.0


def simulated(
    rehearsal: Rehearsal, forecast: Forecast, *, elements: int, expected_s: float
) -> Curve:
    """Return the curve of a simulated run, in seconds of the fleet; losses are not known."""
    world = world_of(rehearsal, forecast, elements=elements, duration_s=LONGEST * expected_s)
    world.run()
    every, moments, sent = period_of(forecast), [START], 0.0
    for row in world.record.rows:
        seconds = row.decided_s - START_S
        if not row.committed or row.round == 0 or seconds <= moments[-1].seconds:
            continue  # in the first round they only agree on where they begin
        sent += forecast.sent_bytes * every * row.contributors
        moments.append(
            Moment(
                seconds=seconds, steps=float(row.round * every), rounds=float(row.round),
                sent_bytes=sent, loss=math.nan,
            )
        )  # fmt: skip
    return Curve(tuple(moments)).until(rehearsal.steps)


def period_of(forecast: Forecast) -> int:
    """Return the steps of a simulated period.

    Members of a script or a method that meets in every step are simulated with the forecast's
    interval between two rounds.
    """
    return max(1, round(forecast.every))


def world_of(
    rehearsal: Rehearsal, forecast: Forecast, *, elements: int, duration_s: float,
    start_s: float = START_S,
) -> World:  # fmt: skip
    """Return the world of a rehearsal, in seconds of the fleet.

    Args:
        rehearsal: Machines, job and faults.
        forecast: Of the job on all of them.
        elements: Values of the model; a newcomer takes over them, their start and two moments.
        duration_s: From the first step.
        start_s: From the start of an agent to its member's first request. The first step of all is
            as long after the world's begin.
    """
    every, size = period_of(forecast), forecast.sent_bytes * period_of(forecast)
    return World(
        Setting(
            fleet=dataclasses.replace(rehearsal.fleet, faults=()), every=every,
            exchange_bytes=max(1.0, size), state_bytes=16.0 * elements,
            duration_s=duration_s + start_s,
            seed=rehearsal.spec.job.seed, route=rehearsal.candidate.route,
            quorum=rehearsal.spec.job.quorum, jitter=0.0, start_s=start_s,
            faults=tuple(_absences(rehearsal, begin_s=start_s)),
        )
    )  # fmt: skip


CAUSES = {
    Trouble.KILL: Cause.KILLED, Trouble.SLEEP: Cause.ASLEEP, Trouble.CUT: Cause.CUT,
    Trouble.JOIN: Cause.CLOSED,
}  # fmt: skip


def _absences(rehearsal: Rehearsal, *, begin_s: float) -> Iterator[tuple[int, Absence]]:
    """Yield what happens to which member, counted from the start of the processes."""
    names = [machine.name for machine in rehearsal.fleet.machines]
    for fault in rehearsal.fleet.faults:
        since_s, until_s = fault.absence
        since_s = since_s + begin_s if since_s > 0 else 0.0
        yield (
            names.index(fault.machine),
            Absence(since_s, until_s + begin_s, CAUSES[fault.trouble]),
        )
