"""What the planner says of a rehearsal, with speeds that are not known at first, and faults."""

from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.fleet.faults import Fault
from atoll.rehearse.curve import Curve
from atoll.rehearse.expected import SILENT_S, START_S, expected
from tests.rehearse.plays import fleet, rehearsal


def curve(*faults: Fault, speeds: tuple[float, ...] = (0.1, 0.1, 0.2)) -> Curve:
    plan, load = rehearsal(fleet(*speeds, faults=faults))
    return expected(plan, load)


def test_the_first_period_is_as_long_as_the_slowest_member_needs() -> None:
    found = curve()
    first, second = found.moments[1], found.moments[2]
    assert first.steps == 20
    assert first.seconds > 20 * 0.2
    assert second.seconds - first.seconds < 20 * 0.15  # then the slow one does half of the steps
    assert found.end.steps == rehearsal(fleet(0.1, 0.1, 0.2))[0].steps


def test_a_killed_member_delays_none_and_sends_nothing() -> None:
    plain, killed = curve(), curve(Fault(what="kill", machine="m2", at_s=20.0, for_s=30.0))
    assert killed.end.seconds == pytest.approx(plain.end.seconds, rel=0.05)
    assert killed.end.sent_bytes < 0.95 * plain.end.sent_bytes
    ended = curve(Fault(what="kill", machine="m2", at_s=20.0))
    assert ended.end.sent_bytes < killed.end.sent_bytes


def test_a_silent_member_delays_one_round() -> None:
    plain, cut = curve(), curve(Fault(what="cut", machine="m1", at_s=50.0, for_s=40.0))
    assert 1.0 < cut.end.seconds - plain.end.seconds < SILENT_S + 1.0
    short = curve(Fault(what="sleep", machine="m1", at_s=50.0, for_s=2.0))
    assert short.end.seconds - plain.end.seconds < 4.0


def test_a_machine_that_joins_adds_its_bytes_from_then_on() -> None:
    late = curve(Fault(what="join", machine="m0", at_s=60.0))
    assert late.moments[1].sent_bytes < 0.9 * curve().moments[1].sent_bytes
    steps = [late.at(s).sent_bytes for s in (30.0, 50.0, 70.0 + START_S, 90.0 + START_S)]
    assert steps[3] - steps[2] > 1.2 * (steps[1] - steps[0])


def test_a_run_that_all_leave_for_good_ends_then() -> None:
    faults = [Fault(what="kill", machine=f"m{n}", at_s=20.0 + n) for n in range(3)]
    found = curve(*faults)
    assert 0 < found.end.steps < rehearsal(fleet(0.1, 0.1, 0.2))[0].steps
    assert 20.0 < found.end.seconds < 30.0


def test_everything_is_slower_alike() -> None:
    known = fleet(0.01, 0.01, 0.02, faults=(Fault(what="kill", machine="m2", at_s=4.0),))
    plan, load = rehearsal(known, slower=0.0, here_s=0.02)
    assert plan.slower == pytest.approx(0.02 * 1.5 * 1.3 / 0.01)
    twice, _ = rehearsal(known, slower=2 * plan.slower, steps=plan.steps, seconds=1e6)
    ratio = expected(twice, load).end.seconds / expected(plan, load).end.seconds
    assert ratio == pytest.approx(2.0, rel=0.1)  # but for what this machine does itself in a round


def test_too_little_time_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match="too little time for three rounds"):
        rehearsal(fleet(0.1, 0.1), seconds=2.0)


def test_thousands_are_for_the_simulation() -> None:
    with pytest.raises(ConfigError, match="atoll simulate takes thousands"):
        rehearsal(fleet(*[0.1] * 40))
