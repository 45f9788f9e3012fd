"""What a fleet is: machines, sites, links and the hub's own line. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.config.constraints import Amount, Positive
from atoll.errors import unknown
from atoll.fleet.faults import Fault

HOURS_PER_DAY = 24.0
MBPS = 1e6


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`[[machines]]`: one machine, or `count` equal ones.

    Its figures come from its owner, `atoll doctor` or the hub; 0 is an unknown figure, except where
    another meaning is given.
    """

    name: str
    count: Positive = 1
    """Equal machines; they are named `NAME-1`, `NAME-2`, ..."""
    step_s: Amount = 0.0
    """Measured seconds of one optimizer step of the job, alone on this machine."""
    gflops: Amount = 0.0
    """Speed of fp32 matrix products (`atoll doctor`), from which `step_s` is estimated."""
    memory_gb: Amount = 0.0
    """Memory in GB (10^9 bytes) where the job computes: of its accelerator, if it has one."""
    up_mbps: Amount = 0.0
    """Megabits per second from this machine to the hub."""
    down_mbps: Amount = 0.0
    """Megabits per second from the hub to this machine."""
    latency_ms: Amount = 0.0
    """Round trip to the hub."""
    site: str = ""
    """Machines of one site reach each other directly; empty: none reaches it."""
    hours_per_day: Amount = HOURS_PER_DAY
    """Hours of a day in which its owner lends it."""
    price_per_hour: Amount = 0.0
    """Price of an hour, in any currency."""
    failures_per_day: Amount = 0.0
    """Times a day that it leaves without notice."""
    congestion: str = ""
    """Its TCP congestion control (`sysctl net.ipv4.tcp_congestion_control`): `bbr` keeps its rate
    in a pause, all others start slowly again; empty: one of those."""

    @property
    def share(self) -> float:
        """Share of a day in which it is there."""
        return min(1.0, self.hours_per_day / HOURS_PER_DAY)


@dataclass(frozen=True, kw_only=True)
class Site:
    """`[[sites]]`: the network inside a site; without it its machines use their own lines."""

    name: str
    mbps: Amount = 0.0
    """Megabits per second of each machine inside the site; 0: of its own line."""
    latency_ms: Amount = 0.0
    """Round trip between two machines of the site."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """`[[links]]`: a measured link between two machines or two sites."""

    between: list[str]
    """From the first to the second; and back, unless there is another link for that."""
    mbps: Amount = 0.0
    """Megabits per second of one connection; 0: those of the site or of the narrower line."""
    latency_ms: Amount = 0.0
    """Round trip; 0: the sum of both round trips to the hub."""

    @property
    def ends(self) -> tuple[str, str]:
        """The two names."""
        return self.between[0], self.between[1]


@dataclass(frozen=True, kw_only=True)
class HubLine:
    """`[hub]`: the line of the hub, which all relayed traffic passes."""

    up_mbps: Amount = 0.0
    """Megabits per second to the machines; 0: it does not limit."""
    down_mbps: Amount = 0.0
    """Megabits per second from the machines; 0: it does not limit."""
    machine: str = ""
    """The machine on which it runs, if it is one of the fleet."""
    congestion: str = ""
    """As of a machine."""


@dataclass(frozen=True)
class Path:
    """The path of one machine's traffic to another, or to the hub."""

    bytes_per_s: float
    round_trip_s: float
    keeps_rate: bool = False
    """Whether its sender's TCP does not start slowly again after a pause."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines with unique names, and what connects them."""

    machines: tuple[Machine, ...]
    sites: tuple[Site, ...] = ()
    links: tuple[Link, ...] = ()
    hub: HubLine = dataclasses.field(default_factory=HubLine)
    faults: tuple[Fault, ...] = ()
    """What goes wrong in a rehearsal; plans and simulations have rates of failures instead."""
    notes: tuple[str, ...] = ()
    """What was assumed or is missing, in words."""

    def __len__(self) -> int:
        return len(self.machines)

    @cached_property
    def by_name(self) -> Mapping[str, Machine]:
        """The machines by their names."""
        return {machine.name: machine for machine in self.machines}

    def machine(self, name: str) -> Machine:
        """Return a machine; raises ConfigError for an unknown name."""
        if name not in self.by_name:
            raise unknown("machine of the fleet", name, self.by_name)
        return self.by_name[name]

    def of(self, names: Sequence[str]) -> tuple[Machine, ...]:
        """Return some of the machines, in this order."""
        return tuple(self.machine(name) for name in names)

    def with_machines(self, machines: Iterable[Machine]) -> Fleet:
        """Return the fleet with other machines and the same network."""
        return dataclasses.replace(self, machines=tuple(machines))

    def changed(self, name: str, **changes: float) -> Fleet:
        """Return the fleet with figures of one machine changed."""
        return self.with_machines(
            dataclasses.replace(machine, **changes) if machine.name == name else machine  # type: ignore[arg-type]
            for machine in self.machines
        )

    # ------------------------------------------------------------------------- the network

    def to_hub(self, machine: Machine) -> Path:
        """Return a machine's path up to the hub; an unknown rate is 0."""
        return self._hub_path(machine, machine.up_mbps, machine.congestion)

    def from_hub(self, machine: Machine) -> Path:
        """Return a machine's path down from the hub; an unknown rate is 0."""
        return self._hub_path(machine, machine.down_mbps, self.hub.congestion)

    def _hub_path(self, machine: Machine, mbps: float, congestion: str) -> Path:
        if machine.name == self.hub.machine:
            return Path(LOCAL_BYTES_PER_S, 0.0)
        return Path(mbps * MBPS / 8, machine.latency_ms / 1000, congestion == KEEPS_RATE)

    @property
    def hub_rates_mbps(self) -> tuple[float, float]:
        """The hub's rates from and to all machines together; 0: it does not limit.

        A hub on one of the machines has that machine's line.
        """
        host = self.by_name.get(self.hub.machine, Machine(name=""))
        return self.hub.down_mbps or host.down_mbps, self.hub.up_mbps or host.up_mbps

    def reach_each_other(self, a: Machine, b: Machine) -> bool:
        """Return whether two machines can connect directly."""
        return bool(a.site and a.site == b.site) or self.link(a, b) is not None

    def all_reach(self, machines: Sequence[Machine]) -> bool:
        """Return whether each of some machines can connect directly to each other one."""
        return all(
            self.reach_each_other(a, b)
            for number, a in enumerate(machines)
            for b in machines[number + 1 :]
        )

    def link(self, a: Machine, b: Machine) -> Link | None:
        """Return the measured link from `a` to `b`, of the machines or of their sites."""
        ends = [(x, y) for x in (a.name, a.site) for y in (b.name, b.site)]
        for there, back in (*ends, *((y, x) for x, y in ends)):
            if (there, back) in self._links:
                return self._links[there, back]
        return None

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {link.ends: link for link in self.links}

    @cached_property
    def _sites(self) -> Mapping[str, Site]:
        return {site.name: site for site in self.sites}

    @cached_property
    def _paths(self) -> dict[tuple[str, str], Path]:
        """What `between` has answered: a plan asks for the same pairs 100,000 times."""
        return {}

    def between(self, a: Machine, b: Machine) -> Path:
        """Return the direct path from one machine to another; an unknown rate is 0.

        Without a measured link that is what their site says. If it says nothing: the narrower of
        both lines, and the round trips of both to the hub together, which is an upper bound.
        """
        found = self._paths.get((a.name, b.name))
        if found is None:
            found = self._paths[a.name, b.name] = self._between(a, b)
        return found

    def _between(self, a: Machine, b: Machine) -> Path:
        link, site = self.link(a, b), self._sites.get(a.site) if a.site == b.site else None
        lines = min(a.up_mbps, b.down_mbps)
        mbps = (link.mbps if link else 0.0) or (site.mbps if site else 0.0) or lines
        if link is None and site is not None and site.mbps:
            return Path(mbps * MBPS / 8, site.latency_ms / 1000, a.congestion == KEEPS_RATE)
        inside_ms = site.latency_ms if site is not None else 0.0
        latency_ms = (link.latency_ms if link else inside_ms) or a.latency_ms + b.latency_ms
        if link is not None and lines and a.site != b.site:
            mbps = min(mbps, lines)  # a link cannot carry more than the lines at its ends
        return Path(mbps * MBPS / 8, latency_ms / 1000, a.congestion == KEEPS_RATE)


KEEPS_RATE = "bbr"
"""Congestion control that goes on with its measured rate after a pause."""
LOCAL_BYTES_PER_S = 2e9
"""Between two processes of one machine."""


def few(names: Sequence[str]) -> str:
    """Return the names for people; of many only the first."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
