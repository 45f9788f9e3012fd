"""Placement of waiting jobs by priority and age, without overtaking; pure functions.

A waiting job *keeps* every node that it could use if the node were idle: later jobs may only take
nodes that it cannot use. So small jobs cannot overtake a large one for ever. A job that could not
start even if all present nodes were idle keeps nothing.

The machines of an island are different nodes, of one network where that is known.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.hub.scheduler.resources import (
    Capacity,
    ResourceRequest,
    free_share,
    mismatch,
    never,
    summarized,
)

LAN_BITS = {4: 24, 6: 64}
"""Prefix lengths by which private IPv4 and IPv6 addresses count as one network."""


@dataclass(frozen=True, kw_only=True)
class FreeCapacity:
    """What one node has left for machines of islands."""

    count: int
    """Machines of islands that it can take."""
    slots: int = 0
    """Processes that it can take, regardless of their needs."""
    network: str = ""
    """Its network; see `network_of`."""


@dataclass(kw_only=True)
class GangPlacement:
    """Nodes assigned to islands, one island after the other."""

    rooms: Mapping[str, FreeCapacity]
    beside: Mapping[str, int] = field(default_factory=dict)
    """Live processes of the job, by node."""
    avoid: str = ""
    """A node that is used only if there is no other."""
    used: Counter[str] = field(default_factory=Counter)

    def islands(self, sizes: Sequence[int], *, there: Sequence[str] = ()) -> list[str]:
        """Return the nodes of islands that lack so many machines each, island by island.

        The machines of an island are different nodes wherever there are enough, and of one network
        if one has enough of them.

        Args:
            sizes: Machines that each island lacks; all together there is room for them.
            there: Nodes of machines that the (only) island has.
        """
        found: list[str] = []
        for number, size in enumerate(sizes):
            found += self._island(size, there, after=len(sizes) - number - 1)
        return found

    def _island(self, size: int, there: Sequence[str], *, after: int) -> list[str]:
        """Return the nodes for one island, leaving room for `after` more islands of this size."""
        mine, found = Counter(there), list[str]()
        near = self._network(size, there)
        spare = sum(min(self._left(node), after + 1) for node in self.rooms) - size * (after + 1)
        scarce = [node for node in self.rooms if self._left(node) > after]
        tight = spare < len(scarce)  # nodes that could be in every island have to be used

        def order(node: str) -> tuple[int, bool, bool, bool, int, int, str]:
            return (
                mine[node],
                node == self.avoid,
                tight and node not in scarce,
                self.rooms[node].network != near,
                self.beside.get(node, 0) + self.used[node],
                self.used[node] - self.rooms[node].slots,
                node,
            )

        for _ in range(size):
            node = min((node for node in self.rooms if self._left(node) > 0), key=order)
            mine[node] += 1
            self.used[node] += 1
            found.append(node)
        return found

    def _left(self, node: str) -> int:
        return self.rooms[node].count - self.used[node]

    def _network(self, size: int, there: Sequence[str]) -> str:
        """Return the network for an island: its present one, else the smallest that fits."""
        known = [self.rooms[node].network for node in there if node in self.rooms]
        if known:
            return known[0]
        nodes = Counter(self.rooms[node].network for node in self.rooms if self._left(node) > 0)
        enough = {network: count for network, count in nodes.items() if count >= size}
        if enough:
            return min(enough, key=lambda network: (enough[network], network))
        return max(nodes, key=lambda network: (nodes[network], network))


def network_of(source: str) -> str:
    """Return the prefix shared by the machines of one network, as the hub sees their addresses.

    Machines behind one router share its public address; in the hub's own network they differ in the
    last bits only.
    """
    try:
        address = ipaddress.ip_address(source.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.version == 4 and not address.is_private:
        return str(address)
    return str(ipaddress.ip_network(f"{address}/{LAN_BITS[address.version]}", strict=False))


Key = tuple[str, int]
"""A job, and the slot of the process that it lacks; -1: the whole job, which has not started."""

WHOLE = -1


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A request for places."""

    key: Key
    want: ResourceRequest
    least: int = 1
    """Minimum number of places."""
    most: int = 1
    priority: int = 0
    number: int = 0
    """Order of submission."""
    essential: bool = False
    """A running job is paused without it, so it precedes all jobs that have not started."""
    avoid: str = ""
    """Node on which the last attempt ended: used only if there is no other."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Live processes of the job, by node."""
    machines: int = 1
    """Places of one member, which are only useful together."""
    there: tuple[str, ...] = ()
    """Nodes of the member's live processes, if the job is running."""

    @property
    def running(self) -> bool:
        """Whether a running job lacks processes."""
        return self.key[1] != WHOLE

    def order(self) -> tuple[bool, int, bool, int, int]:
        """Return the sort key; the smallest is served first."""
        return not self.essential, -self.priority, not self.running, self.number, self.key[1]


@dataclass(frozen=True)
class Shortfall:
    """Why a job is still waiting."""

    wanted: int
    free: int
    reasons: tuple[str, ...] = ()
    """One reason per node, beginning with its name."""
    never: str = ""
    """Why none of the known nodes can run it even when idle; empty: one can."""

    @property
    def headline(self) -> str:
        """The short form, which changes only when the number of places changes."""
        if self.never:
            return f"no machine here can ever run this: {self.never}"
        plural, verb = "" if self.wanted == 1 else "s", "is" if self.free == 1 else "are"
        return f"needs {self.wanted} node{plural}, {self.free} {verb} free"

    def __str__(self) -> str:
        """Return the headline and the reasons that matter."""
        if not self.reasons or self.never:
            return self.headline
        return f"{self.headline} ({summarized(self.reasons)})"


@dataclass(frozen=True)
class Assignment:
    """What can start now, and why the rest cannot."""

    granted: dict[Key, list[str]]
    """The node of each process."""
    short: dict[str, Shortfall]
    """By job, of those that have not started or are paused."""


def assign(
    asks: Iterable[Demand], places: Iterable[Capacity], *, settling: bool = False
) -> Assignment:
    """Return the assignment; it does not depend on the order of demands and places.

    Args:
        asks: The requests of all jobs.
        places: All nodes.
        settling: More nodes are about to come back: a job keeps what it could use of those that
            are here, even if they are too few for it.
    """
    here = {place.node: place for place in sorted(places, key=lambda place: place.node)}
    keepers: dict[str, str] = {}
    """Node -> the job that keeps it."""
    granted: dict[Key, list[str]] = {}
    short: dict[str, Shortfall] = {}
    beside: dict[str, Counter[str]] = {}
    room = _Room(here)
    explained: dict[str, tuple[ResourceRequest, int, int, int]] = {}
    for ask in sorted(asks, key=Demand.order):
        job = ask.key[0]
        living = beside.setdefault(job, Counter(ask.beside))
        free = room.of(ask)
        total = sum(free.values())
        if total >= ask.least:
            nodes = _nodes(ask, free, beside=living, places=here)
            for name in nodes:
                here[name] = here[name].with_one_more(ask.want.needs, gpus=ask.want.gpus)
                living[name] += 1
            room.refresh(nodes)
            granted[ask.key] = nodes
        elif ask.essential:
            what = (ask.want, ask.least, total, len(granted))
            if explained.get(job) != what:  # explain equal requests only once
                short[job], explained[job] = _shortfall(ask, total, here, keepers), what
        elif not ask.running:
            short[job] = _shortfall(ask, total, here, keepers)
            usable = _usable(ask, here, least=1 if settling else ask.least)
            keepers |= {name: job for name in usable if name not in keepers}
            room.kept(usable)
    return Assignment(granted, short)


class _Room:
    """Caches how many processes of a demand each node takes, for equal demands of one job.

    A job of ten thousand members may lack a quarter of them: checking all nodes for each one took
    minutes.
    """

    def __init__(self, here: Mapping[str, Capacity]) -> None:
        self._here = here
        self._known: dict[str, list[tuple[ResourceRequest, int, dict[str, int]]]] = {}
        """By job, for each request and number: the nodes that take any, and how many."""
        self._kept: set[str] = set()

    def of(self, ask: Demand) -> Mapping[str, int]:
        known = self._known.setdefault(ask.key[0], [])
        for want, most, found in known:
            if most == ask.most and want == ask.want:
                return found
        found = {
            name: count
            for name, place in self._here.items()
            if name not in self._kept and (count := free_share(ask.want, place, most=ask.most))
        }
        known.append((ask.want, ask.most, found))
        return found

    def refresh(self, nodes: Iterable[str]) -> None:
        """Recompute the entries of nodes that got processes."""
        for name in set(nodes):
            for known in self._known.values():
                for want, most, found in known:
                    count = free_share(want, self._here[name], most=most) if name in found else 0
                    if count:
                        found[name] = count
                    else:
                        found.pop(name, None)

    def kept(self, nodes: Iterable[str]) -> None:
        """Withhold these nodes from later demands."""
        self._kept |= set(nodes)
        for known in self._known.values():
            for _, _, found in known:
                for name in nodes:
                    found.pop(name, None)


def _nodes(
    ask: Demand,
    free: Mapping[str, int],
    *,
    beside: Mapping[str, int],
    places: Mapping[str, Capacity],
) -> list[str]:
    """Return the node of each process of a demand; of islands, one island after the other."""
    wanted = min(ask.most, sum(free.values()))
    if ask.machines == 1:
        return spread(free, wanted, beside=beside, avoid=ask.avoid, places=places)
    rooms = {
        name: FreeCapacity(
            count=count, slots=places[name].free_slots, network=network_of(places[name].source)
        )
        for name, count in free.items()
    }
    placement = GangPlacement(rooms=rooms, beside=beside, avoid=ask.avoid)
    if ask.running:
        return placement.islands([wanted], there=ask.there)
    return placement.islands([ask.machines] * (wanted // ask.machines))


def spread(
    free: Mapping[str, int],
    wanted: int,
    *,
    beside: Mapping[str, int] | None = None,
    avoid: str = "",
    places: Mapping[str, Capacity] | None = None,
) -> list[str]:
    """Return the node of each process, spread evenly over free places; empty: too few are free.

    Among nodes with equally many members of the job, the one with more free places comes first.

    Args:
        free: How many of these processes each node takes.
        wanted: How many processes to place.
        beside: Processes of the job that live already.
        avoid: A node that is used only if there is no other.
        places: The nodes, which know their free slots; None: take `free` for that.
    """
    if sum(free.values()) < wanted:
        return []
    there, used = beside or {}, Counter[str]()

    def order(node: str) -> tuple[bool, int, int, str]:
        slots = places[node].free_slots if places else free[node]
        return node == avoid, there.get(node, 0) + used[node], used[node] - slots, node

    waiting = [order(node) for node in free if free[node]]
    heapq.heapify(waiting)
    for _ in range(wanted):  # the order of a node changes only when it is chosen itself
        *_, node = heapq.heappop(waiting)
        used[node] += 1
        if free[node] > used[node]:
            heapq.heappush(waiting, order(node))
    return sorted(used.elements())


def _usable(ask: Demand, places: Mapping[str, Capacity], *, least: int) -> Sequence[str]:
    """Return the nodes that a job could use if they were empty; none if fewer than `least`."""
    rooms = {
        name: free_share(ask.want, place.emptied(), most=ask.most) for name, place in places.items()
    }
    if sum(rooms.values()) < least:
        return ()
    return [name for name, count in rooms.items() if count]


def _shortfall(
    ask: Demand, free: int, places: Mapping[str, Capacity], keepers: Mapping[str, str]
) -> Shortfall:
    reasons = _reasons(ask, places, keepers) if places else ("no machine has joined yet",)
    return Shortfall(ask.least, free, reasons, "" if free else never(ask.want, places.values()))


def _reasons(
    ask: Demand, places: Mapping[str, Capacity], keepers: Mapping[str, str]
) -> tuple[str, ...]:
    reasons = []
    for name, place in places.items():
        why = mismatch(ask.want, place)
        if not why and name in keepers:
            why = f"{name}: kept for {keepers[name]}, which comes first"
        if why:
            reasons.append(why)
    return tuple(reasons)
