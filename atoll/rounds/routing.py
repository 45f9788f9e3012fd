"""The route of a round, from the direct connections that are possible.

Members that all reach each other reduce directly. If only groups of them do, each group reduces
directly and its first member uses the relay (a two-level reduce as in the hierarchical all-reduce
of Jia et al. 2018, arXiv:1807.11205, with the hub's reducer as the upper level).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.ids import session_id, slot_of
from atoll.wire.messages import RoundJoin, RoundPlan


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


def reach_each_other(a: str, b: str, reachable: Mapping[str, Sequence[str]]) -> bool:
    """Return whether two members can dial each other."""
    return b in reachable.get(a, ()) and a in reachable.get(b, ())


def all_reachable(joins: Mapping[str, RoundJoin]) -> bool:
    """Return whether every member can dial every other one."""
    return all(set(join.reachable) | {me} >= joins.keys() for me, join in joins.items())


def find_sites(members: Sequence[str], reachable: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return groups of members that all reach each other, in slot order, ordered by first member.

    Greedy: each member joins the first group in which it reaches every member.
    """
    sites: list[list[str]] = []
    for member in sorted(members, key=slot_of):
        for site in sites:
            if all(reach_each_other(member, other, reachable) for other in site):
                site.append(member)
                break
        else:
            sites.append([member])
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
    dialable = {
        m: [other for other in join.reachable if _dial(dials, other)] for m, join in joins.items()
    }
    sites = find_sites(members, dialable)
    stores = [_dial(dials, site[0]) if len(site) > 1 else "" for site in sites]
    if any(stores) and len(sites) > 1:
        return Route("hierarchical", sites=sites, stores=stores)
    return Route("relay")


def make_plan(
    route: Route,
    *,
    job: str,
    round_: int,
    epoch: int,
    members: list[str],
    timeout_s: float,
    stopping: bool,
    saving: bool,
    verified: bool = False,
) -> RoundPlan:
    """Return the plan of an attempt."""
    return RoundPlan(
        job=job,
        round=round_,
        epoch=epoch,
        members=members,
        route=route.name,
        reducer=session_id(job, "reducer") if route.needs_reducer else "",
        store=route.store,
        timeout_s=timeout_s,
        stopping=stopping,
        saving=saving,
        verified=verified,
        sites=route.sites,
        stores=route.stores,
    )


def _dial(dials: Mapping[str, Sequence[str]], member: str) -> str:
    return next(iter(dials.get(member, ())), "")
