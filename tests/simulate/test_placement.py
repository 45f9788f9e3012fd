"""Spare machines take the places of lost ones, as the hub places members and after its delays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.simulate.record import Outcome
from atoll.simulate.sessions import GONE_S
from atoll.simulate.setting import Absence, Cause, Setting
from atoll.simulate.world import World
from tests.simulate.fleets import fleet_of, setting_of
from tests.simulate.real_placement import HubWithScheduler, RealPlacement


def away(machine: int, cause: Cause, since_s: float, for_s: float) -> tuple[int, Absence]:
    return machine, Absence(since_s, since_s + for_s, cause)


def small(machines: int, members: int, *faults: tuple[int, Absence], **changes: Any) -> Setting:
    """Return members with rounds every minute, for an hour."""
    figures: dict[str, Any] = {
        "route": "relay", "every": 60, "exchange_bytes": 1e5, "state_bytes": 1e6,
        "duration_s": 3600.0, "start_s": 5.0, "members": members, "faults": faults, **changes,
    }  # fmt: skip
    return setting_of(fleet_of(machines), **figures)


def run(setting: Setting) -> tuple[World, Outcome]:
    made = World(setting)
    return made, made.run()


def attendance(outcome: Outcome, *, after_s: float) -> list[int]:
    rows = [row for row in outcome.timeline if row["committed"] and row["decided_s"] > after_s]
    return [row["contributors"] for row in rows]


def test_a_spare_machine_takes_the_place_of_a_lost_one() -> None:
    made, outcome = run(small(5, 4, away(1, Cause.FAILED, 1000.0, 9e9)))
    assert made.record.placed[:4] == [(0.0, f"w{n}", f"m{n}") for n in range(4)]
    ((when, member, machine),) = made.record.placed[4:]
    assert (member, machine) == ("w1", "m4")
    assert 1000.0 + GONE_S <= when <= 1000.0 + GONE_S + 1.0  # given up, then the hub's next tick
    assert set(attendance(outcome, after_s=1120.0)) == {4}
    assert outcome.least_members == 3
    placed_s = made.record.placed[-1][0]  # a spare machine has it, whatever is with the lost one
    assert made.record.seconds["absent"] == pytest.approx(placed_s - 1000.0)
    assert made.record.seconds["spare"] == pytest.approx(placed_s)


def test_who_leaves_on_purpose_is_replaced_after_a_second() -> None:
    made, _ = run(small(5, 4, away(2, Cause.CLOSED, 1000.5, 9e9)))
    assert made.record.placed[4:] == [(1002.0, "w2", "m4")]  # a pause of 1 s, and the hub's tick


def test_a_start_that_was_given_up_counts_if_it_comes() -> None:
    """Its machine was lost when it was launched there, and is back before it is replaced."""
    faults = [away(0, Cause.FAILED, 200.0, 16.4), away(0, Cause.FAILED, 232.0, 15.2)]
    made, outcome = run(small(1, 1, *faults, start_s=0.5))
    assert [when for when, _, _ in made.record.placed] == [0.0, 235.0]
    assert made.hub.members["w0"].life == 2
    assert set(attendance(outcome, after_s=300.0)) == {1}


def test_a_start_that_was_replaced_is_refused() -> None:
    """As above, with another machine that is back and has its place before it registers."""
    faults = [away(0, Cause.FAILED, 200.0, 45.6), away(1, Cause.FAILED, 230.0, 15.5)]
    made, outcome = run(small(2, 1, *faults))
    assert [machine for _, _, machine in made.record.placed] == ["m0", "m1", "m0"]
    assert made.hub.members["w0"].life == 3
    assert made.record.seconds["spare"] > 3500.0  # the refused one has ended
    assert set(attendance(outcome, after_s=300.0)) == {1}


def test_below_its_least_members_a_job_pauses_and_goes_on() -> None:
    faults = [away(n, Cause.FAILED, 1000.0, 1000.0) for n in (0, 1)]
    _, outcome = run(small(4, 4, *faults, min_members=3))
    assert outcome.events["paused"] == 1
    assert 800.0 < outcome.paused_s < 1100.0
    ends = [row["decided_s"] for row in outcome.timeline if row["committed"]]
    assert not [end for end in ends if 1090.0 < end < 2000.0]
    assert attendance(outcome, after_s=2200.0)[-5:] == [4] * 5
    assert outcome.least_members == 2


def test_with_fewer_machines_than_wanted_it_runs_with_those() -> None:
    _, outcome = run(small(3, 8, min_members=2))
    assert set(attendance(outcome, after_s=0.0)) == {3}
    assert outcome.mean_members == pytest.approx(3.0)


def test_a_job_waits_until_its_least_machines_are_there() -> None:
    late = [away(n, Cause.CLOSED, 0.0, 500.0 * n) for n in (1, 2)]
    _, outcome = run(small(4, 4, *late, min_members=3))
    assert outcome.timeline[0]["first_join_s"] == pytest.approx(505.0, abs=1.0)
    assert attendance(outcome, after_s=1200.0)[-5:] == [4] * 5


def test_a_job_that_never_starts_says_so() -> None:
    late = [away(n, Cause.CLOSED, 0.0, 9e9) for n in (1, 2)]
    _, outcome = run(small(4, 4, *late, min_members=3))
    assert (outcome.rounds_committed, outcome.mean_members, outcome.least_members) == (0, 0.0, 0)
    assert "the job never started: at no time were 3 machines there" in outcome.notes[-1]


def test_a_job_that_could_never_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="never start"):
        run(small(3, 4, min_members=0))
    with pytest.raises(ConfigError, match="not among the nodes"):
        run(small(3, 3, on=("m0", "m1"), min_members=3))


def test_equal_seeds_place_equally() -> None:
    setting = dataclasses.replace(small(9, 6), faults=None)
    fleet = fleet_of(9, failures_per_day=40.0)
    first, again = (run(dataclasses.replace(setting, fleet=fleet))[0] for _ in range(2))
    assert first.record.placed == again.record.placed
    assert len(first.record.placed) > 9


@pytest.mark.parametrize(
    ("machines", "members", "least", "seed"), [(6, 6, 1, 0), (9, 6, 3, 1), (5, 6, 4, 2)]
)
def test_placed_as_by_the_real_scheduler_and_database(
    tmp_path: Path, machines: int, members: int, least: int, seed: int
) -> None:
    setting = small(machines, members, min_members=least, seed=seed, repair_s=120.0)
    fleet = fleet_of(machines, failures_per_day=100.0, hours_per_day=20.0)
    setting = dataclasses.replace(setting, fleet=fleet, faults=None, duration_s=2400.0)
    mine, _ = run(setting)
    RealPlacement.folder = tmp_path
    real = World(setting, hub=HubWithScheduler)
    real.run()
    assert isinstance(real.hub.placement, RealPlacement)
    real.hub.placement.close()
    assert len(mine.record.placed) > members
    assert mine.record.placed == real.record.placed
