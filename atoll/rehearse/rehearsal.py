"""What is rehearsed: a job on a fleet, for how long, and how much slower than there.

Where this machine computes slower than the fleet, or its members share too few cores, everything is
slowed down alike: steps last longer, rates fall, round trips grow, faults come later. What is
printed are the fleet's own seconds again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet
from atoll.forecast.candidates import Candidate
from atoll.forecast.keys import AUTO, without_auto
from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.workload import Workload
from atoll.system import congestion_control

MOST_MACHINES = 16
"""Each is an agent and a process that computes."""
HEADROOM = 1.3
"""A member may need so many times its share of this machine's cores."""
FEWEST_PERIODS = 3
EVAL_TOKENS = 1024
"""Evaluations are no part of the prediction: they are kept short."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One rehearsal, in times and rates of the fleet; times are `slower` times longer here."""

    spec: JobSpec
    """The job, with all machines, and nothing left open."""
    fleet: Fleet
    candidate: Candidate
    steps: int
    """Of the member that is furthest: then it ends."""
    slower: float

    @property
    def step_s(self) -> Mapping[str, float]:
        """Seconds of a step of each machine, as the fleet says."""
        return {machine.name: machine.step_s for machine in self.fleet.machines}

    @property
    def first(self) -> tuple[str, ...]:
        """The machines that are there from the beginning."""
        late = {fault.machine for fault in self.fleet.faults if fault.absence[0] <= 0}
        return tuple(m.name for m in self.fleet.machines if m.name not in late)


class Here(NamedTuple):
    """The machine on which a job is rehearsed."""

    step_s: float
    """Measured seconds of a step of the job, alone."""
    cores: int


def prepare(
    spec: JobSpec, fleet: Fleet, workload: Workload, *, here: Here, seconds: float, steps: int = 0,
    slower: float = 0.0,
) -> tuple[Rehearsal, Forecast]:  # fmt: skip
    """Return the rehearsal of a job, and the forecast of its steady state.

    Args:
        spec: A job of the built-in trainer whose keys are answered.
        fleet: Where it is to run.
        workload: Of the job.
        here: This machine.
        seconds: How long it may take here, about.
        steps: Instead: until so many steps; 0: as many as fit.
        slower: How much slower than there; 0: as little as this machine allows.

    Raises:
        ConfigError: too many machines, a speed or line is not known, or there is too little time.
    """
    if not 1 < len(fleet) <= MOST_MACHINES:
        raise ConfigError(
            "so many machines cannot be rehearsed on one", given=len(fleet),
            expected=f"2 to {MOST_MACHINES}",
            remedy="atoll simulate takes thousands; or rehearse a part of them",
        )  # fmt: skip
    known = fleet.with_machines(
        dataclasses.replace(m, step_s=workload.step_on(m).seconds) for m in fleet.machines
    )
    fastest_s = min(machine.step_s for machine in known.machines)
    crowd = max(1.0, len(known) / here.cores)
    slower = slower or max(1.0, here.step_s * crowd * HEADROOM / fastest_s)
    candidate = candidate_of(spec, known)
    forecast = Planner(workload).predict(known, candidate)
    fitting = math.floor(seconds / slower / forecast.step_s)
    every = max(1, math.ceil(forecast.every))
    steps = min(steps or fitting // every * every, spec.train.steps)
    least = min(spec.train.steps, FEWEST_PERIODS * every)
    if steps < least:
        raise ConfigError(
            "there is too little time for three rounds",
            given=f"{seconds:g} s for {steps} steps; one takes {forecast.step_s * slower:.3g} s "
            f"here, {slower:.3g} times as long as there",
            expected=f"{math.ceil(least * forecast.step_s * slower)} s or more",
            remedy="--minutes; or a smaller model or batch: --set train.batch=...",
        )  # fmt: skip
    made = Rehearsal(
        spec=on_all(spec, known, candidate), fleet=known, candidate=candidate, steps=steps,
        slower=slower,
    )  # fmt: skip
    return made, forecast


def candidate_of(spec: JobSpec, fleet: Fleet) -> Candidate:
    """Return what the job says as a candidate, on all machines."""
    table = spec.strategy
    route = spec.job.route
    if route == AUTO:  # as the hub decides it when all that reach each other are there
        route = "direct" if fleet.all_reach(fleet.machines) else "relay"
    return Candidate(
        preset=table.preset, members=tuple(m.name for m in fleet.machines),
        codec=without_auto(spec).strategy.codec, route=route, collective=table.collective,
        options=dict(table.options),
    )  # fmt: skip


def on_all(spec: JobSpec, fleet: Fleet, candidate: Candidate) -> JobSpec:
    """Return the job for all machines of the fleet: it begins when the first ones are there."""
    late = sum(fault.absence[0] <= 0 for fault in fleet.faults)
    least = max(1, min(spec.job.min_nodes or 1, len(fleet) - late))
    job = dataclasses.replace(
        spec.job, name="rehearsal", nodes=len(fleet), min_nodes=least, on=[], priority=0,
        route=candidate.route,
    )  # fmt: skip
    few = min(EVAL_TOKENS, spec.train.eval_tokens) or EVAL_TOKENS
    train = dataclasses.replace(spec.train, eval_tokens=few)
    return dataclasses.replace(spec, job=job, train=train)


def slowed(rehearsal: Rehearsal) -> Fleet:
    """Return the fleet as it is rehearsed here: everything is slower by the same factor."""
    k, fleet, congestion = rehearsal.slower, rehearsal.fleet, congestion_control()
    machines = [
        dataclasses.replace(
            m, step_s=m.step_s * k, up_mbps=m.up_mbps / k, down_mbps=m.down_mbps / k,
            latency_ms=m.latency_ms * k, congestion=congestion,
        )
        for m in fleet.machines
    ]  # fmt: skip
    faults = [dataclasses.replace(f, at_s=f.at_s * k, for_s=f.for_s * k) for f in fleet.faults]
    return dataclasses.replace(
        fleet, machines=tuple(machines), faults=tuple(faults),
        sites=tuple(
            dataclasses.replace(s, mbps=s.mbps / k, latency_ms=s.latency_ms * k)
            for s in fleet.sites
        ),
        links=tuple(
            dataclasses.replace(x, mbps=x.mbps / k, latency_ms=x.latency_ms * k)
            for x in fleet.links
        ),
        hub=dataclasses.replace(
            fleet.hub, up_mbps=fleet.hub.up_mbps / k, down_mbps=fleet.hub.down_mbps / k,
            congestion=congestion,
        ),
    )  # fmt: skip
