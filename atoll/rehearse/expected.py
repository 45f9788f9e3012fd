"""What the planner says of a rehearsal: the curve period by period, with its faults.

The hub assigns a member fewer steps once its speed is known: in the first period all do equally
many. A member that is killed is missed at once; one that falls silent (a machine that sleeps, a
line that is cut) holds a round up until the hub waits for it no longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from atoll.fleet.faults import Fault, Trouble
from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.workload import Workload
from atoll.rehearse.curve import START, Curve, Moment
from atoll.rehearse.rehearsal import Rehearsal, slowed

SILENT_S = 7.0
"""After so much silence rounds go on without a member: three heartbeats, and a look of the hub."""
START_S = 8.0
"""From the start of an agent to its member's first step: loading torch, and taking over the state.
"""
MOST_PERIODS = 100_000


def expected(rehearsal: Rehearsal, workload: Workload) -> Curve:
    """Return the curve in seconds of this machine, up to the rehearsal's last step.

    Raises:
        ConfigError: a machine's speed or line is not known.
    """
    return _Expectation(rehearsal, workload).curve()


class _Expectation:
    def __init__(self, rehearsal: Rehearsal, workload: Workload) -> None:
        self._rehearsal = rehearsal
        self._planner = Planner(workload)
        self._fleet = slowed(rehearsal)
        self._known: dict[tuple[str, ...], Forecast] = {}

    def curve(self) -> Curve:
        """Return the moments at the end of every period; it ends when no machine comes back."""
        moments = [START]
        resolved = self._rehearsal.candidate.resolved(steps=self._rehearsal.spec.train.steps)
        shared = int(getattr(resolved.method, "shared_steps", 0))
        while moments[-1].steps < self._rehearsal.steps and len(moments) < MOST_PERIODS:
            period = self._period(moments[-1], shared=shared)
            if math.isinf(period.seconds):
                break
            moments.append(period)
        return Curve(tuple(moments)).until(self._rehearsal.steps)

    def _period(self, now: Moment, *, shared: int) -> Moment:
        present = self._present(now.seconds)
        if not present:  # the run waits for the first that comes back
            back = [end for f in self._fleet.faults if (end := self._back_s(f)) > now.seconds]
            return dataclasses.replace(now, seconds=min(back, default=math.inf))
        forecast = self._forecast(present)
        every = forecast.every if len(present) > 1 else self._alone_every()
        first = now.steps == 0
        steps = float(shared) if first and shared else every
        silent = first and shared > 0
        waiting_s = 0.0 if silent else forecast.waiting_s * every
        if first:  # no machine's speed is known yet
            slowest = max(self._fleet.machine(name).step_s for name in present)
            seconds = steps * slowest + waiting_s
        else:
            seconds = steps * forecast.step_s
        seconds = self._held_up(now.seconds, seconds, present)
        return Moment(
            seconds=now.seconds + seconds, steps=now.steps + steps,
            rounds=now.rounds + (0 if silent else 1),
            sent_bytes=now.sent_bytes
            + (0.0 if silent else forecast.sent_bytes * every * len(present)),
        )  # fmt: skip

    def _present(self, now_s: float) -> tuple[str, ...]:
        found = []
        for machine in self._fleet.machines:
            own = [fault for fault in self._fleet.faults if fault.machine == machine.name]
            if not any(fault.absence[0] <= now_s < self._back_s(fault) for fault in own):
                found.append(machine.name)
        return tuple(found)

    def _back_s(self, fault: Fault) -> float:
        """Return when a machine takes part again."""
        starts = fault.trouble in (Trouble.KILL, Trouble.JOIN)
        return fault.absence[1] + (START_S if starts else 0.0)

    def _held_up(self, now_s: float, seconds: float, present: Sequence[str]) -> float:
        """Return the length of a period in which members may fall silent."""
        for fault in self._fleet.faults:
            begin_s = fault.absence[0]
            quiet = fault.trouble in (Trouble.SLEEP, Trouble.CUT)
            if quiet and fault.machine in present and now_s < begin_s < now_s + seconds:
                known_s = min(begin_s + SILENT_S, self._back_s(fault) + now_s + seconds - begin_s)
                seconds = max(seconds, known_s - now_s)
        return seconds

    def _forecast(self, present: tuple[str, ...]) -> Forecast:
        if present not in self._known:
            fleet = self._fleet.with_machines(self._fleet.of(present))
            fleet = dataclasses.replace(fleet, faults=())
            one = dataclasses.replace(self._rehearsal.candidate, members=present)
            if len(present) == 1:
                one = dataclasses.replace(one, preset="alone", codec="fp32", options={})
            self._known[present] = self._planner.predict(fleet, one)
        return self._known[present]

    def _alone_every(self) -> float:
        whole = tuple(machine.name for machine in self._fleet.machines)
        return self._forecast(whole).every
