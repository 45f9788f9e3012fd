"""What breaks first in a fleet, and at how many members: by arithmetic on one period.

A period is the compute time of the median machine. Every resource has a demand per
member and period, so its share of use grows with the members; where it reaches 1 the run is held up
by that resource alone. The simulation shows what happens before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.config.sizes import size_text
from atoll.simulate.schedule import Moved
from atoll.simulate.setting import Costs, Profile, Setting, profiles

SIZES = (100, 1_000, 10_000)

ROUND_MESSAGES = 2
"""Requests of a member in a round: its join and its vote."""
MACHINE_S = 40e-6
"""Processor time of the round machine for both, on the computer of docs/guide/simulate.md."""
NAME_BYTES = 6
"""Of a member in a list of names, as it is encoded."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One resource at one size."""

    resource: str
    share: float
    """Of its capacity in a period; above 1 the members wait for it."""
    ends_at: int
    """Members with which it is used up."""
    arithmetic: str
    remedy: str

    def words(self) -> str:
        """Return one sentence."""
        used = f"{self.share:.0%}" if self.share < 10 else f"{self.share:,.0f} times its capacity"
        state = "breaks" if self.share >= 1 else "holds"
        return f"{self.resource} {state} ({used}): {self.arithmetic}"


@dataclass(frozen=True, kw_only=True)
class Period:
    """What limits are compared with."""

    seconds: float
    team: float
    """Members that deliver one contribution together; 1: every member by itself."""
    slowest_s: float
    """Seconds in which the slowest line carries a contribution there and back."""
    slowest: str


def period_of(setting: Setting) -> Period:
    """Return a period of a fleet, as long as the median machine trains.

    Slower machines do fewer steps, at least a quarter of them.
    """
    machines = list(profiles(setting.fleet))
    moved = _moved(setting, len(machines))
    sites: dict[str, int] = {}
    for one in machines:
        if one.site:
            sites[one.site] = sites.get(one.site, 0) + 1
    teams = len(sites) + sum(not one.site for one in machines)
    if setting.route == "relay":
        teams = len(machines)
    slow = max(machines, key=lambda one: _there_and_back(moved, one))
    return Period(
        seconds=setting.schedule.every * statistics.median(one.step_s for one in machines),
        team=len(machines) / teams,
        slowest_s=_there_and_back(moved, slow),
        slowest=slow.name,
    )


def _moved(setting: Setting, members: int) -> Moved:
    """Return the bytes of a member in a usual round."""
    return setting.moved(setting.schedule.marks, members)


def _there_and_back(moved: Moved, one: Profile) -> float:
    return 8 * (moved.relay_sent / one.up_bps + moved.relay_received / one.down_bps)


def limits(setting: Setting, members: int) -> list[Limit]:
    """Return the use of every resource by a fleet like this one of `members`, most used first."""
    period = period_of(setting)
    found = [
        _hub_processor(setting.costs, period, members),
        _control(setting, period, members),
        *_hub_line(setting, period, members),
        _relay(setting, period, members),
        _slow_link(period),
    ]
    return sorted(found, key=lambda one: -one.share)


def breaks_first(setting: Setting) -> Limit:
    """Return the resource that is used up with the fewest members."""
    return min(limits(setting, setting.wanted), key=lambda one: (one.ends_at, -one.share))


def _ends(share: float, members: int, *, power: int = 1) -> int:
    """Return the members at which a share that grows with this power of them is 1."""
    return int(members / share ** (1 / power)) if share > 0 else 10**9


def _hub_processor(costs: Costs, period: Period, members: int) -> Limit:
    beats = costs.beat_s / costs.beat_every_s
    rounds = (ROUND_MESSAGES * costs.message_s + MACHINE_S) / period.seconds
    share = members * (beats + rounds)
    return Limit(
        resource="the hub's processor", share=share, ends_at=_ends(share, members),
        arithmetic=f"{members:,} members x ({1e6 * costs.beat_s:.0f} µs per heartbeat each "
        f"{costs.beat_every_s:g} s + {1e6 * rounds * period.seconds:.0f} µs per round of "
        f"{period.seconds:,.0f} s)",
        remedy="fewer heartbeats, or a hub per region",
    )  # fmt: skip


def _control(setting: Setting, period: Period, members: int) -> Limit:
    """Plans and verdicts name all members, to all members: bytes grow with the square."""
    _, up_mbps = setting.fleet.hub_rates_mbps
    nbytes = 2 * NAME_BYTES * members * members
    seconds = 8 * nbytes / (up_mbps * 1e6) if up_mbps else 0.0
    share = seconds / period.seconds
    return Limit(
        resource="names in plans and verdicts", share=share,
        ends_at=_ends(share, members, power=2),
        arithmetic=f"2 x {members:,} x {members:,} x {NAME_BYTES} bytes = {size_text(nbytes)} a "
        f"round, {seconds:,.1f} s of the hub's line in a period of {period.seconds:,.0f} s",
        remedy="a method whose rounds are of pairs or groups, e.g. noloco",
    )  # fmt: skip


def _hub_line(setting: Setting, period: Period, members: int) -> list[Limit]:
    down_mbps, up_mbps = setting.fleet.hub_rates_mbps
    teams, moved = members / period.team, _moved(setting, members)
    found = []
    for way, mbps, size in (
        ("into", down_mbps, moved.relay_sent), ("out of", up_mbps, moved.relay_received),
    ):  # fmt: skip
        seconds = 8 * teams * size / (mbps * 1e6) if mbps else 0.0
        share = seconds / period.seconds
        found.append(
            Limit(
                resource=f"the line {way} the hub's reducer", share=share,
                ends_at=_ends(share, members),
                arithmetic=f"{teams:,.0f} contributions x {size_text(size)} at {mbps:g} Mbit/s = "
                f"{seconds:,.0f} s, of a period of {period.seconds:,.0f} s",
                remedy="sites whose members reach each other, a smaller codec, longer periods, "
                "or a faster line",
            )
        )  # fmt: skip
    return found


def _relay(setting: Setting, period: Period, members: int) -> Limit:
    teams, moved = members / period.team, _moved(setting, members)
    size = (moved.relay_sent + moved.relay_received) / 2
    seconds = 2 * teams * size / setting.costs.relay_bytes_per_s
    share = seconds / period.seconds
    return Limit(
        resource="the hub's relay", share=share, ends_at=_ends(share, members),
        arithmetic=f"2 x {teams:,.0f} x {size_text(size)} at "
        f"{setting.costs.relay_bytes_per_s / 1e9:.2f} GB per second of its processor = "
        f"{seconds:,.0f} s of {period.seconds:,.0f} s",
        remedy="sites whose members reach each other, or a smaller codec",
    )  # fmt: skip


def _slow_link(period: Period) -> Limit:
    share = period.slowest_s / period.seconds
    return Limit(
        resource=f"the line of {period.slowest}", share=share,
        ends_at=1 if share >= 1 else 10**9,
        arithmetic=f"its contribution takes {period.slowest_s:,.0f} s there and back, beside a "
        f"period of {period.seconds:,.0f} s, and every round waits for it",
        remedy="a quorum, a smaller codec for it, or longer periods",
    )  # fmt: skip


def verdict(setting: Setting, sizes: Sequence[int] = SIZES) -> list[str]:
    """Return in words what breaks at each of these sizes, and what breaks first of all."""
    lines = []
    for members in sizes:
        found = limits(setting, members)
        broken = [one for one in found if one.share >= 1]
        if broken:
            lines.append(f"{members:,} members: {broken[0].words()}")
            others = ", ".join(one.resource for one in broken[1:])
            lines += [f"  also over: {others}"] if others else []
            lines.append(f"  remedy: {broken[0].remedy}")
        else:
            lines.append(f"{members:,} members: nothing breaks; nearest is {found[0].words()}")
    first = breaks_first(setting)
    if first.ends_at < 10**9:
        lines.append(
            f"first of all: {first.resource}, with about {max(1, first.ends_at):,} members"
        )
    return lines
