"""Who is there when: chance, owners' hours and traces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.simulate.presence import absences, read_trace
from atoll.simulate.setting import DAY_S, Absence, Cause, profiles
from atoll.simulate.world import simulate
from tests.simulate.fleets import fleet_of, setting_of

SPOT = Path(__file__).resolve().parents[2] / "examples" / "traces" / "spot_p3.csv"


def test_failures_come_as_often_as_said() -> None:
    setting = setting_of(fleet_of(1, failures_per_day=10.0), duration_s=100 * DAY_S, repair_s=60.0)
    found = absences(setting, next(profiles(setting.fleet)), 0)
    assert 900 < len(found) < 1100
    assert all(a.until_s <= b.since_s for a, b in itertools.pairwise(found))
    mean_s = sum(one.until_s - one.since_s for one in found) / len(found)
    assert 50 < mean_s < 70


def test_owners_lend_the_same_hours_every_day() -> None:
    setting = setting_of(fleet_of(1, hours_per_day=8.0), duration_s=10 * DAY_S)
    found = absences(setting, next(profiles(setting.fleet)), 0)
    whole = [one for one in found if one.since_s > 0]
    assert {one.cause for one in found} == {Cause.CLOSED}
    assert all(one.until_s - one.since_s == pytest.approx(16 * 3600) for one in whole)


def test_a_trace_is_read_and_repeated_for_more_members(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    text = "# who\nmember,from_s,to_s\nanna,0,60\nben,30,90\nanna,80,100\n"
    path.write_text(text, encoding="utf-8-sig")  # as spreadsheets write it
    rows = ((0, 0.0, 60.0), (1, 30.0, 90.0), (0, 80.0, 100.0))
    assert read_trace(path) == rows
    assert read_trace(path, members=4)[3:] == tuple((who + 2, a, b) for who, a, b in rows)
    setting = setting_of(fleet_of(2), trace=rows, duration_s=120.0)
    assert absences(setting, next(profiles(setting.fleet)), 0) == [
        Absence(60.0, 80.0, Cause.FAILED),
        Absence(100.0, 120.0, Cause.FAILED),
    ]
    assert absences(setting, next(profiles(setting.fleet)), 1)[0].cause == Cause.CLOSED


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("who,when\na,1\n", "member,from_s,to_s"),
        ("member,from_s,to_s\na,9,3\n", "row 1: '9' to '3'"),
        ("member,from_s,to_s\na,0,1\nb,x,3\n", "row 2: 'x' to '3'"),
        ("", "member,from_s,to_s"),
    ],
)
def test_a_wrong_trace_is_named_with_its_row(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*none\.csv"):
        read_trace(tmp_path / "none.csv")


def test_a_real_trace_of_spot_instances_is_replayed() -> None:
    trace = read_trace(SPOT)
    members = 1 + max(who for who, _, _ in trace)
    assert (members, len(trace)) == (32, 177)
    hours = max(until for _, _, until in trace) / 3600
    setting = setting_of(
        fleet_of(members), trace=trace, duration_s=3600 * hours, every=200, exchange_bytes=1e6
    )
    outcome = simulate(setting)
    there_s = sum(until - since for _, since, until in trace)
    assert outcome.shares["absent"] == pytest.approx(
        1 - there_s / (members * setting.duration_s), abs=0.01
    )
    assert outcome.events["failed"] == 166
    assert outcome.rounds_committed > 100
