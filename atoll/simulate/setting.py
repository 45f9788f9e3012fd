"""What is simulated: machines, the job's sizes, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from atoll.config import NeedsTable
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet
from atoll.simulate.schedule import Moved, Schedule, typed

HOUR_S, DAY_S = 3600.0, 86_400.0

ASSUMED_STEP_S, ASSUMED_UP_MBPS, ASSUMED_DOWN_MBPS = 1.0, 20.0, 100.0
"""Of a machine for which the file names nothing."""
ASSUMED_SITE_MBPS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Processor time of the hub beside the round machine, measured by `python -m bench.hub`."""

    message_s: float = 19e-6
    """One request and its answer: 52,900 a second."""
    beat_s: float = 44e-6
    """One heartbeat: 5,000 nodes every two seconds take 0.11 of a core."""
    beat_every_s: float = 2.0
    recover_s: float = 2.0
    """Of a member that takes over a state, beside the bytes: `python -m bench.simulate --real`."""
    relay_bytes_per_s: float = 1.248e9
    """Bytes relayed per second of processor time."""


class Cause(StrEnum):
    """Why a machine takes no part."""

    FAILED = "failed"
    """It is gone without notice: no message of it arrives."""
    KILLED = "killed"
    """Its processes are, which the hub notices at once by their broken connections."""
    CLOSED = "closed"
    """Its owner wants it back: its process leaves properly."""
    ASLEEP = "asleep"
    """It stops and goes on later, like a laptop whose lid is closed."""
    CUT = "cut"
    """Its line carries nothing; it computes on."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A time in which a machine takes no part, in seconds from the start."""

    since_s: float
    until_s: float
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One simulation. Sizes in bytes, times in seconds."""

    fleet: Fleet
    """The machines: as many members as are wanted, and spare ones."""
    members: int = 0
    """How many members are wanted; 0: as many as there are machines."""
    min_members: int = 1
    """The job pauses with fewer; 0: all are needed to start, one to go on."""
    needs: NeedsTable = field(default_factory=NeedsTable)
    """What each member needs of its machine."""
    on: tuple[str, ...] = ()
    """Machines that may run it; none: any."""
    every: int = 500
    """Optimizer steps of a period, at full pace."""
    exchange_bytes: float = 100e6
    """What a member sends in a round, and gets back."""
    method: Schedule | None = None
    """The rounds of a job's method, and their bytes; None: every `every` steps, as typed."""
    state_bytes: float = 0.0
    """What a newcomer takes over; 0: four times `exchange_bytes`."""
    duration_s: float = DAY_S
    seed: int = 0
    route: str = "auto"
    quorum: float = 0.0
    """Share of the members whose joins suffice for a round; 0: rounds wait for all."""
    jitter: float = 0.05
    """Standard deviation of a period's compute time, as a share of it."""
    repair_s: float = 600.0
    """Mean time until a failed machine is back."""
    start_s: float = 20.0
    """From the launch of a process to its first request."""
    costs: Costs = field(default_factory=Costs)
    trace: tuple[tuple[int, float, float], ...] = ()
    """Who was there when, instead of failures and owners' hours: (machine, from, to)."""
    faults: tuple[tuple[int, Absence], ...] | None = None
    """What happens to which machine, instead of the trace or chance; None: as these say."""
    notes: tuple[str, ...] = ()
    """What of a job is not in the simulation, for people."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("duration_s", 1.0), ("exchange_bytes", 1.0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} of a simulation is too small",
                    given=getattr(self, name), expected=f"at least {least}",
                )  # fmt: skip
        if not 0 <= self.min_members <= self.wanted:
            raise ConfigError(
                "a job cannot run with so many members",
                given=f"{self.min_members} at least, {self.wanted} wanted",
                expected="no more at least than are wanted",
                remedy=f"--min-members {self.wanted}, or fewer",
            )  # fmt: skip
        if not 0 <= self.quorum <= 1 or not 0 <= self.jitter < 1:
            raise ConfigError(
                "a share is out of range", given=f"quorum {self.quorum}, jitter {self.jitter}",
                expected="quorum from 0 to 1, jitter from 0 to below 1",
            )  # fmt: skip

    @property
    def wanted(self) -> int:
        """How many members are wanted."""
        return self.members or len(self.fleet)

    @property
    def least(self) -> int:
        """How many machines must be there at once for the job to start."""
        return self.min_members or self.wanted

    @cached_property
    def schedule(self) -> Schedule:
        """When members meet."""
        return self.method or Schedule(every=self.every)

    def moved(self, round_: int, members: int) -> Moved:
        """Return the bytes of each member in a round of so many."""
        moved = self.schedule.moved
        return moved(round_, members) if moved else typed(self.exchange_bytes, members)

    @property
    def newcomer_bytes(self) -> float:
        """Bytes that a newcomer takes over: by default weights, momentum and two moments."""
        return self.state_bytes or 4 * self.exchange_bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine of the simulation, with every figure known."""

    name: str
    step_s: float
    up_bps: float
    down_bps: float
    one_way_s: float
    """To the hub."""
    site: str
    site_bps: float
    failures_per_s: float
    lent_share: float
    """Share of a day in which its owner lends it."""
    memory_bytes: float = 0.0
    """0: not known."""


def scaled(fleet: Fleet, members: int) -> Fleet:
    """Return a fleet of `members` machines, in the same proportions.

    Kinds are mixed evenly. A site keeps its size: what is added is in further sites, because more
    machines do not make one home's network larger. Links between sites are not copied.
    """
    size = len(fleet)
    order = sorted(range(size), key=lambda n: (n * 0.6180339887498949) % 1.0)
    machines = []
    for number in range(members):
        copy, index = divmod(number, size)
        one = fleet.machines[order[index] if copy * size + size > members else index]
        end = f"+{copy}" if copy else ""
        machines.append(replace(one, name=one.name + end, site=one.site + end if one.site else ""))
    return fleet.with_machines(machines)


def profiles(fleet: Fleet) -> Iterator[Profile]:
    """Yield the machines of a fleet, with what its file does not say assumed."""
    sites = {site.name: site for site in fleet.sites}
    for machine in fleet.machines:
        site = sites.get(machine.site.partition("+")[0])
        inside = site.mbps if site is not None else 0.0
        yield Profile(
            name=machine.name,
            step_s=machine.step_s or ASSUMED_STEP_S,
            up_bps=(machine.up_mbps or ASSUMED_UP_MBPS) * 1e6,
            down_bps=(machine.down_mbps or ASSUMED_DOWN_MBPS) * 1e6,
            one_way_s=machine.latency_ms / 2000,
            site=machine.site,
            site_bps=(inside or ASSUMED_SITE_MBPS) * 1e6,
            failures_per_s=machine.failures_per_day / DAY_S,
            lent_share=machine.share,
            memory_bytes=machine.memory_gb * 1e9,
        )


def assumptions(fleet: Fleet) -> list[str]:
    """Return what was assumed because the file does not say it."""

    def count(missing: str) -> int:
        return sum(not getattr(machine, missing) for machine in fleet.machines)

    found = [
        (count("step_s"), f"no step_s: taken as {ASSUMED_STEP_S:g} s"),
        (count("up_mbps"), f"no up_mbps: taken as {ASSUMED_UP_MBPS:g}"),
        (count("down_mbps"), f"no down_mbps: taken as {ASSUMED_DOWN_MBPS:g}"),
    ]
    notes = [f"{number} of {len(fleet)} machines have {what}" for number, what in found if number]
    if not all(fleet.hub_rates_mbps):
        notes.append("the hub's line is not given in [hub]: it does not limit")
    return notes
