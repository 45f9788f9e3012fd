"""What befalls members, as the hub notices it: killed, asleep, cut off; and what it costs."""

from __future__ import annotations

import math

import pytest

from atoll.simulate.machine import CONNECT_S, carries_again_s
from atoll.simulate.scheduler import BEGIN_S
from atoll.simulate.setting import Absence, Cause
from atoll.simulate.world import World
from atoll.wire.limits import DEAD_AFTER_S
from tests.simulate.fleets import fleet_of, setting_of


def world(cause: Cause, since_s: float, for_s: float) -> World:
    """Return four members, of which the second is away once, after an hour's run."""
    away = Absence(since_s, since_s + for_s, cause)
    setting = setting_of(
        fleet_of(4), route="relay", every=60, exchange_bytes=1e5, state_bytes=1e6,
        duration_s=3600.0, start_s=5.0, faults=((1, away),),
    )  # fmt: skip
    made = World(setting)
    made.run()
    return made


def longest_wait_s(made: World) -> float:
    """Return how long members waited for the last one, in the worst round after the first."""
    return max(row.planned_s - row.first_join_s for row in made.record.rows[2:])


def attendance(made: World) -> list[int]:
    return [row.contributors for row in made.record.rows if row.committed]


def test_a_killed_member_is_missed_at_once_and_starts_again() -> None:
    killed = world(Cause.KILLED, 1000.0, 120.0)
    assert longest_wait_s(killed) < 8.0  # for its state, when it is back
    assert 1 < attendance(killed).count(3) <= 4
    assert killed.hub.members["w1"].life == 2
    assert killed.record.events["recovered"] == 1


def test_who_fails_without_notice_holds_a_round_up_for_a_while() -> None:
    # It fails shortly before it would have joined.
    waits = [longest_wait_s(world(Cause.FAILED, 1000.0 + more, 300.0)) for more in range(0, 60, 5)]
    assert 4.0 < max(waits) < 9.0


@pytest.mark.parametrize(("for_s", "lives"), [(4.0, 1), (10.0, 1), (60.0, 2)])
def test_who_sleeps_goes_on_unless_the_hub_has_given_it_up(for_s: float, lives: int) -> None:
    slept = world(Cause.ASLEEP, 1000.0, for_s)
    assert slept.hub.members["w1"].life == lives
    assert attendance(slept)[-5:] == [4] * 5
    absent_s = slept.record.seconds["absent"]
    assert absent_s == pytest.approx(for_s)


@pytest.mark.parametrize("for_s", [4.0, 60.0])
def test_who_loses_its_line_goes_on_in_the_same_process(for_s: float) -> None:
    cut = world(Cause.CUT, 1000.0, for_s)
    assert cut.hub.members["w1"].life == 1
    assert attendance(cut)[-5:] == [4] * 5


def test_connections_work_again_when_tcp_tries_again() -> None:
    def again_s(for_s: float) -> float:
        return carries_again_s(Absence(100.0, 100.0 + for_s, Cause.CUT)) - 100.0

    assert again_s(0.5) == pytest.approx(0.6)  # tries after 0.2, 0.6, 1.4, 3.0, 6.2 s
    assert again_s(4.0) == pytest.approx(6.2)
    assert again_s(13.0) == pytest.approx(DEAD_AFTER_S + CONNECT_S)
    assert again_s(40.0) == pytest.approx(40.0 + CONNECT_S)
    assert math.isinf(again_s(math.inf))


def test_newcomers_do_not_hold_up_the_messages_of_others() -> None:
    away = tuple((slot, Absence(1000.0, 1060.0, Cause.KILLED)) for slot in range(3))
    setting = setting_of(
        fleet_of(8, up_mbps=10.0), route="relay", every=200, exchange_bytes=1e5, state_bytes=1e8,
        duration_s=3600.0, faults=away,
    )  # fmt: skip
    made = World(setting)
    outcome = made.run()
    # A state of 100 MB leaves a donor in 80 s; the hub's line of 1 Gbit/s needs 0.8 s for it.
    assert outcome.queues["line out of the hub, s"] < 3.0
    rows = [row for row in made.record.rows if row.planned_s - BEGIN_S > 1000.0]
    assert max(row.decided_s - row.planned_s for row in rows) < 20.0
