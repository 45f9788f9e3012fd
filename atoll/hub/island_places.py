"""Which machines make up which island: different ones, of one network where that is known. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LAN_BITS = {4: 24, 6: 64}
"""Leading bits of their addresses by which private IPv4 and IPv6 addresses count as one network."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one node has left for machines of islands."""

    count: int
    """How many of them it takes."""
    slots: int = 0
    """How many processes it takes, whatever they need."""
    network: str = ""
    """Where it is; see `network_of`."""


@dataclass(kw_only=True)
class Deal:
    """Nodes dealt out to islands, one island after the other."""

    rooms: Mapping[str, Room]
    beside: Mapping[str, int] = field(default_factory=dict)
    """Processes of the job that live already, by node."""
    avoid: str = ""
    """A node that is taken only if there is no other."""
    taken: Counter[str] = field(default_factory=Counter)

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
        """Return the nodes of one island; `after` it come so many of its size."""
        mine, found = Counter(there), list[str]()
        near = self._network(size, there)
        spare = sum(min(self._left(node), after + 1) for node in self.rooms) - size * (after + 1)
        scarce = [node for node in self.rooms if self._left(node) > after]
        tight = spare < len(scarce)  # who could be in every island has to be

        def order(node: str) -> tuple[int, bool, bool, bool, int, int, str]:
            return (
                mine[node],
                node == self.avoid,
                tight and node not in scarce,
                self.rooms[node].network != near,
                self.beside.get(node, 0) + self.taken[node],
                self.taken[node] - self.rooms[node].slots,
                node,
            )

        for _ in range(size):
            node = min((node for node in self.rooms if self._left(node) > 0), key=order)
            mine[node] += 1
            self.taken[node] += 1
            found.append(node)
        return found

    def _left(self, node: str) -> int:
        return self.rooms[node].count - self.taken[node]

    def _network(self, size: int, there: Sequence[str]) -> str:
        """Return the network that an island is to lie in: where it is, else the smallest for it."""
        known = [self.rooms[node].network for node in there if node in self.rooms]
        if known:
            return known[0]
        nodes = Counter(self.rooms[node].network for node in self.rooms if self._left(node) > 0)
        enough = {network: count for network, count in nodes.items() if count >= size}
        if enough:
            return min(enough, key=lambda network: (enough[network], network))
        return max(nodes, key=lambda network: (nodes[network], network))


def network_of(source: str) -> str:
    """Return what the machines of one network have in common, as the hub sees their addresses.

    Machines behind one router come from its one public address; in the hub's own network they
    differ in their last digits only.
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
