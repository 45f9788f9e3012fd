"""One schedule: a world, one or more faults, and the questions at its end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.simulate.scheduler import BEGIN_S, Process
from tests.faults.simulation.faults import CHECKPOINT, FAULTS, RECOVERY, Cell, Faults, target_of
from tests.faults.simulation.member import Member
from tests.faults.simulation.world import Setting, World, simulated

PATIENCE_S = 300.0
"""The job has ended so many virtual seconds after the last fault is over, or it hangs."""

AFTERWARDS_S = 30.0
"""So long after the end of its job no process of it is left."""


@dataclass
class Outcome:
    """How a schedule ended."""

    seed: str
    what: str
    broken: list[str]
    struck: list[str]
    seconds: float
    """Virtual seconds to the end of the job."""
    late_s: float
    """Of these, after the last fault was over."""
    phases: set[str] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)
    aborted: int = 0
    rewinds: int = 0
    wasted_steps: int = 0

    @property
    def fingerprint(self) -> str:
        """Equal if and only if everything that was noted is equal."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    def explain(self, *, lines: int = 40) -> str:
        """Return what went wrong, how to see it again, and the end of the trace."""
        first = next((i for i, line in enumerate(self.trace) if "!!" in line), len(self.trace))
        shown = self.trace[max(0, first - lines) : first + 8]
        return "\n".join(
            [
                f"{self.what}: seed {self.seed!r}",
                *self.broken,
                f"python -m tests.faults.simulation {self.seed!r}",
                *shown,
            ]
        )


def setting_of(cell: Cell, world_seed: int) -> Setting:
    """Return what the world of a cell is like."""
    return Setting(
        members=3 + world_seed % 2,
        route=cell.route,
        rounds=6,
        reducers_beside_hub=world_seed % 3 != 0,
        checkpoint_every=1 if cell.phase in CHECKPOINT else 2,
        uneven=world_seed % 4 == 3,
    )


def run_cell(cell: Cell, seed: int) -> Outcome:
    """Let a fault happen when its phase is reached the first, second or third time."""

    def arm(world: World, faults: Faults) -> None:
        wait = world.random.randrange(3)
        delay_s = world.random.choice((0.0, 0.0, 0.01, 0.05))
        left = [wait, 1]

        def on_phase(who: str, phase: str, process: Process) -> None:
            if phase != cell.phase or not left[1] or world.round() < 1:
                return
            if left[0]:
                left[0] -= 1
                return
            target = target_of(world, cell.role, process)
            if target is None:
                return
            left[1] = 0
            if delay_s:
                world.scheduler.after(delay_s, lambda: faults.strike(cell.fault, target))
            else:
                faults.strike(cell.fault, target)

        world.on_phase = on_phase
        if cell.phase in RECOVERY:
            _lose_one(world, faults)

    return _run(f"cell:{cell.fault}:{cell.phase}:{cell.role}:{cell.route}:{seed}",
                str(cell), setting_of(cell, seed), arm)  # fmt: skip


def _lose_one(world: World, faults: Faults) -> None:
    """Make sure that somebody recovers: kill a member after the first round."""
    watch = world.on_phase
    victim = f"w{world.random.randrange(world.setting.members)}"

    def on_phase(who: str, phase: str, process: Process) -> None:
        watch(who, phase, process)
        if phase == "verdict told" and world.round() == 1:
            world.on_phase = watch
            member = world.member(victim)
            if member is not None:
                world.scheduler.after(0.2, lambda: faults.strike("kill", member))

    world.on_phase = on_phase


def run_random(seed: int) -> Outcome:
    """Let several faults happen at random times to random processes."""

    def arm(world: World, faults: Faults) -> None:
        random = world.random
        for _ in range(random.randrange(1, 7)):
            world.scheduler.after(1.0 + 8.0 * random.random(), lambda: strike(world, faults))

    def strike(world: World, faults: Faults) -> None:
        role = world.random.choice(("worker", "worker", "worker", "reducer", "hub", "node"))
        target: Process | None
        if role == "node":
            nodes = [p for p in world.processes if p.name.startswith("n") and p.alive]
            target = world.random.choice(nodes)
            fault = world.random.choice(("freeze", "cut", "dark", "slow", "duplicate", "reorder"))
        else:
            target = target_of(world, role, world.nobody)
            fault = world.random.choice(FAULTS)
        if target is not None and target.alive:
            faults.strike(fault, target)

    import random as chance

    dice = chance.Random(seed)
    setting = Setting(
        members=dice.choice((2, 3, 3, 4)),
        least=dice.choice((0, 1, 1, 2)),
        route=dice.choice(("relay", "direct", "auto")),
        rounds=dice.choice((5, 8, 12)),
        reducers_beside_hub=dice.random() < 0.6,
        checkpoint_every=dice.choice((1, 2, 3)),
        uneven=dice.random() < 0.3,
        spare=dice.choice((0, 1, 2)),
    )
    return _run(f"random:{seed}", "random faults", setting, arm)


def _run(seed: str, what: str, setting: Setting, arm: Callable[[World, Faults], None]) -> Outcome:
    with simulated(seed, setting) as world:
        faults = Faults(world)
        arm(world, faults)
        world.begin()
        ended = world.run(limit_s=60.0)
        while not ended and world.scheduler.now < faults.over + PATIENCE_S:
            ended = world.run(limit_s=20.0)
        ended_at = world.scheduler.now
        finish(world, ended=ended)
        return Outcome(
            seed, what, world.oracle.broken, faults.done, ended_at - BEGIN_S,
            max(0.0, ended_at - max(faults.over, BEGIN_S)), world.phases, world.trace,
            rewinds=len(world.rewinds), wasted_steps=world.oracle.wasted_steps,
        )  # fmt: skip


def finish(world: World, *, ended: bool) -> None:
    """Ask what must hold at the end of a schedule."""
    oracle, state = world.oracle, world.job_state()
    if not ended:
        stuck = {m.name: f"round {m.round}" for m in world.members()}
        oracle.complain(f"the job hangs in state {state}, members: {stuck}")
    elif state != "done":
        oracle.complain(f"the job ended as {state}")
    else:
        world.run(limit_s=AFTERWARDS_S, until=lambda: not world.members())
        if world.members():
            oracle.complain(f"processes are left: {world.members()}")
    oracle.check_records()
    done = [p for p in world.processes if isinstance(p, Member) and p.finished]
    if ended and state == "done" and not done:
        oracle.complain("nobody finished")
    oracle.check_end(done)
    short = {m.name: m.round for m in done if m.round < world.rounds_wanted}
    if short:
        oracle.complain(f"finished early: {short}")


def replay(seed: str) -> Outcome:
    """Run the schedule that a seed names."""
    kind, *rest = seed.split(":")
    if kind == "random":
        return run_random(int(rest[0]))
    # A phase may have a colon of its own.
    fault, *phase, role, route, number = rest
    return run_cell(Cell(fault, ":".join(phase), role, route), int(number))


__all__: list[Any] = ["Outcome", "replay", "run_cell", "run_random"]
