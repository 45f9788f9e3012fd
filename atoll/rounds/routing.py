"""The route of a round, from the direct connections that are possible.

Members that all reach each other reduce directly. If only groups of them do, each group reduces
directly and its first member uses the relay (a two-level reduce as in the hierarchical all-reduce
of Jia et al. 2018, arXiv:1807.11205, with the hub's reducer as the upper level).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.ids import session_id, slot_of
from atoll.wire.messages import RoundJoin


@dataclass(frozen=True)
class Route:
    """The route of a round and its stores."""

    name: str
    """alone, direct, relay or hierarchical."""
    store: str = ""
    sites: list[list[str]] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)

    @property
    def needs_reducer(self) -> bool:
        """Whether it requires the job's reducer."""
        return self.name in ("relay", "hierarchical")

    def reducer(self, job: str) -> str:
        """Return the session of the job's reducer; empty: the route needs none."""
        return session_id(job, "reducer") if self.needs_reducer else ""


def all_reachable(joins: Mapping[str, RoundJoin]) -> bool:
    """Return whether every member can dial every other one."""
    return all(set(join.reachable) | {me} >= joins.keys() for me, join in joins.items())


def find_sites(members: Sequence[str], reachable: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return groups of members that all reach each other, in slot order, ordered by first member.

    Greedy: each member joins the first group in which it reaches every member.
    """
    reach = {member: frozenset(reachable.get(member, ())) for member in members}
    sites: list[list[str]] = []
    common: list[frozenset[str]] = []
    """For each site, the members that all of its members reach."""
    firsts: dict[str, int] = {}
    """Numbers of the sites by their first members: a member of a site reaches that one."""
    for member in sorted(members, key=slot_of):
        for number in sorted(firsts[first] for first in firsts.keys() & reach[member]):
            site = sites[number]
            if member in common[number] and reach[member].issuperset(site):
                site.append(member)
                common[number] &= reach[member]
                break
        else:
            firsts[member] = len(sites)
            sites.append([member])
            common.append(reach[member])
    return sites


def choose_route(
    preference: str,
    joins: Mapping[str, RoundJoin],
    dials: Mapping[str, Sequence[str]],
    *,
    relay_only: bool = False,
) -> Route:
    """Return the route of a round, by preference (`auto`, `direct` or `relay`) and reachability."""
    members = sorted(joins, key=slot_of)
    if len(members) == 1:
        return Route("alone")
    if preference == "relay" or (preference == "auto" and relay_only):
        return Route("relay")
    if preference == "direct" or all_reachable(joins):
        dial = _dial(dials, members[0])
        return Route("direct", store=dial) if dial else Route("relay")
    listening = frozenset(member for member in members if _dial(dials, member))
    dialable = {m: listening.intersection(join.reachable) for m, join in joins.items()}
    sites = find_sites(members, dialable)
    stores = [_dial(dials, site[0]) if len(site) > 1 else "" for site in sites]
    if any(stores) and len(sites) > 1:
        return Route("hierarchical", sites=sites, stores=stores)
    return Route("relay")


def _dial(dials: Mapping[str, Sequence[str]], member: str) -> str:
    return next(iter(dials.get(member, ())), "")
