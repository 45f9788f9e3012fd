"""In place of processes, where there are no namespaces: the real round machine on virtual time."""

from __future__ import annotations

import dataclasses
import math

from atoll.fleet.faults import absences
from atoll.forecast.predict import Forecast
from atoll.rehearse.curve import START, Curve, Moment
from atoll.rehearse.expected import START_S
from atoll.rehearse.rehearsal import Rehearsal
from atoll.simulate.setting import Setting
from atoll.simulate.world import World

LONGEST = 3.0


def simulated(rehearsal: Rehearsal, forecast: Forecast, *, expected_s: float) -> Curve:
    """Return the curve of a simulated run, in seconds of the fleet; losses are not known.

    Members of a script or a method that meets in every step are simulated with the forecast's
    interval between two rounds.
    """
    every = max(1, round(forecast.every))
    duration_s = LONGEST * expected_s + START_S
    world = World(
        Setting(
            fleet=dataclasses.replace(rehearsal.fleet, faults=()), every=every,
            exchange_bytes=max(1.0, forecast.sent_bytes * every), duration_s=duration_s,
            seed=rehearsal.spec.job.seed, route=rehearsal.candidate.route,
            quorum=rehearsal.spec.job.quorum, jitter=0.0, start_s=START_S,
            trace=tuple(_presence(rehearsal, duration_s)),
        )
    )  # fmt: skip
    world.run()
    moments, sent = [START], 0.0
    for row in world.record.rows:
        if not row.committed or not row.decided_s:
            continue
        sent += forecast.sent_bytes * every * row.contributors
        seconds = row.decided_s - START_S
        if seconds > moments[-1].seconds:
            count = len(moments)
            moments.append(
                Moment(
                    seconds=seconds, steps=float(count * every), rounds=float(count),
                    sent_bytes=sent, loss=math.nan,
                )
            )  # fmt: skip
    return Curve(tuple(moments)).until(rehearsal.steps)


def _presence(rehearsal: Rehearsal, duration_s: float) -> list[tuple[int, float, float]]:
    """Return who is there when, counted from the start of the processes."""
    rows = []
    for number, machine in enumerate(rehearsal.fleet.machines):
        since_s = 0.0
        for begin_s, end_s in absences(rehearsal.fleet.faults, machine.name):
            begin_s = begin_s + START_S if begin_s > 0 else 0.0
            if begin_s > since_s:
                rows.append((number, since_s, begin_s))
            since_s = end_s + START_S
        if since_s < duration_s:
            rows.append((number, since_s, duration_s))
    return rows
