"""Simulations: equal by seed, right where arithmetic knows the answer, and what they are for."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.fleet.fleet import Site
from atoll.simulate.limits import breaks_first, limits, verdict
from atoll.simulate.record import Outcome
from atoll.simulate.schedule import Moved, Schedule
from atoll.simulate.scheduler import BEGIN_S
from atoll.simulate.setting import Setting, scaled
from atoll.simulate.world import World, simulate
from tests.simulate.fleets import fleet_of, setting_of


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return what must not depend on this computer."""
    found = outcome.figures()
    del found["measured"]
    return found


def failing(**changes: Any) -> Setting:
    return setting_of(fleet_of(12, failures_per_day=20.0), jitter=0.05, **changes)


def test_equal_seeds_give_equal_outcomes() -> None:
    first, again = simulate(failing(seed=3)), simulate(failing(seed=3))
    assert figures(first) == figures(again)
    assert figures(simulate(failing(seed=4))) != figures(first)


def test_every_lent_second_has_one_cause() -> None:
    outcome = simulate(failing())
    assert sum(outcome.shares.values()) == pytest.approx(1.0)
    assert min(outcome.shares.values()) >= 0
    assert outcome.events["failed"] > 0
    assert outcome.shares["absent"] > 0
    assert outcome.shares["lost work"] > 0


def test_without_failures_goodput_is_compute_over_period() -> None:
    setting = setting_of(fleet_of(4, up_mbps=10.0, down_mbps=40.0), route="relay", start_s=0.0)
    outcome = simulate(setting)
    # 100 s of steps, 8 s up and 2 s down; the hub's line of 1 Gbit/s and its tick add little.
    assert outcome.goodput == pytest.approx(100 / 110, abs=0.01)
    assert outcome.rounds_aborted == 0
    assert outcome.round_s == pytest.approx(10.0, abs=0.5)
    assert outcome.member_bytes == pytest.approx(outcome.rounds_committed * 4 * 10e6, rel=0.1)


def test_an_interval_told_in_the_middle_holds_for_all_who_come() -> None:
    setting = setting_of(fleet_of(6, failures_per_day=40.0), duration_s=7200.0, repair_s=60.0)
    world = World(setting)

    def plan_again() -> None:
        world.hub.machine.commit_log.every = 3 * setting.every

    world.scheduler.at(BEGIN_S + 3600.0, plan_again)
    outcome = world.run()
    ends = [row["decided_s"] for row in outcome.timeline if row["committed"]]
    spans = [(b, b - a) for a, b in pairwise(ends)]
    before = statistics.median(span for end, span in spans if end < 3600)
    after = statistics.median(span for end, span in spans if end > 4200)
    assert after == pytest.approx(before + 2 * setting.every, rel=0.1)  # of a second each
    assert outcome.events["recovered"] > 0  # newcomers have the interval from the state
    assert {member._every for member in world.hub.members.values()} == {3 * setting.every}


def test_members_of_a_site_relay_one_contribution() -> None:
    fleet = fleet_of(8, hub_mbps=50.0)
    machines = [m.__class__(name=m.name, step_s=1.0, site=f"s{n % 2}", up_mbps=100, down_mbps=100)
                for n, m in enumerate(fleet.machines)]  # fmt: skip
    sites = (Site(name="s0", mbps=1000), Site(name="s1", mbps=1000))
    near = fleet.__class__(machines=tuple(machines), sites=sites, hub=fleet.hub)
    hierarchical = simulate(setting_of(near))
    relayed = simulate(setting_of(near, route="relay"))
    routes = Counter(row["route"] for row in hierarchical.timeline if row["committed"])
    assert routes["hierarchical"] > 9 * routes["relay"], "seldom tried: it is not faster"
    per_round = relayed.relay_bytes / relayed.rounds_committed
    expected = per_round * (routes["hierarchical"] / 4 + routes["relay"])
    assert hierarchical.relay_bytes == pytest.approx(expected, rel=0.1)


def test_a_line_too_slow_for_the_usual_limit_commits_later() -> None:
    slow_hub = fleet_of(4, hub_mbps=1.0)
    setting = setting_of(
        slow_hub, route="relay", exchange_bytes=20e6, every=1000, duration_s=8 * 3600.0
    )
    outcome = simulate(setting)  # 640 s there and as much back, of 120 s that a first one may take
    assert outcome.timeline[0]["committed"] is False
    assert outcome.rounds_committed >= 8
    late = [row for row in outcome.timeline if row["decided_s"] > 4 * 3600.0]
    assert all(row["committed"] for row in late)  # the limit follows what was measured
    first = breaks_first(setting)
    assert "line" in first.resource
    assert first.ends_at == 6  # a member needs 160 s of 1000


@pytest.mark.parametrize(("up", "down"), [(10.0, 10.0), (10.0, 40.0), (40.0, 10.0)])
def test_a_mean_comes_down_while_the_rest_goes_up(up: float, down: float) -> None:
    def round_s(last: float) -> float:
        """Return the seconds of a round in which so many bytes wait for the last contribution."""
        method = Schedule(every=100, moved=lambda *_: Moved(1e7, 1e7, 0.0, 0.0, last))
        fleet = fleet_of(4, hub_mbps=0.0, up_mbps=up, down_mbps=down)
        outcome = simulate(setting_of(fleet, route="relay", method=method))
        return statistics.median(
            float(row["decided_s"] - row["planned_s"])
            for row in outcome.timeline
            if row["committed"]
        )

    slower_way_s = 8 * 1e7 / (min(up, down) * 1e6)
    assert round_s(1e7) == pytest.approx(8 * 1e7 / (up * 1e6) + 8 * 1e7 / (down * 1e6), rel=0.1)
    assert slower_way_s < round_s(3e5) < 1.15 * slower_way_s


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 2.0), (1.0, 2.0, 4.0)])
def test_a_slow_member_joins_rounds_of_a_long_interval(speeds: tuple[float, ...]) -> None:
    fleet = fleet_of(len(speeds))
    machines = [
        dataclasses.replace(m, step_s=step_s)
        for m, step_s in zip(fleet.machines, speeds, strict=True)
    ]
    outcome = simulate(
        setting_of(fleet.with_machines(machines), every=500, duration_s=12 * 3600.0, route="relay")
    )
    # Its speed is not known at first: it comes too late once or twice, then it does fewer steps.
    taking_part = [row["contributors"] for row in outcome.timeline if row["committed"]]
    assert set(taking_part[6:]) == {len(speeds)}


def test_a_quorum_spares_the_others_the_wait_for_the_last() -> None:
    fleet = fleet_of(150)
    plain, quorum = (
        simulate(setting_of(fleet, exchange_bytes=1e6, jitter=0.1, quorum=share, every=300))
        for share in (0.0, 0.9)
    )
    assert quorum.goodput > plain.goodput + 0.02
    assert quorum.shares["waiting"] < plain.shares["waiting"] - 0.05


def test_a_trace_says_who_was_there_when() -> None:
    trace = ((0, 0.0, 7200.0), (1, 0.0, 7200.0), (2, 0.0, 1800.0), (2, 3600.0, 7200.0))
    outcome = simulate(setting_of(fleet_of(3), trace=trace))
    assert outcome.events["failed"] == 1
    assert outcome.shares["absent"] == pytest.approx(1800 / (3 * 7200), rel=0.02)


def test_owners_hours_count_as_no_loss() -> None:
    outcome = simulate(setting_of(fleet_of(3, hours_per_day=12.0), duration_s=86_400.0, every=900))
    assert outcome.shares["absent"] == 0
    assert outcome.events["closed"] >= 2


def test_arithmetic_names_what_breaks_first() -> None:
    setting = setting_of(fleet_of(10), every=500, exchange_bytes=100e6, route="relay")
    lines = verdict(setting)
    text = "\n".join(lines)
    assert "1,000 members: the line into the hub's reducer breaks" in text
    assert "first of all: the line into the hub's reducer" in lines[-1]
    # 0.8 s of the hub's line per member and way, of a period of 500 s.
    assert breaks_first(setting).ends_at == 625
    squared = {one.resource: one.share for one in limits(setting, 10_000)}
    tenth = {one.resource: one.share for one in limits(setting, 1_000)}
    names = "names in plans and verdicts"
    assert squared[names] == pytest.approx(100 * tenth[names])


def test_a_slow_line_breaks_at_any_size() -> None:
    fleet = fleet_of(4, up_mbps=1.0)
    found = breaks_first(setting_of(fleet, exchange_bytes=100e6))
    assert found.resource == "the line of m0"
    assert found.ends_at == 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="quorum from 0 to 1"):
        setting_of(fleet_of(2), quorum=1.5)
    with pytest.raises(ConfigError, match="duration_s"):
        setting_of(fleet_of(2), duration_s=0.0)


def test_a_larger_fleet_has_the_same_mixture() -> None:
    fleet = fleet_of(3)
    kinds = [m.name for m in fleet.machines]
    larger = scaled(fleet, 30)
    names = [m.name.partition("+")[0] for m in larger.machines]
    assert len({m.name for m in larger.machines}) == 30
    assert all(names.count(kind) == 10 for kind in kinds)
