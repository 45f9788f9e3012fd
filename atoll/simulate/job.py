"""What a job file says of a simulation: its method's rounds, bytes and state, places and steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atoll.config import JobSpec, NeedsTable
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet
from atoll.forecast.keys import adapts_delay, open_keys
from atoll.forecast.predict import (
    hidden_steps,
    relay_last,
    shared_steps,
    steps_between,
    steps_of_traffic,
    vectors_of,
)
from atoll.forecast.state import newcomer_bytes
from atoll.forecast.workload import GUESS_FACTOR, TrafficOf, Workload, workload_of
from atoll.simulate.schedule import Moved, Schedule
from atoll.simulate.setting import Setting
from atoll.strategies.compatibility import check_job
from atoll.strategies.resolve import Resolved

if TYPE_CHECKING:
    from atoll.strategies.base import Traffic

IN_PAIRS = frozenset({"gossip", "pairwise", "noloco"})
"""Methods without a common round."""
BY_INTERVAL = frozenset({"average", "diloco", "streaming", "decoupled", "eager", "slowmo"})
"""Methods whose `every` are the steps between two rounds."""


def setting_of(spec: JobSpec, fleet: Fleet) -> Setting:
    """Return the simulation of a job on these machines; loads torch, allocates nothing.

    Raises:
        ConfigError: the job contradicts itself or the machines, or cannot be simulated.
    """
    _refuse(spec, fleet)
    resolved, workload = check_job(spec), workload_of(spec)
    _refuse_method(resolved)
    machines = [dataclasses.replace(m, step_s=workload.step_on(m).seconds) for m in fleet.machines]
    schedule = schedule_of(spec, resolved, workload)
    first = schedule.moved(schedule.marks, 2) if schedule.moved else None
    needs = NeedsTable(
        memory_gb=max(spec.needs.memory_gb, spec.needs.gpu_memory_gb),
        bandwidth_mbps=spec.needs.bandwidth_mbps,
    )
    return Setting(
        fleet=fleet.with_machines(machines), members=spec.job.nodes,
        min_members=spec.job.min_nodes, needs=needs, on=tuple(spec.job.on), method=schedule,
        every=schedule.every, exchange_bytes=max(1.0, first.relay_sent if first else 0.0),
        state_bytes=newcomer_bytes(spec, workload, resolved), seed=spec.job.seed,
        route=spec.job.route, quorum=spec.job.quorum,
        notes=tuple(_notes(spec, fleet, workload, resolved)),
    )  # fmt: skip


def schedule_of(spec: JobSpec, resolved: Resolved, workload: Workload) -> Schedule:
    """Return the rounds of a job, with the bytes of its method's own accounting."""
    traffic_of, steps = TrafficOf(workload), spec.train.steps
    whole = traffic_of(resolved, peers=max(2, spec.job.nodes), steps=steps)
    method, shared = resolved.method, shared_steps(resolved, steps=steps)
    every = _interval(resolved) or round(steps_between(resolved, steps=steps, rounds=whole.rounds))
    every, marks = max(1, every), 1 + (shared > 0)
    hidden, delay, first = int(hidden_steps(resolved)), getattr(method, "delay", 0), 0
    if isinstance(delay, str):  # as `StreamingPlan` begins
        number = delay.partition(":")[2]
        first = max(1, min(hidden, int(number) if number else (hidden + 1) // 2))
    else:
        hidden += int(getattr(method, "grace", 0))

    @functools.cache
    def moved(mark: bool, members: int) -> Moved:
        from atoll.strategies.outer.periodic import start_volume

        if members < 2:
            return Moved(0.0, 0.0, 0.0, 0.0)
        start = _bytes(start_volume(members, rank=0))
        if mark:
            return Moved(*start)
        run = steps_of_traffic(resolved, steps=steps)
        if getattr(method, "warmup_steps", 0):  # whose rounds may carry many times the bytes
            run = steps
        found = traffic_of(resolved, peers=members, steps=run)
        rounds = max(1, found.rounds - marks)
        sent, received, direct_sent, direct_received = (
            (all_ - marks * one) / rounds for all_, one in zip(_bytes(found), start, strict=True)
        )
        last = relay_last(resolved, received)
        return Moved(sent, received, direct_sent, direct_received, last)

    return Schedule(
        every=every, shared_steps=shared, steps=steps, rounds=whole.rounds,
        hidden=min(every, hidden), first_hidden=first,
        paced=workload.paced and not method.uses_gradients,
        moved=lambda round_, members: moved(round_ < marks, members),
    )  # fmt: skip


def _interval(resolved: Resolved) -> int:
    """Return the steps between two rounds if the method says them; 0: it does not."""
    method: Any = resolved.method
    if method.name not in BY_INTERVAL:
        return 0
    parts = method.fragments if getattr(method, "staggered", False) else 1
    return int(method.every) // int(parts)


def _bytes(traffic: Traffic) -> tuple[int, int, int, int]:
    return (
        traffic.relay_sent_bytes, traffic.relay_received_bytes, traffic.direct_sent_bytes,
        traffic.direct_received_bytes,
    )  # fmt: skip


def _refuse(spec: JobSpec, fleet: Fleet) -> None:
    """Refuse jobs whose rounds are not those of one group, and keys that are not answered."""
    why = ""
    if spec.kind != "trainer":
        why = f"a job of kind {spec.kind}: what it does and sends is in its own code"
    elif spec.swarm.stages:
        why = "[swarm]: passes between stages are no rounds of a group"
    elif spec.dipaco.modules:
        why = "[dipaco]: members meet in a group for each module"
    elif spec.island.machines > 1:
        why = f"[island] machines = {spec.island.machines}: a member here is one machine"
    if why:
        raise ConfigError(
            "this job cannot be simulated", given=why,
            expected="a job of the built-in trainer whose members hold the whole model",
            remedy="without --job: --every, --exchange and --state by hand",
        )  # fmt: skip
    if keys := open_keys(spec):
        named = [name for name in keys if name != "delay" or not adapts_delay(spec)]
        if named:
            raise ConfigError(
                f"{named[0]} is open in this job", given=f"{named[0]} = auto",
                expected="a value; the planner chooses it when a job starts",
                remedy="atoll plan JOB --machines FLEET prints what to paste; or --every",
            )  # fmt: skip
    reached = fleet.all_reach(fleet.machines) if spec.job.route == "direct" else True
    if spec.job.route == "direct" and spec.job.nodes > 1 and (fleet.links or not reached):
        one = {machine.site for machine in fleet.machines}
        if len(one) > 1 or "" in one:
            raise ConfigError(
                "route = direct cannot be simulated on these machines",
                given="machines of several sites, or of none",
                expected="machines of one site: links between machines are not simulated",
                remedy="--route auto, or --route relay",
            )  # fmt: skip


def _refuse_method(resolved: Resolved) -> None:
    """Refuse methods whose members do not meet in rounds of all."""
    method, why = resolved.method, ""
    if not method.exchanges:
        why = "its members never meet"
    elif method.needs_servers:
        why = "its members talk to parameter servers, each when it is done"
    elif method.name in IN_PAIRS:
        why = "its members meet in pairs or with neighbours"
    if why:
        raise ConfigError(
            "this method cannot be simulated", given=f"{method.name}: {why}",
            expected="a method whose members meet in rounds of all, e.g. diloco or ddp",
        )  # fmt: skip


def _notes(spec: JobSpec, fleet: Fleet, workload: Workload, resolved: Resolved) -> Iterator[str]:
    """Yield what of the job is not in the simulation, or rests on an estimate."""
    guessed = sum(not machine.step_s for machine in fleet.machines)
    if guessed:
        yield (
            f"steps of {guessed} of {len(fleet)} machines are estimated from gflops, right within "
            f"a factor of {GUESS_FACTOR:g}"
        )
    needs = spec.needs
    requirements = {"cores": needs.cores, "gpu": needs.gpu, "disk_gb": needs.disk_gb,
             "labels": needs.labels}  # fmt: skip
    if names := [name for name, value in requirements.items() if value]:
        yield f"[needs] {', '.join(names)}: the file of machines does not say; taken as met"
    vectors = vectors_of(resolved)
    small = sum(workload.fits(machine, vectors=vectors) is False for machine in fleet.machines)
    if small:
        yield f"a member does not fit into the memory of {small} of {len(fleet)} machines"
    if spec.job.planned:
        yield "what the hub plans again while the job runs is not in it"
    if spec.job.trust == "audit":
        yield "rounds that are computed again (trust = audit) are not in it"
