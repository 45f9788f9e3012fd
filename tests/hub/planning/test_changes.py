"""What counts as another fleet, and what is said of it."""

from __future__ import annotations

import pytest

from atoll.clock import VirtualClock
from atoll.hub.planning.changes import LASTS_S, PAUSE_S, Line, Lines, Watch, changes

HOME = Line(20e6, 100e6, 30.0)


def fleet(**lines: Line) -> Lines:
    return Lines({name: HOME for name in ("a", "b", "c", "d", "e")} | lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (Line(23e6, 110e6, 34.0), ""),  # all within a fifth
        (Line(8e6, 100e6, 30.0), "a's line up is 60% slower"),
        (Line(20e6, 150e6, 30.0), "a's line down is 50% faster"),
        (Line(20e6, 100e6, 90.0), "a's round trip went from 30 to 90 ms"),
        (Line(), ""),  # not measured says nothing
    ],
)
def test_a_line_that_changes_by_a_fifth_is_named(line: Line, said: str) -> None:
    assert "; ".join(changes(fleet(), fleet(a=line))) == said


def test_short_round_trips_may_double() -> None:
    near = Lines({"a": Line(20e6, 100e6, 1.0)})
    assert not changes(near, Lines({"a": Line(20e6, 100e6, 3.0)}))


def test_a_line_between_members_that_are_far_apart_counts() -> None:
    def between(mbps: float, trip_ms: float) -> Lines:
        return Lines({"a": HOME, "b": HOME}, {("a", "b"): Line(mbps * 1e6, 0.0, trip_ms)})

    assert changes(between(50, 40.0), between(20, 41.0)) == ["the line a to b is 60% slower"]
    assert changes(between(50, 40.0), between(50, 90.0)) == [
        "the round trip a to b went from 40 to 90 ms"
    ]
    assert not changes(between(50, 1.0), between(20, 1.0))  # at one place: noise


def test_many_changes_become_one_line() -> None:
    found = changes(fleet(), fleet(**dict.fromkeys("abcde", Line(1e6, 1e6, 30.0))))
    assert found[-1] == "6 more changes"
    assert len(found) == 5


def test_one_member_of_five_is_no_change_and_two_are() -> None:
    rest = {name: HOME for name in ("a", "c", "d", "e")}
    assert not changes(fleet(), Lines(rest))
    assert changes(fleet(), Lines({**rest, "new": HOME})) == ["b is gone", "new has come"]


def test_a_change_must_last_and_plans_are_rare() -> None:
    clock, near = VirtualClock(), Lines({"a": HOME})
    far, watch = Lines({"a": Line(2e6, 100e6, 30.0)}), Watch(near)

    def look(lines: Lines, after_s: float) -> str:
        clock.advance(after_s)
        return watch.look(lines, clock.monotonic())

    assert not look(far, 1.0)
    assert not look(near, LASTS_S)  # it was back
    assert not look(far, LASTS_S)
    assert look(far, LASTS_S) == "a's line up is 90% slower"
    assert not look(far, PAUSE_S)  # that is planned for now
    assert not look(near, 1.0)
    assert look(near, LASTS_S) == "a's line up is 900% faster"
    assert not look(far, 1.0)
    assert not look(far, LASTS_S)  # too soon after the last plan
    assert look(far, PAUSE_S)
