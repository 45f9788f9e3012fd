"""One simulation from its begin to its outcome; deterministic by seed.

The real round machine decides plans, verdicts, paces, data slots and recoveries. What it needs of
members is real as well: joins, votes, reachability and reports of their speed. Compute, links,
failures and owners' hours are models; tensors are sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil

from atoll.simulate.hub import TIMED, SimulatedHub
from atoll.simulate.machine import SimulatedMachine, SimulatedSite
from atoll.simulate.presence import absences
from atoll.simulate.record import Outcome, Record, Spent, timeline
from atoll.simulate.scheduler import BEGIN_S, Scheduler
from atoll.simulate.setting import Setting, assumptions, profiles

Progress = Callable[[float], None]

LOOK_EVERY_S = 600.0
"""Simulated seconds between two reports of progress."""


class World:
    """Members, their hub and the time between."""

    def __init__(self, setting: Setting, *, hub: type[SimulatedHub] = SimulatedHub) -> None:
        """Make the members; `hub`: another one decides the rounds."""
        self.setting = setting
        self.scheduler = Scheduler(setting.seed)
        self.record = Record()
        self.hub = hub(self.scheduler, setting, self.record)
        sites: dict[str, SimulatedSite] = {}
        for number, profile in enumerate(profiles(setting.fleet)):
            machine = SimulatedMachine(self.hub, profile, absences(setting, profile, number))
            self.hub.add(machine)
            if profile.site:
                machine.site = sites.setdefault(profile.site, SimulatedSite())
                machine.site.machines.append(machine)

    def run(self, progress: Progress = lambda share: None) -> Outcome:
        """Let the simulated time pass; `progress` is called with the share that is over."""
        began, used = time.perf_counter(), time.process_time()
        for machine in self.hub.machines.values():
            machine.place(BEGIN_S)
        self.hub.begin()
        end = BEGIN_S + self.setting.duration_s
        now = BEGIN_S
        while now < end and not self.hub.ended:
            now = min(end, now + LOOK_EVERY_S)
            while self.scheduler.step(now) and not self.hub.ended:
                pass
            progress((now - BEGIN_S) / self.setting.duration_s)
        if not self.hub.ended:
            self.scheduler.now = end
        for machine in self.hub.machines.values():
            machine.finish()
        self.hub.finish()
        return self._outcome(time.perf_counter() - began, time.process_time() - used)

    def _outcome(self, wall_s: float, cpu_s: float) -> Outcome:
        record, hub, setting = self.record, self.hub, self.setting
        lent_s = sum(record.seconds[name] for name in Spent)
        shares = {name.value: record.seconds[name] / lent_s if lent_s else 0.0 for name in Spent}
        rows = [row for row in record.rows if row.decided_s]
        for row in record.rows:
            row.first_join_s -= BEGIN_S
            row.planned_s -= BEGIN_S
            row.decided_s = max(0.0, row.decided_s - BEGIN_S)
        committed = [row for row in rows if row.committed]
        costs, seconds = setting.costs, self.scheduler.now - BEGIN_S
        beats = len(hub.machines) / costs.beat_every_s * costs.beat_s
        busy_s = hub.processor.busy_s + hub.network.relay.busy_s
        notes = [*assumptions(setting.fleet), *setting.notes]
        if not hub.placement.begun:
            notes.append(
                f"the job never started: at no time were {setting.least} machines there that can "
                "run it; --min-members for fewer, --machines for more"
            )
        sent = float(record.events.pop("bytes sent", 0))
        inside = float(record.events.pop("bytes inside sites", 0))
        return Outcome(
            members=setting.wanted,
            machines=len(hub.machines),
            simulated_s=seconds,
            ended=hub.ended,
            steps=setting.schedule.steps_until(hub.machine.committed_round),
            goodput=shares[Spent.USEFUL] / (1 - shares[Spent.SPARE])
            if shares[Spent.SPARE] < 1 else 0.0,
            shares=shares,
            paused_s=record.paused_s,
            mean_members=hub.placement.mean_members(),
            least_members=hub.placement.least,
            rounds_committed=len(committed),
            rounds_aborted=len(rows) - len(committed),
            round_s=statistics.median(r.decided_s - r.first_join_s for r in committed)
            if committed else 0.0,
            member_bytes=sent + inside,
            relay_bytes=hub.network.line_in.nbytes + hub.network.line_out.nbytes,
            control_bytes=float(sum(record.control_bytes.values())),
            messages=dict(record.messages),
            messages_per_s=sum(record.messages.values()) / seconds,
            hub_share=beats + busy_s / seconds,
            hub_up_share=hub.network.line_out.busy_s / seconds,
            hub_down_share=hub.network.line_in.busy_s / seconds,
            queues=dict(record.worst),
            events=dict(record.events),
            timeline=timeline(record.rows),
            measured={
                "wall_s": wall_s,
                "processor_s": cpu_s,
                "rss_gb": resident_gb(),
                "us_per_event": {
                    kind: 1e6 * record.measured_s[kind] / record.measured[kind]
                    for kind in record.measured
                },
                "machine_s": TIMED * sum(record.measured_s.values()),
            },
            notes=notes,
        )  # fmt: skip


def resident_gb() -> float:
    """Return the resident memory of this process: at the end of a run its largest, or nearly so."""
    return float(psutil.Process().memory_info().rss) / 1e9


def simulate(setting: Setting, progress: Progress = lambda share: None) -> Outcome:
    """Return the outcome of a simulation."""
    return World(setting).run(progress)
