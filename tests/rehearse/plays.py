"""Fleets and rehearsals of tests."""

from __future__ import annotations

import dataclasses

from atoll.config import JobSpec, parse_spec
from atoll.fleet.faults import Fault
from atoll.fleet.fleet import Fleet
from atoll.forecast.workload import Workload, workload_of
from atoll.rehearse.rehearsal import Here, Rehearsal, prepare
from tests.forecast.worlds import fleet as machines

JOB = """
[job]
nodes = 3
[model]
layers = 1
width = 32
heads = 2
context = 32
[train]
steps = 4000
batch = 2
[strategy]
preset = "diloco"
every = 20
shared_steps = 0
"""


def fleet(*speeds: float, faults: tuple[Fault, ...] = ()) -> Fleet:
    """Return machines of one site with these seconds per step, and what happens to them."""
    return dataclasses.replace(machines(*speeds), faults=faults)


def job(more: str = "") -> JobSpec:
    return parse_spec(JOB + more)


def rehearsal(
    known: Fleet,
    *,
    seconds: float = 120.0,
    slower: float = 1.0,
    here_s: float = 0.01,
    steps: int = 0,
) -> tuple[Rehearsal, Workload]:
    """Return a rehearsal of the job on a fleet, and its workload."""
    load = workload_of(job())
    made, _ = prepare(
        job(), known, load, here=Here(here_s, 2), seconds=seconds, slower=slower, steps=steps
    )
    return made, load
