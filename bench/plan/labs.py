"""Random labs, the candidates that are tried in each, and the fleet that the planner receives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.fleet.fleet import Fleet, HubLine, Machine
from atoll.forecast.candidates import Candidate
from atoll.forecast.workload import Workload
from atoll.netlab.shape import Shape
from atoll.system import congestion_control

ELEMENTS = 200_000
STEPS = 2_000
"""Of the job that is planned; a trial does fewer."""
FASTEST_S = 0.05
MEMBERS = (2, 6)
RATES_MBPS = (5.0, 500.0)
TRIPS_MS = (0.0, 200.0)
SPEEDS = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One lab: host 0 is the hub, the others are machines."""

    seed: int
    fleet: Fleet
    shapes: tuple[Shape, ...]
    """Of the hub and of every machine."""


def draw(seed: int) -> Drawn:
    """Return the lab of a seed: rates are uniform in logarithms, the rest is uniform.

    `Shape.rtt_s` is the round trip between two alike hosts; the hub has none, so that a machine's
    round trip to it is half of that, and two machines' is the sum of both.
    """
    chance = random.Random(seed)
    machines, shapes = [], [Shape()]
    for number in range(1, chance.randint(*MEMBERS) + 1):
        low, high = RATES_MBPS
        up, down = (round(low * (high / low) ** chance.random(), 1) for _ in range(2))
        trip_ms = round(chance.uniform(*TRIPS_MS), 1)
        speed = chance.uniform(*SPEEDS)
        machines.append(
            Machine(
                name=f"n{number}", step_s=round(FASTEST_S * speed, 3), up_mbps=up, down_mbps=down,
                latency_ms=trip_ms / 2, site="lab", memory_gb=16,
                congestion=congestion_control(),
            )
        )  # fmt: skip
        shapes.append(Shape(up_bps=up * 1e6, down_bps=down * 1e6, rtt_s=trip_ms / 1000))
    hub = HubLine(congestion=congestion_control())
    return Drawn(seed=seed, fleet=Fleet(machines=tuple(machines), hub=hub), shapes=tuple(shapes))


def workload() -> Workload:
    """Return the job: a vector of parameters and a step that lasts as long as it has to."""
    return Workload(
        name="slept", parameters=ELEMENTS, elements=ELEMENTS, tokens=1, steps=STEPS,
        optimizer="sgd",
    )  # fmt: skip


def tried(drawn: Drawn) -> Iterator[Candidate]:
    """Yield what is tried in a lab: 14 candidates, or 12 with two machines."""
    fleet = drawn.fleet
    names = tuple(machine.name for machine in fleet.machines)
    order = sorted(fleet.machines, key=lambda machine: machine.step_s)
    yield Candidate(preset="alone", members=(order[0].name,), codec="fp32")
    for preset, codec, route, options in METHODS:
        yield Candidate(preset=preset, members=names, codec=codec, route=route, options=options)
    if len(names) > 2:
        quick = tuple(name for name in names if name != order[-1].name)
        near = min(fleet.machines, key=lambda machine: min(machine.up_mbps, machine.down_mbps)).name
        for chosen in dict.fromkeys((quick, tuple(name for name in names if name != near))):
            yield Candidate(
                preset="diloco", members=chosen, codec="feedback(int8)", route="relay",
                options=_diloco(10),
            )  # fmt: skip


def _diloco(every: int) -> dict[str, object]:
    return {"every": every, "shared_steps": 0}


def _streaming(every: int, delay: int) -> dict[str, object]:
    return {"every": every, "delay": delay, "fragments": 4, "shared_steps": 0}


METHODS: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    ("ddp", "fp32", "relay", {}),
    ("ddp", "fp32", "direct", {}),
    ("ddp", "feedback(int8)", "relay", {}),
    ("ddp", "feedback(int8)", "direct", {}),
    ("diloco", "fp32", "direct", _diloco(10)),
    ("diloco", "feedback(int8)", "relay", _diloco(10)),
    ("diloco", "feedback(int8)", "direct", _diloco(10)),
    ("diloco", "feedback(int4)", "relay", _diloco(25)),
    ("diloco", "feedback(int8)", "direct", _diloco(50)),
    ("streaming-diloco", "feedback(e3m0)", "relay", _streaming(20, 4)),
    ("streaming-diloco", "feedback(int8)", "direct", _streaming(40, 2)),
)
